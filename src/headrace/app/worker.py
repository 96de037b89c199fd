"""One data-plane process: puts the parts together, opens them in order, closes them in reverse.

    python -m headrace.app.worker --number 1 --home DIR --listen-fd 3 --lifeline-fd 4 --status-fd 5 --workers 2

The supervisor starts it so; `headrace worker` starts one alone (`--standalone`), which then listens and serves its own
metrics. SIGTERM drains; a second one ends at once, unless there is a supervisor to do that. SIGUSR1 retires: the worker
stops accepting, answers what its connections still send and leaves when they have gone. End of file on the lifeline
means that the supervisor has died.

Exit codes: 0 drained; 3 nothing can be served (the report says why); 4 a model run got stuck and the worker wants to
be replaced.

Alone it takes SIGHUP as a supervisor does. This is one file although it is long: the parts of a worker meet here and
nowhere else, and what is opened in `run` is closed in reverse in `_shut_down`.
"""

import argparse
import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import setproctitle
import uvloop

from headrace.app.companion import Companion
from headrace.app.observe import has_terminal
from headrace.app.sockets import listen
from headrace.app.start import StartError, read_settings
from headrace.app.worker_gauges import WorkerGauges
from headrace.clock import SystemClock
from headrace.config import Settings
from headrace.data_plane.admit import Admission
from headrace.data_plane.gateway.http import HttpFront, tls_context
from headrace.data_plane.gateway.listener import Listener
from headrace.data_plane.gateway.routes import Router
from headrace.data_plane.pipeline import Pipeline
from headrace.data_plane.plane import Plane
from headrace.data_plane.route import FAILED_RETRY_AFTER_S
from headrace.data_plane.statistics import ModelStatistics
from headrace.errors import ConfigError, ModelFailed
from headrace.home import Home, write_atomically
from headrace.ports import Runtime, RuntimeLoader
from headrace.report import WorkerReport, WorkerState
from headrace.snapshot import RuntimeOptions, Snapshot, VersionSpec, make_snapshot
from headrace.storage.segments import SegmentWriter
from headrace.telemetry.logs import LibraryLogs, log, log_unexpected
from headrace.telemetry.metrics import RecordFold
from headrace.telemetry.slots import SlotsInUse, SlotsUnreadable, SlotValues, SlotWriter, peek_connections, read_slots

RUNTIMES: Final = {"onnx": "headrace.runtimes.onnx", "sleep": "headrace.testing.sleep_runtime"}
"""Adapter by name; imported when its first model is loaded, so that a worker carries only what it uses."""

TICK_S: Final = 0.25
"""How often a worker looks for a new snapshot, beats its heart and enforces time limits of connections."""

RETRY_S: Final = FAILED_RETRY_AFTER_S
RETRY_S_MAX: Final = 600.0
"""First and longest time after which a model that could not be loaded is tried again; callers are told the first."""

UNKNOWN_ENDPOINT: Final = "unknown"

EXIT_NOTHING_TO_SERVE: Final = 3
EXIT_STUCK: Final = 4

LINGER_S: Final = 0.1
"""How long a drained worker still answers 503 before its connections close, so that callers read their answers."""


