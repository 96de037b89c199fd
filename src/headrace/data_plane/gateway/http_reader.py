"""Reads HTTP/1.1 requests out of a byte stream, strictly.

Strictness comes from llhttp, no leniency of which is switched on: it refuses bare line feeds, folded headers, NUL,
repeated or conflicting lengths, bad chunk sizes. What it leaves open is decided here: the version, the host, transfer
codings, repeated headers, sizes, and upgrades, which are read as ordinary requests. However the bytes are cut into
reads, the same requests come out (the fuzz harness checks exactly that).

Parser callbacks only collect: no handler runs inside the parser, so that nothing re-enters it and a handler's exception
cannot break it.
"""

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NoReturn

import httptools

from headrace.clock import Clock
from headrace.config import Settings
from headrace.data_plane.gateway.http_compression import OFFERED, WINDOW_BITS
from headrace.data_plane.gateway.http_exchange import CLOSES, KEEPS, KEEPS_10, Exchange
from headrace.errors import (
    BadRequest,
    BodiesFull,
    BodyTooLarge,
    ExpectationFailed,
    HeaderTooLarge,
    HeadraceError,
    NotImplementedYet,
    UnsupportedEncoding,
)

if TYPE_CHECKING:
    from headrace.data_plane.gateway.http_connection import Connection

__all__ = ["BODY", "HEAD", "IDLE", "HeldBodies", "KnownHeads", "RequestReader"]

_METHODS: Final = {
    name.encode(): name for name in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")
}
_COMMON: Final = """
    Accept Accept-Encoding Accept-Language Authorization Connection Content-Encoding Content-Length Content-Type Cookie
    Expect Host Inference-Header-Content-Length Traceparent Tracestate Transfer-Encoding Upgrade User-Agent Via
    X-Envoy-Attempt-Count X-Forwarded-For X-Forwarded-Proto X-Real-Ip X-Request-Id X-Request-Timeout-Ms
"""
# Both spellings that clients use, so that most headers cost one look-up; the values are shared by all requests.
_LOWER: Final = {
    spelling: name.lower().encode() for name in _COMMON.split() for spelling in (name.encode(), name.lower().encode())
}
_NEVER_REPEATED: Final = frozenset(
    (
        *(b"host", b"content-length", b"transfer-encoding", b"content-type", b"content-encoding", b"expect"),
        *(b"authorization", b"inference-header-content-length"),
    )
)

IDLE, HEAD, BODY = range(3)

# Headers whose presence makes a request more than its head and a body of stated length, or its head one of a kind.
_NOT_KEPT: Final = (
    *(b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"connection"),
    *(b"x-request-id", b"traceparent"),
)
_KNOWN_HEADS_MAX: Final = 1024
_KNOWN_HEAD_BYTES_MAX: Final = 2048


class HeldBodies:
    """Bytes of bodies that have come in part, over all connections of the front.

    Each body has its limit, but a caller may begin one on every connection and never end it.
    """

    __slots__ = ("bytes_max", "held_bytes")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0


class KnownHeads(dict[bytes, tuple[str, bytes, dict[bytes, bytes], int]]):
    """Heads that were read and accepted before, by their exact bytes: method, target, headers, length of the body.

    Clients repeat themselves, and the parser calls back for every header: looking the head up instead saves some 4 µs a
    request (benchmarks/notes.md). Nothing is decided here: what is not known is read as ever. Headers are shared by all
    requests with that head, so nobody changes them.
    """

    __slots__ = ()

    def learn(self, data: bytes | memoryview, method: str, target: bytes, headers: dict[bytes, bytes]) -> None:
        """Keep the head that a read begins with, if another request may well have the same."""
        head, end, _ = bytes(data[:_KNOWN_HEAD_BYTES_MAX]).partition(b"\r\n\r\n")
        if not end or any(name in headers for name in _NOT_KEPT):
            return
        if len(self) >= _KNOWN_HEADS_MAX:
            self.clear()
        self[head + end] = (method, target, headers, int(headers.get(b"content-length", b"0")))


class _Refused(Exception):
    """Leaves a parser callback; the error to tell is in `RequestReader._refusal`."""


