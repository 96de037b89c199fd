"""One HTTP request and its one answer."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from headrace.data_plane.gateway.http_compression import INLINE_BYTES, WORTHWHILE_BYTES, chosen_coding, compress
from headrace.data_plane.gateway.http_reply import error_reply
from headrace.errors import HeadraceError, ServerError

if TYPE_CHECKING:
    from headrace.data_plane.gateway.http_connection import Connection

__all__ = ["CLOSES", "KEEPS", "KEEPS_10", "REFUSES", "Exchange", "Part", "body_bytes"]

Part = bytes | memoryview

_CODED_HEAD: Final = {
    coding: b"content-encoding: %b\r\nvary: accept-encoding\r\n" % coding for coding in (b"gzip", b"deflate")
}


# What becomes of the connection after an answer, in rising order of finality. Plain numbers: they are compared on every
# request, where an IntEnum is three times as slow.
KEEPS: Final = 0  # HTTP/1.1: goes on, and need not say so
KEEPS_10: Final = 1  # HTTP/1.0 that asked for keep-alive, which must be confirmed
CLOSES: Final = 2  # the caller asked for it
REFUSES: Final = 3  # what the caller still sends is not read as requests


class Exchange:
    """A complete request, and the way to answer it.

    Attributes:
        method: `GET`, `POST`, …
        target: Path and query as sent, not decoded; of an absolute target only these.
        headers: Values by lower-case name. A repeated header is joined with `, `. Trailers are left out.
        body: Dechunked and decompressed.
        connection: Where the answer goes; None once it has gone out or the caller has left.
        special: For the connection: the content coding to undo, or the error to tell; None for a plain request.
        received_at_s: Monotonic time at which the last byte of the message was parsed, before decompression.
        body_bytes_received: Length of the body as sent: dechunked, not decompressed.
        on_abandoned: Set by the handler; called at most once, when the caller has gone before the answer was sent.
        may_compress: Whether the answer may be compressed when the caller asks; only a 200 to a POST ever is.

    Concurrency: event loop only.
    """

    __slots__ = (
        "_is_sent",
        "body",
        "body_bytes_received",
        "connection",
        "headers",
        "is_ready",
        "may_compress",
        "method",
        "on_abandoned",
        "persistence",
        "received_at_s",
        "reply_body",
        "reply_head",
        "reply_status",
        "special",
        "target",
    )

    # Written by `send`, read by the connection once `is_ready`.
    reply_status: int
    reply_head: bytes
    reply_body: Sequence[Part]

    def __init__(
        self,
        connection: "Connection | None",
        method: str,
        target: bytes,
        headers: dict[bytes, bytes],
        body: bytes,
        received_at_s: float,
        persistence: int,
        special: bytes | HeadraceError | None = None,
    ) -> None:
        self.connection = connection
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.body_bytes_received = len(body)
        self.received_at_s = received_at_s
        self.persistence = persistence
        self.special = special
        self.on_abandoned: Callable[[], None] | None = None
        self.may_compress = True
        self.is_ready = False
        self._is_sent = False

    @property
    def is_sent(self) -> bool:
        """`send` has been called."""
        return self._is_sent

    @property
    def is_gone(self) -> bool:
        """The caller has gone, or has been handed the answer."""
        return self.connection is None

    def send(self, status: int, head: bytes, body: Sequence[Part]) -> bool:
        """Answer the request.

        Args:
            status: HTTP status, 200–599.
            head: Extra header lines, lower-case names, each ending in CR LF; never the caller's bytes. Length, date,
                connection and content coding are added here.
            body: Parts, written one after the other; they must not change afterwards. A HEAD request is told their
                length only.

        Returns:
            False when the caller has gone. True means that the answer was taken: it leaves when those before it on the
            connection have left, and can still be lost with the connection.

        Raises:
            RuntimeError: The request was answered before.
            TypeError: A part is no contiguous buffer; the request is still unanswered.
        """
        if self._is_sent:
            raise RuntimeError(f"a second answer ({status}) to one request; each request has exactly one")
        if len(body) != 1 or type(body[0]) is not bytes:
            body = as_bytes(body)
        self._is_sent = True
        self.on_abandoned = None  # Also lets go of whatever the callback holds.
        connection = self.connection
        if connection is None:
            return False
        self.reply_status = status
        self.reply_head = head
        self.reply_body = body
        if b"accept-encoding" in self.headers and self._is_left_to_compress(connection):
            return True
        self.is_ready = True
        connection.answer_ready(self)
        return True

    def abandon(self) -> Callable[[], None] | None:
        """The caller has gone: no answer leaves any more. Returns the callback that is now due, if any."""
        self.connection = None
        callback, self.on_abandoned = self.on_abandoned, None
        return callback

    def _is_left_to_compress(self, connection: "Connection") -> bool:
        """Compress the answer if that is asked for; True when it is ready only later.

        Only a 200 to a POST is compressed, that is: predictions. tritonclient's aio variant lets aiohttp ask for gzip
        on every request, switches its decompression off, and undoes the coding of inference answers alone; a
        compressed error or metadata body would be unreadable there. Triton compresses inference answers only, too.
        """
        if self.reply_status != 200 or self.method != "POST" or not self.may_compress:
            return False
        coding, is_forced = chosen_coding(self.headers[b"accept-encoding"])
        length_bytes = body_bytes(self.reply_body)
        if not coding or not (length_bytes >= WORTHWHILE_BYTES or (is_forced and length_bytes)):
            return False
        self.reply_head += _CODED_HEAD[coding]
        if length_bytes > INLINE_BYTES:
            connection.front.run_aside(partial(compress, self.reply_body, coding), self._compressed)
            return True
        self.reply_body = (compress(self.reply_body, coding),)
        return False

    def _compressed(self, result: bytes | BaseException) -> None:
        connection = self.connection
        if connection is None:
            return
        if isinstance(result, BaseException):
            # Only a foreign buffer that cannot be read gets here; the caller is not left waiting.
            connection.front.report("an answer could not be compressed", result)
            self.reply_status, self.reply_head, self.reply_body = error_reply(ServerError("the answer was lost here"))
        else:
            self.reply_body = (result,)
        self.is_ready = True
        connection.answer_ready(self)


def as_bytes(parts: Sequence[Part]) -> list[Part]:
    """The parts as bytes or views of bytes, whose `len` is their size; empty ones, which cannot be cast, left out."""
    return [
        part if type(part) is bytes else memoryview(part).cast("B")
        for part in parts
        if (len(part) if type(part) is bytes else memoryview(part).nbytes)
    ]


def body_bytes(parts: Sequence[Part]) -> int:
    """Length of a body in bytes."""
    return sum(map(len, parts))