class Worker:
    """The parts of one worker and its life."""

    def __init__(
        self,
        number: int,
        home: Home,
        settings: Settings,
        listening: socket.socket,
        workers: int,
        status_fd: int | None,
        on_reload: Callable[[], None] | None = None,
    ) -> None:
        self._on_reload = on_reload
        self._number = number
        self._home = home
        self._settings = settings
        self._listening = listening
        self._status_fd = status_fd
        self._is_supervised = status_fd is not None
        if status_fd is not None:
            os.set_blocking(status_fd, False)  # a supervisor that is stopped must not stop its workers
        self._neighbours = [home.slots_file(other) for other in range(1, 2 * workers + 2) if other != number]
        self._state: WorkerState = "starting"
        self._started_s = 0.0
        self._last_report: WorkerReport | None = None
        self._unreadable_ids: set[str] = set()
        self._retry_s = RETRY_S
        self._retry_at_s = 0.0
        self._reconciling: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._is_closing = False
        self._exit_code = 0
        self._gc_started_s = 0.0

    async def run(self) -> int:
        """Live until told to stop; returns the exit code."""
        loop = asyncio.get_running_loop()
        clock = self._clock = SystemClock()
        settings, home = self._settings, self._home

        # Open in order: counters first, because everything counts; then where records go; then the path; last the door.
        slots = self._slots = SlotWriter.open(home.slots_file(self._number), clock=clock)
        self._gauges = WorkerGauges(slots, self._number)
        fold = RecordFold(slots)
        self._sink = sink = SegmentWriter(
            home.records_folder(self._number), settings, loop.call_soon_threadsafe, clock,
            self._gauges.count_records, worker=self._number,
        )  # fmt: skip
        admission = self._admission = Admission()
        pipeline = self._pipeline = Pipeline(
            loop, clock, self._number, admission, slots.ledger(UNKNOWN_ENDPOINT), sink, fold,
            ModelStatistics(slots, clock),
        )  # fmt: skip
        loaders: dict[str, RuntimeLoader] = {name: partial(_load_with, module) for name, module in RUNTIMES.items()}
        self._plane = Plane(
            loop, clock, pipeline, slots, loaders, settings.threads, settings.json_depth_max,
            home.run / "load.lock", self._plane_changed,
        )  # fmt: skip
        router = self._router = Router(loop, clock, pipeline, self._is_ready, self._read_all_slots)
        self._front = HttpFront(settings, router, clock)
        tls = tls_context(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
        self._listener = Listener(self._listening, self._front, tls, self._ask_neighbours)
        self._front.connections_changed = self._publish_connections
        self._watch_gc()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._terminate)
        loop.add_signal_handler(signal.SIGUSR1, self._retire)
        self._take_hangup(loop)

        ticker = asyncio.ensure_future(self._tick_for_ever())
        try:
            await self._stop.wait()
            await self._shut_down()
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
        return self._exit_code

    def _take_hangup(self, loop: asyncio.AbstractEventLoop) -> None:
        """Below a supervisor it is the supervisor's to understand; nohup starts us with it ignored, and that stands."""
        if self._on_reload is None or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            return
        reload, had_terminal = self._on_reload, has_terminal()

        def hangup() -> None:
            if had_terminal and not has_terminal():  # it has closed, and nobody is left to press Ctrl-C
                self._stop.set()
            else:
                reload()

        loop.add_signal_handler(signal.SIGHUP, hangup)

    # ---------------------------------------------------------------- while it lives

    async def _tick_for_ever(self) -> None:
        while True:
            self._tick()
            await asyncio.sleep(TICK_S)

    def _tick(self) -> None:
        for step in (
            self._front.sweep,
            self._slots.beat,
            self._watch_stuck_runs,
            self._follow_snapshot,
            self._accept_or_leave_it,
            self._update_gauges,
            self._write_report,
        ):
            try:
                step()
            except Exception as error:  # out of descriptors, for one: the sweep that gives some back must go on
                log_unexpected(f"tick: {step.__name__}", error)
        if self._state == "retiring" and not self._front.connections:
            self._stop.set()

    def _update_gauges(self) -> None:
        self._gauges.update(self._plane, self._sink, self._pipeline.snapshot_id)

    def _follow_snapshot(self) -> None:
        """Start to reconcile when another snapshot is desired; one at a time."""
        if self._reconciling is not None and not self._reconciling.done():
            return
        if self._stop.is_set():
            return
        desired = self._home.desired_id()
        if desired is None and not self._pipeline.snapshot_id:
            desired = self._home.last_good_id()  # nothing is desired in readable form, and there is nothing to keep
        if desired is None or (desired == self._pipeline.snapshot_id and not self._is_retry_due()):
            return
        snapshot = self._read_snapshot(desired)
        if snapshot is not None:
            self._reconciling = asyncio.ensure_future(self._reconcile(snapshot))

    def _read_snapshot(self, desired: str) -> Snapshot | None:
        """The desired snapshot; while it cannot be read, the last good one (static stability)."""
        for snapshot_id in (desired, self._home.last_good_id()):
            if snapshot_id is None or (snapshot_id == self._pipeline.snapshot_id and snapshot_id != desired):
                continue
            try:
                return self._home.read_snapshot(snapshot_id)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                if snapshot_id not in self._unreadable_ids:  # said once, tried again at every tick
                    self._unreadable_ids.add(snapshot_id)
                    log("error", "snapshot unreadable", snapshot=snapshot_id, reason=str(error))
        return None

    def _is_retry_due(self) -> bool:
        """What could not be loaded is tried again, less and less often: the trouble may have been the disk's."""
        return bool(self._plane.problems()) and self._clock.now_s() >= self._retry_at_s

    async def _reconcile(self, snapshot: Snapshot) -> None:
        try:
            await self._plane.reconcile(snapshot)
            fallback = self._with_last_good(snapshot, self._plane.not_ready())
            if fallback is not None:
                await self._plane.reconcile(fallback)
                await self._plane.reconcile(snapshot)  # keeps what serves now until the desired version can be loaded
        except Exception as error:  # nobody awaits this task
            log_unexpected("reconcile", error)
        self._unreadable_ids.clear()
        self._retry_s = min(2 * self._retry_s, RETRY_S_MAX) if self._plane.problems() else RETRY_S
        self._retry_at_s = self._clock.now_s() + self._retry_s
        if not self._plane.is_ready and self._plane.cannot_serve():
            self._exit_code = EXIT_NOTHING_TO_SERVE
            self._write_report()
            self._stop.set()
        self._tick()

    def _with_last_good(self, snapshot: Snapshot, missing: list[str]) -> Snapshot | None:
        """The snapshot with its unloadable endpoints as they were when last all was warm (static stability); None when
        that changes nothing."""
        last_good_id = self._home.last_good_id()
        if not missing or last_good_id in (None, snapshot.id):
            return None
        try:
            last_good = self._home.read_snapshot(str(last_good_id))
        except (OSError, ValueError, msgspec.MsgspecError):
            return None
        earlier = {spec.name: spec for spec in last_good.endpoints if spec.name in missing}
        if not earlier:
            return None
        log("warning", "serving the last good version", endpoints=sorted(earlier), snapshot=last_good_id)
        return make_snapshot([earlier.get(spec.name, spec) for spec in snapshot.endpoints])

    def _plane_changed(self) -> None:
        self._router.endpoints_changed()
        # Before the report is written: nobody shall read that all models are warm and the worker is not ready.
        if self._plane.is_ready and self._state == "starting":
            self._state = "ready"
            self._started_s = time.time() - process_start_unix_s()
            # And nobody shall read that it is ready while it takes no connections yet.
            self._accept_or_leave_it()
            if self._on_reload is not None:  # alone; otherwise the start screen says so
                log("info", "ready", http_port=self._listening.getsockname()[1], after_s=round(self._started_s, 3))
        self._write_report()

    def _accept_or_leave_it(self) -> None:
        """A worker that is not ready leaves new connections to neighbours that are; if none is, it answers 503."""
        if self._is_closing:
            return
        takes = self._plane.is_ready and self._state == "ready"
        self._slots.is_taking.set(float(takes))
        leaves = not takes and (self._state == "retiring" or self._fewest_connections() >= 0)
        if leaves:
            self._listener.stop()
        else:
            self._listener.start()
        if self._state in ("starting", "ready"):
            # Whoever came while nobody was ready is sent on to them by the answer to its next request.
            self._front.is_retiring = leaves

    def _publish_connections(self) -> None:
        """Neighbours compare this number with theirs before they accept."""
        if self._state != "stopped":  # then the file may be another worker's
            self._slots.connections.set(self._listener.connections)

    def _ask_neighbours(self) -> int:
        """For the listener, before each connection: some may have become ready since the last tick."""
        if self._state != "ready":
            self._accept_or_leave_it()
        return self._fewest_connections()

    def _fewest_connections(self) -> int:
        now_s = self._clock.now_s()
        counts = [peek_connections(path, now_s) for path in self._neighbours]
        return min((count for count in counts if count is not None), default=-1)

    def _watch_stuck_runs(self) -> None:
        """A run that never returns cannot be stopped, only left: tell its callers and ask for a new process."""
        executor = self._plane.executor
        if self._clock.now_s() - executor.oldest_start_s() <= self._settings.run_s_max:
            return
        error = ModelFailed(f"a model run did not return within {self._settings.run_s_max:g} s; the worker is replaced")
        log("error", "model run stuck", limit_s=self._settings.run_s_max)
        for batch in executor.running():
            for piece in batch.pieces:
                if piece.ticket.ending is None:
                    self._pipeline.refuse(piece.ticket, error)
        self._exit_code = EXIT_STUCK
        self._stop.set()

    def _watch_gc(self) -> None:
        """Measure collector pauses; thresholds are raised because requests leave no cycles behind."""
        pauses = self._gauges.gc_pause
        gc.set_threshold(20_000, 20, 50)

        def measure(phase: str, _info: dict[str, int]) -> None:
            if phase == "start":
                self._gc_started_s = time.perf_counter()
            else:
                pauses.add(time.perf_counter() - self._gc_started_s)

        gc.callbacks.append(measure)

    # ---------------------------------------------------------------- what it says

    def _is_ready(self) -> tuple[bool, list[str]]:
        if self._admission.is_draining:
            return False, []
        return self._plane.is_ready, self._plane.not_ready()

    def _read_all_slots(self) -> list[SlotValues]:
        values = []
        for path in sorted(self._home.run.glob("worker-*.slots")):
            # One damaged file, or one that is just being replaced, must not hide what the others have counted.
            with contextlib.suppress(OSError, SlotsUnreadable):
                values.append(read_slots(path))
        return values

    def _write_report(self) -> None:
        report = WorkerReport(
            number=self._number,
            pid=os.getpid(),
            state=self._state,
            snapshot_id=self._plane.warm_snapshot_id,
            started_s=self._started_s,
            is_recording=self._sink.is_writable,
            replicas=self._plane.reports(),
        )
        if report == self._last_report:
            return
        try:
            # Not synced: it dies with the process, and a disk that is slow to sync would hold up every request.
            write_atomically(self._home.report_file(self._number), msgspec.json.encode(report), is_synced=False)
            self._last_report = report
            if self._status_fd is not None:
                with contextlib.suppress(BlockingIOError):  # full of news that nobody has read yet
                    os.write(self._status_fd, b"\n")
        except OSError as error:  # a full disk or a dead supervisor must not stop the path
            log("warning", "report not written", reason=str(error))

    # ---------------------------------------------------------------- how it ends

    def lifeline_lost(self, lifeline_fd: int) -> None:
        """The supervisor has died: nobody would restart or stop this worker any more."""
        asyncio.get_running_loop().remove_reader(lifeline_fd)
        log("warning", "supervisor gone, draining")
        self._is_supervised = False
        self._stop.set()

    def _terminate(self) -> None:
        if self._stop.is_set() and not self._is_supervised:
            os._exit(128 + signal.SIGTERM)  # a second signal skips to the end
        # A supervisor kills when it is asked twice. Its SIGTERM may well be the second one here: service managers
        # signal every process of a service, and the supervisor passes its own on.
        self._stop.set()

    def _retire(self) -> None:
        if self._stop.is_set():
            return  # it is leaving already
        self._state = "retiring"
        self._front.retire()
        self._tick()

    async def _shut_down(self) -> None:
        self._state = "draining"
        idle = asyncio.Event()
        self._admission.on_idle = idle.set
        # Not ready first: balancers and neighbours must stop sending before anything closes.
        self._admission.is_draining = True
        self._write_report()
        # Still accepting: whoever comes now gets a 503 that says when to come back, not a refused connection.
        self._front.retire()
        if self._reconciling is not None:
            self._reconciling.cancel()
            await asyncio.gather(self._reconciling, return_exceptions=True)
        # Finish what is in flight, until the deadline for that.
        if self._admission.tickets_open and self._exit_code != EXIT_STUCK:
            try:
                await asyncio.wait_for(idle.wait(), self._settings.drain_s_max)
            except TimeoutError:
                log("warning", "requests cut off at shutdown", requests=self._admission.tickets_open)
        await asyncio.sleep(LINGER_S)
        # With the connections that are accepted but not set up: a request on one of them would come after its records.
        self._is_closing = True
        self._listener.abort()
        # What is still open now ends as abandoned: its connection closes.
        self._front.close_idle()
        self._front.abort_all()
        self._front.close()
        # Then the records, because they tell about everything above; then the models; then the counters.
        self._pipeline.close()
        await self._sink.close()
        if self._exit_code != EXIT_STUCK:
            self._plane.close()
        self._state = "stopped"
        self._write_report()
        self._slots.close()


