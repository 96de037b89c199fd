"""Broken files, taken ports, full disks and stepped clocks: said clearly, survived where that is possible."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.clock import ManualClock
from headrace.config import Settings
from headrace.data_plane.gateway.http import HttpFront
from headrace.records import Record
from headrace.storage.segments import iter_records
from headrace.testing import models
from headrace.testing.server import CLOSED, ServerProcess, Traffic, sleep_config, wait_until
from headrace.testing.sleep_runtime import SleepArtefact

DAY_S = 86_400.0
FAKETIME_LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")

# --------------------------------------------------------------------------------------------------------- at start


def broken(kind: str) -> bytes:
    """Content of a model file that cannot be served."""
    sound = models.logistic()
    return {
        "corrupt": sound[:40] + bytes(byte ^ 0x5A for byte in sound[40:]),
        "truncated": sound[: len(sound) // 2],
        "empty": b"",
        "foreign": pickle.dumps({"coefficients": [1.0, 2.0]}),
        "sequence": models.sequence_output(),
    }[kind]


def ended(server: ServerProcess) -> tuple[int, str]:
    """Exit code and output of a server that cannot start."""
    with server:
        code = server.process.wait(30)
    return code, server.output


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("corrupt", "ONNX"),
        ("truncated", "ONNX"),
        ("empty", "empty"),
        ("foreign", "pickle"),
        ("sequence", "sequence"),
    ],
)
def test_a_model_file_that_cannot_be_served_ends_the_start_with_a_message_that_names_it(
    tmp_path: Path, kind: str, words: str
) -> None:
    """F2: the message says which file, what is wrong with it and what would be accepted; exit code 1, no stack trace,
    and no process left."""
    path = tmp_path / "model.onnx"
    path.write_bytes(broken(kind))
    code, output = ended(ServerProcess(path, tmp_path / "home", "--workers", "1", wait=False))

    assert 1 == code, output
    assert "model.onnx" in output
    assert words.lower() in output.lower()
    assert "accepted" in output or "hint" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("path", ["nowhere.onnx", "empty-folder"])
def test_a_model_that_is_not_there_ends_the_start_with_a_message_that_names_it(tmp_path: Path, path: str) -> None:
    """F2: a slip of the pen in the path costs a glance, not an hour."""
    (tmp_path / "empty-folder").mkdir()
    code, output = ended(ServerProcess(tmp_path / path, tmp_path / "home", wait=False))

    assert 1 == code, output
    assert path in output
    assert "accepted" in output or "hint" in output
    assert "Traceback" not in output


def test_a_broken_model_beside_a_sound_one_is_said_and_the_sound_one_is_served(tmp_path: Path) -> None:
    """F2: one bad file does not take the others out of service; readiness names the one that is missing, and
    its callers are told when to come back."""
    models.save(tmp_path / "models" / "good.onnx", models.identity(shape=("N", 1)))
    models.save(tmp_path / "models" / "bad.onnx", broken("truncated"))
    with ServerProcess(tmp_path / "models", tmp_path / "home", "--workers", "1", wait=False) as server:
        good = server.caller()
        wait_until(lambda: good.infer("good").status == 200)
        bad = server.caller().infer("bad")
        ready, _, body = server.request("GET", "/v2/health/ready")

    assert 503 == bad.status
    assert ("model_unavailable", "30") == (bad.code, bad.headers["retry-after"])
    assert (503, True) == (ready, b"bad" in body)


@pytest.mark.parametrize("which", ["http_port", "admin_port"])
def test_a_port_in_use_ends_the_start_and_says_who_has_it_and_what_to_do(tmp_path: Path, which: str) -> None:
    """F2: exit code 1, the setting, the port, its owner, and the flag that takes another."""
    model = models.save(tmp_path / "m.onnx", models.identity())
    server = ServerProcess(model, tmp_path / "home", wait=False)
    with socket.create_server(("127.0.0.1", getattr(server, which))):
        code, output = ended(server)

    assert 1 == code, output
    assert f"{which} {getattr(server, which)} on 127.0.0.1 is in use" in output
    assert f"(pid {os.getpid()})" in output
    assert f"--{which.replace('_', '-')} {getattr(server, which) + 1}" in output
    assert "Traceback" not in output


def without_privileges() -> list[str]:
    """Prefix of a command that file modes apply to, whoever runs the tests."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


