"""The control process beside a worker that runs alone, so that its metrics are served as everywhere else."""

import asyncio
import os
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
        self._admin.close()
        os.close(self._lifeline)
        os.close(self._own_end)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "headrace.app.control", "--home", str(self._home.root),
                "--admin-fd", str(self._admin.fileno()), "--lifeline-fd", str(self._lifeline),
            ],
            pass_fds=(self._admin.fileno(), self._lifeline),
        )  # fmt: skip

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