def _load_with(module: str, version: VersionSpec, options: RuntimeOptions, threads: int) -> Runtime:
    """Load through an adapter module; runs on the loader thread, which also pays for the import."""
    loader: RuntimeLoader = importlib.import_module(module).load
    return loader(version, options, threads)


def process_start_unix_s() -> float:
    """When this process was started, from /proc: includes the interpreter's own start."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rsplit(b")", 1)[1].split()[19])
    with open("/proc/uptime", "rb") as file:
        uptime_s = float(file.read().split()[0])
    return time.time() - uptime_s + ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="headrace.app.worker")
    parser.add_argument("--number", type=int, default=1)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--listen-fd", type=int)
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("--lifeline-fd", type=int)
    parser.add_argument("--status-fd", type=int)
    options = parser.parse_args()
    setproctitle.setproctitle(f"headrace: worker {options.number}")
    logging.basicConfig(level=logging.WARNING, handlers=[LibraryLogs()])
    home = Home(options.home)

    async def live() -> int:
        settings = read_settings(home)
        with contextlib.ExitStack() as stack:
            on_reload: Callable[[], None] | None = None
            if options.standalone:
                listening = listen(settings.http_host, settings.http_port, "http")
                companion = stack.enter_context(Companion(home, settings))
                stack.callback(asyncio.ensure_future(companion.keep_alive()).cancel)
                on_reload = companion.reload
            else:
                listening = socket.socket(fileno=options.listen_fd)
                listening.setblocking(False)
            worker = Worker(options.number, home, settings, listening, options.workers, options.status_fd, on_reload)
            if options.lifeline_fd is not None:
                asyncio.get_running_loop().add_reader(options.lifeline_fd, worker.lifeline_lost, options.lifeline_fd)
            return await worker.run()

    try:
        code = uvloop.run(live())
    except (ConfigError, StartError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        code = EXIT_NOTHING_TO_SERVE
    except SlotsInUse as error:  # of a worker that has not quite gone: worth another try
        print(f"headrace: {error}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    os._exit(code)  # executor threads may still be inside a model; the kernel takes them


if __name__ == "__main__":
    main()
