"""The control process: metrics, health and status on the admin port, reloads, and the mark of the last good snapshot.

    python -m headrace.app.control --home DIR [--admin-fd 3] [--lifeline-fd 4] [--status-fd 5]

It reads files and asks nobody, so it cannot slow a worker down; no request passes through it, so its death touches
none. The supervisor keeps the admin socket open, so callers who come while it is restarted wait in the kernel's queue.
SIGHUP looks again at what is served and publishes the difference; SIGTERM ends it.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import setproctitle
import uvicorn
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace import __version__
from headrace.app.observe import cpu_seconds, read_reports, resident_bytes
from headrace.app.sockets import listen
from headrace.app.start import StartError, prepare_home, read_pid, read_settings
from headrace.background import run_in_background
from headrace.config import Settings
from headrace.control_plane import publish
from headrace.errors import ConfigError
from headrace.home import Home
from headrace.report import WorkerReport
from headrace.telemetry.exposition import SlotsCollector, render
from headrace.telemetry.logs import LibraryLogs, log
from headrace.telemetry.slots import SlotsUnreadable, read_slots

LOOK_S: Final = 0.5
"""How often the reports are compared with the desired snapshot."""


class Admin:
    """Answers of the admin port.

    Args:
        settings: In force when this process began; ports do not change while it lives.
    """

    def __init__(self, home: Home, settings: Settings) -> None:
        self._home = home
        self._settings = settings
        self._collector = _WithOwnProcesses(home, SlotsCollector(lambda: home.run.glob("*.slots")))

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            ("/metrics", self.metrics),
            ("/livez", self.live),
            ("/healthz", self.live),
            ("/readyz", self.ready),
            ("/v1/status", self.status),
        ]
        return Starlette(
            routes=[Route(path, handler) for path, handler in routes],
            exception_handlers={HTTPException: _http_error, Exception: _unexpected},
        )

    def metrics(self, request: Request) -> Response:
        """Everything that is counted. A plain function: Starlette runs it on a thread, so a scrape delays no probe."""
        body, content_type = render(self._collector, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def live(self, _request: Request) -> Response:
        """This process answers, so it lives."""
        return JSONResponse({"status": "ok", "live": True})

    async def ready(self, _request: Request) -> Response:
        """Ready once some worker is; a worker's readiness latches, see `headrace.report`."""
        reports = read_reports(self._home)
        is_ready = any(report.state == "ready" for report in reports)
        missing = not_ready(self._expected(), reports)
        body: dict[str, Any] = {"ready": is_ready, "not_ready": missing}
        if not is_ready:
            body |= {"error": _why_not(reports, missing), "code": "model_loading"}
        return JSONResponse(body, status_code=200 if is_ready else 503)

    def status(self, _request: Request) -> Response:
        """One look at everything, for people and scripts."""
        reports = read_reports(self._home)
        supervisor = read_pid(self._home)
        return JSONResponse(
            {
                "version": __version__,
                "home": str(self._home.root),
                "supervisor_pid": supervisor,
                "control_pid": os.getpid(),
                "http": {"host": self._settings.http_host, "port": self._settings.http_port},
                "admin": {"host": self._settings.admin_host, "port": self._settings.admin_port},
                "snapshot": {"desired": self._home.desired_id(), "last_good": self._home.last_good_id()},
                "ready": any(report.state == "ready" for report in reports),
                "not_ready": not_ready(self._expected(), reports),
                "in_flight": in_flight(self._home),
                "workers": [
                    {
                        **msgspec.to_builtins(report),
                        "memory_bytes": resident_bytes(report.pid),
                        "cpu_seconds": cpu_seconds(report.pid),
                    }
                    for report in reports
                ],
            }
        )

    def _expected(self) -> list[tuple[str, str]]:
        snapshot = publish.current(self._home)
        return [] if snapshot is None else [(spec.name, spec.default_version) for spec in snapshot.endpoints]


class _WithOwnProcesses(Collector):
    """Adds the supervisor and this process to what the workers say of themselves."""

    def __init__(self, home: Home, workers: SlotsCollector) -> None:
        self._home = home
        self._workers = workers

    def collect(self) -> Iterator[Family]:
        own = {"control": os.getpid(), "supervisor": read_pid(self._home) or 0}
        for family in self._workers.collect():
            if family.name == "headrace_memory_bytes":
                _add(family, "headrace_memory_bytes", own, resident_bytes)
            elif family.name == "headrace_cpu_seconds":
                _add(family, "headrace_cpu_seconds_total", own, cpu_seconds)
            elif family.name == "headrace_worker_starts":
                # The supervisor keeps a slots file for its one counter, but it is no worker.
                family.samples = [sample for sample in family.samples if sample.labels["worker"] != "supervisor"]
            yield family


def _add(family: Family, name: str, processes: dict[str, int], measure: Callable[[int], float]) -> None:
    for process, pid in processes.items():
        if pid:
            family.add_sample(name, {"worker": process}, measure(pid))


