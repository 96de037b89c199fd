"""A server that is told to stop finishes what it holds, refuses the rest, and writes everything down."""

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from headrace.drills.load import LoadResult, Outcome, infer_request_bytes, json_infer_body, open_loop, run
from headrace.records import Record
from headrace.storage.segments import iter_records
from headrace.testing.server import CLOSED, Reply, ServerProcess, sleep_config, wait_until
from headrace.testing.sleep_runtime import SleepArtefact

SLOWED = SleepArtefact(base_s=0.002, is_slowed_by_input=True)
SECOND = (-1.0,)
ENDING = {200: "answered", 503: "rejected"}


def in_flight(server: ServerProcess, model: str) -> int:
    """What the ledger says that the workers hold."""
    return int(server.metrics().get(f'headrace_in_flight{{endpoint="{model}"}}', 0))


def test_sigterm_finishes_twenty_requests_in_flight_refuses_new_ones_and_writes_all_of_them_down(
    tmp_path: Path,
) -> None:
    """F6, O3: ready turns 503 before anything else, what is in flight is answered, newcomers are told when to come
    back, the records on disk say what the callers saw, and the exit code is 0."""
    config = sleep_config(tmp_path / "models", {"m": SLOWED}, server={"workers": 2}, slo="p99=10s")
    with ServerProcess(config, tmp_path / "home") as server:
        server.wait_workers(2)
        callers = [server.caller(f"early-{number}") for number in range(20)]
        for caller in callers:
            caller.send("m", SECOND)
        wait_until(lambda: in_flight(server, "m") == 20)
        began_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.request("GET", "/v2/health/ready")[0] == 503, 0.5)
        late = [server.caller(f"late-{number}").infer("m") for number in range(5)]
        was_holding = in_flight(server, "m")
        early = [caller.receive() for caller in callers]
        code = server.process.wait(20)
        took_s = time.monotonic() - began_s

    assert 20 == was_holding, "newcomers were refused while the early requests were still running"
    assert [200] * 20 == [reply.status for reply in early]
    assert [(503, "shutting_down")] * 5 == [(reply.status, reply.code) for reply in late]
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in late)
    assert {"close"} == {reply.headers["connection"] for reply in late}
    assert 0 == code
    assert took_s < 10
    assert_records_say_what_callers_saw(server.home, [*early, *late])


def assert_records_say_what_callers_saw(home: Path, replies: list[Reply]) -> None:
    """Each answered or refused request has one record with that ending, and there is no other record."""
    records = [record for record in iter_records(home / "records") if isinstance(record, Record)]
    written = {record.request_id: (record.ending, record.code, record.status) for record in records}
    assert len(written) == len(records), "a request has two records"
    seen = {reply.request_id: (ENDING[reply.status], reply.code, reply.status) for reply in replies}
    assert seen == written


def test_a_caller_that_keeps_its_connection_is_told_to_close_it(tmp_path: Path) -> None:
    """F6: the last answer on a kept-alive connection says `connection: close`, so that none is lost on it later."""
    config = sleep_config(tmp_path / "models", {"m": SLOWED}, server={"workers": 1}, slo="p99=10s")
    with ServerProcess(config, tmp_path / "home") as server:
        caller = server.caller()
        first = caller.infer("m")
        caller.send("m", SECOND)
        wait_until(lambda: in_flight(server, "m") == 1)
        server.process.send_signal(signal.SIGTERM)
        last = caller.receive()

    assert (200, None) == (first.status, first.headers.get("connection"))
    assert (200, "close") == (last.status, last.headers.get("connection"))


def test_a_second_sigterm_ends_at_once_although_a_run_takes_thirty_seconds(tmp_path: Path) -> None:
    """F6: whoever asks twice does not want to wait; the caller sees its connection close, not a hang."""
    config = sleep_config(tmp_path / "models", {"m": SLOWED}, server={"workers": 1}, slo="p99=60s")
    with ServerProcess(config, tmp_path / "home") as server:
        caller = server.caller()
        caller.send("m", (-30.0,))
        wait_until(lambda: in_flight(server, "m") == 1)
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.request("GET", "/v2/health/ready")[0] == 503)
        began_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(10)
        took_s = time.monotonic() - began_s
        reply = caller.receive()
        orphans = [pid for pid in children if Path(f"/proc/{pid}").exists()]

    assert 128 + signal.SIGTERM == code
    assert took_s < 3
    assert CLOSED == reply.status
    assert [] == orphans


