"""The supervisor keeps children alive, replaces them, stops them in order, and leaves no orphans.

The children here are small scripts that write down what happens to them in `HOME/log`; the supervisor is the real one,
in a process of its own, so that it can be killed.
"""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headrace
from headrace.app.children import Backoff, describe_exit
from headrace.app.observe import is_alive
from headrace.app.sockets import listen, port_owner
from headrace.app.start import StartError, prepare_home, take_lock
from headrace.home import Home

SOURCE = str(Path(headrace.__file__).parents[1])
PATIENCE_S = 15.0

CHILD = """
import json, os, select, signal, sys, time
mode, options = sys.argv[1], dict(zip(sys.argv[2::2], sys.argv[3::2]))
home, number = options["--home"], int(options.get("--number", 0))
name = f"worker-{number}" if number else "control"
log = os.open(f"{home}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(event):
    os.write(log, f"{name} {event} {os.getpid()} {time.monotonic():.3f}\\n".encode())
def report(state, problem=""):
    replica = {"endpoint": "m", "model": "m", "version": "1", "state": "failed", "problem": problem}
    content = {"number": number, "pid": os.getpid(), "state": state, "replicas": [replica] if problem else []}
    with open(f"{home}/run/{name}.json", "w") as file:
        json.dump(content, file)
def tell():
    os.write(int(options["--status-fd"]), b"\\n")
def leave(event):
    note(event)
    os._exit(0)
note("start")
signal.signal(signal.SIGTERM, (lambda *_: note("deaf")) if "stubborn" in mode else (lambda *_: leave("term")))
signal.signal(signal.SIGUSR1, lambda *_: leave("retired"))
signal.signal(signal.SIGHUP, lambda *_: note("reload"))
if "crash" in mode and number:
    os._exit(7)
if "cannot" in mode and number:
    report("starting", "weights are missing")
    os._exit(3)
if number:
    open(f"{home}/run/{name}.slots", "a").close()
    report("ready")
    if "greedy" in mode and number == 1:
        ballast = bytearray(os.urandom(1 << 20)) * 120
elif "slowcontrol" in mode:
    time.sleep(0.5)
note("ready")
tell()
if "flaky" in mode and number:
    os._exit(7)
lifeline = int(options["--lifeline-fd"])
while True:
    if select.select([lifeline], [], [], 60)[0]:
        leave("orphan")
"""

DRIVER = """
import sys
from pathlib import Path
from headrace.app import supervisor as module
from headrace.app.start import prepare_home, take_lock
from headrace.config import Settings
import msgspec
root, mode, settings = sys.argv[1], sys.argv[2], msgspec.json.decode(sys.argv[3], type=Settings)
module.STOP_MARGIN_S, module.MEMORY_LOOK_S = 0.5, 0.1
module.BEAT_LOOK_S, module.HUNG_S_MIN = 0.2, 2.0
log = open(f"{root}/log", "a", buffering=1)
class Counters:
    def settle(self, slots_file):
        print(slots_file.stem, "settled 0 0", file=log)
    def count_restart(self, report):
        print("supervisor counted 0 0", file=log)
    def heartbeat_s(self, slots_file):
        return slots_file.stat().st_mtime if "hung" in mode else 0.0
home = prepare_home(Path(root))
child = (sys.executable, "-S", f"{root}/child.py", mode)
sys.exit(module.Supervisor(
    home, settings, counters=Counters(), lock_fd=take_lock(home), worker_command=child, control_command=child,
    memory_age_s_min=0.0,
).run())
"""


