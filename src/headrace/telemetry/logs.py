"""Logs: one JSON line per event on stderr, without payloads, and never more than a few a second from one place."""

import sys
import time
import traceback
from typing import Any

import msgspec

LINES_PER_SITE_S = 5.0
"""A site that has more to say is silent for the rest of the second and then says how much it kept back."""

_windows: dict[str, tuple[int, int]] = {}


def log(level: str, event: str, **fields: Any) -> None:
    """Write one line.

    Args:
        level: `info`, `warning` or `error`.
        event: What happened, past tense, a constant text: it is the site of the rate limit.
        **fields: JSON values.
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
    line = msgspec.json.encode({"time": time.time(), "level": level, "event": event, **fields}, enc_hook=str)
    try:
        sys.stderr.buffer.write(line + b"\n")
        sys.stderr.buffer.flush()
    except (OSError, ValueError):
        return  # a closed stderr must not end the server


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
