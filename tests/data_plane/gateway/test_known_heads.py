"""Heads that were read before: the same requests come out whether a head is looked up or parsed."""

from typing import Any

import pytest

from headrace.clock import ManualClock
from headrace.config import Settings
from headrace.data_plane.gateway.http import Exchange, HttpFront
from headrace.errors import HeadraceError

BODY = b'{"inputs": []}'


class Wire:
    """Takes what a connection writes."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


class Keeper:
    """A handler that keeps what it was handed, and answers at once."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes, dict[bytes, bytes], bytes]] = []

    def handle(self, exchange: Exchange) -> None:
        self.seen.append((exchange.method, exchange.target, exchange.headers, exchange.body))
        exchange.send(200, b"", (b"ok",))

    def refused(self, error: HeadraceError) -> None:
        self.seen.append((error.code, b"", {}, b""))


class Front:
    """A front with one connection."""

    def __init__(self) -> None:
        self.keeper = Keeper()
        self.front = HttpFront(Settings(), self.keeper, ManualClock())
        self.connection = self.front.connection()
        self.wire = Wire()
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]  # the part of a transport that is used

    def read(self, data: bytes) -> None:
        self.connection.data_received(data)


def request(*lines: bytes, body: bytes = BODY) -> bytes:
    head = [b"POST /v2/models/m/infer HTTP/1.1", b"host: here", b"content-length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def test_a_request_with_a_known_head_is_the_same_as_the_first() -> None:
    """X5, P3: method, target, headers and the request's own body."""
    one = Front()
    one.read(request(b"content-type: application/json"))
    one.read(request(b"content-type: application/json", body=b'{"inputs": 12}'))

    first, second = one.keeper.seen
    assert first[:3] == second[:3]
    assert (BODY, b'{"inputs": 12}') == (first[3], second[3])
    assert 2 == one.wire.written.count(b"200 OK")
    assert 1 == len(one.front.known_heads)


def test_a_known_head_serves_other_connections_of_the_front() -> None:
    """X5: what is kept is the front's, bounded by it and not by the number of connections."""
    one = Front()
    one.read(request())
    other = one.front.connection()
    other.connection_made(Wire())  # type: ignore[arg-type]
    other.data_received(request())

    assert one.keeper.seen[0] == one.keeper.seen[1]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(request() + request(), id="two at once"),
        pytest.param(request()[:-3], id="body in pieces"),
        pytest.param(request()[:20], id="head in pieces"),
        pytest.param(request() + b"GET", id="the next one begins"),
    ],
)
def test_whatever_is_not_exactly_one_request_is_read_by_the_parser(data: bytes) -> None:
    """F7: the parser stays where it was, so that what follows is read rightly."""
    known, fresh = Front(), Front()
    known.read(request())
    rest = (request() + request())[len(data) :] if data in request() + request() else b" / HTTP/1.1\r\nhost: a\r\n\r\n"
    for part in (data, rest):
        known.read(part)
        fresh.read(part)

    assert known.keeper.seen[1:] == fresh.keeper.seen
    assert 2 == len(fresh.keeper.seen)


@pytest.mark.parametrize(
    "lines",
    [
        (b"expect: 100-continue",),
        (b"connection: close",),
        (b"connection: keep-alive",),
        (b"content-encoding: gzip",),
        (b"x-request-id: 17",),
        (b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",),
        (b"upgrade: h2c",),
    ],
)
def test_heads_that_mean_more_or_come_once_are_not_kept(lines: tuple[bytes, ...]) -> None:
    """F7: their meaning is not in the bytes alone, or nobody sends them again."""
    one = Front()
    one.read(request(*lines))

    assert {} == one.front.known_heads


def test_refused_heads_are_not_kept() -> None:
    """F7: neither a conflict nor a body that is too large becomes known."""
    one = Front()
    one.read(request(b"content-length: 99"))
    other = Front()
    other.read(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (Settings().body_bytes_max + 1))

    assert [["bad_request"], ["body_too_large"]] == [[entry[0] for entry in each.keeper.seen] for each in (one, other)]
    assert {} == one.front.known_heads | other.front.known_heads


def test_the_table_is_bounded() -> None:
    """F6: a caller who sends ever new heads takes bounded memory."""
    one = Front()
    for number in range(3000):
        one.read(request(b"x-number: %d" % number))
    one.read(request(b"x-long: " + b"a" * 4000))

    assert 3001 == len(one.keeper.seen)
    assert len(one.front.known_heads) <= 1024
    assert max(map(len, one.front.known_heads)) <= 2048
