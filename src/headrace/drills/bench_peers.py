"""The servers that are compared: how each is installed, started, asked, checked and stopped, all in the same way.

A peer is one file `benchmarks/peers/with_<name>.py`, a program for the peer's own virtual environment. Its head, inline
script metadata, pins what is installed and says where the server answers and which forms of configuration are tried.
"""

import hashlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from headrace.drills.bench_load import Request
from headrace.drills.bench_machine import available_cores, pinned_to, tree
from headrace.drills.load import json_infer_body
from headrace.tensors import Array
from headrace.testing.server import free_port, is_running

__all__ = ["Contender", "Peer", "Running", "Task", "echo", "headrace", "numbers_in", "read_peers", "running"]

ROOT: Final = Path(__file__).resolve().parents[3]
PEERS: Final = ROOT / "benchmarks" / "peers"
START_S_MAX: Final = 60.0
STOP_S_MAX: Final = 15.0
_BLOCK: Final = re.compile(r"^# /// script$\n(?P<text>(?:^#(?: .*)?$\n)+)^# ///$", re.MULTILINE)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A model and the one request for it that every server gets.

    Attributes:
        name: Of the model in URLs.
        model: The ONNX file, the very same for all.
        input: Name of its input.
        row: FP32 [1, …], written in JSON with the digits of `json_row`.
        json_row: The same in float64, rounded as a caller would send it.
        outputs: All numbers of the right answer, in the order of the model's outputs.
    """

    name: str
    model: Path
    input: str
    row: Array
    json_row: Array
    outputs: Array

    def request(self, path: str, body: str) -> Request:
        """Ask in one of the forms that servers take.

        Args:
            path: Of the route, with `{model}` where the name goes.
            body: `oip` (Open Inference Protocol), `input` ({"input": numbers}) or `rows` ({"rows": [numbers]}).
        """
        numbers = self.json_row.ravel().tolist()
        bodies: dict[str, Callable[[], bytes]] = {
            "oip": lambda: json_infer_body(self.input, self.json_row, datatype="FP32"),
            "input": lambda: json.dumps({"input": numbers}, separators=(",", ":")).encode(),
            "rows": lambda: json.dumps({"rows": [numbers]}, separators=(",", ":")).encode(),
        }
        return Request(path.format(model=self.name), bodies[body]())

    def check(self, answer: bytes) -> None:
        """Raise ValueError unless an answer carries the model's numbers."""
        got = numbers_in(json.loads(answer))
        if len(got) != self.outputs.size or not np.allclose(got, self.outputs, rtol=1e-3, atol=1e-6):
            raise ValueError(f"answered {answer[:300]!r}, right is {self.outputs.tolist()}")


def numbers_in(answer: Any) -> list[float]:
    """Every number of the outputs in an answer: `outputs[].data` in the Open Inference Protocol, else all there are."""
    if isinstance(answer, dict):
        if "outputs" in answer:
            answer = [output["data"] for output in answer["outputs"]]
        else:
            answer = list(answer.values())
    if isinstance(answer, list):
        return [number for each in answer for number in numbers_in(each)]
    return [float(answer)]


@dataclass(frozen=True, slots=True)
class Contender:
    """A server in one form of its configuration.

    Attributes:
        name: `headrace`, `echo`, or the peer's.
        title: For people.
        variant: Form of configuration; empty where there is one only.
        path, body: See `Task.request`.
        command: (task, port, own folder) → command line.
    """

    name: str
    title: str
    variant: str
    path: str
    body: str
    command: Callable[[Task, int, Path], list[str]]


def headrace(*flags: str, variant: str = "") -> Contender:
    """This very installation of Headrace, with its defaults but for these flags."""

    def command(task: Task, port: int, folder: Path) -> list[str]:
        return [
            sys.executable, "-m", "headrace.cli.main", "serve", str(task.model), "--name", task.name,
            "--http-port", str(port), "--admin-port", "0", "--home", str(folder / "home"), *flags,
        ]  # fmt: skip

    return Contender("headrace", "Headrace", variant, "/v2/models/{model}/infer", "oip", command)


def echo(answer: bytes) -> Contender:
    """The yardstick, repeating one answer."""

    def command(_: Task, port: int, folder: Path) -> list[str]:
        (folder / "answer").write_bytes(answer)
        return [sys.executable, "-m", "headrace.testing.echo", "--port", str(port), "--answer", str(folder / "answer")]

    return Contender("echo", "bare echo", "one process", "/v2/models/{model}/infer", "oip", command)


# -------------------------------------------------------------------------------------------------------------- peers


@dataclass(frozen=True, slots=True)
class Peer:
    """What the head of a peer's file says.

    Attributes:
        name: From the file's name.
        program: The file.
        title: For people.
        dependencies: Pinned; what pip installs.
        path, body: See `Task.request`.
        variants: Forms of configuration that are tried.
    """

    name: str
    program: Path
    title: str
    dependencies: tuple[str, ...]
    path: str
    body: str
    variants: tuple[str, ...]

    def contenders(self, home: Path) -> list[Contender]:
        """One for each form of configuration; `install` comes first."""

        def command_for(variant: str) -> Callable[[Task, int, Path], list[str]]:
            def command(task: Task, port: int, folder: Path) -> list[str]:
                return [
                    str(home / self.name / "bin" / "python"), str(self.program), "--port", str(port),
                    "--model", str(task.model), "--name", task.name, "--variant", variant, "--folder", str(folder),
                ]  # fmt: skip

            return command

        return [
            Contender(self.name, self.title, variant, self.path, self.body, command_for(variant))
            for variant in self.variants
        ]

    def install(self, home: Path) -> dict[str, str]:
        """Make its virtual environment; returns at once when it is there.

        Returns:
            Versions of all that is installed.

        Raises:
            RuntimeError: pip failed; carries its last lines.
        """
        return install(home / self.name, self.dependencies)


