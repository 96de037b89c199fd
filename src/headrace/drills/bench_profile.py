"""Where a worker's processor time goes, by stage of the path: samples of py-spy, each given to a stage by its frame.

A sample belongs to the innermost frame that a rule knows; frames of libraries know none, so numpy inside a fold is the
fold's. uvloop's own time (callbacks, epoll, reading sockets) shows as asyncio's `Runner.run`, which is no stage: a bare
echo spends it too.
"""

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from headrace.drills.bench_load import Generator, Request
from headrace.testing.server import ServerProcess

__all__ = ["FREE_STAGES", "RULES", "STAGES", "by_stage", "profile", "stage_of", "top_functions", "total"]

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


def by_stage(stacks: str) -> dict[str, float]:
    """Share of the samples by stage; all of `STAGES`, adding up to 1.

    Args:
        stacks: Lines `outer;inner;… count`, as py-spy's format `raw` writes them.
    """
    counts: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        stages = (stage_of(frame) for frame in reversed(stack.split(";")))
        counts[next((stage for stage in stages if stage is not None), "other")] += int(count)
    samples = counts.total() or 1
    return {stage: counts[stage] / samples for stage in STAGES}


def top_functions(stacks: str, limit: int = 15) -> list[dict[str, Any]]:
    """Functions by the share of samples in which they were on top.

    Args:
        stacks: As for `by_stage`.
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
        frames = [re.sub(r":-?\d+\)$", ")", frame) for frame in stack.split(";")]
        on_top[frames[-1]] += int(count)
        for frame in set(frames):
            anywhere[frame] += int(count)
    samples = on_top.total() or 1
    return [
        {"function": frame, "self_share": count / samples, "total_share": anywhere[frame] / samples}
        for frame, count in on_top.most_common(limit)
    ]


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
        "--rate", "200", "--format", "raw", "--output", str(output),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        generator.measure(server.http_port, request, CONNECTIONS, PROFILE_S, core)
        told, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    if process.returncode != 0 or not output.exists():
        return {"note": f"py-spy could not sample: {told.strip().splitlines()[-1:]}"}
    stacks = output.read_text()
    samples = sum(int(line.rpartition(" ")[2]) for line in stacks.splitlines())
    return {"samples": samples, "cpu_by_stage": by_stage(stacks), "functions": top_functions(stacks)}
