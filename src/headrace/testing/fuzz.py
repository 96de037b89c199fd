"""A mutational fuzz harness for the HTTP front, in process.

Each input is a stream of requests, some of them broken. It is fed to a connection whole and again cut into other reads,
and after each the promises of the front are checked:

1. nothing raises, and nothing reaches the loop's exception handler;
2. every complete request is handed over exactly once, in order, and a stream that was not broken yields exactly what
   was put in;
3. there is one answer per request handed over and one reply per refusal, and nothing behind a reply that closes;
   answers come in the order of the requests although the handler answers in another order;
4. the answers parse, and an error is JSON;
5. what is handed over never exceeds the bound on pipelined requests;
6. however the stream is cut into reads, requests and answers are the same.

Example:
    >>> report = run(executions=200, seed=1)
    >>> report.failures
    []
"""

import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import msgspec

from headrace.clock import ManualClock
from headrace.config import Settings
from headrace.data_plane.gateway.http import Exchange, HttpFront
from headrace.errors import HeadraceError

__all__ = ["Report", "run"]

_PIPELINED_MAX: Final = 4
_SETTINGS: Final = Settings(header_bytes_max=1024, body_bytes_max=4096, pipelined_requests_max=_PIPELINED_MAX)
_FAILURES_MAX: Final = 10

Request = tuple[str, bytes, bytes]


@dataclass(slots=True)
class Report:
    """What a run found.

    Attributes:
        executions: Connections driven.
        requests: Complete requests that were handed over.
        refusals: Streams that were broken off.
        seconds: Wall time.
        failures: One line each with the input, at most ten.
    """

    executions: int = 0
    requests: int = 0
    refusals: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class FakeTransport:
    """Takes everything at once; shipped for tests that drive a connection without a socket."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_open = True
        self.is_eof_written = False
        self.is_reading = True

    def write(self, data: bytes | memoryview) -> None:
        assert self.is_open, "written after close"
        assert not self.is_eof_written, "written after end of file"
        self.written.append(bytes(data))

    def writelines(self, parts: Sequence[bytes | memoryview]) -> None:
        for part in parts:
            self.write(part)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_eof_written = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        assert self.is_open, "paused after close"
        assert self.is_reading, "paused twice"
        self.is_reading = False

    def resume_reading(self) -> None:
        assert self.is_open, "resumed after close"
        assert not self.is_reading, "resumed twice"
        self.is_reading = True

    def is_closing(self) -> bool:
        return not self.is_open

    def close(self) -> None:
        self.is_open = False

    abort = close


class FakeLoop:
    """Runs what was asked for when it is told to."""

    def __init__(self) -> None:
        self.soon: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.errors: list[dict[str, Any]] = []

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.soon.append((callback, args))

    call_soon_threadsafe = call_soon

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def turn(self) -> None:
        """Run everything that is due."""
        while self.soon:
            callback, args = self.soon.popleft()
            callback(*args)


class _Handler:
    """Answers with the number and a checksum of the request: one in three at once, the others later and shuffled."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.refusals: list[str] = []
        self.waiting: list[tuple[int, Exchange]] = []
        self.open = 0
        self.open_most = 0
        self.abandoned = 0

    def handle(self, exchange: Exchange) -> None:
        number = len(self.requests)
        self.requests.append((exchange.method, exchange.target, exchange.body))
        self.headers.append(exchange.headers)
        self.open += 1
        self.open_most = max(self.open, self.open_most)
        if number % 3 == 0:
            self.answer(number, exchange)
        else:
            exchange.on_abandoned = self.abandon
            self.waiting.append((number, exchange))

    def answer(self, number: int, exchange: Exchange) -> None:
        self.open -= 1
        exchange.send(200, b"content-type: text/plain\r\n", (b"%d" % number, memoryview(b".")))

    def abandon(self) -> None:
        self.abandoned += 1

    def refused(self, error: HeadraceError) -> None:
        self.refusals.append(error.code)


@dataclass(slots=True)
class _Outcome:
    requests: list[Request]
    headers: list[dict[bytes, bytes]]
    refusals: list[str]
    answers: bytes  # without the refusal that ended the connection, whose wording may depend on the reads
    is_closed: bool


