"""The parent of all: opens the ports, keeps workers and the control process alive, stops them in order.

It imports nothing heavy (a test measures it) and serves nothing, so there is little in it that can fail. One loop over
pipes, signals and timers; every change of a child's state passes through `_on_exit` or `_on_status`. The file is long
because the loop is one thing: start, death, memory and stop change the same few fields, and are read side by side.

    start    sockets → settings → settle what an earlier run left → workers → control → start screen
    death    settle its counters → count → wait (0.1 s doubling to 10 s) → same number again
    hung     no sign of life for longer than a model run may take → SIGKILL, then as death
    memory   above memory_bytes_max: spare worker → ready → old one retires (SIGUSR1) → gone
    stop     SIGTERM to workers → drain_s_max + 5 s → SIGKILL → settle → control last → exit

Exit status: 0 stopped as asked; 1 could not serve; 130 or 143 when a second SIGINT or SIGTERM cut the drain short.
"""

import heapq
import itertools
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol

import msgspec

from headrace.app.children import Backoff, Child, describe_exit, spawn
from headrace.app.observe import has_terminal, is_serving, read_report, resident_bytes
from headrace.app.sockets import listen
from headrace.app.start import PYTHON, StartError, prepare_home, read_settings, take_lock, write_settings
from headrace.config import Settings
from headrace.home import Home, write_atomically
from headrace.report import WorkerReport
from headrace.telemetry.stderr import put_line

if TYPE_CHECKING:
    from headrace.telemetry.metrics import Meter

CANNOT_SERVE: Final = 3  # exit status of a worker that could load nothing; its report says why
FIRST_STARTS_MAX: Final = 5  # a worker that dies this often before anything was ready will not get better
STOP_MARGIN_S: Final = 5.0
CONTROL_STOP_S: Final = 5.0
MEMORY_LOOK_S: Final = 1.0
BEAT_LOOK_S: Final = 1.0
HUNG_S_MIN: Final = 10.0  # however short a model run may be, a machine that is busy may hold up a worker for seconds
SCREEN_S_MAX: Final = 5.0

WORKER_COMMAND: Final = (*PYTHON, "-m", "headrace.app.worker")
CONTROL_COMMAND: Final = (*PYTHON, "-m", "headrace.app.control")


class Screen(Protocol):
    """What the supervisor tells the person who started it."""

    @property
    def tick_s(self) -> float:
        """How often `loading` wants to be called, seconds."""
        ...

    def loading(self, reports: Sequence[WorkerReport]) -> None:
        """Show progress."""
        ...

    def ready(self, home: Home, settings: Settings, reports: Sequence[WorkerReport]) -> None:
        """Show what is served; once."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was. Idempotent."""
        ...


class Counters(Protocol):
    """The supervisor's hand in the metrics."""

    def settle(self, slots_file: Path) -> None:
        """End what a dead worker held as `failed{code=worker_lost}`."""
        ...

    def heartbeat_s(self, slots_file: Path) -> float:
        """When a worker last said that it lives, monotonic seconds; 0 when that is not known."""
        ...

    def count_restart(self, report: WorkerReport | None) -> None:
        """Count the replicas that a worker took with it.

        Args:
            report: Its last; None when it died before it wrote one.
        """
        ...


