"""The benchmark's arithmetic, and its yardstick."""

from pathlib import Path

import pytest

from headrace.drills.bench import Generator, Sample, echo_server, summarise, top_functions, total

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
    top = top_functions("main (a.py:1);work (b.py:7) 3\nmain (a.py:2);work (b.py:9);work (b.py:9) 5\nmain (a.py:1) 2\n")

    assert [each["function"] for each in top] == ["work (b.py)", "main (a.py)"]
    assert [each["self_share"] for each in top] == [0.8, 0.2]
    assert [each["total_share"] for each in top] == [0.8, 1.0]


def test_the_echo_answers_every_request_with_its_bytes(tmp_path: Path) -> None:
    """D1: the yardstick is measured by the same generator as the server, without errors."""
    with echo_server(ANSWER, tmp_path, None) as port:
        generator = Generator(b"{}", tmp_path, None, prefers_wrk=False)
        samples = [generator.measure(port, 2, 0.3) for _ in range(3)]

    assert generator.name == "headrace.drills.load"
    assert samples[-1].errors == 0
    assert samples[-1].requests_per_s > 100
