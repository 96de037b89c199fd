"""Where a worker's processor time goes, by stage of the path: samples of py-spy, each given to a stage by its frame.

A sample belongs to the innermost frame that a rule knows; frames of libraries know none, so numpy inside a fold is the
fold's. uvloop's own time (callbacks, epoll, reading sockets) shows as asyncio's `Runner.run`, which is no stage: a bare
echo spends it too. The samples of a thread are scaled to the processor time that it had, since a thread that waits for
work is now and then taken for one that runs.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from headrace.drills.bench_load import Generator, Request
from headrace.testing.server import ServerProcess

__all__ = ["FREE_STAGES", "RULES", "STAGES", "by_stage", "profile", "stage_of", "top_functions", "total", "weigh"]

STAGES: Final = (
    "loop", "parse", "route", "decode", "validate", "batch", "model", "respond", "write", "record", "fold", "other",
)  # fmt: skip
FREE_STAGES: Final = frozenset({"loop", "parse", "model", "write"})
"""Those that "all stages but parse, model and write" leaves out; the loop belongs to no stage."""

# (stage, file, functions or "" for all, text of the line or "" for any). The first that fits is taken.
RULES: Final = (
    ("loop", r"asyncio/runners\.py", "", ""),
    ("write", r"gateway/http_connection\.py", "", r"_transport\.write"),
    ("respond", r"gateway/http_connection\.py", "answer_ready|_flush|_render|_finish", ""),
    ("respond", r"gateway/(http_exchange|http_reply|http_compression)\.py", "", ""),
    ("parse", r"gateway/(http|http_connection|http_reader|listener)\.py", "", ""),
    ("route", r"gateway/routes\.py|data_plane/(route|admit)\.py", "", ""),
    ("respond", r"gateway/oip\.py", "encode", ""),
    ("respond", r"gateway/oip_leaves\.py", "", ""),
    ("respond", r"gateway/infer_http\.py", "encode|send|refuse", ""),
    ("decode", r"gateway/(oip|oip_json|oip_binary|oip_parameters|oip_plans|infer_http)\.py", "", ""),
    ("validate", r"data_plane/validate\.py", "", ""),
    ("model", r"runtimes/onnx\.py|onnxruntime/.*\.py", "", ""),
    ("batch", r"data_plane/(batch|batch_policy|batch_curve|batch_rivals|replicas)\.py", "", ""),
    ("record", r"data_plane/record\.py|headrace/records\.py|storage/segments\.py", "", ""),
    ("record", r"data_plane/pipeline\.py", "_record", ""),
    ("fold", r"telemetry/(metrics|slots)\.py|data_plane/statistics\.py", "", ""),
    ("respond", r"data_plane/pipeline\.py", "executed|_respond|_send|_assemble", ""),
    ("other", r"data_plane/pipeline\.py", "", ""),
)

CONNECTIONS: Final = 16
PROFILE_S: Final = 11.0
ELAPSED_STAGES: Final = ("decode", "queue", "run", "respond")
_THREAD: Final = re.compile(r"thread \((?P<id>\d+)\)")
_FRAME: Final = re.compile(r"^(?P<function>.*) \((?P<file>.*):(?P<line>-?\d+)\)$")
_SOURCE: Final = Path(__file__).resolve().parents[2]


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


@cache
def stage_of(frame: str) -> str | None:
    """Stage of one frame, `function (file:line)`; None when no rule knows it."""
    found = _FRAME.match(frame)
    if found is None:
        return None
    for stage, file, functions, text in RULES:
        if (
            re.search(rf"(^|/)({file})$", found["file"])
            and (not functions or re.fullmatch(rf"(.*\.)?({functions})(\.<locals>.*)?", found["function"]))
            and (not text or re.search(text, _line(found["file"], int(found["line"]))))
        ):
            return stage
    return None


@cache
def _lines(file: str) -> Sequence[str]:
    path = _SOURCE / file
    return path.read_text().splitlines() if path.is_file() else ()


def _line(file: str, number: int) -> str:
    lines = _lines(file)
    return lines[number - 1] if 0 < number <= len(lines) else ""


Stacks = Sequence[tuple[Sequence[str], float]]
"""Frames from the outermost in, and the processor time that the samples stand for."""


def weigh(text: str, cpu_s: Mapping[str, float]) -> Stacks:
    """Read what py-spy wrote, and scale each thread's samples to the processor time that it had.

    Args:
        text: Lines `thread (id): name;outer;inner;… count`, as `--threads --format raw` writes them.
        cpu_s: Processor time by thread id, over the same time, seconds.
    """
    counted: list[tuple[str, list[str], int]] = []
    samples: Counter[str] = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        found = _THREAD.match(thread)
        if found is None or not frames:
            continue  # a thread without a Python frame
        counted.append((found["id"], frames, int(count)))
        samples[found["id"]] += int(count)
    return [(frames, count * cpu_s.get(thread, 0.0) / samples[thread]) for thread, frames, count in counted]


def by_stage(stacks: Stacks) -> dict[str, float]:
    """Share of the processor time by stage; all of `STAGES`, adding up to 1."""
    spent_s: defaultdict[str, float] = defaultdict(float)
    for frames, cpu_s in stacks:
        stages = (stage_of(frame) for frame in reversed(frames))
        spent_s[next((stage for stage in stages if stage is not None), "other")] += cpu_s
    total_s = sum(spent_s.values()) or 1.0
    return {stage: spent_s[stage] / total_s for stage in STAGES}


def top_functions(stacks: Stacks, limit: int = 15) -> list[dict[str, Any]]:
    """Functions by the share of processor time in which they were on top.

    Returns:
        At most `limit` times `function`, `self_share` (on top) and `total_share` (anywhere on the stack), 0 to 1.
    """
    on_top: defaultdict[str, float] = defaultdict(float)
    anywhere: defaultdict[str, float] = defaultdict(float)
    for stack, cpu_s in stacks:
        frames = [re.sub(r":-?\d+\)$", ")", frame) for frame in stack]
        on_top[frames[-1]] += cpu_s
        for frame in set(frames):
            anywhere[frame] += cpu_s
    total_s = sum(on_top.values()) or 1.0
    return [
        {"function": frame, "self_share": on_top[frame] / total_s, "total_share": anywhere[frame] / total_s}
        for frame in sorted(on_top, key=on_top.__getitem__, reverse=True)[:limit]
    ]


def _thread_cpu_s(pid: int) -> dict[str, float]:
    """Processor time of every thread of a process, by thread id, seconds."""
    found: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        found[task.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def profile(
    server: ServerProcess, generator: Generator, request: Request, folder: Path, core: int | None, spy: Path | None
) -> dict[str, Any]:
    """Where a request's time and the worker's CPU go, at `CONNECTIONS` connections.

    Args:
        server: With one worker.
        generator: Keeps it busy.
        request: What it is asked.
        folder: For scratch files.
        core: Of the generator.
        spy: Program py-spy; None looks beside this Python and in the PATH.

    Returns:
        Mean seconds per request and stage, CPU seconds per request and mean batch rows, from the server's own metrics;
        from py-spy the share of the worker's time by stage and its top functions, else why not.
    """
    before = server.metrics()
    generator.measure(server.http_port, request, CONNECTIONS, 3.0, core)
    after = server.metrics()

    def grown(name: str, **labels: str) -> float:
        return total(after, f"headrace_{name}", **labels) - total(before, f"headrace_{name}", **labels)

    requests = grown("request_seconds_count") or float("nan")
    found: dict[str, Any] = {
        "connections": CONNECTIONS,
        "requests": requests,
        "request_s": grown("request_seconds_sum") / requests,
        "stages_s": {stage: grown("stage_seconds_sum", stage=stage) / requests for stage in ELAPSED_STAGES},
        "cpu_s": grown("cpu_seconds_total", worker="1") / requests,
        "batch_rows": grown("batch_rows_sum") / requests,
    }
    return found | _sampled(server, generator, request, folder, core, spy)


def _sampled(
    server: ServerProcess, generator: Generator, request: Request, folder: Path, core: int | None, spy: Path | None
) -> dict[str, Any]:
    beside = Path(sys.executable).with_name("py-spy")
    program = spy or (beside if beside.exists() else shutil.which("py-spy"))
    if program is None:
        return {"note": "py-spy is not installed"}
    output = folder / "stacks"
    # Samples are taken of threads that run or want to, whether or not they hold the interpreter lock.
    command = [
        str(program), "record", "--pid", str(server.worker_pids()[0]), "--duration", str(int(PROFILE_S) - 1),
        "--rate", "200", "--threads", "--format", "raw", "--output", str(output),
    ]  # fmt: skip
    before_s = _thread_cpu_s(server.worker_pids()[0])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        generator.measure(server.http_port, request, CONNECTIONS, PROFILE_S, core)
        told, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    if process.returncode != 0 or not output.exists():
        return {"note": f"py-spy could not sample: {told.strip().splitlines()[-1:]}"}
    after_s = _thread_cpu_s(server.worker_pids()[0])
    text = output.read_text()
    stacks = weigh(text, {thread: spent_s - before_s.get(thread, 0.0) for thread, spent_s in after_s.items()})
    samples = sum(int(line.rpartition(" ")[2]) for line in text.splitlines())
    return {"samples": samples, "cpu_by_stage": by_stage(stacks), "functions": top_functions(stacks)}
