"""Headrace over the bare minimum: the same bytes in and out, on the same parser and loop, in one run.

A is `headrace serve` with a tabular ONNX model (30 features, 100 trees), Open Inference Protocol JSON, one row a
request. B is `headrace.testing.echo`, which answers A's own bytes without doing anything for them. Both sit on one
core, the generator on another; they are measured in turn, A B A B, so that what the machine does meanwhile hits both.
Only the ratios are worth keeping: absolute rates belong to the machine.

Writes `benchmarks/results.md` and `benchmarks/results.json`.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from headrace.drills.load import Outcome, closed_loop, infer_request_bytes, json_infer_body, run_in_process
from headrace.testing.models import breast_cancer, breast_cancer_rows, save
from headrace.testing.server import ServerProcess, free_port

__all__ = ["Sample", "available_cores", "pinned_to", "summarise", "top_functions", "total"]

CONNECTIONS: Final = (1, 16, 64)
TREES: Final = 100
NAME: Final = "tabular"
PACKAGES: Final = ("headrace", "httptools", "uvloop", "msgspec", "numpy", "onnxruntime")
STAGES: Final = ("decode", "queue", "run", "respond")
PROFILE_CONNECTIONS: Final = 16
PROFILE_S: Final = 4.0

# wrk reads the body from a file, since a body in the script would have to be escaped, and prints what we need as JSON.
WRK_SCRIPT: Final = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local file = io.open("BODY", "rb")
wrk.body = file:read("*a")
file:close()
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('\\nRESULT {"requests": %d, "duration_us": %d, "errors": %d, "p50_us": %g, "p99_us": %g}\\n',
    summary.requests, summary.duration, e.connect + e.read + e.write + e.status + e.timeout,
    latency:percentile(50), latency:percentile(99)))
end
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one server.

    Attributes:
        requests_per_s: Answers per second.
        p50_s, p99_s: Latency of a closed loop, seconds: comparable between servers, no user's latency.
        errors: Requests that were not answered with 200.
    """

    requests_per_s: float
    p50_s: float
    p99_s: float
    errors: int


# -------------------------------------------------------------------------------------------------------- small tools


def available_cores() -> list[int]:
    """Cores this process may use, ascending."""
    return sorted(os.sched_getaffinity(0))


@contextmanager
def pinned_to(cores: Sequence[int]) -> Iterator[None]:
    """Processes started meanwhile run on these cores only; this one goes back to its own afterwards."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def total(samples: dict[str, float], name: str, **labels: str) -> float:
    """Sum of a metric over all label sets that have these labels.

    Args:
        samples: From `ServerProcess.metrics`: name with labels → value.
        name: With its prefix.
        labels: Wanted values.
    """
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for sample, value in samples.items()
        if sample.partition("{")[0] == name
        and all(re.search(rf"[{{,]{re.escape(pair)}[,}}]", sample) for pair in wanted)
    )


def machine_facts() -> dict[str, str]:
    """What a reader needs to judge the absolute figures."""
    model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": str(len(available_cores())),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


# ---------------------------------------------------------------------------------------------------------- measuring


class Generator:
    """Keeps connections busy: `wrk` where it is installed, since it costs less per request than ours, else ours.

    Args:
        request_body: Sent in every request.
        folder: For wrk's script.
        core: Pinned to it; None leaves it to the system.
        prefers_wrk: False takes ours in any case.
    """

    def __init__(self, request_body: bytes, folder: Path, core: int | None, *, prefers_wrk: bool = True) -> None:
        self._body = request_body
        self._core = core
        self._wrk = shutil.which("wrk") if prefers_wrk else None
        self._script = folder / "wrk.lua"
        (folder / "body").write_bytes(request_body)
        self._script.write_text(WRK_SCRIPT.replace("BODY", str(folder / "body")))

    @property
    def name(self) -> str:
        """For the report."""
        return "wrk" if self._wrk else "headrace.drills.load"

    def measure(self, port: int, connections: int, seconds: float) -> Sample:
        """One closed-loop run.

        Raises:
            RuntimeError: The generator failed.
        """
        return (self._by_wrk if self._wrk else self._by_own)(port, connections, seconds)

    def _by_wrk(self, port: int, connections: int, seconds: float) -> Sample:
        assert self._wrk is not None
        # wrk takes whole seconds only.
        whole_s = max(1, round(seconds))
        url = f"http://127.0.0.1:{port}/v2/models/{NAME}/infer"
        command = [self._wrk, "-t1", f"-c{connections}", f"-d{whole_s}s", "-s", str(self._script), url]
        with pinned_to([self._core] if self._core is not None else available_cores()):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output, _ = process.communicate(timeout=whole_s + 30)
        finally:
            process.kill()
        result = re.search(r"^RESULT (.*)$", output, re.MULTILINE)
        if process.returncode != 0 or result is None:
            raise RuntimeError(f"wrk ended with {process.returncode}:\n{output}")
        seen = json.loads(result[1])
        return Sample(
            requests_per_s=(seen["requests"] - seen["errors"]) / (seen["duration_us"] * 1e-6),
            p50_s=seen["p50_us"] * 1e-6,
            p99_s=seen["p99_us"] * 1e-6,
            errors=seen["errors"],
        )

    def _by_own(self, port: int, connections: int, seconds: float) -> Sample:
        request = infer_request_bytes("127.0.0.1", port, NAME, self._body)
        plan = closed_loop("127.0.0.1", port, [request], connections=connections, duration_s=seconds)
        result = run_in_process(plan, core=self._core)
        return Sample(
            requests_per_s=result.throughput_per_s,
            p50_s=result.latency_s(0.5),
            p99_s=result.latency_s(0.99),
            errors=len(result.outcomes) - result.count(Outcome.ANSWERED),
        )


def raw_answer(server: ServerProcess, body: bytes) -> bytes:
    """One answer of the server's with its head, for the echo to repeat."""
    status, headers, content = server.request(
        "POST", f"/v2/models/{NAME}/infer", body, {"Content-Type": "application/json"}
    )
    if status != 200:
        raise RuntimeError(f"the server answered {status}: {content!r}")
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + content


