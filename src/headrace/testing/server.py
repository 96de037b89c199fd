"""A real server for tests: `headrace serve` in its own processes, on free ports, in its own home folder; and the
callers that tests send to it, who write down what they were told.

This is one file although it is long: a test needs both, and what a caller may be told is read beside how a server ends.
"""

import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.testing.sleep_runtime import SleepArtefact, write_artefact

START_S_MAX = 30.0
STOP_S_MAX = 45.0
LOG_CHARACTERS_MAX = 4000

CLOSED = 0
"""Status of a reply that never came because the connection was refused or closed."""

SILENCE = -1
"""Status of a reply that had not come when the caller's patience ended: what must never happen."""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """`headrace serve` as a child; a context manager that leaves no process behind.

    Args:
        source: Model file, folder or configuration file.
        home: State folder.
        flags: Further flags of `headrace serve`.
        environment: Added to this process's own.
        wait: For readiness; False returns as soon as the child was started.
        prefix: Command that runs it, for example `setpriv` with its flags.

    Attributes:
        http_port, admin_port: Where it listens.
        process: The supervisor.
        output: What it printed, after it has stopped.
    """

    def __init__(
        self,
        source: Path | str,
        home: Path,
        *flags: str,
        environment: dict[str, str] | None = None,
        wait: bool = True,
        prefix: Sequence[str] = (),
    ) -> None:
        self.http_port, self.admin_port = free_port(), free_port()
        self.home = home
        self.output = ""
        self._wait = wait
        self._log = home.with_name(f"{home.name}.log")
        self._callers: list[Caller] = []
        self._command = [
            *prefix, sys.executable, "-m", "headrace.cli.main", "serve", str(source),
            "--http-port", str(self.http_port), "--admin-port", str(self.admin_port), "--home", str(home), *flags,
        ]  # fmt: skip
        self._environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] = None  # type: ignore[assignment]  # set by start, which __enter__ calls

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the child and, unless told otherwise, wait until it is ready."""
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment)
        if self._wait:
            try:
                self.wait_ready()
            except BaseException:
                self.stop()
                raise

    def wait_ready(self, seconds: float = START_S_MAX) -> None:
        """Return when `/v2/health/ready` says so.

        Raises:
            RuntimeError: The child ended, or was not ready in time; carries what it printed.
        """
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self._log.read_text()}")
            try:
                status, _, _ = self.request("GET", "/v2/health/ready")
            except OSError:
                status = 0
            if status == 200:
                return
            time.sleep(0.02)
        raise RuntimeError(f"the server was not ready within {seconds} s:\n{self.log()[-LOG_CHARACTERS_MAX:]}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop the child and return its exit code; what does not stop in time is killed. Its callers hang up."""
        for caller in self._callers:
            caller.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.output = self._log.read_text(errors="replace")
        return self.process.returncode

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        admin: bool = False,
        timeout_s: float = 15.0,
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a fresh connection: status, headers (lower case) and body."""
        port = self.admin_port if admin else self.http_port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        try:
            connection.request(method, path, body, headers or {})
            reply = connection.getresponse()
            return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()
        finally:
            connection.close()

    def infer(self, model: str, inputs: list[dict[str, Any]], **parts: Any) -> tuple[int, dict[str, Any]]:
        """One inference in JSON: status and decoded body."""
        body = json.dumps({"inputs": inputs, **parts}).encode()
        status, _, reply = self.request("POST", f"/v2/models/{model}/infer", body)
        return status, json.loads(reply)

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics`: name with labels → value."""
        _, _, body = self.request("GET", "/metrics", admin=True)
        samples = {}
        for line in body.decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that live and are ready, by number, from their reports."""
        pids = {}
        for path in self.home.glob("run/worker-*.json"):
            try:
                report = json.loads(path.read_bytes())
            except FileNotFoundError:
                continue  # the supervisor takes the report of a dead worker away
            if report["state"] == "ready" and is_running(report["pid"]):
                pids[report["number"]] = report["pid"]
        return [pids[number] for number in sorted(pids)]

    def wait_workers(self, count: int) -> list[int]:
        """Return the process ids of the workers once so many are ready."""
        wait_until(lambda: len(self.worker_pids()) == count, what=f"{count} workers ready")
        return self.worker_pids()

    def caller(self, name: str = "caller") -> "Caller":
        """A caller of this server, which hangs up when the server stops."""
        caller = Caller(self.http_port, name)
        self._callers.append(caller)
        return caller

    def log(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    def control_pid(self) -> int:
        """Process id of the control process."""
        _, _, body = self.request("GET", "/v1/status", admin=True)
        pid: int = json.loads(body)["control_pid"]
        return pid

    def children(self) -> list[int]:
        """Process ids of everything that the supervisor has started and that still runs."""
        pids = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            pids += [int(pid) for pid in task.read_text().split()]
        return pids


def wait_until(is_so: Callable[[], bool], seconds: float = 15.0, what: str = "") -> float:
    """Look every 20 ms until something is so.

    Returns:
        How long it took, seconds.

    Raises:
        TimeoutError: It never was.
    """
    began_s = time.monotonic()
    while not is_so():
        if time.monotonic() - began_s > seconds:
            raise TimeoutError(f"not within {seconds:g} s: {what or is_so}")
        time.sleep(0.02)
    return time.monotonic() - began_s


def title(pid: int) -> str:
    """Title of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ").decode()
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """True while a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def sleep_config(
    folder: Path, models: Mapping[str, SleepArtefact], *, server: Mapping[str, Any] | None = None, **entry: Any
) -> Path:
    """Write a `headrace.yaml` that serves sleep artefacts.

    Args:
        folder: Made when missing; holds the artefacts too.
        models: By endpoint name.
        server: Settings.
        entry: Further keys of every entry under `models:`, for example `slo="p99=5s"`.

    Returns:
        The path of the configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for name, artefact in models.items():
        path = write_artefact(folder / f"{name}.sleep.json", artefact)
        entries.append({"name": name, "path": str(path), "runtime": {"name": "sleep"}, **entry})
    config = folder / "headrace.yaml"
    config.write_text(json.dumps({"server": dict(server or {}), "models": entries}))  # JSON is YAML
    return config


