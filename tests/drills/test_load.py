"""The load generator tells the truth about the server and about itself."""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httptools
import numpy as np
import pytest
import uvloop

from headrace.drills.load import (
    LoadPlan,
    LoadResult,
    NotLoopback,
    Outcome,
    binary_infer_body,
    closed_loop,
    constant_offsets,
    infer_request_bytes,
    json_infer_body,
    open_loop,
    poisson_offsets,
    run,
    run_in_process,
)

REQUEST = infer_request_bytes("127.0.0.1", 80, "m", b"{}")
REFUSAL = b'{"error":"too much","code":"shed"}'


@dataclass
class Behaviour:
    """What the test server does; changed by the tests, from their thread.

    Attributes:
        delay_s: Before each answer, without blocking the others.
        stall_at: Number of the request (from 0) at which the whole server stands still; -1 never.
        stall_s: For how long.
        status_every: Each n-th request gets this status, by n.
        is_closing: Answers carry `Connection: close`.
        is_hanging_up: Closes instead of answering.
        is_silent: Never answers.
    """

    delay_s: float = 0.0
    stall_at: int = -1
    stall_s: float = 0.2
    status_every: dict[int, int] = field(default_factory=dict)
    is_closing: bool = False
    is_hanging_up: bool = False
    is_silent: bool = False
    received: int = 0
    bodies: list[bytes] = field(default_factory=list)
    port: int = 0


class _Served(asyncio.Protocol):
    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, chunk: bytes) -> None:
        self._body += chunk

    def on_message_complete(self) -> None:
        behaviour = self._behaviour
        number = behaviour.received
        behaviour.received += 1
        if len(behaviour.bodies) < 100:
            behaviour.bodies.append(self._body)
        self._body = b""
        if number == behaviour.stall_at:
            time.sleep(behaviour.stall_s)
        if behaviour.is_hanging_up:
            self._transport.close()
        elif not behaviour.is_silent:
            status = next((s for every, s in behaviour.status_every.items() if number % every == 0), 200)
            if behaviour.delay_s:
                asyncio.get_running_loop().call_later(behaviour.delay_s, self._answer, status)
            else:
                self._answer(status)

    def _answer(self, status: int) -> None:
        body = b"{}" if status == 200 else REFUSAL
        close = "Connection: close\r\n" if self._behaviour.is_closing else ""
        head = f"HTTP/1.1 {status} X\r\n{close}Content-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        if self._behaviour.is_closing:
            self._transport.close()


@pytest.fixture
def server() -> Iterator[Behaviour]:
    """A small HTTP server on a thread of its own."""
    behaviour = Behaviour()
    is_up = threading.Event()
    loop = uvloop.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        served = await loop.create_server(lambda: _Served(behaviour), "127.0.0.1", 0)
        behaviour.port = served.sockets[0].getsockname()[1]
        is_up.set()
        await stop.wait()
        served.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert is_up.wait(5)
    yield behaviour
    loop.call_soon_threadsafe(stop.set)
    thread.join(5)
    loop.close()


def add_up(result: LoadResult) -> int:
    return sum(result.count(outcome) for outcome in Outcome)


def made(done_s: list[float], outcomes: list[int], **changed: Any) -> LoadResult:
    """A result as it would come from a run; every request was scheduled at 0."""
    count = len(done_s)
    values: dict[str, Any] = {
        "kind": "open",
        "duration_s": 1.0,
        "elapsed_s": 1.0,
        "deadline_s": 0.05,
        "lag_limit_s": 0.001,
        "scheduled_s": np.zeros(count),
        "sent_s": np.zeros(count),
        "done_s": np.array(done_s),
        "outcomes": np.array(outcomes, dtype=np.uint8),
        "statuses": np.zeros(count, dtype=np.int16),
        "codes": {},
        "connections_peak": 1,
        "waited": 0,
    }
    return LoadResult(**{**values, **changed})


def test_percentiles_are_values_that_occurred() -> None:
    """D1: percentiles are nearest-rank, and only answers within the deadline are goodput."""
    result = made([n / 1000 for n in range(1, 101)], [Outcome.ANSWERED] * 100)

    assert [result.latency_s(share) for share in (0.5, 0.95, 0.99, 0.999)] == [0.05, 0.095, 0.099, 0.1]
    assert result.in_time == 50
    assert result.goodput_per_s == 50.0
    assert result.throughput_per_s == 100.0


def test_a_summary_of_nothing_holds_no_number_that_nobody_measured() -> None:
    """D1: with no answer at all the percentiles are absent, not zero."""
    summary = made([np.nan], [Outcome.UNANSWERED]).summary()

    assert summary["latency_s"]["p99"] is None
    assert summary["unanswered"] == 1