@contextmanager
def echo_server(answer: bytes, folder: Path, core: int | None) -> Iterator[int]:
    """The yardstick in a process of its own; its port."""
    port = free_port()
    path = folder / "answer"
    path.write_bytes(answer)
    command = [sys.executable, "-m", "headrace.testing.echo", "--port", str(port), "--answer", str(path)]
    with pinned_to([core] if core is not None else available_cores()):
        process = subprocess.Popen(command)
    try:
        yield port
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure_pairs(
    generator: Generator, headrace_port: int, echo_port: int, *, seconds: float, repetitions: int
) -> dict[int, list[tuple[Sample, Sample]]]:
    """Headrace and echo in turn, at every number of connections.

    Returns:
        By connections: (Headrace, echo) for each repetition.
    """
    for port in (headrace_port, echo_port):
        _measure_when_up(generator, port)
    pairs: dict[int, list[tuple[Sample, Sample]]] = {connections: [] for connections in CONNECTIONS}
    for number in range(repetitions):
        for connections in CONNECTIONS:
            say(f"bench: repetition {number + 1} of {repetitions}, {connections} connections")
            ours = generator.measure(headrace_port, connections, seconds)
            theirs = generator.measure(echo_port, connections, seconds)
            pairs[connections].append((ours, theirs))
    return pairs


def _measure_when_up(generator: Generator, port: int) -> None:
    """Warm a server up; the echo may need a moment until it listens."""
    for _ in range(100):
        try:
            if generator.measure(port, 1, 1.0).requests_per_s:
                return
        except RuntimeError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"nothing answers on port {port}")


