"""The control process beside a worker that runs alone."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.app import companion
from headrace.app.observe import read_report
from headrace.config import Settings
from headrace.home import Home
from headrace.testing import models
from headrace.testing.server import free_port, wait_until


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


class QuietProcess:
    """A process that lives, and is up when the test says so."""

    returncode = None

    def __init__(self, command: list[str], **_: Any) -> None:
        self.status_fd = os.dup(int(command[command.index("--status-fd") + 1]))
        self.signals: list[int] = []
        QuietProcess.latest = self

    latest: "QuietProcess"

    def poll(self) -> int | None:
        return None

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def terminate(self) -> None: ...

    def wait(self, seconds: float | None = None) -> int:
        return 0


async def test_a_reload_waits_until_the_control_process_can_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1: SIGHUP would end a process that has no handler yet, so it is kept until that says it is up."""
    monkeypatch.setattr(companion, "RESTART_S", 0.01)
    monkeypatch.setattr(subprocess, "Popen", QuietProcess)
    with companion.Companion(Home(tmp_path), Settings(admin_port=0)) as control:
        keeping = asyncio.ensure_future(control.keep_alive())
        control.reload()
        await asyncio.sleep(0.05)
        before = list(QuietProcess.latest.signals)
        os.write(QuietProcess.latest.status_fd, b"\n")
        await asyncio.sleep(0.1)
        control.reload()
        keeping.cancel()
    os.close(QuietProcess.latest.status_fd)

    assert [] == before
    assert [signal.SIGHUP, signal.SIGHUP] == QuietProcess.latest.signals


def test_a_worker_without_a_supervisor_looks_again_on_sighup(tmp_path: Path) -> None:
    """L1: the same signal does the same, whoever restarts the process."""
    models.save(tmp_path / "models" / "first.onnx", models.identity())
    home = Home(tmp_path / "home")
    worker = subprocess.Popen(
        [
            sys.executable, "-m", "headrace", "worker", str(tmp_path / "models"), "--home", str(home.root),
            "--http-port", str(free_port()), "--admin-port", str(free_port()),
        ]
    )  # fmt: skip
    try:
        wait_until(lambda: _serves(home, "first"), what="the first model")
        models.save(tmp_path / "models" / "second.onnx", models.identity())
        worker.send_signal(signal.SIGHUP)
        wait_until(lambda: _serves(home, "second"), what="the second model")
        worker.terminate()

        assert 0 == worker.wait(20)
    finally:
        worker.kill()
        worker.wait()


def _serves(home: Home, name: str) -> bool:
    report = read_report(home.report_file(1))
    return report is not None and name in {each.endpoint for each in report.replicas if each.state.value == "ready"}