def test_a_run_longer_than_the_drain_limit_is_cut_off_and_its_caller_sees_the_connection_close(tmp_path: Path) -> None:
    """F6: the drain is bounded by drain_s_max, whatever the model does; the request ends as abandoned, not twice."""
    config = sleep_config(tmp_path / "models", {"m": SLOWED}, server={"workers": 1, "drain_s_max": 0.5}, slo="p99=60s")
    with ServerProcess(config, tmp_path / "home") as server:
        caller = server.caller()
        request_id = caller.send("m", (-30.0,))
        wait_until(lambda: in_flight(server, "m") == 1)
        began_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        reply = caller.receive()
        code = server.process.wait(10)
        took_s = time.monotonic() - began_s

    assert (CLOSED, 0) == (reply.status, code)
    assert took_s < 5
    records = [record for record in iter_records(server.home / "records") if isinstance(record, Record)]
    assert [(request_id, "abandoned")] == [(record.request_id, record.ending) for record in records]


def test_sigterm_under_open_loop_traffic_leaves_no_caller_without_an_end(tmp_path: Path) -> None:
    """F6: with 150 requests a second arriving, each is answered, refused with 503, or sees its connection closed or
    refused once the listener has gone; none hangs, and none fails."""
    config = sleep_config(tmp_path / "models", {"m": SleepArtefact(base_s=0.02)}, server={"workers": 2}, slo="p99=2s")
    with ServerProcess(config, tmp_path / "home") as server:
        server.wait_workers(2)
        body = json_infer_body("x", np.ones((1, 1), np.float32))
        request = infer_request_bytes("127.0.0.1", server.http_port, "m", body)
        offsets_s = np.arange(300) / 150.0
        plan = open_loop("127.0.0.1", server.http_port, [request], offsets_s, connections_max=64, grace_s=8.0)
        results: list[LoadResult] = []
        thread = threading.Thread(target=lambda: results.append(run(plan)))
        thread.start()
        wait_until(lambda: server.metrics().get('headrace_received_total{endpoint="m"}', 0) > 100)
        server.process.send_signal(signal.SIGTERM)
        thread.join(30)
        code = server.process.wait(20)
        result = results[0]

    counts = {outcome.name: result.count(outcome) for outcome in Outcome if result.count(outcome)}
    assert set(counts) <= {"ANSWERED", "REFUSED", "CONNECTION_ERROR"}, f"{counts} {result.codes}"
    assert result.count(Outcome.ANSWERED) >= 100
    assert set(result.codes) <= {"503 shutting_down"}
    assert 0 == code
    records = [record for record in iter_records(server.home / "records") if isinstance(record, Record)]
    endings = Counter(record.ending for record in records)
    # What was sent into a connection that closes at that moment may have been answered without being read.
    assert 0 <= endings["answered"] - counts["ANSWERED"] <= counts.get("CONNECTION_ERROR", 0)
    assert 0 <= endings["rejected"] - counts.get("REFUSED", 0) <= counts.get("CONNECTION_ERROR", 0)


def test_a_service_manager_that_signals_every_process_still_gets_a_graceful_stop(tmp_path: Path) -> None:
    """F6: systemd and others send SIGTERM to the whole group, so that a worker is told twice, once by the supervisor;
    that is one wish, and what is in flight is answered."""
    config = sleep_config(tmp_path / "models", {"m": SLOWED}, server={"workers": 2}, slo="p99=10s")
    with ServerProcess(config, tmp_path / "home") as server:
        server.wait_workers(2)
        callers = [server.caller(f"early-{number}") for number in range(4)]
        for caller in callers:
            caller.send("m", SECOND)
        wait_until(lambda: in_flight(server, "m") == 4)
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        for pid in children:
            os.kill(pid, signal.SIGTERM)
        replies = [caller.receive() for caller in callers]
        code = server.process.wait(20)

    assert [200] * 4 == [reply.status for reply in replies]
    assert 0 == code