# ------------------------------------------------------------------------------------------------------------- callers


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of one request, as its caller saw it.

    Attributes:
        request_id: Sent as `x-request-id`.
        status: HTTP status, `CLOSED` or `SILENCE`.
        code: The error's code; empty when answered.
        headers: Lower case.
        body: Decoded JSON; empty without an answer.
        is_sent: The request had left before the connection ended.
        began_s: Monotonic time of sending.
        took_s: Until the answer or the end of the connection.
    """

    request_id: str
    status: int
    code: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    is_sent: bool
    began_s: float
    took_s: float


class Caller:
    """One kept-alive connection, opened at the first request and again after it was closed. It never sends twice.

    Args:
        port: Of the server, on the loopback interface.
        name: Begins its request ids.
        patience_s: How long it waits for an answer.
    """

    def __init__(self, port: int, name: str = "caller", patience_s: float = 20.0) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience_s)
        self._name = name
        self._numbers = itertools.count(1)
        self._request_id = ""
        self._is_sent = False
        self._began_s = 0.0

    def connect(self) -> None:
        """Open the connection without sending anything."""
        self._connection.connect()

    def send(self, model: str, rows: Sequence[float] = (1.0,), **headers: str) -> str:
        """Send one request for an FP32 [N, 1] input named x; underscores in header names stand for hyphens.

        Returns:
            Its request id.
        """
        inputs = [{"name": "x", "datatype": "FP32", "shape": [len(rows), 1], "data": list(rows)}]
        self._request_id = f"{self._name}-{next(self._numbers)}"
        lines = {name.replace("_", "-"): value for name, value in headers.items()} | {"x-request-id": self._request_id}
        self._is_sent = False
        self._began_s = time.monotonic()
        try:
            self._connection.request(
                "POST", f"/v2/models/{model}/infer", json.dumps({"inputs": inputs}).encode(), lines
            )
            self._is_sent = True
        except OSError:
            self._connection.close()
        return self._request_id

    def receive(self) -> Reply:
        """Wait for the answer to what was sent."""
        status, headers, body = CLOSED, {}, b""
        if self._is_sent:
            try:
                response = self._connection.getresponse()
                body = response.read()
                status, headers = response.status, {name.lower(): value for name, value in response.getheaders()}
            except TimeoutError:
                status = SILENCE
                self._connection.close()
            except (OSError, http.client.HTTPException):
                self._connection.close()
        content = json.loads(body) if body else {}
        return Reply(
            self._request_id, status, content.get("code", ""), headers, content, self._is_sent, self._began_s,
            time.monotonic() - self._began_s,
        )  # fmt: skip

    def infer(self, model: str, rows: Sequence[float] = (1.0,), **headers: str) -> Reply:
        """Send and receive."""
        self.send(model, rows, **headers)
        return self.receive()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def receive_all(callers: Sequence[Caller]) -> list[Reply]:
    """The replies of many callers, each timed for itself."""
    with ThreadPoolExecutor(len(callers)) as threads:
        return list(threads.map(Caller.receive, callers))


class Traffic:
    """Callers on threads, each sending the next request some time after the answer to the last; a context manager.

    Args:
        port: Of the server.
        model: Which endpoint.
        callers: How many.
        pause_s: Between an answer and the next request.
        rows: What they send.

    Attributes:
        replies: Of all callers, in the order they came; complete after the end.
    """

    def __init__(
        self, port: int, model: str, *, callers: int = 4, pause_s: float = 0.01, rows: Sequence[float] = (1.0,)
    ) -> None:
        self._port, self._model, self._rows, self._pause_s = port, model, rows, pause_s
        self._is_over = threading.Event()
        self.replies: list[Reply] = []
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(callers)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let every caller finish its request. Idempotent."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(30)

    def statuses(self) -> Counter[int]:
        """How often each status came."""
        return Counter(reply.status for reply in self.replies)

    def _run(self, number: int) -> None:
        caller = Caller(self._port, f"traffic-{number}")
        while not self._is_over.is_set():
            self.replies.append(caller.infer(self._model, self._rows))
            self._is_over.wait(self._pause_s)
        caller.close()