@pytest.mark.parametrize("host", ["example.com", "10.0.0.1", "0.0.0.0", "192.168.1.1", "2001:db8::1", ""])
def test_load_is_never_sent_to_another_machine(host: str) -> None:
    """D1: hosts other than loopback are refused before a connection is opened, names without resolving them."""
    with pytest.raises(NotLoopback, match="this machine only"):
        LoadPlan(host=host, port=80, requests=(REQUEST,), duration_s=1.0)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_is_accepted(host: str) -> None:
    """D1: this machine may be loaded."""
    assert LoadPlan(host=host, port=80, requests=(REQUEST,), duration_s=1.0).host == host


def test_a_poisson_schedule_is_a_function_of_its_seed() -> None:
    """D1: the same seed gives the same schedule, with the mean and the spread of a Poisson process."""
    offsets_s = poisson_offsets(1000.0, 20.0, seed=7)
    gaps_s = np.diff(offsets_s)

    assert np.array_equal(offsets_s, poisson_offsets(1000.0, 20.0, seed=7))
    assert not np.array_equal(offsets_s[:100], poisson_offsets(1000.0, 20.0, seed=8)[:100])
    assert pytest.approx(20_000, rel=0.05) == offsets_s.size
    assert pytest.approx(1.0, rel=0.05) == gaps_s.std() / gaps_s.mean()


def test_the_offered_rate_is_the_scheduled_rate(server: Behaviour) -> None:
    """D1: every scheduled request is sent once, on time, and accounted for."""
    result = run(open_loop("127.0.0.1", server.port, [REQUEST], constant_offsets(500.0, 1.0), deadline_s=0.25))

    assert 500 == result.count(Outcome.ANSWERED) == server.received == add_up(result)
    assert 0.998 <= np.nanmax(result.sent_s) < 1.2
    assert np.median(result.send_lag_s) < 0.005


def test_latency_is_what_the_server_took(server: Behaviour) -> None:
    """D1: against a server that takes 20 ms every percentile says about 20 ms."""
    server.delay_s = 0.02
    result = run(open_loop("127.0.0.1", server.port, [REQUEST], poisson_offsets(200.0, 1.0, seed=1), deadline_s=0.25))

    assert result.latency_s(0.01) >= 0.018
    assert result.latency_s(0.5) <= 0.03
    assert 0.018 <= result.latency_s(0.99) <= 0.2


def test_one_stall_is_felt_by_everyone_who_was_due_meanwhile(server: Behaviour) -> None:
    """D1: no coordinated omission. 300 requests/s meet one stall of 200 ms: 60 of them were due during it and show it,
    on four connections too, where a closed loop would have recorded four slow requests."""
    server.stall_at = 100
    plan = open_loop(
        "127.0.0.1", server.port, [REQUEST], constant_offsets(300.0, 1.0), connections=4, connections_max=4
    )
    result = run(plan)

    # Upper bounds are loose: a busy machine adds stalls of its own, which are latencies too.
    assert 50 <= np.count_nonzero(result.latencies_s > 0.02) <= 150
    assert 25 <= np.count_nonzero(result.latencies_s > 0.1) <= 100
    assert 0.19 <= result.latencies_s.max() <= 0.4
    assert result.waited >= 40


def test_more_connections_are_opened_while_all_are_busy_up_to_the_maximum(server: Behaviour) -> None:
    """D1: 400 requests/s of 50 ms need 20 connections; the pool grows from 2 and stops at its bound."""
    server.delay_s = 0.05
    offsets_s = constant_offsets(400.0, 0.5)
    wide = run(open_loop("127.0.0.1", server.port, [REQUEST], offsets_s, connections=2, connections_max=64))
    narrow = run(open_loop("127.0.0.1", server.port, [REQUEST], offsets_s, connections=2, connections_max=8))

    assert 18 <= wide.connections_peak <= 64
    assert wide.latency_s(0.5) < 0.1
    assert narrow.connections_peak == 8
    assert narrow.latency_s(0.5) > 0.1


def test_a_run_that_could_not_keep_its_schedule_is_void(server: Behaviour) -> None:
    """D1: the send lag is measured on every request; above 2 % of the deadline the run proves nothing and says why."""
    server.delay_s = 0.05
    offsets_s = constant_offsets(100.0, 0.5)
    bound_by_pool = run(
        open_loop("127.0.0.1", server.port, [REQUEST], offsets_s, connections=1, connections_max=1, deadline_s=0.1)
    )
    late_generator = made([0.01] * 10, [Outcome.ANSWERED] * 10, sent_s=np.full(10, 0.005))

    assert "found all connections busy" in bound_by_pool.void_reason
    assert "could not keep its own schedule" in late_generator.void_reason
    assert late_generator.summary()["is_void"] is True


