"""Serving depends on nothing but what a worker already has: not on the control process, not on a readable snapshot, not
on a writable home.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.home import Home
from headrace.testing import models
from headrace.testing.server import (
    CLOSED,
    Caller,
    ServerProcess,
    Traffic,
    free_port,
    is_running,
    sleep_config,
    title,
    wait_until,
)
from headrace.testing.sleep_runtime import SleepArtefact

SERVER = {"workers": 2}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """Two workers, one quick model, the control process up and the snapshot marked good."""
    config = sleep_config(tmp_path / "models", {"m": SleepArtefact(base_s=0.001)}, server=SERVER, slo="p99=5s")
    with ServerProcess(config, tmp_path / "home") as running:
        running.wait_workers(2)
        wait_until(lambda: Home(running.home).last_good_id() is not None)
        yield running


def admin_answers(server: ServerProcess) -> bool:
    """The admin port answers."""
    try:
        return server.request("GET", "/livez", admin=True, timeout_s=2)[0] == 200
    except OSError:
        return False


def test_killing_the_control_process_touches_no_request_and_the_admin_port_answers_again(
    server: ServerProcess,
) -> None:
    """F7: no request passes through the control process; it is restarted, and whoever asks meanwhile waits for it."""
    control = server.control_pid()
    with Traffic(server.http_port, "m", callers=4) as traffic:
        for _ in range(3):
            time.sleep(0.2)
            os.kill(control, signal.SIGKILL)
            wait_until(lambda control=control: not is_running(control))
            again_s = wait_until(lambda: admin_answers(server), 10)
            control = server.control_pid()
    workers = [title(pid) for pid in server.children() if title(pid).startswith("headrace: worker")]

    assert {200} == set(traffic.statuses())
    assert again_s < 5, f"the admin port answered after {again_s:.2f} s (about 2 s on a machine at rest)"
    assert ["headrace: worker 1", "headrace: worker 2"] == sorted(workers)
    assert "no request is touched" in server.log()


def test_a_worker_whose_desired_snapshot_is_damaged_serves_the_last_good_one(tmp_path: Path) -> None:
    """F7: started alone with its own flags, it finds the desired file unreadable, says so, and serves what was warm."""
    folder = tmp_path / "models"
    config = sleep_config(folder, {"m": SleepArtefact(base_s=0.001)}, server={"workers": 1})
    home = Home(tmp_path / "home")
    with ServerProcess(config, home.root):
        good = str(wait_for_good(home))
    sleep_config(folder, {"m": SleepArtefact(base_s=0.002)}, server={"workers": 1})
    with ServerProcess(config, home.root):
        desired = str(wait_for_good(home, other_than=good))
    home.mark_good(good)
    (home.snapshots / f"{desired}.json").write_bytes(b'{"schema": 1, "endpo')

    worker = LoneWorker(home)
    try:
        reply = worker.ask()
        report = json.loads(home.report_file(1).read_bytes())
    finally:
        log = worker.stop()

    assert 200 == reply
    assert good == report["snapshot_id"]
    assert "snapshot unreadable" in log
    assert desired in log


def wait_for_good(home: Home, other_than: str | None = None) -> str | None:
    """The last good snapshot once it is another."""
    wait_until(lambda: home.last_good_id() not in (None, other_than))
    return home.last_good_id()


class LoneWorker:
    """`headrace.app.worker` with the flags that the supervisor gives it, but without a supervisor."""

    def __init__(self, home: Home) -> None:
        import socket

        self._log = home.root.with_name("worker.log")
        self.port = free_port()
        with socket.create_server(("127.0.0.1", self.port)) as listener, self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "headrace.app.worker", "--home", str(home.root)),
                    *("--number", "1", "--listen-fd", str(listener.fileno())),
                ],
                pass_fds=[listener.fileno()],
                stderr=log,
            )

    def ask(self) -> int:
        """Status of one inference, once the model is warm."""
        caller = Caller(self.port)
        status = 503
        end_s = time.monotonic() + 20
        while status == 503 and time.monotonic() < end_s:
            status = caller.infer("m").status
            time.sleep(0.05)
        caller.close()
        return status

    def stop(self) -> str:
        self.process.terminate()
        self.process.wait(20)
        return self._log.read_text()


def test_a_server_whose_every_snapshot_is_damaged_starts_from_its_configuration(tmp_path: Path) -> None:
    """F7: files that were torn while the server was down do not keep it from starting."""
    config = sleep_config(tmp_path / "models", {"m": SleepArtefact(base_s=0.001)}, server={"workers": 1})
    with ServerProcess(config, tmp_path / "home") as server:
        wait_for_good(Home(server.home))
    for path in (tmp_path / "home" / "snapshots").glob("*.json"):
        path.write_bytes(path.read_bytes()[:20])
    with ServerProcess(config, tmp_path / "home") as server:
        reply = server.caller().infer("m")

    assert 200 == reply.status


def test_a_damaged_snapshot_that_appears_while_serving_changes_nothing(server: ServerProcess) -> None:
    """F7: a worker that cannot read the new desired snapshot keeps serving the one it has."""
    home = Home(server.home)
    before = home.desired_id()
    with Traffic(server.http_port, "m", callers=2) as traffic:
        (home.snapshots / "deadbeef.json").write_bytes(b"\x00" * 100)
        (home.snapshots / "desired").write_text("deadbeef")
        wait_until(lambda: server.log().count("snapshot unreadable") >= 2)
        time.sleep(0.3)
    reports = [json.loads(path.read_bytes()) for path in home.run.glob("worker-*.json")]

    assert {200} == set(traffic.statuses())
    assert [before, before] == [report["snapshot_id"] for report in reports]
    assert 200 == server.request("GET", "/v2/health/ready")[0]


def test_losing_the_home_folder_while_serving_is_said_and_survived(server: ServerProcess, tmp_path: Path) -> None:
    """F7, O3: when records can no longer be written, answers go on, dropped records are counted, and the metrics say
    that the records are not writable."""
    for worker in (1, 2):
        folder = server.home / "records" / f"worker-{worker}"
        folder.rename(folder.with_name(f"lost-{worker}"))
        folder.write_text("a file where the folder was: nothing can be made below it, not even by root")
    for path in (server.home / "records").glob("lost-*/*.seg"):
        path.unlink()
    with Traffic(server.http_port, "m", callers=4) as traffic:
        for pid in server.worker_pids():
            os.kill(pid, signal.SIGKILL)  # a restarted worker has to open a new segment
            wait_until(lambda pid=pid: pid not in server.worker_pids() and len(server.worker_pids()) == 2)
        del traffic.replies[:]
        wait_until(lambda: server.metrics().get("headrace_records_writable") == 0)
        time.sleep(0.5)
        metrics = server.metrics()
    ready = server.request("GET", "/v2/health/ready")[0]
    _, _, status = server.request("GET", "/v1/status", admin=True)

    assert {200} == set(traffic.statuses())
    assert 200 == ready
    assert metrics['headrace_records_total{outcome="dropped"}'] > 0
    assert [False, False] == [worker["is_recording"] for worker in json.loads(status)["workers"]]


def test_a_worker_that_restarts_on_a_version_it_cannot_load_serves_the_last_good_one(tmp_path: Path) -> None:
    """F7: version 2 is broken and made the default; the running workers keep version 1, and so does one that is killed
    and starts anew; the index says what is wrong."""
    folder = tmp_path / "models"
    models.save(folder / "m" / "1" / "model.onnx", models.identity())
    (folder / "m" / "2").mkdir(parents=True)
    (folder / "m" / "2" / "model.onnx").write_bytes(b"not a model")
    inputs = [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]
    (tmp_path / "headrace.yaml").write_text(
        json.dumps({"server": {"workers": 1}, "models": [{"name": "m", "path": str(folder), "default_version": "1"}]})
    )
    with ServerProcess(tmp_path / "headrace.yaml", tmp_path / "home") as server:
        wait_until(lambda: Home(server.home).last_good_id() is not None)
        subprocess.run(
            [sys.executable, "-m", "headrace", "model", "alias", "m", "2", "--home", str(server.home)], check=True
        )
        wait_until(lambda: Home(server.home).desired_id() != Home(server.home).last_good_id())
        before = server.infer("m", inputs)
        (victim,) = server.worker_pids()
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: server.worker_pids() not in ([], [victim]), 20)
        after = server.infer("m", inputs)
        _, _, index = server.request("POST", "/v2/repository/index")

    assert [(200, "1"), (200, "1")] == [(status, body["model_version"]) for status, body in (before, after)]
    assert {"1": "READY", "2": "UNAVAILABLE"} == {entry["version"]: entry["state"] for entry in json.loads(index)}


def test_a_worker_that_finds_no_desired_snapshot_serves_the_last_good_one(server: ServerProcess) -> None:
    """F7: the file that names what is desired was emptied, then removed; whoever starts now serves what was warm."""
    desired = server.home / "snapshots" / "desired"
    statuses = []
    for spoil in (lambda: desired.write_bytes(b""), desired.unlink):
        spoil()
        victims = server.worker_pids()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda victims=victims: len(set(server.worker_pids()) - set(victims)) == 2, 40)
        statuses.append(server.caller().infer("m").status)

    assert [200, 200] == statuses


@pytest.mark.parametrize("kept_bytes", [0, 256])
def test_counters_that_are_truncated_under_a_worker_cost_that_worker_only(
    server: ServerProcess, kept_bytes: int
) -> None:
    """F7, O1: a store into what was cut off a mapped file kills the process; it comes back, and its neighbour has
    answered meanwhile."""
    (victim, neighbour) = server.worker_pids()
    with Traffic(server.http_port, "m", callers=4) as traffic:
        os.truncate(server.home / "run" / "worker-1.slots", kept_bytes)
        wait_until(lambda: victim not in server.worker_pids() and len(server.worker_pids()) == 2, 40)
    status = server.caller().infer("m").status
    metrics = server.metrics()

    assert neighbour in server.worker_pids()
    assert {200, CLOSED} >= set(traffic.statuses())
    assert 200 == status
    assert {0.0} == {value for name, value in metrics.items() if name.startswith("headrace_conservation")}
