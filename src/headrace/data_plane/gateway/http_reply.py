"""What the HTTP front writes besides bodies: status lines, the date, and the reply to an error."""

import math
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

import msgspec

from headrace.data_plane.gateway.http_compression import OFFERED
from headrace.errors import HeadraceError, UnsupportedEncoding

__all__ = ["LENGTH_LINES", "StatusLines", "error_reply"]

_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}
_encode = msgspec.json.Encoder().encode


def error_reply(error: HeadraceError) -> tuple[int, bytes, list[bytes]]:
    """The reply that tells a caller about an error; the arguments of `Exchange.send`.

    Args:
        error: What happened. Its text goes into the JSON body only, never into a header.

    Returns:
        Status; extra header lines; body. The content type is exactly `application/json`, because the kserve client
        reads the error only then. `retry-after` is whole seconds, at least 1, when the error says when to come back.
    """
    head = b"content-type: application/json\r\n"
    if error.retry_after_s is not None:
        # `min` first: infinity and NaN become a day.
        head += b"retry-after: %d\r\n" % math.ceil(max(1.0, min(86_400.0, error.retry_after_s)))
    if isinstance(error, UnsupportedEncoding):
        head += b"accept-encoding: %b\r\n" % OFFERED  # RFC 9110 §15.5.16
    # A caller's text may hold lone surrogates, which UTF-8 cannot carry.
    text = error.message.encode("utf-8", "backslashreplace").decode()
    return error.http_status, head, [_encode({"error": text, "code": error.code})]


class StatusLines(dict[int, bytes]):
    """Status line and date by status, made once a second: `HTTP/1.1 200 OK` and `date: …`, each with its line end."""

    __slots__ = ("_date",)

    def __init__(self, unix_s: float) -> None:
        super().__init__()
        self.set_date(unix_s)

    def set_date(self, unix_s: float) -> None:
        """Move the date."""
        self._date = formatdate(unix_s, usegmt=True).encode()
        self.clear()

    def __missing__(self, status: int) -> bytes:
        reason = _REASONS.get(status, "Unknown").encode()
        lines = self[status] = b"HTTP/1.1 %d %b\r\ndate: %b\r\n" % (status, reason, self._date)
        return lines


class _LengthLines(dict[int, bytes]):
    """The content-length line, with the empty line behind it, by length; the short ones are made once."""

    __slots__ = ()

    def __missing__(self, length: int) -> bytes:
        line = b"content-length: %d\r\n\r\n" % length
        if length < 4096:
            self[length] = line
        return line


LENGTH_LINES: Final = _LengthLines()