def not_ready(expected: Sequence[tuple[str, str]], reports: Sequence[WorkerReport]) -> list[dict[str, str]]:
    """Endpoints whose default version is warm in no worker, with the reason where one is known."""
    replicas = [replica for report in reports for replica in report.replicas]
    missing = []
    for name, version in expected:
        ours = [replica for replica in replicas if (replica.endpoint, replica.version) == (name, version)]
        if not any(replica.state.value == "ready" for replica in ours):
            problem = next((replica.problem for replica in ours if replica.problem), "")
            state = ours[0].state.value if ours else "unknown"
            missing.append({"model": name, "version": version, "state": state, "problem": problem})
    return missing


def _why_not(reports: Sequence[WorkerReport], missing: Sequence[dict[str, str]]) -> str:
    if not reports:
        return "no worker is running yet"
    if all(report.state in ("draining", "stopped") for report in reports):
        return "the server is shutting down"
    names = ", ".join(f"{item['model']} ({item['problem'] or item['state']})" for item in missing)
    return f"not ready: {names}" if names else "workers are starting"


def in_flight(home: Home) -> dict[str, int]:
    """Requests received and not ended, by endpoint."""
    totals: dict[str, int] = {}
    for path in home.run.glob("worker-*.slots"):
        try:
            for endpoint, row in read_slots(path).ledgers.items():
                totals[endpoint] = totals.get(endpoint, 0) + row.in_flight
        except (OSError, SlotsUnreadable):
            continue
    return totals


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
    accepted = "/metrics, /livez, /readyz, /healthz, /v1/status"
    text = f"{error.detail}; accepted: GET {accepted}" if error.status_code in (404, 405) else error.detail
    return JSONResponse({"error": text, "code": code}, status_code=error.status_code, headers=error.headers)


async def _unexpected(_request: Request, error: Exception) -> Response:
    log("error", "admin request failed", error=f"{type(error).__name__}: {error}")
    return JSONResponse({"error": "internal error; the log says more", "code": "internal"}, status_code=500)


class Control:
    """The process: its server, and what it does beside answering."""

    def __init__(self, home: Home, settings: Settings, listener: socket.socket) -> None:
        self._home = home
        self._settings = settings
        self._listener = listener
        config = uvicorn.Config(
            Admin(home, settings).app(),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._reloading: asyncio.Task[None] | None = None
        self._is_reload_wanted = False

    async def run(self, lifeline_fd: int | None, status_fd: int | None) -> None:
        """Serve until the supervisor says so or is gone."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._reload_soon)
        if lifeline_fd is not None:
            loop.add_reader(lifeline_fd, self._stop, lifeline_fd)
        if status_fd is not None:
            os.write(status_fd, b"\n")  # only now may SIGHUP be sent here
        async with asyncio.TaskGroup() as tasks:
            marking = tasks.create_task(self._mark_good_for_ever())
            await self._server.serve(sockets=[self._listener])
            marking.cancel()

    def _stop(self, lifeline_fd: int) -> None:
        asyncio.get_running_loop().remove_reader(lifeline_fd)
        self._server.should_exit = True

    def _reload_soon(self) -> None:
        """However many signals come during one reload, one more follows it: what they are about may have changed after
        the one under way had read it."""
        self._is_reload_wanted = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.ensure_future(self._reload_while_wanted())

    async def _reload_while_wanted(self) -> None:
        while self._is_reload_wanted:
            self._is_reload_wanted = False
            await self._reload()

    async def _reload(self) -> None:
        """Digests of large files take seconds of a core, so it happens beside the traffic; what is served stays on any
        error."""
        try:
            plan = await run_in_background("headrace-reload", publish.reload, self._home)
        except ConfigError as error:
            log("error", "reload refused", problems=error.problems)
        except (publish.PublishError, OSError, ValueError) as error:
            log("error", "reload refused", reason=str(error))
        else:
            log("info", "reloaded", snapshot=plan.snapshot.id, notices=plan.notices)

    async def _mark_good_for_ever(self) -> None:
        while True:
            try:
                self.mark_good()
            except OSError as error:
                log("warning", "last good snapshot not marked", reason=str(error))
            await asyncio.sleep(LOOK_S)

    def mark_good(self) -> None:
        """The desired snapshot is good once every worker that stays serves it warm."""
        desired = self._home.desired_id()
        if desired is None or desired == self._home.last_good_id():
            return
        staying = [report for report in read_reports(self._home) if report.state in ("starting", "ready")]
        if len(staying) >= self._settings.workers and all(report.snapshot_id == desired for report in staying):
            self._home.mark_good(desired)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="headrace.app.control")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--admin-fd", type=int)
    parser.add_argument("--lifeline-fd", type=int)
    parser.add_argument("--status-fd", type=int)
    options = parser.parse_args(arguments)
    setproctitle.setproctitle("headrace: control")
    logging.basicConfig(level=logging.WARNING, handlers=[LibraryLogs()])
    try:
        home = prepare_home(options.home)
        settings = read_settings(home)
        if options.admin_fd is None:
            listener = listen(settings.admin_host, settings.admin_port, "admin")
        else:
            listener = socket.socket(fileno=options.admin_fd)
    except StartError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    asyncio.run(Control(home, settings, listener).run(options.lifeline_fd, options.status_fd))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