@pytest.mark.service("setpriv")
def test_a_state_folder_that_cannot_be_written_ends_the_start_with_the_way_out(tmp_path: Path) -> None:
    """F2: read-only home as a user without privileges."""
    model = models.save(tmp_path / "m.onnx", models.identity())
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o500)
    try:
        code, output = ended(ServerProcess(model, home, wait=False, prefix=without_privileges()))
    finally:
        home.chmod(0o700)

    assert 1 == code, output
    assert f"the state folder {home} cannot be written: Permission denied" in output
    assert "hint: choose another one: HEADRACE_HOME" in output
    assert "Traceback" not in output


@pytest.mark.service("setpriv")
@pytest.mark.parametrize("name", ["run/lock", "run/worker-1.slots", "snapshots/.lock"])
def test_a_file_of_another_user_in_the_state_folder_ends_the_start_and_is_named(tmp_path: Path, name: str) -> None:
    """F2: the server ran once as root, in a folder that all may write."""
    model = models.save(tmp_path / "m.onnx", models.identity())
    home = tmp_path / "home"
    theirs = home / name
    theirs.parent.mkdir(parents=True)
    theirs.touch(0o400)
    code, output = ended(ServerProcess(model, home, wait=False, prefix=without_privileges()))

    assert 1 == code, output
    assert f"the state folder {home} cannot be written: this user may not write {theirs}" in output
    assert "Traceback" not in output


# ------------------------------------------------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own of 8 MB; needs root."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mount.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Take all space that is left."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


def test_a_full_disk_costs_records_and_they_are_counted_but_no_answer(small_disk: Path, tmp_path: Path) -> None:
    """O3: under buffered durability the server answers on, says that it cannot write, counts every record that it
    drops, and writes again once there is space."""
    config = sleep_config(tmp_path / "models", {"m": SleepArtefact(base_s=0.001)}, server={"workers": 1}, slo="p99=5s")
    home = small_disk / "home"
    with ServerProcess(config, home) as server, Traffic(server.http_port, "m", callers=4, pause_s=0.002) as traffic:
        wait_until(lambda: server.metrics().get('headrace_records_total{outcome="written"}', 0) > 20)
        ballast = fill(small_disk)
        wait_until(lambda: server.metrics()["headrace_records_writable"] == 0, 30)
        wait_until(lambda: server.metrics()['headrace_records_total{outcome="dropped"}'] > 20, 30)
        ballast.unlink()
        wait_until(lambda: server.metrics()["headrace_records_writable"] == 1, 20)
        time.sleep(0.5)
        traffic.stop()
        time.sleep(0.5)
        metrics = server.metrics()
        server.stop()
        records = [record for record in iter_records(home / "records") if isinstance(record, Record)]

    assert {200} == set(traffic.statuses())
    written = metrics['headrace_records_total{outcome="written"}']
    dropped = metrics['headrace_records_total{outcome="dropped"}']
    assert len(traffic.replies) == metrics['headrace_received_total{endpoint="m"}'] == written + dropped
    assert len(records) == written


def test_strict_durability_refuses_while_the_disk_is_full_and_recovers(small_disk: Path, tmp_path: Path) -> None:
    """O3: no answer without its record: 503 records_unavailable with Retry-After, until there is space again; and every
    answered request is on disk."""
    config = sleep_config(
        tmp_path / "models", {"m": SleepArtefact(base_s=0.001)}, server={"workers": 1}, slo="p99=5s",
        records={"durability": "strict"},
    )  # fmt: skip
    home = small_disk / "home"
    with ServerProcess(config, home) as server, Traffic(server.http_port, "m", callers=4, pause_s=0.002) as traffic:
        wait_until(lambda: traffic.statuses()[200] > 20)
        ballast = fill(small_disk)
        wait_until(lambda: traffic.statuses()[503] > 20, 30)
        ready = server.request("GET", "/v2/health/live")[0]
        ballast.unlink()
        refused = len(traffic.replies)
        wait_until(lambda: 10 == [reply.status for reply in traffic.replies[refused:][-10:]].count(200), 30)
        traffic.stop()
        metrics = server.metrics()
        server.stop()
        records = [record for record in iter_records(home / "records") if isinstance(record, Record)]

    assert 200 == ready
    assert {200, 503} == set(traffic.statuses())
    refusals = [reply for reply in traffic.replies if reply.status == 503]
    assert {"records_unavailable"} == {reply.code for reply in refusals}
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refusals)
    on_disk = {record.request_id for record in records if record.ending == "answered"}
    answered = {reply.request_id for reply in traffic.replies if reply.status == 200}
    assert answered == on_disk
    assert 0 == metrics['headrace_conservation_difference{endpoint="m"}']


