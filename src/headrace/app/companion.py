"""The control process beside a worker that runs alone, so that metrics and reloads are there as everywhere else."""

import asyncio
import os
import signal
import subprocess
import sys
from types import TracebackType
from typing import Final, Self

from headrace.app.sockets import listen
from headrace.config import Settings
from headrace.home import Home
from headrace.telemetry.logs import log

RESTART_S: Final = 1.0
STOP_S_MAX: Final = 5.0


class Companion:
    """Starts `headrace.app.control` on the admin port and starts it again when it dies; ends with its owner.

    Raises:
        headrace.app.start.StartError: The admin port cannot be opened.
    """

    def __init__(self, home: Home, settings: Settings) -> None:
        self._home = home
        self._admin = listen(settings.admin_host, settings.admin_port, "admin")
        # Only this process holds the other end: the companion sees it close however this process ends.
        self._lifeline, self._own_end = os.pipe()
        self._process: subprocess.Popen[bytes] | None = None
        self._status_fd = -1
        self._is_up = False
        self._is_reload_wanted = False

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._close_status()
        self._admin.close()
        os.close(self._lifeline)
        os.close(self._own_end)

    def _start(self) -> None:
        self._close_status()
        self._is_up = False
        self._status_fd, their_end = os.pipe()
        os.set_blocking(self._status_fd, False)
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "headrace.app.control", "--home", str(self._home.root),
                    "--admin-fd", str(self._admin.fileno()), "--lifeline-fd", str(self._lifeline),
                    "--status-fd", str(their_end),
                ],
                pass_fds=(self._admin.fileno(), self._lifeline, their_end),
            )  # fmt: skip
        finally:
            os.close(their_end)

    def _close_status(self) -> None:
        if self._status_fd >= 0:
            os.close(self._status_fd)
            self._status_fd = -1

    def reload(self) -> None:
        """Have the process look again at what is served, now or as soon as it is up."""
        self._is_reload_wanted = True
        self._forward_reload()

    def _forward_reload(self) -> None:
        # Only to one that said it is up: SIGHUP would end a process that has no handler yet.
        if self._is_reload_wanted and self._process is not None and self._process.poll() is None and self._said_up():
            self._is_reload_wanted = False
            self._process.send_signal(signal.SIGHUP)

    def _said_up(self) -> bool:
        if not self._is_up:
            try:
                self._is_up = bool(os.read(self._status_fd, 64))
            except BlockingIOError:
                pass
        return self._is_up

    async def keep_alive(self) -> None:
        """Start the process again whenever it has ended."""
        while True:
            await asyncio.sleep(RESTART_S)
            if self._process is not None and self._process.poll() is not None:
                log("warning", "control process restarted", exit_code=self._process.returncode)
                try:
                    self._start()
                except OSError as error:  # no process or descriptor to be had now; there may be in a second
                    log("error", "control process not started", reason=str(error))
            self._forward_reload()
