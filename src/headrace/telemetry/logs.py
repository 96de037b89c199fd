"""Logs: one JSON line per event on stderr, without payloads, and never more than a few a second from one place.

Logging never waits and never raises: what stands in its way costs the line, not the request.
"""

import logging
import time
import traceback
from typing import Any, Final

import msgspec

from headrace.telemetry.stderr import LINE_BYTES_MAX, put_line

LINES_PER_SITE_S = 5.0
"""A site that has more to say is silent for the rest of the second and then says how much it kept back."""

_TEXT_CHARACTERS_MAX: Final = 400

_windows: dict[str, tuple[int, int]] = {}
_lost = [0]


def log(level: str, event: str, **fields: Any) -> None:
    """Write one line.

    Args:
        level: `info`, `warning` or `error`.
        event: What happened, past tense, a constant text: it is the site of the rate limit.
        **fields: JSON values. `suppressed` and `lost` are added: lines held back, or that standard error did not take.
    """
    second = int(time.monotonic())
    window, count = _windows.get(event, (second, 0))
    if window != second:
        if count > LINES_PER_SITE_S:
            fields["suppressed"] = count - int(LINES_PER_SITE_S)
        window, count = second, 0
    _windows[event] = (window, count + 1)
    if count >= LINES_PER_SITE_S:
        return
    if _lost[0]:
        fields["lost"] = _lost[0]
    if put_line(_line({"time": time.time(), "level": level, "event": event, **fields})):
        _lost[0] = 0
    else:
        _lost[0] += 1


def _line(fields: dict[str, Any]) -> bytes:
    try:
        line = msgspec.json.encode(fields, enc_hook=str)
        if len(line) < LINE_BYTES_MAX:
            return line
    except (TypeError, ValueError, RecursionError):
        pass  # a path that is not UTF-8, for one
    return msgspec.json.encode({name: _plain(value) for name, value in fields.items()})


def _plain(value: Any) -> int | float | str:
    """What JSON can say in any case: with escapes, and shortened, rather than not at all."""
    if isinstance(value, int | float):
        return value
    text = str(value)[:_TEXT_CHARACTERS_MAX]
    return text.encode("utf-8", "backslashreplace").decode()


def log_unexpected(where: str, error: BaseException) -> None:
    """Write down an error that should not have been possible, with the place it was raised at."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    log(
        "error",
        "unexpected error",
        where=where,
        error=f"{type(error).__name__}: {error}"[:500],
        at=[f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in frames],
    )


class LibraryLogs(logging.Handler):
    """Takes what libraries say through `logging`, the event loop's own complaints among it, which would otherwise be
    written to standard error by writes that wait."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        fields = {"text": record.getMessage()}
        if record.exc_info and record.exc_info[1] is not None:
            fields["error"] = repr(record.exc_info[1])
        # The logger is the site of the rate limit: texts have addresses in them, and there is no end of those.
        log(record.levelname.lower(), f"said by {record.name}", **fields)