class Supervisor:
    """Runs until it is told to stop.

    Args:
        home: Prepared; this process holds its lock.
        settings: With workers and threads decided.
        lock_fd: Lock of the home, inherited by children so that it outlives a killed supervisor.
        worker_command, control_command: Programs to run; tests put their own. No control command, no control process.
        memory_age_s_min: Youngest age at which a worker is replaced for its memory: a limit below what a fresh worker
            needs must not become a carousel.
    """

    def __init__(
        self,
        home: Home,
        settings: Settings,
        *,
        counters: Counters,
        screen: Screen | None = None,
        lock_fd: int | None = None,
        worker_command: Sequence[str] = WORKER_COMMAND,
        control_command: Sequence[str] = CONTROL_COMMAND,
        memory_age_s_min: float = 10.0,
    ) -> None:
        self.home = home
        self.settings = settings
        self.exit_code = 0
        self._counters = counters
        self._screen = screen
        self._lock_fds = () if lock_fd is None else (lock_fd,)
        self._worker_command = tuple(worker_command)
        self._control_command = tuple(control_command)
        self._memory_age_s_min = memory_age_s_min
        self._phase: Literal["serving", "draining", "closing", "done"] = "serving"
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._workers: dict[int, Child] = {}
        self._control: Child | None = None
        self._backoff: dict[int, Backoff] = {}
        self._waiting: set[int] = set()  # numbers whose restart is due later
        self._replacing: tuple[int, int] | None = None  # (worker that goes, worker that comes)
        self._was_ever_ready = False
        self._is_reload_wanted = False
        self._signals: deque[int] = deque()
        self._stop_signal: int | None = None

    # --------------------------------------------------------------------------------------------------- the run

    def run(self) -> int:
        """Serve until stopped.

        Returns:
            The exit status.

        Raises:
            StartError: A port cannot be opened; nothing was started.
        """
        self._http = listen(self.settings.http_host, self.settings.http_port, "http")
        self._admin = listen(self.settings.admin_host, self.settings.admin_port, "admin")
        self._note_ports()
        # Signals before children: a SIGTERM between the two would leave orphans to their lifeline only.
        self._take_signals()
        self._lifeline_read, self._lifeline_write = os.pipe()
        self._clean_up_earlier_run()
        for number in range(1, self.settings.workers + 1):
            self._start_worker(number)
        self._start_control()
        # Late, while the workers load: neither is needed to get them going.
        _set_title("headrace: supervisor")
        self._tick_screen()
        self._after(BEAT_LOOK_S, self._look_for_hung_workers)
        if self.settings.memory_bytes_max:
            self._after(MEMORY_LOOK_S, self._look_at_memory)
        while self._phase != "done":
            self._step()
        self._tidy()
        return self.exit_code

    def _step(self) -> None:
        timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        for key, _ in self._selector.select(timeout):
            key.data()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._sequence), action))

    def _note_ports(self) -> None:
        self.settings = msgspec.structs.replace(
            self.settings,
            http_port=self._http.getsockname()[1],
            admin_port=self._admin.getsockname()[1],
        )
        write_settings(self.home, self.settings)
        write_atomically(self.home.pid_file(), str(os.getpid()).encode())

    def _clean_up_earlier_run(self) -> None:
        # The lock is ours, so every worker of an earlier run is dead: what it held ends now, and its report must not
        # be taken for one of ours.
        for path in self.home.run.glob("worker-*.slots"):
            self._settle(path)
        for path in self.home.run.glob("worker-*.json"):
            _remove(path)

    def _tidy(self) -> None:
        if self._screen is not None:
            self._screen.close()
        _remove(self.home.pid_file())

    # --------------------------------------------------------------------------------------------------- signals

    def _take_signals(self) -> None:
        self._had_terminal = has_terminal()
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        self._wake = (wake_read, wake_write)
        # nohup starts us with SIGHUP ignored; that wish stands.
        hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, *hangup):
            signal.signal(signum, self._note_signal)
        self._selector.register(wake_read, selectors.EVENT_READ, self._on_signals)

    def _note_signal(self, signum: int, _frame: object) -> None:
        # The wake-up descriptor only wakes: in a storm of signals its buffer fills, and a SIGTERM would find no room.
        self._signals.append(signum)

    def _on_signals(self) -> None:
        self._wake[0].recv(1 << 16)
        while self._signals:
            signum = self._signals.popleft()
            if signum in (signal.SIGTERM, signal.SIGINT):
                self._on_stop_signal(signum)
            elif signum == signal.SIGHUP:
                self._on_hangup()
        # Whatever the signal was: SIGCHLD may have been merged with it.
        self._reap()

    def _on_stop_signal(self, signum: int) -> None:
        if self._stop_signal is None:
            self._stop_signal = signum
            self._drain(0)
            return
        _say("second signal: stopping at once")
        self.exit_code = 128 + signum
        for child in self._children():
            child.signal(signal.SIGKILL)

    def _on_hangup(self) -> None:
        # A terminal that closes says SIGHUP too; then nobody is left to read us or press Ctrl-C.
        if self._had_terminal and not has_terminal():
            _say("the terminal is gone: stopping")
            self._on_stop_signal(signal.SIGTERM)
            return
        self._is_reload_wanted = True
        self._forward_reload()

    def _forward_reload(self) -> None:
        # Only to a control process that said it is up: SIGHUP would end one that has no handler yet.
        if self._is_reload_wanted and self._control is not None and self._control.ready_s is not None:
            self._is_reload_wanted = False
            self._control.signal(signal.SIGHUP)

    # --------------------------------------------------------------------------------------------------- children

    def _children(self) -> list[Child]:
        return [*self._workers.values(), *([self._control] if self._control is not None else [])]

    def _start_worker(self, number: int) -> None:
        self._waiting.discard(number)
        if self._phase != "serving":
            return
        command = [
            *self._worker_command,
            *("--number", str(number), "--home", str(self.home.root)),
            *("--listen-fd", str(self._http.fileno()), "--workers", str(self.settings.workers)),
        ]
        child = self._spawn(f"worker {number}", number, command, self._http.fileno())
        if child is None:
            self._restart_later(number, 0.0)
            return
        self._workers[number] = child

    def _start_control(self) -> None:
        if not self._control_command or self._phase != "serving":
            return
        command = [*self._control_command, "--home", str(self.home.root), "--admin-fd", str(self._admin.fileno())]
        self._control = self._spawn("control", 0, command, self._admin.fileno())
        if self._control is None:
            self._after(self._backoff.setdefault(0, Backoff()).next_s(0.0), self._start_control)

    def _spawn(self, name: str, number: int, command: list[str], socket_fd: int) -> Child | None:
        try:
            child = spawn(
                name,
                number,
                command,
                lifeline_fd=self._lifeline_read,
                keep_fds=(socket_fd, *self._lock_fds),
                now_s=time.monotonic(),
            )
        except OSError as error:
            _say(f"{name} cannot be started: {error.strerror or error}")
            return None
        self._selector.register(child.status_fd, selectors.EVENT_READ, lambda: self._on_status(child))
        return child

    def _on_status(self, child: Child) -> None:
        descriptor = child.status_fd
        if descriptor < 0:
            return  # it was reaped by an event of the same turn
        is_news = child.read_status()
        if child.status_fd < 0:
            self._selector.unregister(descriptor)
        if not is_news:
            return
        if child is self._control:
            child.ready_s = child.ready_s or time.monotonic()
            self._forward_reload()
            return
        child.report = read_report(self.home.report_file(child.number))
        if child.report is not None and child.ready_s is None and is_serving(child.report):
            self._on_serving(child)

    def _on_serving(self, child: Child) -> None:
        child.ready_s = time.monotonic()
        self._was_ever_ready = True
        if self._replacing is not None and self._replacing[1] == child.number:
            self._retire(self._workers.get(self._replacing[0]))

    # ----------------------------------------------------------------------------------------------------- deaths

    def _reap(self) -> None:
        for child in self._children():
            code = child.process.poll()
            if code is not None:
                if child.status_fd >= 0:
                    self._on_status(child)  # its last words may still be in the pipe
                if child.status_fd >= 0:
                    self._selector.unregister(child.status_fd)
                    child.close_status()
                self._on_exit(child, code)

    def _on_exit(self, child: Child, code: int) -> None:
        if child is self._control:
            self._control = None
            self._on_control_exit(child, code)
            return
        del self._workers[child.number]
        # Before any restart: the next worker of this number maps the same file.
        self._settle(self.home.slots_file(child.number))
        if child.report is None:
            child.report = read_report(self.home.report_file(child.number))
        _remove(self.home.report_file(child.number))
        if self._phase == "serving":
            self._on_worker_exit(child, code)
        elif not self._workers:
            self._close_control()

    def _on_worker_exit(self, child: Child, code: int) -> None:
        going, coming = self._replacing or (-1, -1)
        if child.number == coming:
            _say(f"{child.name}, a replacement, {describe_exit(code)}")
            self._replacing = None
            return
        if child.number == going:
            self._replacing = None
            if child.is_retiring:
                return
            # It died before it was replaced; the worker that was coming takes its place.
            self._counters.count_restart(child.report)
            _say(f"{child.name} {describe_exit(code)}; worker {coming} takes its place")
            return
        self._restart(child, code)

    def _restart(self, child: Child, code: int) -> None:
        if not self._was_ever_ready and self._gave_up(child, code):
            return
        self._counters.count_restart(child.report)
        wait_s = self._restart_later(child.number, child.healthy_s(time.monotonic()))
        _say(f"{child.name} (pid {child.pid}) {describe_exit(code)}; restarting in {wait_s:g} s")

    def _restart_later(self, number: int, healthy_s: float) -> float:
        wait_s = self._backoff.setdefault(number, Backoff()).next_s(healthy_s)
        self._waiting.add(number)
        self._after(wait_s, lambda: self._start_worker(number))
        return wait_s

    def _gave_up(self, child: Child, code: int) -> bool:
        """A first start that cannot succeed ends the server instead of spinning."""
        if code == CANNOT_SERVE:
            # Others may load what this one could not (memory, for one); the last one to fail decides.
            if self._workers or self._waiting:
                self._restart_when_ready(child)
                return True
            _say("no model can be served", *_reasons(child))
        elif self._backoff.setdefault(child.number, Backoff()).failures + 1 >= FIRST_STARTS_MAX:
            _say(f"{child.name} {describe_exit(code)} at each of {FIRST_STARTS_MAX} starts; giving up")
        else:
            return False
        self._drain(1)
        return True

    def _restart_when_ready(self, child: Child) -> None:
        if self._was_ever_ready:
            self._restart_later(child.number, 0.0)
        elif self._phase == "serving":
            self._after(0.1, lambda: self._restart_when_ready(child))

    def _on_control_exit(self, child: Child, code: int) -> None:
        if self._phase == "serving":
            wait_s = self._backoff.setdefault(0, Backoff()).next_s(child.healthy_s(time.monotonic()))
            _say(f"control (pid {child.pid}) {describe_exit(code)}; restarting in {wait_s:g} s; no request is touched")
            self._after(wait_s, self._start_control)
        elif self._phase == "closing":
            self._phase = "done"

    def _settle(self, slots_file: Path) -> None:
        if os.path.exists(slots_file):  # Path.exists raises when it may not look
            self._counters.settle(slots_file)

    def _look_for_hung_workers(self) -> None:
        """End a worker whose loop turns no more: nothing inside it can say so, and its callers would wait for ever."""
        if self._phase != "serving":
            return
        self._after(BEAT_LOOK_S, self._look_for_hung_workers)
        for child in self._workers.values():
            if child.report is None:
                continue  # what the file says is its predecessor's
            beat_s = self._counters.heartbeat_s(self.home.slots_file(child.number))
            # Looks are counted, not seconds: when a whole machine was paused, everybody's last sign of life is old.
            child.still_s = child.still_s + BEAT_LOOK_S if beat_s and beat_s == child.beat_s else 0.0
            child.beat_s = beat_s
            if child.still_s > max(self.settings.run_s_max, HUNG_S_MIN):
                child.still_s = 0.0
                _say(f"{child.name} (pid {child.pid}) gives no sign of life; it is killed")
                child.signal(signal.SIGKILL)

    # ----------------------------------------------------------------------------------------------------- memory

    def _look_at_memory(self) -> None:
        if self._phase != "serving":
            return
        self._after(MEMORY_LOOK_S, self._look_at_memory)
        if self._replacing is not None:
            return
        grown = [
            (resident_bytes(child.pid), number)
            for number, child in self._workers.items()
            if child.healthy_s(time.monotonic()) >= self._memory_age_s_min
        ]
        most_bytes, number = max(grown, default=(0, 0))
        if most_bytes > self.settings.memory_bytes_max:
            self._replace(number, most_bytes)

    def _replace(self, number: int, seen_bytes: int) -> None:
        spare = next(free for free in itertools.count(1) if free not in self._workers and free not in self._waiting)
        _say(
            f"worker {number} holds {seen_bytes / 2**20:,.0f} MiB, above memory_bytes_max "
            f"{self.settings.memory_bytes_max / 2**20:,.0f} MiB; worker {spare} takes over"
        )
        self._start_worker(spare)
        if spare in self._workers:
            self._replacing = (number, spare)

    def _retire(self, child: Child | None) -> None:
        if child is None:
            self._replacing = None
            return
        child.is_retiring = True
        child.signal(signal.SIGUSR1)
        # Connections that stay silent keep it; SIGTERM has it finish what it holds and close them.
        self._after(self.settings.drain_s_max, lambda: child.signal(signal.SIGTERM))
        self._after(2 * self.settings.drain_s_max + STOP_MARGIN_S, lambda: child.signal(signal.SIGKILL))

    # ------------------------------------------------------------------------------------------------------- stop

    def _drain(self, exit_code: int) -> None:
        """Stop: workers finish what they hold, then the control process goes."""
        if self._phase != "serving":
            return
        self._phase = "draining"
        self.exit_code = self.exit_code or exit_code
        for child in self._workers.values():
            child.signal(signal.SIGTERM)
        # Our copy too: while any copy is open the kernel queues callers for whom nobody will come.
        self._http.close()
        self._after(self.settings.drain_s_max + STOP_MARGIN_S, self._kill_workers)
        if not self._workers:
            self._close_control()

    def _kill_workers(self) -> None:
        for child in self._workers.values():
            _say(f"{child.name} (pid {child.pid}) did not stop in time; it is killed")
            child.signal(signal.SIGKILL)

    def _close_control(self) -> None:
        # Last, so that the final counters can still be scraped.
        self._phase = "closing"
        self._admin.close()
        if self._control is None:
            self._phase = "done"
            return
        control = self._control
        control.signal(signal.SIGTERM)
        self._after(CONTROL_STOP_S, lambda: control.signal(signal.SIGKILL))

    # ----------------------------------------------------------------------------------------------------- screen

    def _tick_screen(self) -> None:
        """Show progress while loading, then the start screen once."""
        if self._screen is None or self._phase != "serving":
            return
        reports = [child.report for child in self._workers.values() if child.report is not None]
        waited_s = max((child.healthy_s(time.monotonic()) for child in self._workers.values()), default=0.0)
        is_complete = not self._waiting and all(child.ready_s is not None for child in self._workers.values())
        # One worker that does not come up must not keep the address of the others from the reader.
        if self._workers and (is_complete or waited_s > SCREEN_S_MAX):
            self._screen.ready(self.home, self.settings, reports)
            return
        self._screen.loading(reports)
        self._after(self._screen.tick_s, self._tick_screen)


