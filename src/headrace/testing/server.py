"""A real server for tests: `headrace serve` in its own processes, on free ports, in its own home folder."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_S_MAX = 30.0
STOP_S_MAX = 45.0


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
    ) -> None:
        self.http_port, self.admin_port = free_port(), free_port()
        self.home = home
        self.output = ""
        self._wait = wait
        self._log = home.with_name(f"{home.name}.log")
        self._command = [
            sys.executable, "-m", "headrace.cli.main", "serve", str(source),
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
        raise RuntimeError(f"the server was not ready within {seconds} s:\n{self._log.read_text()}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop the child and return its exit code; what does not stop in time is killed."""
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
        """Process ids of the live workers, from their reports."""
        pids = []
        for path in sorted(self.home.glob("run/worker-*.json")):
            pid = json.loads(path.read_bytes())["pid"]
            if Path(f"/proc/{pid}").exists():
                pids.append(pid)
        return pids