def summarise(pairs: dict[int, list[tuple[Sample, Sample]]]) -> list[dict[str, Any]]:
    """Medians and spreads (smallest to largest) per number of connections; ratios are taken within a repetition."""

    def over(values: list[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    return [
        {
            "connections": connections,
            "headrace_requests_per_s": over([ours.requests_per_s for ours, _ in samples]),
            "echo_requests_per_s": over([theirs.requests_per_s for _, theirs in samples]),
            "requests_ratio": over([ours.requests_per_s / theirs.requests_per_s for ours, theirs in samples]),
            "headrace_p50_s": over([ours.p50_s for ours, _ in samples]),
            "headrace_p99_s": over([ours.p99_s for ours, _ in samples]),
            "echo_p99_s": over([theirs.p99_s for _, theirs in samples]),
            "p99_ratio": over([ours.p99_s / theirs.p99_s for ours, theirs in samples]),
            "errors": sum(ours.errors + theirs.errors for ours, theirs in samples),
            "samples": [{"headrace": asdict(ours), "echo": asdict(theirs)} for ours, theirs in samples],
        }
        for connections, samples in pairs.items()
    ]


# ---------------------------------------------------------------------------------------------------------- profiling


def profile(server: ServerProcess, generator: Generator, folder: Path) -> dict[str, Any]:
    """Where a request's time and the worker's CPU go, at `PROFILE_CONNECTIONS` connections.

    Returns:
        Mean seconds per request and stage, CPU seconds per request, mean batch rows, and the top functions when py-spy
        is there; else why not.
    """
    say("bench: profile of the worker by stage")
    before = server.metrics()
    generator.measure(server.http_port, PROFILE_CONNECTIONS, PROFILE_S)
    after = server.metrics()

    def grown(name: str, **labels: str) -> float:
        return total(after, f"headrace_{name}", **labels) - total(before, f"headrace_{name}", **labels)

    requests = grown("request_seconds_count") or float("nan")
    found: dict[str, Any] = {
        "connections": PROFILE_CONNECTIONS,
        "requests": requests,
        "request_s": grown("request_seconds_sum") / requests,
        "stages_s": {stage: grown("stage_seconds_sum", stage=stage) / requests for stage in STAGES},
        "cpu_s": grown("cpu_seconds_total", worker="1") / requests,
        "batch_rows": grown("batch_rows_sum") / requests,
    }
    return {**found, **_sampled(server, generator, folder)}


def _sampled(server: ServerProcess, generator: Generator, folder: Path) -> dict[str, Any]:
    """Top functions by py-spy, which is optional."""
    beside = Path(sys.executable).with_name("py-spy")
    spy = str(beside) if beside.exists() else shutil.which("py-spy")
    if spy is None:
        return {"functions_note": "py-spy is not installed (pip install py-spy)"}
    output = folder / "stacks"
    pid = server.worker_pids()[0]
    command = [
        spy, "record", "--pid", str(pid), "--duration", str(int(PROFILE_S) - 1), "--rate", "250", "--format", "raw",
        "--nonblocking", "--output", str(output),
    ]  # fmt: skip
    say("bench: profile of the worker by function (py-spy)")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        generator.measure(server.http_port, PROFILE_CONNECTIONS, PROFILE_S)
        told, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    if process.returncode != 0 or not output.exists():
        return {"functions_note": f"py-spy could not sample: {told.strip().splitlines()[-1:]}"}
    return {"functions": top_functions(output.read_text())}


def top_functions(stacks: str, limit: int = 15) -> list[dict[str, Any]]:
    """Functions by the share of samples in which they were on top, from collapsed stacks.

    Args:
        stacks: Lines `outer;inner;… count`, as py-spy's format `raw` writes them.
        limit: Number of functions.

    Returns:
        `function`, `self_share` (on top) and `total_share` (anywhere on the stack), 0 to 1.
    """
    on_top: Counter[str] = Counter()
    anywhere: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        if not stack:
            continue  # a thread without a Python frame
        frames = [re.sub(r":\d+\)$", ")", frame) for frame in stack.split(";")]
        on_top[frames[-1]] += int(count)
        for frame in set(frames):
            anywhere[frame] += int(count)
    samples = on_top.total() or 1
    return [
        {"function": frame, "self_share": count / samples, "total_share": anywhere[frame] / samples}
        for frame, count in on_top.most_common(limit)
    ]


# ------------------------------------------------------------------------------------------------------------- report


def report_lines(results: dict[str, Any]) -> list[str]:
    """`benchmarks/results.md`."""
    rows = []
    for each in results["comparison"]:

        def cell(name: str, scale: float, digits: int, each: dict[str, Any] = each) -> str:
            values = each[name]
            median, least, most = (f"{values[key] * scale:,.{digits}f}" for key in ("median", "min", "max"))
            return f"{median} ({least}–{most})"

        cells = (
            cell("echo_requests_per_s", 1, 0),
            cell("headrace_requests_per_s", 1, 0),
            f"**{cell('requests_ratio', 1, 3)}**",
            cell("echo_p99_s", 1e3, 2),
            cell("headrace_p99_s", 1e3, 2),
            cell("p99_ratio", 1, 2),
        )
        rows.append(f"| {each['connections']} | {' | '.join(cells)} |")
    found = results["profile"]
    stages = " | ".join(f"{seconds * 1e6:,.0f}" for seconds in found["stages_s"].values())
    facts = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    functions = [
        f"| `{each['function']}` | {each['self_share']:.1%} | {each['total_share']:.1%} |"
        for each in found.get("functions", [])
    ]
    errors = sum(each["errors"] for each in results["comparison"])
    return [
        "# Headrace over a bare echo",
        "",
        f"Made by `scripts/bench`. A is `headrace serve` with a tabular ONNX model (30 features, {TREES} trees), Open "
        "Inference Protocol JSON, one row a request; B answers the same bytes from `httptools` and `uvloop` without "
        "doing anything for them. Both on one core, the generator on another, measured in turn A B A B. Medians of "
        f"{results['repetitions']} × {results['seconds']:g} s, smallest and largest in brackets. "
        "Keep the ratios; the rates belong to the machine.",
        "",
        "| connections | echo, requests/s | Headrace, requests/s | ratio | echo p99, ms | Headrace p99, ms | ratio |",
        "|---:|---:|---:|---:|---:|---:|---:|",
        *rows,
        "",
        f"Requests not answered with 200: {errors}. Generator: {results['generator']}. Pinned: {results['pinned']}.",
        "",
        "## Where the time goes",
        "",
        f"Mean per request at {found['connections']} connections, µs of elapsed time; a batch's run counts for each of "
        "its requests.",
        "",
        "| total | decode | queue | run | respond | worker CPU | rows in a batch |",
        "|---:|---:|---:|---:|---:|---:|---:|",
        f"| {found['request_s'] * 1e6:,.0f} | {stages} | {found['cpu_s'] * 1e6:,.0f} | {found['batch_rows']:,.1f} |",
        "",
        *(
            ["| function | on top | on the stack |", "|---|---:|---:|", *functions]
            if functions
            else [f"Functions: {found.get('functions_note', 'no samples')}."]
        ),
        "",
        f"Machine: {facts}. Date: {results['date']}.",
    ]


def say(line: str) -> None:
    """Progress goes to stderr: data is on stdout."""
    print(line, file=sys.stderr, flush=True)


def bench(folder: Path, *, seconds: float, repetitions: int, prefers_wrk: bool) -> dict[str, Any]:
    """Measure everything.

    Args:
        folder: For models and scratch files.
        seconds: Of each measurement.
        repetitions: Of each pair.
        prefers_wrk: False takes our own generator even when wrk is there.
    """
    cores = available_cores()
    server_core, load_core = (cores[0], cores[-1]) if len(cores) > 1 else (None, None)
    model = save(folder / f"{NAME}.onnx", breast_cancer(TREES))
    rows, _ = breast_cancer_rows()
    # Six significant digits, as a caller would send them: a float32 printed in full has up to seventeen.
    row = rows[:1].astype("f8")
    body = json_infer_body("X", (row * 1e4).round() / 1e4, datatype="FP32")
    generator = Generator(body, folder, load_core, prefers_wrk=prefers_wrk)
    server = ServerProcess(model, folder / "home", "--slo", "p99=50ms", "--workers", "1", "--threads", "1")
    with pinned_to([server_core] if server_core is not None else cores):
        server.start()
    try:
        with echo_server(raw_answer(server, body), folder, server_core) as echo_port:
            pairs = measure_pairs(generator, server.http_port, echo_port, seconds=seconds, repetitions=repetitions)
        found = profile(server, generator, folder)
    finally:
        server.stop()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "generator": generator.name,
        "pinned": f"servers to core {server_core}, generator to core {load_core}" if load_core is not None else "no",
        "seconds": seconds,
        "repetitions": repetitions,
        "comparison": summarise(pairs),
        "profile": found,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `scripts/bench`."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Headrace over a bare echo of the same bytes.")
    parser.add_argument("--quick", action="store_true", help="3 repetitions of 2 s instead of 5 of 5 s")
    parser.add_argument("--own", action="store_true", help="use our own generator even when wrk is installed")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text", help="what to print on stdout")
    parser.add_argument("--folder", type=Path, default=Path("benchmarks"), help="where results.md and .json go")
    options = parser.parse_args(arguments)
    seconds, repetitions = (2.0, 3) if options.quick else (5.0, 5)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: no server stays behind
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        try:
            results = bench(Path(folder), seconds=seconds, repetitions=repetitions, prefers_wrk=not options.own)
        except KeyboardInterrupt:
            say("bench: stopped")
            return 130
        except RuntimeError as error:
            say(f"bench: FAILED: {error}")
            return 1
    text = "\n".join(report_lines(results)) + "\n"
    document = json.dumps(results, indent=1) + "\n"
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "results.md").write_text(text)
    (options.folder / "results.json").write_text(document)
    sys.stdout.write(document if options.output == "json" else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