def _reasons(child: Child) -> list[str]:
    replicas = () if child.report is None else child.report.replicas
    return [f"  {each.endpoint} version {each.version}: {each.problem}" for each in replicas if each.problem]


def _remove(path: Path) -> None:
    """Remove a file if that is possible: a disk that has just become read-only must not end the server."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _say(f"{path} cannot be removed: {error.strerror or error}")


def _say(*lines: str) -> None:
    # Whoever reads us may be gone, or paused; that is no reason to stop looking after the workers.
    for line in lines:
        put_line(f"headrace: {line}".encode("utf-8", "backslashreplace"))


def _set_title(title: str) -> None:
    import setproctitle

    setproctitle.setproctitle(title)


class SlotCounters:
    """Counters in memory-mapped slots; their modules are imported when first needed, after the workers were started."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._meter: Meter | None = None

    def settle(self, slots_file: Path) -> None:
        """End what a dead worker held."""
        from headrace.telemetry.slots import SlotsInUse, settle

        try:
            lost = settle(slots_file)
        except (OSError, ValueError, SlotsInUse) as error:
            _say(f"{slots_file} cannot be settled: {error}")
            return
        for endpoint, count in lost.items():
            _say(f"{endpoint}: {count} requests ended as failed, code worker_lost")

    def heartbeat_s(self, slots_file: Path) -> float:
        """From the head of the file."""
        from headrace.telemetry.slots import peek_heartbeat_s

        return peek_heartbeat_s(slots_file)

    def count_restart(self, report: WorkerReport | None) -> None:
        """Count into `run/supervisor.slots`."""
        from headrace.telemetry.metrics import Meter
        from headrace.telemetry.slots import SlotsInUse, SlotWriter

        try:
            if self._meter is None:
                self._meter = Meter(SlotWriter.open(self._home.run / "supervisor.slots"))
            for names in self._replicas(report):
                self._meter.counter("replica_restarts_total", *names).add()
        except (OSError, ValueError, SlotsInUse) as error:
            _say(f"a restart cannot be counted: {error}")

    def _replicas(self, report: WorkerReport | None) -> list[tuple[str, str, str]]:
        if report is not None and report.replicas:
            return [(replica.endpoint, replica.model, replica.version) for replica in report.replicas]
        # It died before its first report: it was about to serve what is desired.
        snapshot = self._home.read_snapshot(self._home.desired_id() or "")
        return [(spec.name, spec.model, version.version) for spec in snapshot.endpoints for version in spec.versions]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run with the settings that `run/settings.json` holds."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = dict(zip(words[::2], words[1::2], strict=True))
    try:
        home = prepare_home(Path(options["--home"]))
        lock_fd = int(options["--lock-fd"]) if "--lock-fd" in options else take_lock(home)
        os.set_inheritable(lock_fd, False)
        from headrace.app.screen import StartScreen  # here, not above: `Supervisor` alone needs no screen

        supervisor = Supervisor(
            home, read_settings(home), counters=SlotCounters(home), screen=StartScreen(), lock_fd=lock_fd
        )
        return supervisor.run()
    except StartError as error:
        _say(error.message)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
