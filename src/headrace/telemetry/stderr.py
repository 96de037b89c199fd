"""Standard error as a place to say something, never one to wait for.

Whoever reads it may have stopped: a log collector that hangs, a terminal paused by Ctrl-S. A plain write would then
hold the event loop of a worker, or the supervisor, for as long as that lasts.
"""

import os
import select
import socket
import stat
import sys
from typing import Final

__all__ = ["LINE_BYTES_MAX", "put_line"]

LINE_BYTES_MAX: Final = select.PIPE_BUF
"""What is longer is cut: up to here a pipe takes all or nothing, and no line is torn by another process's."""


def put_line(content: bytes) -> bool:
    """Write one line, if that can be done at once; about 20 µs.

    Returns:
        False when it was not written: the reader is gone, or so far behind that the write would wait.
    """
    content = content[: LINE_BYTES_MAX - 1] + b"\n"
    try:
        return _write_at_once(sys.stderr.fileno(), content) == len(content)
    except (AttributeError, OSError, ValueError):  # full; or standard error was closed, before or since the start
        return False


def _write_at_once(descriptor: int, content: bytes) -> int:
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(kind):
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return connection.send(content, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    if not (stat.S_ISFIFO(kind) or os.isatty(descriptor)):
        return os.write(descriptor, content)
    # Opened anew: non-blocking is a property that our descriptor shares with every process that inherited it, shells
    # included, which would be surprised.
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        return os.write(own, content)
    finally:
        os.close(own)
