"""What runs out comes back: descriptors, a snapshot that was not there yet."""

import json
import os
import socket
import time
from pathlib import Path

from headrace.home import Home
from headrace.testing.server import ServerProcess, sleep_config, wait_until
from headrace.testing.sleep_runtime import SleepArtefact


def test_a_worker_that_ran_out_of_descriptors_goes_on_keeping_time_and_recovers(tmp_path: Path) -> None:
    """F1, F6: silent connections take every descriptor; the limits that end them are still applied, so that the next
    caller is served, and the worker goes on telling its neighbours that it lives."""
    config = sleep_config(tmp_path / "models", {"m": SleepArtefact()}, server={"workers": 1, "idle_s_max": 3})
    with ServerProcess(config, tmp_path / "home") as server:
        (pid,) = server.wait_workers(1)
        open_files = len(os.listdir(f"/proc/{pid}/fd"))
        limit_files(pid, open_files + 20)
        silent = [socket.create_connection(("127.0.0.1", server.http_port)) for _ in range(60)]
        wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) >= open_files + 20, what="out of descriptors")
        time.sleep(1)
        began_s = time.monotonic()
        reply = server.caller().infer("m")
        took_s = time.monotonic() - began_s
        for connection in silent:
            connection.close()
        again = server.caller().infer("m")
        is_same = server.worker_pids() == [pid]

    assert 200 == reply.status, "the silent connections were ended by the idle limit"
    assert took_s < 15
    assert 200 == again.status
    assert is_same


def limit_files(pid: int, most: int) -> None:
    import resource

    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))


def test_a_desired_snapshot_that_can_be_read_only_later_is_served_then(tmp_path: Path) -> None:
    """F7: level-triggered: a worker that could not read what is desired looks again, and says so once."""
    folder = tmp_path / "models"
    config = sleep_config(folder, {"m": SleepArtefact()}, server={"workers": 1})
    home = Home(tmp_path / "home")
    with ServerProcess(config, home.root):
        wait_until(lambda: home.last_good_id() is not None)
    first = home.desired_id()
    sleep_config(folder, {"m": SleepArtefact(base_s=0.001)}, server={"workers": 1})
    with ServerProcess(config, home.root):
        wait_until(lambda: home.last_good_id() != first)
        second = home.desired_id()
    with ServerProcess(config, home.root) as server:
        server.wait_workers(1)
        path = home.snapshots / f"{first}.json"
        hidden = path.rename(path.with_suffix(".hidden"))
        (home.snapshots / "desired").write_text(str(first))
        wait_until(lambda: "snapshot unreadable" in server.log())
        time.sleep(1)
        hidden.rename(path)
        wait_until(lambda: json.loads(home.report_file(1).read_bytes())["snapshot_id"] == first)
        said = server.log().count("snapshot unreadable")

    assert second != first
    assert 1 == said