# ------------------------------------------------------------------------------------------------------ stepped clocks


class Faketime:
    """The wall clock of a server and its children, stepped while they run; the monotonic clock stays."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "faketime"
        self.step("+0")
        self.environment = {
            "LD_PRELOAD": str(FAKETIME_LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def step(self, offset: str) -> None:
        draft = self._file.with_suffix(".draft")
        draft.write_text(f"{offset}\n")
        os.replace(draft, self._file)


@pytest.mark.service("faketime")
def test_a_wall_clock_that_is_stepped_by_a_day_changes_no_deadline_and_no_timer(tmp_path: Path) -> None:
    """F1, S2: forwards and backwards under traffic: no request fails, runs that span the step are answered, deadlines
    and idle limits keep their length, and nobody takes the worker for dead."""
    if not FAKETIME_LIBRARY.exists():
        pytest.skip(f"{FAKETIME_LIBRARY} is not there")
    clock = Faketime(tmp_path)
    config = sleep_config(
        tmp_path / "models", {"m": SleepArtefact(base_s=0.005, is_slowed_by_input=True)},
        server={"workers": 1, "idle_s_max": 2}, slo="p99=5s",
    )  # fmt: skip
    with (
        ServerProcess(config, tmp_path / "home", environment=clock.environment) as server,
        Traffic(server.http_port, "m", callers=2, pause_s=0.02) as traffic,
    ):
        pids = server.wait_workers(1)
        for offset in ("+1d", "-1d", "+0"):
            spanning, idle = server.caller("spanning"), server.caller("idle")
            assert 200 == idle.infer("m").status
            spanning.send("m", (-0.5,))
            time.sleep(0.1)
            clock.step(offset)
            assert 200 == spanning.receive().status
            hasty = server.caller("hasty").infer("m", (-0.5,), x_request_timeout_ms="4000")
            assert 200 == hasty.status
            assert 0.4 < hasty.took_s < 4
            assert 200 == idle.infer("m").status, "a connection that was silent for a second is not swept by the step"
            assert 1 == server.metrics()['headrace_worker_up{worker="1"}']
        silent = server.caller("silent")
        silent.infer("m")
        time.sleep(3.0)
        assert CLOSED == silent.infer("m").status, "idle connections are still swept"
        same = server.wait_workers(1)
    records = [record for record in iter_records(server.home / "records") if isinstance(record, Record)]

    assert {200} == set(traffic.statuses())
    assert pids == same
    assert all(0 <= record.total_s < 10 for record in records)
    stamps = [record.time_unix_s - time.time() for record in records]
    assert max(stamps) > DAY_S / 2, "the clock was not stepped"
    assert min(stamps) < -DAY_S / 2


class Wire:
    """A transport that takes everything and notes whether it was closed."""

    def __init__(self) -> None:
        self.is_closed = False
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True

    abort = close


class Nobody:
    """A handler that is never reached."""

    def handle(self, exchange: object) -> None:
        raise AssertionError

    def refused(self, error: object) -> None:
        return


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
def test_the_idle_sweep_follows_the_monotonic_clock_whatever_the_wall_clock_does(step_s: float) -> None:
    """F1: on a manual clock: a step closes nothing, and does not keep what is due from being closed."""
    clock = ManualClock()
    front = HttpFront(Settings(idle_s_max=10), Nobody(), clock)
    connection, wire = front.connection(), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    clock.step_wall_clock(step_s)
    front.sweep()
    is_closed_by_step = wire.is_closed
    clock.advance(9)
    front.sweep()
    is_closed_early = wire.is_closed
    clock.step_wall_clock(-step_s)
    clock.advance(2)
    front.sweep()

    assert (False, False, True) == (is_closed_by_step, is_closed_early, wire.is_closed)


# ------------------------------------------------------------------------------------------------- signals at bad times


@pytest.mark.parametrize("delay_s", [0.05, 0.3, 0.6])
def test_sigterm_at_any_moment_of_the_start_ends_it_and_leaves_no_process(tmp_path: Path, delay_s: float) -> None:
    """F6: before, while and after the children are started."""
    model = models.save(tmp_path / "m.onnx", models.identity())
    with ServerProcess(model, tmp_path / "home", "--workers", "2", wait=False) as server:
        time.sleep(delay_s)
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(20)

    assert code in (0, 143, -signal.SIGTERM), server.output
    assert "Traceback" not in server.output
    with pytest.raises(ConnectionRefusedError):
        server.request("GET", "/v2/health/live")
