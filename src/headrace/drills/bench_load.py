"""Keeps connections of one server busy and says what came back: one `Sample` per run."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from headrace.drills.bench_machine import available_cores, pinned_to
from headrace.drills.load import Outcome, closed_loop, run_in_process

__all__ = ["Generator", "Request", "Sample", "parse_wrk", "spread", "summary"]

# wrk reads the body from a file, since a body in the script would have to be escaped, and prints what we need as JSON.
WRK_SCRIPT: Final = """
wrk.method = "POST"
for name, value in pairs(HEADERS) do wrk.headers[name] = value end
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
class Request:
    """What is asked, over and over.

    Attributes:
        path: Of the URL.
        body: As sent.
        headers: Beside Host and Content-Length.
    """

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})

    def raw(self, port: int) -> bytes:
        """The complete HTTP/1.1 request."""
        lines = {"Host": f"127.0.0.1:{port}", **self.headers, "Content-Length": str(len(self.body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST {self.path} HTTP/1.1\r\n{head}\r\n".encode() + self.body


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one server.

    Attributes:
        requests_per_s: Answers per second.
        p50_s, p99_s: Latency of a closed loop, seconds: comparable between servers, no user's latency.
        errors: Requests that were not answered with 200.
        generator_cpu_share: Processor time of the generator over elapsed time; near 1 it measured itself.
    """

    requests_per_s: float
    p50_s: float
    p99_s: float
    errors: int
    generator_cpu_share: float = 0.0


def parse_wrk(output: str, cpu_s: float) -> Sample:
    """Read what `WRK_SCRIPT` made wrk print.

    Args:
        output: All of it.
        cpu_s: Processor time that wrk took, seconds.

    Raises:
        RuntimeError: There is no result in it.
    """
    result = re.search(r"^RESULT (.*)$", output, re.MULTILINE)
    if result is None:
        raise RuntimeError(f"wrk printed no result:\n{output}")
    seen = json.loads(result[1])
    duration_s = seen["duration_us"] * 1e-6
    return Sample(
        requests_per_s=(seen["requests"] - seen["errors"]) / duration_s,
        p50_s=seen["p50_us"] * 1e-6,
        p99_s=seen["p99_us"] * 1e-6,
        errors=seen["errors"],
        generator_cpu_share=cpu_s / duration_s,
    )


class Generator:
    """`wrk` where it is installed, since it costs less per request than ours, else ours.

    Args:
        folder: For wrk's script.
        prefers_wrk: False takes ours in any case.
    """

    def __init__(self, folder: Path, *, prefers_wrk: bool = True) -> None:
        self._folder = folder
        self._wrk = shutil.which("wrk") if prefers_wrk else None

    @property
    def name(self) -> str:
        """For the report."""
        return "wrk" if self._wrk else "headrace.drills.load"

    def measure(self, port: int, request: Request, connections: int, seconds: float, core: int | None = None) -> Sample:
        """One closed-loop run.

        Args:
            port: Of a server on the loopback interface.
            request: Sent again and again.
            connections: Kept busy.
            seconds: wrk takes whole ones only.
            core: Pin the generator to it; None leaves it to the system.

        Raises:
            RuntimeError: The generator failed.
        """
        if self._wrk is None:
            return self._by_own(port, request, connections, seconds, core)
        script, body = self._folder / "wrk.lua", self._folder / "body"
        body.write_bytes(request.body)
        pairs = ", ".join(f"[{json.dumps(name)}] = {json.dumps(value)}" for name, value in request.headers.items())
        script.write_text(WRK_SCRIPT.replace("HEADERS", f"{{{pairs}}}").replace("BODY", str(body)))
        whole_s = max(1, round(seconds))
        url = f"http://127.0.0.1:{port}{request.path}"
        command = [self._wrk, "-t1", f"-c{connections}", f"-d{whole_s}s", "--timeout", "10s", "-s", str(script), url]
        with pinned_to([core] if core is not None else available_cores()):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        # Waiting for this very process tells its processor time: the sum over all children would mix in others.
        assert process.stdout is not None
        try:
            output = process.stdout.read()
        except BaseException:
            process.kill()
            raise
        finally:
            process.stdout.close()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise RuntimeError(f"wrk ended with {process.returncode}:\n{output}")
        return parse_wrk(output, used.ru_utime + used.ru_stime)

    def _by_own(self, port: int, request: Request, connections: int, seconds: float, core: int | None) -> Sample:
        plan = closed_loop("127.0.0.1", port, [request.raw(port)], connections=connections, duration_s=seconds)
        result = run_in_process(plan, core=core)
        return Sample(
            requests_per_s=result.throughput_per_s,
            p50_s=result.latency_s(0.5),
            p99_s=result.latency_s(0.99),
            errors=len(result.outcomes) - result.count(Outcome.ANSWERED),
        )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians and spreads of repeated measurements."""
    return {
        "requests_per_s": spread([each.requests_per_s for each in samples]),
        "p50_s": spread([each.p50_s for each in samples]),
        "p99_s": spread([each.p99_s for each in samples]),
        "errors": sum(each.errors for each in samples),
        "generator_cpu_share": max(each.generator_cpu_share for each in samples),
    }