class Running:
    """One supervisor under test."""

    def __init__(self, home: Path, mode: str, settings: str) -> None:
        self.home = home
        (home / "child.py").write_text(CHILD)
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(home), mode, settings],
            env={**os.environ, "PYTHONPATH": SOURCE},
            stderr=subprocess.PIPE,
            text=True,
        )

    def events(self) -> list[tuple[str, str, int, float]]:
        try:
            lines = (self.home / "log").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(who, what, int(pid), float(at)) for who, what, pid, at in (line.split() for line in lines)]

    def times(self, who: str, what: str) -> list[float]:
        return [at for name, event, _, at in self.events() if (name, event) == (who, what)]

    def pids(self, who: str) -> list[int]:
        return [pid for name, event, pid, _ in self.events() if (name, event) == (who, "start")]

    def count(self, who: str, what: str) -> int:
        return len(self.times(who, what))

    def until(self, condition: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < limit_s, self.events()
            time.sleep(0.01)

    def until_ready(self, workers: int = 2) -> None:
        self.until(lambda: all(self.count(f"worker-{n}", "ready") for n in range(1, workers + 1)))
        self.until(lambda: self.count("control", "ready") > 0)

    def wait(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)
        for _, event, pid, _ in self.events():
            if event == "start" and is_alive(pid):
                os.kill(pid, signal.SIGKILL)


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts supervisors and leaves nothing behind."""
    running: list[Running] = []

    def begin(mode: str, *, workers: int = 2, drain_s_max: float = 5, memory_bytes_max: int = 0) -> Running:
        settings = (
            f'{{"workers": {workers}, "threads": 1, "http_port": 0, "admin_port": 0, "drain_s_max": {drain_s_max},'
            f' "run_s_max": 0.1,'
            f' "memory_bytes_max": {memory_bytes_max}}}'
        )
        running.append(Running(tmp_path, mode, settings))
        return running[-1]

    yield begin
    for each in running:
        each.close()


def test_a_dead_worker_is_settled_and_comes_back(start: Start) -> None:
    """Its counters are closed before the next worker of its number opens them (F7)."""
    server = start("good")
    server.until_ready()

    os.kill(server.pids("worker-1")[0], signal.SIGKILL)
    server.until(lambda: server.count("worker-1", "ready") == 2)

    what = [event for who, event, _, _ in server.events() if who == "worker-1"]
    assert ["start", "ready", "settled", "start", "ready"] == what
    assert 1 == server.count("supervisor", "counted")
    assert 1 == server.count("worker-2", "start")
    assert 1 == server.count("control", "start")


def test_a_worker_that_keeps_dying_waits_longer_each_time(start: Start) -> None:
    """0.1 s, then double, so a broken worker costs no core (F7)."""
    server = start("flaky", workers=1)

    server.until(lambda: server.count("worker-1", "start") == 5)

    starts = server.times("worker-1", "start")
    waits = [after - before for before, after in itertools.pairwise(starts)]
    for wait_s, least_s in zip(waits, (0.1, 0.2, 0.4, 0.8), strict=True):
        assert least_s <= wait_s < least_s + 0.6, waits


def test_back_off_doubles_to_ten_seconds_and_forgets_after_health() -> None:
    """The schedule itself (F7)."""
    backoff = Backoff()

    waits = [backoff.next_s(0.0) for _ in range(10)]

    assert [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0] == pytest.approx(waits)
    assert 0.1 == backoff.next_s(30.0)


def test_a_server_that_can_serve_nothing_says_why_and_exits(start: Start) -> None:
    """It neither spins nor stays up with nothing behind it (L1)."""
    server = start("cannot")

    status, errors = server.wait()

    assert 1 == status
    assert "no model can be served" in errors
    assert "weights are missing" in errors
    assert 2 == server.count("worker-1", "start") + server.count("worker-2", "start")


def test_a_worker_that_crashes_at_every_first_start_ends_the_server(start: Start) -> None:
    """A crash loop at start is a failed start (F7)."""
    server = start("crash", workers=1)

    status, errors = server.wait()

    assert 1 == status
    assert 5 == server.count("worker-1", "start")
    assert "giving up" in errors


def test_sigterm_stops_workers_first_and_the_control_process_last(start: Start) -> None:
    """Metrics can be scraped to the end (O2)."""
    server = start("good")
    server.until_ready()

    server.process.terminate()
    status, _ = server.wait()

    stops = [who for who, event, _, _ in server.events() if event in ("term", "settled")]
    assert 0 == status
    assert "control" == stops[-1]
    assert {"worker-1", "worker-2"} == set(stops[:-1])
    assert not (server.home / "run/supervisor.pid").exists()


def test_a_worker_that_does_not_stop_is_killed_after_the_limit(start: Start) -> None:
    """A stop has an end (design §2)."""
    server = start("stubborn", drain_s_max=0.2)
    server.until_ready()

    server.process.terminate()
    server.until(lambda: server.count("worker-1", "settled") == 1)
    os.kill(server.pids("control")[0], signal.SIGKILL)  # it is stubborn too, and has five seconds
    status, errors = server.wait()

    assert 0 == status
    assert "did not stop in time" in errors


def test_a_second_signal_stops_everything_at_once(start: Start) -> None:
    """Ctrl-C twice means now; the status says which signal (design §2)."""
    server = start("stubborn", drain_s_max=60)
    server.until_ready()

    server.process.send_signal(signal.SIGINT)
    server.until(lambda: server.count("worker-1", "deaf") == 1)
    server.process.send_signal(signal.SIGINT)
    status, _ = server.wait()

    assert 130 == status
    assert not any(is_alive(pid) for pid in server.pids("worker-1") + server.pids("worker-2") + server.pids("control"))


def test_nothing_outlives_a_killed_supervisor(start: Start) -> None:
    """The lifeline tells every child, and the next server can start (F7)."""
    server = start("good")
    server.until_ready()

    server.process.kill()
    server.wait()
    children = server.pids("worker-1") + server.pids("worker-2") + server.pids("control")
    server.until(lambda: not any(is_alive(pid) for pid in children))

    assert 1 == server.count("worker-1", "orphan") == server.count("control", "orphan")
    os.close(take_lock(Home(server.home), orphan_s_max=PATIENCE_S))


def test_a_worker_above_the_memory_limit_is_replaced_before_it_leaves(start: Start) -> None:
    """At every moment somebody serves (F7)."""
    server = start("greedy", workers=1, memory_bytes_max=80 << 20)

    server.until(lambda: server.count("worker-1", "retired") == 1)
    server.until(lambda: server.count("worker-1", "settled") == 1)
    time.sleep(0.3)

    assert server.times("worker-2", "ready")[0] <= server.times("worker-1", "retired")[0]
    assert 1 == server.count("worker-1", "start")
    assert 0 == server.count("supervisor", "counted")
    assert is_alive(server.pids("worker-2")[0])


def test_a_dead_control_process_is_back_within_a_second_and_touches_no_worker(start: Start) -> None:
    """Its death touches no request (design §1)."""
    server = start("good")
    server.until_ready()

    os.kill(server.pids("control")[0], signal.SIGKILL)
    killed_s = time.monotonic()
    server.until(lambda: server.count("control", "ready") == 2)

    assert server.times("control", "ready")[1] - killed_s < 1.0
    assert 1 == server.count("worker-1", "start") == server.count("worker-2", "start")


def test_sighup_reaches_the_control_process_once_it_listens(start: Start) -> None:
    """A reload asked for too early is not lost, and does not end anybody (L6)."""
    server = start("slowcontrol", workers=1)
    server.until(lambda: server.count("worker-1", "ready") == 1)

    server.process.send_signal(signal.SIGHUP)
    server.until(lambda: server.count("control", "reload") == 1)

    assert 1 == server.count("control", "start")
    assert server.times("control", "ready")[0] <= server.times("control", "reload")[0]


def test_a_port_in_use_names_its_owner_and_the_next_step() -> None:
    """The most common start failure explains itself (design §3)."""
    with listen("127.0.0.1", 0, "http") as taken:
        port = taken.getsockname()[1]

        with pytest.raises(StartError) as caught:
            listen("127.0.0.1", port, "http")

    assert f"http_port {port}" in caught.value.message
    assert f"pid {os.getpid()}" in caught.value.message
    assert "--http-port" in caught.value.hint
    assert "" == port_owner(port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1", "300.1.1.1"])
def test_a_wrong_host_says_what_to_use(host: str) -> None:
    """Addresses of other machines and of none (design §3)."""
    with pytest.raises(StartError) as caught:
        listen(host, 0, "http")

    assert host in caught.value.message
    assert "0.0.0.0" in caught.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may take every port")
def test_a_privileged_port_says_what_to_use() -> None:
    """Permission errors name the way out (design §3)."""
    with pytest.raises(StartError, match="privileges"):
        listen("127.0.0.1", 80, "http")


def test_a_second_server_on_the_same_home_is_refused(start: Start, tmp_path: Path) -> None:
    """Two servers would write the same counters (design §2)."""
    server = start("good")
    server.until_ready()

    with pytest.raises(StartError) as caught:
        take_lock(Home(tmp_path), orphan_s_max=5.0)

    assert f"pid {server.process.pid}" in caught.value.message
    assert "HEADRACE_HOME" in caught.value.hint


def test_a_home_that_cannot_be_written_names_the_variable(tmp_path: Path) -> None:
    """A read-only working folder is common in containers (S5)."""
    (tmp_path / "file").write_text("")

    with pytest.raises(StartError) as caught:
        prepare_home(tmp_path / "file" / "home")

    assert "HEADRACE_HOME" in caught.value.hint


def test_the_supervisor_imports_nothing_heavy() -> None:
    """X3: what does little must cost little: less processor time than numpy alone, which a worker pays beside it.

    Measured in turn, because a busy machine slows both; on a quiet one it is about 60 ms.
    """
    code = (
        "import sys, time; began = time.process_time(); import {};"
        "print(time.process_time() - began);"
        "heavy = {{'numpy', 'onnxruntime', 'rich', 'cyclopts', 'asyncio', 'uvloop', 'starlette', 'yaml'}};"
        "print(sorted(heavy & set(sys.modules)))"
    )

    def run(module: str) -> list[str]:
        command = [sys.executable, "-c", code.format(module)]
        environment = {**os.environ, "PYTHONPATH": SOURCE}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    runs = [(run("headrace.app.supervisor"), run("numpy")) for _ in range(7)]

    assert "[]" == runs[0][0][1]
    ours_s, numpys_s = (min(float(pair[which][0]) for pair in runs) for which in (0, 1))
    assert ours_s < numpys_s


def test_the_end_of_a_child_is_told_in_words() -> None:
    """Log lines are read by people (D3)."""
    assert "was ended by SIGKILL" == describe_exit(-9)
    assert "exited with 3" == describe_exit(3)


def test_the_listening_queue_outlives_a_worker(start: Start) -> None:
    """The supervisor's socket holds callers while a worker is replaced (F7)."""
    server = start("good", workers=1)
    server.until_ready(1)
    port = int((server.home / "run/settings.json").read_text().split('"http_port":')[1].split(",")[0])

    os.kill(server.pids("worker-1")[0], signal.SIGKILL)

    with socket.create_connection(("127.0.0.1", port), timeout=1.0):
        pass


def test_a_reader_of_our_output_that_has_stopped_does_not_stop_the_supervisor(start: Start) -> None:
    """F7: standard error is a pipe that nobody empties any more; a worker that dies comes back all the same."""
    server = start("", workers=1)
    server.until_ready(workers=1)
    assert server.process.stderr is not None
    fill(server.process.stderr.fileno())
    for turn in range(1, 4):
        os.kill(server.pids("worker-1")[-1], signal.SIGKILL)
        server.until(lambda turn=turn: server.count("worker-1", "ready") == turn + 1)
    server.process.send_signal(signal.SIGTERM)
    code, _ = server.wait()

    assert 0 == code


def fill(read_fd: int) -> None:
    """Leave no room in the pipe whose reading end this is."""
    write_fd = os.open(f"/proc/self/fd/{read_fd}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(write_fd, b"x" * 4096)
    except BlockingIOError:
        os.close(write_fd)


def test_a_file_that_cannot_be_removed_does_not_end_the_server(start: Start, tmp_path: Path) -> None:
    """F7: the disk of the state folder has become unusable for us; a dead worker is still replaced."""
    server = start("", workers=1)
    server.until_ready(workers=1)
    report = tmp_path / "run" / "worker-1.json"
    report.unlink()
    report.mkdir()
    (report / "in the way").touch()
    os.kill(server.pids("worker-1")[0], signal.SIGKILL)
    server.until(lambda: server.count("worker-1", "start") == 2)

    assert server.process.poll() is None


STORM = """
import os, signal, sys
from pathlib import Path
from headrace.app.start import prepare_home
from headrace.app.supervisor import Supervisor
from headrace.config import Settings
supervisor = Supervisor(prepare_home(Path(sys.argv[1])), Settings(workers=1, threads=1), counters=None)
supervisor._take_signals()
for _ in range(5_000):
    os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGTERM)
supervisor._http = supervisor._admin = open(os.devnull)
supervisor._on_signals()
print(supervisor._stop_signal, supervisor._is_reload_wanted)
"""


def test_a_storm_of_signals_does_not_drown_the_one_that_stops(tmp_path: Path) -> None:
    """D6: more hang-ups than the wake-up socket holds, then SIGTERM, all while the supervisor could not look."""
    finished = subprocess.run(
        [sys.executable, "-c", STORM, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )

    assert ("15 True", "") == (finished.stdout.strip(), finished.stderr)


def test_a_worker_that_gives_no_sign_of_life_is_replaced(start: Start) -> None:
    """F7: its loop turns no more, so it can neither answer nor ask to be replaced; one that beats is left alone."""
    server = start("hung")
    server.until_ready()
    victim = server.pids("worker-1")[0]
    beat(server, 2, until=lambda: server.count("worker-1", "start") == 2)
    starts_of_the_other = server.count("worker-2", "start")

    assert not is_alive(victim)
    assert 1 == starts_of_the_other


def beat(server: Running, number: int, *, until: Callable[[], bool]) -> None:
    """Keep one worker's file changing."""
    limit_s = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < limit_s, server.events()
        os.utime(server.home / "run" / f"worker-{number}.slots")
        time.sleep(0.02)
