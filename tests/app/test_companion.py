"""The control process beside a worker that runs alone."""

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headrace.app import companion
from headrace.config import Settings
from headrace.home import Home


class FakeProcess:
    """A process that ended; the third one that is asked for lives and does not listen to SIGTERM."""

    asked_for = 0
    returncode = 1
    is_killed = False

    def __init__(self, *_: Any, **__: Any) -> None:
        FakeProcess.asked_for += 1
        self.number = FakeProcess.asked_for
        if self.number == 2:
            raise OSError(11, "Resource temporarily unavailable")

    def poll(self) -> int | None:
        return None if self.number >= 3 else 1

    def terminate(self) -> None: ...

    def kill(self) -> None:
        FakeProcess.is_killed = True

    def wait(self, seconds: float | None = None) -> int:
        if not FakeProcess.is_killed:
            raise subprocess.TimeoutExpired("control", seconds or 0)
        return -9


async def test_a_control_process_that_cannot_be_started_now_is_started_later_and_ends_with_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7: a machine that has no process to spare for a second does not leave the worker without metrics for good."""
    monkeypatch.setattr(companion, "RESTART_S", 0.01)
    monkeypatch.setattr(subprocess, "Popen", FakeProcess)
    with companion.Companion(Home(tmp_path), Settings(admin_port=0)) as control:
        keeping = asyncio.ensure_future(control.keep_alive())
        await asyncio.sleep(0.1)
        keeping.cancel()

    assert 3 == FakeProcess.asked_for
    assert FakeProcess.is_killed
