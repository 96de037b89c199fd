"""A child process as the supervisor sees it: how it is spawned, what it said last, when it may come again.

Every child gets two pipe ends. The read end of the *lifeline* tells it that the supervisor is gone: only the
supervisor holds the other end, so the kernel closes it however the supervisor dies. On the write end of its *status*
pipe it puts a newline whenever its report file changed, so that nobody has to poll.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from headrace.report import WorkerReport

BACKOFF_S_FIRST: Final = 0.1
BACKOFF_S_MAX: Final = 10.0
HEALTHY_S: Final = 30.0


@dataclass(slots=True)
class Backoff:
    """Exponential waiting: 0.1 s doubling to 10 s, forgotten after 30 s of health.

    Attributes:
        failures: In a row.
    """

    failures: int = 0

    def next_s(self, healthy_s: float) -> float:
        """How long to wait after one more failure.

        Args:
            healthy_s: How long the child had been ready, seconds.
        """
        if healthy_s >= HEALTHY_S:
            self.failures = 0
        wait_s = min(BACKOFF_S_MAX, BACKOFF_S_FIRST * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return wait_s


@dataclass(slots=True, eq=False)
class Child:
    """One running child.

    Attributes:
        number: Of a worker; 0 for the control process.
        status_fd: Read end of its status pipe; -1 once closed.
        spawned_s: Monotonic time of its start.
        ready_s: Monotonic time at which it first said that it serves.
        report: A worker's last report.
        is_retiring: It was told to leave because another took its place.
        beat_s: A worker's last sign of life, as last seen.
        still_s: For how long that has been the same, as far as the supervisor was awake to see it.
    """

    name: str
    number: int
    process: subprocess.Popen[bytes]
    status_fd: int
    spawned_s: float
    ready_s: float | None = None
    report: WorkerReport | None = field(default=None)
    is_retiring: bool = False
    beat_s: float = 0.0
    still_s: float = 0.0

    @property
    def pid(self) -> int:
        return self.process.pid

    def healthy_s(self, now_s: float) -> float:
        """How long it has been ready."""
        return 0.0 if self.ready_s is None else now_s - self.ready_s

    def signal(self, signum: int) -> None:
        """Send a signal; a child that is already gone is no error."""
        try:
            self.process.send_signal(signum)
        except ProcessLookupError:
            pass

    def read_status(self) -> bool:
        """Take what is in the status pipe.

        Returns:
            True when it said something; at end of file the pipe is closed.
        """
        try:
            data = os.read(self.status_fd, 4096)
        except BlockingIOError:
            return False
        if not data:
            self.close_status()
        return bool(data)

    def close_status(self) -> None:
        if self.status_fd >= 0:
            os.close(self.status_fd)
            self.status_fd = -1


def spawn(
    name: str,
    number: int,
    command: Sequence[str],
    *,
    lifeline_fd: int,
    keep_fds: Sequence[int],
    now_s: float,
) -> Child:
    """Start a child in a process group of its own.

    Its own group, so that Ctrl-C in a terminal reaches the supervisor alone, which then stops everything in order.

    Args:
        command: Without the lifeline and status arguments, which are added here.
        keep_fds: Further descriptors it inherits.

    Raises:
        OSError: The system grants no process or descriptor.
    """
    status_read, status_write = os.pipe()
    os.set_blocking(status_read, False)
    try:
        process = subprocess.Popen(
            [*command, "--lifeline-fd", str(lifeline_fd), "--status-fd", str(status_write)],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # standard output belongs to the start screen
            pass_fds=(*keep_fds, lifeline_fd, status_write),
            process_group=0,
        )
    except OSError:
        os.close(status_read)
        raise
    finally:
        os.close(status_write)
    return Child(name, number, process, status_read, now_s)


def describe_exit(code: int) -> str:
    """`was ended by SIGKILL` or `exited with 1`."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