def test_a_silent_server_cannot_hold_the_generator(server: Behaviour) -> None:
    """D1: a run ends at duration + grace at the latest, and says how many requests got no answer."""
    server.is_silent = True
    begin_s = time.monotonic()
    opened = run(
        open_loop("127.0.0.1", server.port, [REQUEST], constant_offsets(100.0, 0.3), connections_max=20, grace_s=0.2)
    )
    closed = run(closed_loop("127.0.0.1", server.port, [REQUEST], connections=3, duration_s=0.3, grace_s=0.2))
    elapsed_s = time.monotonic() - begin_s

    assert elapsed_s < 3.0
    assert (opened.count(Outcome.UNANSWERED), opened.count(Outcome.UNSENT)) == (20, 10)
    assert 3 == closed.count(Outcome.UNANSWERED) == add_up(closed)


def test_refusals_are_told_apart_from_answers_and_failures(server: Behaviour) -> None:
    """D1: 429 and 503 are refusals with a time to refuse and their code; other statuses are failures."""
    server.status_every = {10: 503, 4: 500}
    result = run(open_loop("127.0.0.1", server.port, [REQUEST], constant_offsets(400.0, 0.5), deadline_s=0.25))

    assert result.count(Outcome.REFUSED) == 20
    assert result.count(Outcome.FAILED) == 40
    assert result.codes == {"503 shed": 20, "500 shed": 40}
    assert 0.0 < result.refusal_s(0.5) < 0.05
    assert add_up(result) == 200


def test_broken_and_refused_connections_are_counted_not_hidden(server: Behaviour) -> None:
    """D1: a request whose connection ends before its answer is a connection error, also when none can be opened."""
    server.is_hanging_up = True
    broken = run(open_loop("127.0.0.1", server.port, [REQUEST], constant_offsets(100.0, 0.3)))
    nobody = run(open_loop("127.0.0.1", 9, [REQUEST], constant_offsets(100.0, 0.3), grace_s=0.5))
    closed = run(closed_loop("127.0.0.1", 9, [REQUEST], connections=2, duration_s=0.2, grace_s=0.2))

    assert broken.count(Outcome.CONNECTION_ERROR) == 30
    assert nobody.count(Outcome.CONNECTION_ERROR) == 30
    assert 0 < closed.count(Outcome.CONNECTION_ERROR) == add_up(closed) <= 30


def test_a_connection_that_the_server_closes_after_an_answer_is_replaced(server: Behaviour) -> None:
    """D1: `Connection: close` costs a connection, not a request."""
    server.is_closing = True
    opened = run(open_loop("127.0.0.1", server.port, [REQUEST], constant_offsets(200.0, 0.3), connections=4))
    closed = run(closed_loop("127.0.0.1", server.port, [REQUEST], connections=2, duration_s=0.2))

    assert opened.count(Outcome.ANSWERED) == 60
    assert closed.count(Outcome.ANSWERED) == add_up(closed) > 4


def test_a_closed_loop_keeps_its_connections_busy(server: Behaviour) -> None:
    """D1: 4 connections to a server of 10 ms give about 400 answers/s, and requests go out in rotation."""
    server.delay_s = 0.01
    requests = [infer_request_bytes("127.0.0.1", 80, "m", body) for body in (b"one", b"two", b"three")]
    result = run(closed_loop("127.0.0.1", server.port, requests, connections=4, duration_s=0.5))

    assert 150 <= result.throughput_per_s <= 410
    assert result.count(Outcome.ANSWERED) == add_up(result)
    assert result.connections_peak == 4
    assert {b"one", b"two", b"three"} == set(server.bodies)


def test_a_generator_in_its_own_process_offers_a_high_rate_and_reports_progress(server: Behaviour) -> None:
    """D1: `run_in_process` brings the whole result back and tells about progress on the way."""
    seen: list[tuple[int, float]] = []
    plan = open_loop("127.0.0.1", server.port, [REQUEST], poisson_offsets(2000.0, 1.0, seed=3))
    result = run_in_process(plan, lambda completed, elapsed_s: seen.append((completed, elapsed_s)))

    assert plan.offsets_s is not None
    assert plan.offsets_s.size == result.count(Outcome.ANSWERED)
    assert 2 <= len(seen) <= 30
    assert sorted(seen) == seen
    assert result.summary()["requests"] == seen[-1][0]


def test_an_inference_body_says_what_the_array_holds() -> None:
    """D1: bodies follow the Open Inference Protocol, in JSON with short decimals and in the binary extension."""
    array = np.array([[1.1, 2.0]])
    body, headers = binary_infer_body("x", array.astype(np.float32))
    length = int(headers["Inference-Header-Content-Length"])

    assert (
        json_infer_body("x", array, datatype="FP32")
        == b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1.1,2.0]}]}'
    )
    assert array.astype("<f4").tobytes() == body[length:]
    assert b'"binary_data_size":8' in body[:length]
