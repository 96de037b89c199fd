"""The benchmark's arithmetic, and its yardstick."""

from pathlib import Path

import numpy as np
import pytest

from headrace.drills.bench_load import Generator, Request, Sample, parse_wrk
from headrace.drills.bench_peers import Task, ask, echo, numbers_in, read_peers, running
from headrace.drills.bench_profile import STAGES, by_stage, stage_of, top_functions, total, weigh
from headrace.drills.bench_report import judge, summarise

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


def test_ratios_are_taken_within_a_repetition() -> None:
    """D1: a machine that slows down for one repetition slows both servers, so the ratio stays."""
    pairs = [
        (Sample(50.0, 0.1, 0.2, 0), Sample(100.0, 0.1, 0.1, 0)),
        (Sample(5.0, 0.1, 0.6, 1), Sample(10.0, 1, 0.3, 0)),
    ]
    (row,) = summarise({16: pairs})

    assert row["requests_ratio"] == {"median": 0.5, "min": 0.5, "max": 0.5}
    assert row["p99_ratio"]["median"] == pytest.approx(2.0)
    assert row["headrace_requests_per_s"] == {"median": 27.5, "min": 5.0, "max": 50.0}
    assert row["errors"] == 1


def test_a_metric_is_summed_over_the_labels_that_were_left_open() -> None:
    """D1: `total` matches whole label values and whole metric names."""
    samples = {
        'x_sum{endpoint="a",stage="run"}': 1.0,
        'x_sum{endpoint="b",stage="run"}': 2.0,
        'x_sum{endpoint="b",stage="running"}': 4.0,
        'x_sum_more{stage="run"}': 8.0,
        "x_sum": 16.0,
    }

    assert total(samples, "x_sum", stage="run") == 3.0
    assert total(samples, "x_sum") == 23.0


def test_functions_are_ranked_by_the_samples_they_were_on_top_of() -> None:
    """D1: lines of one function are one function, and recursion counts once."""
    main = ["main (a.py:1)"]
    top = top_functions([([*main, "work (b.py:7)"], 3), ([*main, "work (b.py:9)", "work (b.py:9)"], 5), (main, 2)])

    assert [each["function"] for each in top] == ["work (b.py)", "main (a.py)"]
    assert [each["self_share"] for each in top] == [0.8, 0.2]
    assert [each["total_share"] for each in top] == [0.8, 1.0]


def test_samples_belong_to_the_innermost_stage_that_is_known() -> None:
    """D1: a library's frame belongs to whoever called it; the shares of all stages add up to one."""
    loop = "run (asyncio/runners.py:190)"
    fold = ["fold (headrace/telemetry/metrics.py:200)", "add (numpy/core.py:3)"]
    shares = by_stage([([loop], 5), ([loop, *fold], 3), ([loop, "shout (somewhere/else.py:1)"], 2)])

    assert stage_of("decode (headrace/data_plane/gateway/oip.py:100)") == "decode"
    assert stage_of("encode (headrace/data_plane/gateway/oip.py:200)") == "respond"
    assert shares["fold"] == 0.3
    assert set(shares) == set(STAGES)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_a_thread_that_waits_takes_no_share() -> None:
    """D1: samples say how a thread's time was spent, its processor time says how much there was."""
    busy = "thread (7): MainThread"
    text = f"{busy};main (a.py:1) 30\n{busy};other (a.py:2) 10\nthread (9): idle;wait (b.py:1) 40\n"

    assert [(["main (a.py:1)"], 3.0), (["other (a.py:2)"], 1.0), (["wait (b.py:1)"], 0.0)] == weigh(text, {"7": 4.0})


def test_wrk_is_read_and_its_errors_are_no_answers() -> None:
    """D1: what was not answered with 200 does not count as throughput."""
    printed = 'Running\nRESULT {"requests": 110, "duration_us": 2e6, "errors": 10, "p50_us": 500, "p99_us": 900}\n'
    sample = parse_wrk(printed, cpu_s=1.0)

    assert sample == Sample(50.0, 0.0005, 0.0009, 10, 0.5)
    with pytest.raises(RuntimeError, match="no result"):
        parse_wrk("unable to connect", 0.0)


def test_a_figure_that_was_not_measured_is_never_met() -> None:
    """D1: the page shows what is missing instead of leaving it out."""
    assert {verdict.is_met for verdict in judge({})} == {None}


def test_every_peer_is_pinned_and_has_a_form() -> None:
    """D1: a comparison names exact versions."""
    peers = read_peers()

    assert {"mlserver", "litserve", "kserve", "pytriton", "bentoml"} == {peer.name for peer in peers}
    for peer in peers:
        assert peer.variants, peer.name
        assert all("==" in dependency for dependency in peer.dependencies), peer.dependencies


def test_an_answer_with_wrong_numbers_is_found(tmp_path: Path) -> None:
    """D1: a server that is fast and wrong is not measured."""
    row = np.ones((1, 2), np.float32)
    task = Task("model", tmp_path, "x", row, row.astype(np.float64), np.array([0.25, 0.75]))

    task.check(b'{"outputs": [{"shape": [1, 2], "data": [0.25, 0.75]}]}')
    with pytest.raises(ValueError, match="right is"):
        task.check(b'{"outputs": [{"shape": [1, 2], "data": [0.75, 0.25]}]}')
    assert numbers_in({"label": 1, "probabilities": [[0.5]]}) == [1.0, 0.5]


def test_the_echo_answers_every_request_with_its_bytes(tmp_path: Path) -> None:
    """D1: the yardstick is measured by the same generator as the server, without errors, and leaves nothing behind."""
    row = np.ones((1, 2), np.float32)
    task = Task("model", tmp_path, "x", row, row.astype(np.float64), row)
    with running(echo(ANSWER), task, tmp_path / "echo") as found:
        generator = Generator(tmp_path, prefers_wrk=False)
        samples = [generator.measure(found.port, found.request, 2, 0.3) for _ in range(3)]

    assert generator.name == "headrace.drills.load"
    assert samples[-1].errors == 0
    assert samples[-1].requests_per_s > 100
    with pytest.raises(OSError, match="refused"):
        ask(found.port, Request("/", b""))