class RequestReader:
    """The reading half of one connection.

    Args:
        connection: For the exchanges that are made.
        settings: Limits.
        clock: Times the end of each message.
        completed: Takes every complete request.
        known_heads: Of all connections of the front.
        held_bodies: Of all connections of the front.

    Attributes:
        stage: `IDLE` between requests, `HEAD` or `BODY` inside one.
        is_timed: False from the start of a stage until the connection has noted when that was.
        is_continue_due: The caller waits to be told to send its body.
        is_done: The last request of the connection is complete; nothing after it is read.
        body_left_bytes: Of a body of stated length, what is still to come.

    **Invariant**: after an error was returned, or once `is_done`, `feed` is not called again.
    """

    __slots__ = (
        "_body",
        "_body_bytes",
        "_body_bytes_max",
        "_chunks",
        "_coding",
        "_completed",
        "_connection",
        "_header_bytes_max",
        "_headers",
        "_held_bodies",
        "_held_bytes",
        "_is_chunked",
        "_is_plain",
        "_is_short",
        "_is_upgrade",
        "_known_heads",
        "_message_headers",
        "_method",
        "_now_s",
        "_parser",
        "_persistence",
        "_raw_bytes",
        "_refusal",
        "_target",
        "body_left_bytes",
        "is_continue_due",
        "is_done",
        "is_timed",
        "stage",
    )

    def __init__(
        self,
        connection: "Connection",
        settings: Settings,
        clock: Clock,
        completed: deque[Exchange],
        known_heads: KnownHeads,
        held_bodies: HeldBodies,
    ) -> None:
        self._connection: Connection | None = connection
        self._known_heads = known_heads
        self._held_bodies = held_bodies
        self._held_bytes = 0  # our part of them
        self._header_bytes_max = settings.header_bytes_max
        self._body_bytes_max = settings.body_bytes_max
        self._now_s = clock.now_s
        self._completed = completed
        self._parser: Any = httptools.HttpRequestParser(self)
        self._refusal: HeadraceError | None = None
        self._headers: dict[bytes, bytes] = {}  # being filled
        self._message_headers = self._headers  # of the request whose body is being read
        self._method = ""
        self._target = b""
        self._coding: bytes | None = None
        self._body: bytes | bytearray = b""
        self._persistence = KEEPS
        self._is_chunked = self._is_short = self._is_upgrade = False
        self._is_plain = True  # the fields of the last request that most never change are as they were
        self._raw_bytes = self._body_bytes = self._chunks = 0
        self.body_left_bytes = 0
        self.is_continue_due = False
        self.is_done = False
        self.is_timed = False
        self.stage = IDLE

    def drop(self) -> None:
        """Let go of everything; parser, reader and connection hold one another."""
        self.stage = IDLE
        self.is_continue_due = False
        self._let_go_of_body()
        self._connection = None
        self._parser = None

    def _let_go_of_body(self) -> None:
        self._body = b""
        if self._held_bytes:
            self._held_bodies.held_bytes -= self._held_bytes
            self._held_bytes = 0

    def read_known(self, data: bytes) -> Exchange | None:
        """The request that a read consists of, if its head is known; None for anything else, which `feed` has to read.

        Call it between two requests only; the parser stands there too, and does not notice.
        """
        end = data.find(b"\r\n\r\n") + 4
        known = self._known_heads.get(data[:end])
        if known is None or len(data) - end != known[3]:
            return None
        method, target, headers, _ = known
        return Exchange(self._connection, method, target, headers, data[end:], self._now_s(), KEEPS)

    def feed(self, data: bytes | memoryview) -> HeadraceError | None:
        """Read on.

        Returns:
            None, or the error that the caller is to be told; the stream cannot be read any further then.
        """
        # A head that begins and ends in a read this short cannot be too large, and is not measured.
        self._is_short = self.stage == IDLE and len(data) <= self._header_bytes_max
        was_idle, was_head = self.stage == IDLE, self.stage == HEAD
        was_chunked = self.stage == BODY and self._is_chunked
        completed_before = len(self._completed)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._read_on(data, upgrade.args[0])
        except httptools.HttpParserError as error:
            if self.is_done:
                return None  # what follows `connection: close` is nobody's request
            if self._refusal is None and isinstance(error, httptools.HttpParserCallbackError):
                raise  # a defect of this file
            return self._refusal or BadRequest(f"not a valid HTTP/1.1 request: {error}")
        is_first = len(self._completed) - completed_before == (self.stage == IDLE)  # no request before this one
        if was_idle and self.stage != HEAD and is_first and self._persistence == KEEPS:
            self._known_heads.learn(data, self._method, self._target, self._message_headers)
        if self.stage == IDLE:
            return None
        # Safety nets for what the callbacks do not see: one endless header, and padding between chunks.
        if was_head and self.stage == HEAD:
            self._raw_bytes += len(data)
            if self._raw_bytes > 2 * self._header_bytes_max:
                return self._header_too_large()
        elif was_chunked and self.stage == BODY:
            self._raw_bytes += len(data)
            if self._raw_bytes > 2 * self._header_bytes_max + self._body_bytes + 16 * self._chunks:
                return BadRequest("chunk extensions are larger than the body; send none")
        return None

    def _read_on(self, data: bytes | memoryview, offset: int) -> HeadraceError | None:
        """Go on behind a request that asked for an upgrade, as if it had not.

        Such a request is an ordinary one to a server that upgrades to nothing (RFC 9110 §7.8); Java's HttpClient sends
        it on every first request. The parser has ended the message after its headers and would leave HTTP, so a fresh
        parser takes over. It is brought inside the body by a head of our own that has the same framing.
        """
        self._parser = httptools.HttpRequestParser(self)
        if self._is_upgrade:
            self._is_upgrade = False
            framing = (
                b"transfer-encoding: chunked" if self._is_chunked else b"content-length: %d" % self.body_left_bytes
            )
            if self._persistence == CLOSES:
                framing += b"\r\nconnection: close"
            kept = (
                self._method,
                self._target,
                self._message_headers,
                self._coding,
                self._persistence,
                self.is_continue_due,
            )
            self._parser.feed_data(b"POST / HTTP/1.1\r\nhost:\r\n%b\r\n\r\n" % framing)
            self._method, self._target, self._message_headers, self._coding, self._persistence, self.is_continue_due = (
                kept
            )
        return self.feed(memoryview(data)[offset:]) if offset < len(data) and not self.is_done else None

    def on_message_begin(self) -> None:
        self.stage = HEAD
        self.is_timed = False
        self._target = b""
        self._headers = {}
        self._raw_bytes = 0

    def on_url(self, url: bytes) -> None:
        # Called again for every piece of a target that arrives in pieces.
        self._target = self._target + url if self._target else url

    def on_header(self, name: bytes, value: bytes) -> None:
        key = _LOWER.get(name) or name.lower()
        headers = self._headers
        if key not in headers:
            headers[key] = value
        elif key in _NEVER_REPEATED:
            self._stop(BadRequest(f"the header {key.decode()} is given twice; once is accepted"))
        else:
            headers[key] += b", " + value

    def on_headers_complete(self) -> None:
        self.stage = BODY
        self.is_timed = False
        if not self._is_plain:
            self._is_plain = True
            self._persistence = KEEPS
            self._is_chunked = self._is_upgrade = False
            self._coding = None
            self._body = b""
            self.body_left_bytes = 0
        parser = self._parser
        headers = self._message_headers = self._headers
        method = parser.get_method()
        known = _METHODS.get(method)
        if known is None:
            # CONNECT, WebDAV, RTSP and the like: llhttp knows them, this server is not what they are meant for.
            self._stop(BadRequest(f"the method {method.decode()} is not offered by this server"))
        self._method = known
        if self._target[0] != 0x2F:
            self._target = self._path_of(self._target)
        if not self._is_short:
            self._check_size(len(self._target), headers)
        version = "1.1"
        if not parser.should_keep_alive():
            self._persistence = CLOSES
            self._is_plain = False
        # The version is looked up only where it can matter: 0.9, 1.0 and 2.0 do not keep alive without this header.
        if self._persistence or b"connection" in headers or b"host" not in headers:
            self._is_plain = False
            version = parser.get_http_version()
            if version == "1.0":
                self._persistence = self._persistence or KEEPS_10
            elif version != "1.1":
                self._stop(BadRequest(f"HTTP version {version} is not offered here; use 1.1"))
            elif b"host" not in headers:
                self._stop(BadRequest("an HTTP/1.1 request needs a host header"))
        if b"content-length" in headers or b"transfer-encoding" in headers:
            self._frame(version, headers)
        if b"expect" in headers and version == "1.1":
            if headers[b"expect"].lower() != b"100-continue":
                self._stop(ExpectationFailed("only the expectation 100-continue is offered"))
            self.is_continue_due = self._is_chunked or self.body_left_bytes > 0
        if b"upgrade" in headers:
            self._is_upgrade = parser.should_upgrade() and (self._is_chunked or self.body_left_bytes > 0)

    def _frame(self, version: str, headers: dict[bytes, bytes]) -> None:
        """How the body ends, and whether it is wanted. llhttp has refused the ambiguous framings already; what remains
        is checked again here because everything behind this server trusts it."""
        bytes_max = self._body_bytes_max
        self._is_plain = False
        self._body_bytes = self._raw_bytes = self._chunks = 0
        transfer = headers.get(b"transfer-encoding")
        if transfer is not None:
            if version != "1.1" or b"content-length" in headers:
                self._stop(BadRequest("transfer-encoding needs HTTP/1.1 and no content-length beside it"))
            if transfer.lower() != b"chunked":
                self._stop(NotImplementedYet("the only transfer-encoding offered is chunked"))
            self._is_chunked = True
            self._headers = {}  # takes the trailers, which must not pass for headers
        else:
            self.body_left_bytes = int(headers[b"content-length"])
            if self.body_left_bytes > bytes_max:
                self._stop(BodyTooLarge(f"the body has {self.body_left_bytes} bytes; at most {bytes_max} are accepted"))
        if b"content-encoding" in headers:
            coding = headers[b"content-encoding"].lower()
            if coding in WINDOW_BITS:
                self._coding = coding
            elif coding not in (b"", b"identity"):
                self._stop(UnsupportedEncoding(f"this content-encoding is not offered; {OFFERED.decode()} are"))

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_body(self, piece: bytes) -> None:
        length = len(piece)
        if length == self.body_left_bytes and not self._body:
            self._body = piece  # all of it, as nearly always
            return
        self.is_continue_due = False  # the caller did not wait to be asked
        self.body_left_bytes -= length
        self._body_bytes += length
        if self._body_bytes > self._body_bytes_max:
            limit = self._body_bytes_max
            self._stop(BodyTooLarge(f"the body has more than {limit} bytes; at most {limit} are accepted"))
        held = self._held_bodies
        self._held_bytes += length
        held.held_bytes += length
        if held.held_bytes > held.bytes_max:
            text = f"the bodies that are being received here take more than {held.bytes_max} bytes"
            self._stop(BodiesFull(text, retry_after_s=1.0))
        # One piece is kept as it is; more are gathered in one buffer, because a list of one-byte chunks would take
        # forty times what was sent.
        body = self._body
        if not body:
            self._body = piece
        elif type(body) is bytearray:
            body += piece
        else:
            gathered = bytearray(body)
            gathered += piece
            self._body = gathered

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return  # the parser skipped the body: `_read_on`
        if self._is_chunked and not self._is_short:
            self._check_size(0, self._headers)
        self.stage = IDLE
        self.is_continue_due = False
        body = self._body
        self._completed.append(
            Exchange(
                self._connection,
                self._method,
                self._target,
                self._message_headers,
                body if type(body) is bytes else bytes(body),
                self._now_s(),
                self._persistence,
                self._coding if body else None,
            )
        )
        self._let_go_of_body()  # the exchange has it; while the connection is silent nothing is held
        if self._persistence > KEEPS_10:
            self.is_done = True

    def _path_of(self, target: bytes) -> bytes:
        """Path and query of an absolute target (RFC 9112 §3.2.2); `*` belongs to OPTIONS."""
        if target == b"*" and self._method == "OPTIONS":
            return target
        scheme, separator, rest = target.partition(b"://")
        if not separator or scheme.lower() not in (b"http", b"https"):
            self._stop(BadRequest("the request target must be a path, or an absolute http or https address"))
        for position, byte in enumerate(rest):
            if byte == 0x2F:
                return rest[position:]
            if byte == 0x3F:
                return b"/" + rest[position:]
        return b"/"

    def _check_size(self, target_bytes: int, headers: dict[bytes, bytes]) -> None:
        """Names, values, and the three bytes that at least surround them: never more than what was sent."""
        size_bytes = target_bytes + sum(map(len, headers)) + sum(map(len, headers.values())) + 3 * len(headers)
        if size_bytes > self._header_bytes_max:
            self._stop(self._header_too_large())

    def _header_too_large(self) -> HeaderTooLarge:
        limit = self._header_bytes_max
        return HeaderTooLarge(f"request line and headers are larger than {limit} bytes; at most {limit} are accepted")

    def _stop(self, error: HeadraceError) -> NoReturn:
        self._refusal = error
        raise _Refused
