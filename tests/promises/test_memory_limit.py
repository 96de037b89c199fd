"""A model that leaks memory is replaced, worker by worker, and nobody notices."""

import os
import threading
import time
from pathlib import Path

import pytest

from headrace.app.observe import resident_bytes
from headrace.testing.server import ServerProcess, Traffic, sleep_config, title
from headrace.testing.sleep_runtime import SleepArtefact

MIB = 1 << 20
LIMIT_BYTES = 150 * MIB
LEAK_BYTES = 512 * 1024
WORKER_AGE_S_MIN = 10
"""Younger workers are not replaced: a limit below what a fresh one needs must not become a carousel."""


class MemoryWatch:
    """Samples the resident memory of every worker; a context manager.

    Attributes:
        peak_bytes: By process id.
    """

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak_bytes: dict[int, int] = {}

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._is_over.wait(0.1):
            for pid in self._server.children():
                if title(pid).startswith("headrace: worker"):
                    self.peak_bytes[pid] = max(self.peak_bytes.get(pid, 0), resident_bytes(pid))


@pytest.mark.parametrize("replacements", [1, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.timeout(180)])])
def test_a_worker_above_its_memory_limit_is_replaced_without_a_lost_or_failed_request(
    tmp_path: Path, replacements: int
) -> None:
    """F7: under steady kept-alive traffic every request is answered, while the leaking worker goes and a fresh one
    comes; memory stays bounded although the model leaks for ever."""
    artefact = SleepArtefact(base_s=0.002, leak_bytes=LEAK_BYTES)
    settings = {"workers": 1, "memory_bytes_max": LIMIT_BYTES}
    config = sleep_config(tmp_path / "models", {"m": artefact}, server=settings, slo="p99=5s")
    with (
        ServerProcess(config, tmp_path / "home") as server,
        MemoryWatch(server) as watch,
        Traffic(server.http_port, "m", callers=3, pause_s=0.1) as traffic,
    ):
        first = server.worker_pids()[0]
        end_s = time.monotonic() + (WORKER_AGE_S_MIN + 15) * replacements
        while server.log().count("takes over") < replacements or first in server.worker_pids():
            assert time.monotonic() < end_s, server.log()
            time.sleep(0.1)
        time.sleep(0.5)
        leaked_bytes = len(traffic.replies) * LEAK_BYTES
        gone = not os.path.exists(f"/proc/{first}")
        metrics = server.metrics()

    assert {200} == set(traffic.statuses())
    assert leaked_bytes > LIMIT_BYTES, "the test must leak more than the limit to prove anything"
    assert gone
    assert len(watch.peak_bytes) >= replacements + 1
    assert max(watch.peak_bytes.values()) < LIMIT_BYTES + 100 * MIB, watch.peak_bytes
    assert "above memory_bytes_max 150 MiB" in server.output
    assert 0 == metrics['headrace_conservation_difference{endpoint="m"}']
    assert not [name for name in metrics if "worker_lost" in name]