def _execute(reads: Sequence[bytes], clock: ManualClock) -> _Outcome:
    """Drive one connection to the end of its input and check what can be checked of a single run."""
    handler, loop, transport = _Handler(), FakeLoop(), FakeTransport()
    front = HttpFront(_SETTINGS, handler, clock, loop)
    connection = front.connection()
    connection.connection_made(transport)  # type: ignore[arg-type]

    def settle() -> None:
        """Answer everything, in an order that does not depend on how the input was cut."""
        loop.turn()
        while handler.waiting:
            handler.answer(*handler.waiting.pop(len(handler.waiting) // 2))
            loop.turn()

    for read in reads:
        if not transport.is_open:
            break
        connection.data_received(read)
        loop.turn()
        if not transport.is_reading:
            settle()
            assert transport.is_reading or not transport.is_open, "not read on although everything is answered"
    settle()
    is_closed = transport.is_eof_written or not transport.is_open
    if transport.is_open:
        connection.eof_received()
    connection.connection_lost(None)
    assert not loop.errors, f"reported: {loop.errors[0].get('exception')!r}"
    assert handler.abandoned == 0, "an answered request was abandoned"
    assert handler.open_most <= _PIPELINED_MAX, f"{handler.open_most} requests at once"
    assert front.connections == 0, "the connection was not forgotten"
    output = b"".join(transport.written).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    answers_end = _check_answers(output, handler)
    return _Outcome(handler.requests, handler.headers, handler.refusals, output[:answers_end], is_closed)


def _check_answers(output: bytes, handler: _Handler) -> int:
    """Check what was written; returns where the refusal that ended the connection begins, else the end."""
    answers = refusals = position = 0
    answers_end = len(output)
    methods = [method for method, _, _ in handler.requests]
    while position < len(output):
        end = output.index(b"\r\n\r\n", position)
        lines = output[position:end].split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines[1:])
        length = int(headers[b"content-length"])
        if lines[0] == b"HTTP/1.1 200 OK":
            if methods[answers] == "HEAD":
                length = 0
            else:
                assert output[end + 4 : end + 4 + length] == b"%d." % answers, "an answer out of turn"
            answers += 1
        else:
            # A body that does not decompress is refused too, and if its framing is sound the connection goes on.
            assert headers[b"content-type"] == b"application/json"
            assert msgspec.json.decode(output[end + 4 : end + 4 + length])["code"] == handler.refusals[refusals]
            refusals += 1
            if headers.get(b"connection") == b"close":
                answers_end = position
        assert position <= answers_end, "something follows the refusal that ended the connection"
        position = end + 4 + length
    assert answers == len(handler.requests), f"{answers} answers to {len(handler.requests)} requests"
    assert refusals == len(handler.refusals), f"{refusals} replies to {handler.refusals}"
    return answers_end


# ── Inputs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_HOST: Final = b"host: h\r\n"
_DEFLATED: Final = zlib.compress(b"squeezed")
# Bytes, the request in them, and whether the connection goes on.
_VALID: Final[tuple[tuple[bytes, Request, bool], ...]] = (
    (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", ("GET", b"/", b""), True),
    (b"HEAD /h HTTP/1.1\r\n" + _HOST + b"\r\n", ("HEAD", b"/h", b""), True),
    (b"\r\nGET http://h:80?q=1 HTTP/1.1\r\n" + _HOST + b"\r\n", ("GET", b"/?q=1", b""), True),
    (b"OPTIONS * HTTP/1.1\r\n" + _HOST + b"a: 1\r\na:\r\nA: 2\r\n\r\n", ("OPTIONS", b"*", b""), True),
    (b"POST /p HTTP/1.1\r\n" + _HOST + b"content-length: 3\r\n\r\nabc", ("POST", b"/p", b"abc"), True),
    (
        b"POST /c HTTP/1.1\r\n"
        + _HOST
        + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\nt: v\r\n\r\n",
        ("POST", b"/c", b"abc"),
        True,
    ),
    (
        b"POST /e HTTP/1.1\r\n" + _HOST + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\nab",
        ("POST", b"/e", b"ab"),
        True,
    ),
    (
        b"POST /u HTTP/1.1\r\n" + _HOST + b"upgrade: h2c\r\nconnection: upgrade\r\ncontent-length: 5\r\n\r\nGET /",
        ("POST", b"/u", b"GET /"),
        True,
    ),
    (
        b"POST /v HTTP/1.1\r\n"
        + _HOST
        + b"upgrade: h2c\r\nconnection: upgrade\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        ("POST", b"/v", b"abc"),
        True,
    ),
    (b"GET /w HTTP/1.1\r\n" + _HOST + b"upgrade: websocket\r\nconnection: upgrade\r\n\r\n", ("GET", b"/w", b""), True),
    (
        b"POST /d HTTP/1.1\r\n"
        + _HOST
        + b"content-encoding: deflate\r\ncontent-length: %d\r\n\r\n" % len(_DEFLATED)
        + _DEFLATED,
        ("POST", b"/d", b"squeezed"),
        True,
    ),
    (b"GET /k HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", ("GET", b"/k", b""), True),
    (b"GET /o HTTP/1.0\r\n\r\n", ("GET", b"/o", b""), False),
    (b"GET /x HTTP/1.1\r\n" + _HOST + b"connection: close\r\n\r\n", ("GET", b"/x", b""), False),
    (
        b"POST /y HTTP/1.1\r\n" + _HOST + b"upgrade: h\r\nconnection: upgrade, close\r\ncontent-length: 1\r\n\r\na",
        ("POST", b"/y", b"a"),
        False,
    ),
)
_TOKENS: Final = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b";", b"\r\n ", b"\r\n\r\n", b"0\r\n\r\n", b"%", b"\xff"),
    *(b"content-length: 1\r\n", b"content-length: 0\r\n", b"Content-Length: 99999999999999999999\r\n", b"host: i\r\n"),
    *(b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip, chunked\r\n", b"Transfer-Encoding: identity\r\n"),
    *(b"expect: 100-continue\r\n", b"expect: x\r\n", b"content-encoding: br\r\n", b"connection: close\r\n"),
    *(b"upgrade: x\r\nconnection: upgrade\r\n", b"connection: keep-alive\r\n", b"a: " + b"b" * 1100 + b"\r\n"),
    *(b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT h:1 HTTP/1.1"),
    *(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n", b"ffffffffffffffff\r\n", b"-1\r\n", b"1000\r\n", b"GET /", b"POST"),
)


def _mutate(stream: bytes, dice: random.Random) -> bytes:
    for _ in range(1 + int(dice.random() * 3)):
        at = int(dice.random() * (len(stream) + 1))
        kind = dice.random()
        if kind < 0.4:
            stream = stream[:at] + dice.choice(_TOKENS) + stream[at:]
        elif kind < 0.6:
            stream = stream[:at] + stream[at + 1 + int(dice.random() * 8) :]
        elif kind < 0.8:
            stream = stream[:at] + bytes((int(dice.random() * 256),)) + stream[at + 1 :]
        else:
            line_end = stream.find(b"\n", at)
            stream = stream[:at] + stream[at : line_end + 1] * 2 + stream[line_end + 1 :]
    return stream


def _cut(stream: bytes, dice: random.Random) -> list[bytes]:
    if len(stream) < 60 or dice.random() < 0.05:
        return [stream[i : i + 1] for i in range(len(stream))]
    cuts = sorted({0, len(stream), *(int(dice.random() * len(stream)) for _ in range(1 + int(dice.random() * 6)))})
    return [stream[a:b] for a, b in pairwise(cuts)]


def _check_input(dice: random.Random, clock: ManualClock, report: Report) -> None:
    parts = [dice.choice(_VALID) for _ in range(1 + int(dice.random() * dice.random() * 8))]
    stream = b"".join(part for part, _, _ in parts)
    is_broken = dice.random() < 0.9
    if is_broken:
        stream = _mutate(stream, dice)
    reads = [stream]
    try:
        whole = _execute(reads, clock)
        report.executions += 1
        report.requests += len(whole.requests)
        report.refusals += len(whole.refusals)
        if not is_broken:
            wanted = []
            for _, request, goes_on in parts:
                wanted.append(request)
                if not goes_on:
                    break
            assert whole.requests == wanted, f"{whole.requests} from {wanted}"
            assert not whole.refusals, "a valid stream was refused"
            assert not any(b"t" in headers for headers in whole.headers), "a trailer passed for a header"
        # Smuggling: no request without a request line of its own.
        assert len(whole.requests) <= stream.count(b" HTTP/1."), "more requests than request lines"
        reads = _cut(stream, dice)
        pieces = _execute(reads, clock)
        report.executions += 1
        assert pieces.requests == whole.requests, f"{pieces.requests} from pieces, {whole.requests} from the whole"
        assert pieces.headers == whole.headers, f"{pieces.headers} from pieces, {whole.headers} from the whole"
        if pieces.refusals != whole.refusals:
            # Which of two faults is met first, an endless header or a bad byte behind it, depends on the reads.
            assert len(stream) > _SETTINGS.header_bytes_max, f"{pieces.refusals} for {whole.refusals}"
            assert pieces.refusals[:-1] == whole.refusals[:-1], f"{pieces.refusals} for {whole.refusals}"
            pair = {pieces.refusals[-1], whole.refusals[-1]}
            assert pair == {"bad_request", "header_too_large"}, f"{pair} from one stream"
        assert pieces.answers == whole.answers, "other answers to pieces than to the whole"
        assert pieces.is_closed == whole.is_closed, "another end for pieces than for the whole"
    except Exception as error:
        report.executions += 1
        report.failures.append(f"{type(error).__name__}: {error}; reads: {reads!r}")


def run(executions: int, seed: int) -> Report:
    """Fuzz.

    Args:
        executions: Connections to drive; the run stops at the first input after that many.
        seed: Same seed, same inputs.

    Returns:
        What was found; `failures` is empty when every promise held.
    """
    dice, clock, report = random.Random(seed), ManualClock(), Report()
    started_s = time.perf_counter()
    while report.executions < executions and len(report.failures) < _FAILURES_MAX:
        _check_input(dice, clock, report)
    report.seconds = time.perf_counter() - started_s
    return report
