"""Content codings of the HTTP front: what is offered, which one a caller asks for, and the work itself.

Bodies of up to `INLINE_BYTES` are coded on the event loop, which takes well under a millisecond; longer ones go to the
front's thread pool (zlib releases the interpreter lock), so that no caller's body stalls the others' requests.
"""

import zlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from headrace.errors import BadRequest, BodyTooLarge

__all__ = [
    "INLINE_BYTES",
    "OFFERED",
    "WINDOW_BITS",
    "WORTHWHILE_BYTES",
    "chosen_coding",
    "compress",
    "decompress",
    "decompress_inline",
]

OFFERED: Final = b"gzip, deflate"
INLINE_BYTES: Final = 64 * 1024
WORTHWHILE_BYTES: Final = 1024

# Source: RFC 9110 §8.4.1. `deflate` is the zlib wrapper, not raw deflate; x-gzip is the old name of gzip.
WINDOW_BITS: Final[dict[bytes, int]] = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}


def decompress_inline(data: bytes, coding: bytes, bytes_max: int) -> bytes | None:
    """Decompress a body that takes little time.

    Args:
        data: The body as sent.
        coding: A key of `WINDOW_BITS`.
        bytes_max: Most bytes of the result.

    Returns:
        The body, or None when it is too long for the event loop; `decompress` then starts it again elsewhere.

    Raises:
        headrace.errors.BadRequest: Not of this coding, cut short, or followed by something.
        headrace.errors.BodyTooLarge: The result is longer than `bytes_max`.
    """
    if len(data) > INLINE_BYTES:
        return None
    body = _inflate(data, coding, min(bytes_max, INLINE_BYTES))
    if body is None and bytes_max < INLINE_BYTES:
        raise _too_large(bytes_max)
    return body


def decompress(data: bytes, coding: bytes, bytes_max: int) -> bytes:
    """Decompress a body of any length; blocking. Arguments and errors as `decompress_inline`."""
    body = _inflate(data, coding, bytes_max)
    if body is None:
        raise _too_large(bytes_max)
    return body


def _too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body decompresses to more than {bytes_max} bytes; at most {bytes_max} are accepted")


def _inflate(data: bytes, coding: bytes, bytes_max: int) -> bytes | None:
    """The decompressed body; None when it is longer than `bytes_max`. No more than one byte above that is ever made,
    so a zip bomb costs what an honest body of the largest accepted size costs."""
    name = coding.decode()
    stream = zlib.decompressobj(WINDOW_BITS[coding])
    try:
        body = stream.decompress(data, bytes_max + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is not {name}, as its content-encoding says: {error}") from error
    if len(body) > bytes_max:
        return None
    if not stream.eof:
        raise BadRequest(f"the {name} body is cut short after {len(data)} bytes; a whole {name} stream is needed")
    # A second gzip member is legal in files and useless in a request; a chain of empty ones would cost quadratic time.
    if stream.unused_data:
        raise BadRequest(f"{len(stream.unused_data)} bytes follow the end of the {name} body; one stream is accepted")
    return body


def compress(parts: Iterable[bytes | memoryview], coding: bytes) -> bytes:
    """Compress an answer; level 1, since a serving answer is read once and its latency counts."""
    stream = zlib.compressobj(1, zlib.DEFLATED, WINDOW_BITS[coding])
    pieces = [stream.compress(part) for part in parts]
    pieces.append(stream.flush())
    return b"".join(pieces)


@lru_cache(maxsize=64)
def chosen_coding(accept_encoding: bytes) -> tuple[bytes, bool]:
    """Which coding an Accept-Encoding header asks for.

    Args:
        accept_encoding: Value of the header.

    Returns:
        The coding, empty for none; and whether even a small body must have it, because identity is refused. Where
        identity is refused and nothing on offer is accepted either, the answer goes out as it is: a readable answer in
        the wrong coding helps more than a 406.

    Source: RFC 9110 §12.5.3. Equal weights go to gzip; a malformed entry is ignored.
    """
    weights: dict[bytes, float] = {}
    for entry in accept_encoding.lower().split(b","):
        name, _, parameters = entry.partition(b";")
        weight = 1.0
        for parameter in parameters.split(b";"):
            key, _, value = parameter.partition(b"=")
            if key.strip() == b"q":
                try:
                    weight = float(value)
                except ValueError:
                    weight = -1.0
        if 0.0 <= weight <= 1.0:
            weights[name.strip()] = weight
    rest = weights.get(b"*", 0.0)
    gzip = max(weights.get(b"gzip", rest), weights.get(b"x-gzip", 0.0))
    deflate = weights.get(b"deflate", rest)
    coding, best = (b"gzip", gzip) if gzip >= deflate else (b"deflate", deflate)
    is_identity_refused = weights.get(b"identity", weights.get(b"*", 1.0)) == 0.0
    if best == 0.0 or weights.get(b"identity", 0.0) > best:
        return b"", False
    return coding, is_identity_refused