def read_peers(folder: Path = PEERS) -> list[Peer]:
    """Every peer that has a file, by name.

    Source: PyPA specifications, "Inline script metadata".
    """
    peers = []
    for program in sorted(folder.glob("with_*.py")):
        block = _BLOCK.search(program.read_text())
        if block is None:
            raise ValueError(f"{program} has no inline script metadata")
        head = tomllib.loads("\n".join(line[2:] for line in block["text"].splitlines()))
        own = head["tool"]["headrace"]
        name = program.stem.removeprefix("with_")
        dependencies, variants = tuple(head["dependencies"]), tuple(own["variants"])
        peers.append(Peer(name, program, own["title"], dependencies, own["path"], own["body"], variants))
    return peers


def install(environment: Path, dependencies: Sequence[str]) -> dict[str, str]:
    """A virtual environment with these packages; made once per list, place and Python.

    Returns:
        Versions of all that is installed.

    Raises:
        RuntimeError: pip failed; carries its last lines.
    """
    stamp, log = environment / "stamp.json", environment.with_suffix(".log")
    key = hashlib.sha256(repr((sorted(dependencies), str(environment.resolve()), sys.version)).encode()).hexdigest()
    if stamp.exists() and (known := json.loads(stamp.read_bytes()))["key"] == key:
        return dict(known["versions"])
    environment.parent.mkdir(parents=True, exist_ok=True)
    python = environment / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    with open(log, "wb") as output:
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(environment)],
            [*pip, "install", "--quiet", *dependencies],
        ):
            if subprocess.run(command, stdout=output, stderr=output, check=False).returncode != 0:
                told = [line for line in log.read_text(errors="replace").splitlines() if "WARNING" not in line]
                raise RuntimeError(f"not installed: {' '.join(told[-3:]) or command}")
    listed = subprocess.run([*pip, "list", "--format", "json"], capture_output=True, check=True)
    versions = {each["name"]: each["version"] for each in json.loads(listed.stdout)}
    stamp.write_text(json.dumps({"key": key, "versions": versions}))
    return versions


# ------------------------------------------------------------------------------------------------------------ running


@dataclass(frozen=True, slots=True)
class Running:
    """A server that has answered rightly.

    Attributes:
        port: Where.
        pid: Of its first process.
        request: The one it is asked.
        first_reply_s: From the start of the process to the end of its first answer with status 200, seconds.
    """

    port: int
    pid: int
    request: Request
    first_reply_s: float


@contextmanager
def running(contender: Contender, task: Task, folder: Path, cores: Sequence[int] | None = None) -> Iterator[Running]:
    """Start a server, wait for its first right answer, and leave none of its processes behind.

    Args:
        contender: What to start.
        task: Model and request.
        folder: Empty; its own.
        cores: It may use these; None means all.

    Raises:
        RuntimeError: It ended, or gave no right answer in time; carries what it printed last.
    """
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    request = task.request(contender.path, contender.body)
    with open(folder / "log", "wb") as log, pinned_to(cores or available_cores()):
        began_s = time.monotonic()
        process = subprocess.Popen(contender.command(task, port, folder), stdout=log, stderr=log, cwd=folder)
    try:
        try:
            answer = _first_answer(process, port, request, began_s)
            first_reply_s = time.monotonic() - began_s
            if contender.name != "echo":
                task.check(answer)
        except (RuntimeError, ValueError) as error:
            told = (folder / "log").read_text(errors="replace")[-1500:]
            raise RuntimeError(f"{contender.title} ({contender.variant}): {error}\n{told}") from error
        yield Running(port, process.pid, request, first_reply_s)
    finally:
        _stop(process)


def ask(port: int, request: Request, timeout_s: float = 10.0) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own: status, headers (lower case) and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", request.path, request.body, request.headers)
        reply = connection.getresponse()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
    finally:
        connection.close()


def _first_answer(process: "subprocess.Popen[bytes]", port: int, request: Request, began_s: float) -> bytes:
    told = "nobody listens"
    while time.monotonic() - began_s < START_S_MAX:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode}")
        try:
            status, _, answer = ask(port, request)
        except (OSError, http.client.HTTPException):
            time.sleep(0.005)
            continue
        if status == 200:
            return answer
        told = f"it answered {status}: {answer[:300]!r}"
        time.sleep(0.02)
    raise RuntimeError(f"no answer with status 200 within {START_S_MAX:g} s; {told}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask the first process to end, then end whatever it has left: only processes that it started."""
    pids = tree(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    end_s = time.monotonic() + STOP_S_MAX
    while time.monotonic() < end_s and (process.poll() is None or any(is_running(pid) for pid in pids)):
        # A server whose first process has ended and whose others do not follow within a second has lost them.
        if process.returncode is not None:
            end_s = min(end_s, time.monotonic() + 1.0)
            pids = [pid for pid in pids if is_running(pid)]
        else:
            pids = sorted({*pids, *tree(process.pid)})
        time.sleep(0.05)
    for pid in pids:
        if is_running(pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    process.wait()
