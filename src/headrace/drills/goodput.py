"""Goodput of batch policies, measured through the real HTTP path: who answers most in time, and who collapses?

One server with one worker serves the same sleeping model under every policy; the policies take turns on the same
arrivals, so that what the machine does to one it does to all. The executor sleeps, hence the processor is left to the
server and the generator, and the model's latency curve is exactly what the cell says.

    python -m headrace.drills.goodput [--quick] [-o json]

Figures: the share of requests answered within the deadline at rates around U2; in-time answers per second at 1.5, 3
and 10 × U2 as a share of the fluid optimum G; mean latency at 0.2 × U2; recovery after a spike. A run whose generator
was late is void and is left out.

Source: docs/concepts/scheduling.md for U2 and G; MLPerf Inference's Server scenario for the open loop.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from headrace.data_plane.batch_curve import LatencyCurve, fluid_rate, sustainable_rate
from headrace.drills.load import LoadResult, binary_infer_body, infer_request_bytes, open_loop, poisson_offsets, run
from headrace.testing.server import ServerProcess
from headrace.testing.sleep_runtime import SleepArtefact, write_artefact

ROWS_MAX: Final = 64
OVERHEAD_S: Final = 0.001
"""Both ways between generator and executor, and the 60 µs by which a sleep oversleeps."""

TARGET: Final = 0.99


@dataclass(frozen=True, slots=True)
class Cell:
    """A latency curve and a deadline.

    Attributes:
        base_s, per_row_s: A batch of b rows takes base_s + per_row_s · b seconds.
        deadline_s: Time allowed from the scheduled send.
    """

    name: str
    base_s: float
    per_row_s: float
    deadline_s: float

    @property
    def curve(self) -> LatencyCurve:
        return LatencyCurve(self.base_s, self.per_row_s, 0.03)

    @property
    def sustainable(self) -> float:
        """U2 with the overhead taken off the deadline, requests per second."""
        return sustainable_rate(self.curve, self.deadline_s - OVERHEAD_S, ROWS_MAX)

    def fluid(self, rate: float) -> float:
        """G at an offered rate, requests per second."""
        return fluid_rate(self.curve, self.deadline_s - OVERHEAD_S, ROWS_MAX, rate)


CELLS: Final = (
    Cell("steep base", 0.040, 0.0015, 0.166),
    Cell("mixed", 0.002, 0.001, 0.030),
    Cell("compute-bound", 0.0005, 0.002, 0.025),
)

POLICIES: Final[dict[str, dict[str, Any]]] = {
    "priced": {"policy": "priced"},
    "greedy": {"policy": "greedy"},
    "delay 1 ms": {"policy": "fixed_delay", "delay_s": 0.001},
    "delay 5 ms": {"policy": "fixed_delay", "delay_s": 0.005},
    "aimd": {"policy": "aimd"},
    "cork": {"policy": "cork"},
}


class Bench:
    """A server with every policy over one cell, and the runs against it."""

    def __init__(self, cell: Cell, server: ServerProcess, run_s: float) -> None:
        self.cell = cell
        self._server = server
        self._run_s = run_s
        self.voids = 0

    def measure(self, policy: str, offsets_s: np.ndarray[Any, Any], duration_s: float | None = None) -> LoadResult:
        """Send one schedule to one policy."""
        body, headers = binary_infer_body("x", np.ones((1, 1), np.float32))
        headers["x-request-timeout-ms"] = f"{(self.cell.deadline_s - OVERHEAD_S) * 1e3:.3f}"
        request = infer_request_bytes("127.0.0.1", self._server.http_port, _endpoint(policy), body, headers)
        plan = open_loop(
            "127.0.0.1", self._server.http_port, [request], offsets_s,
            duration_s=duration_s or self._run_s, connections=64, connections_max=2048,
            deadline_s=self.cell.deadline_s, grace_s=1.0, send_lag_s_max=max(0.001, 0.02 * self.cell.deadline_s),
        )  # fmt: skip
        return run(plan)

    def shares(self, policy: str, rate: float, seeds: range) -> Iterator[LoadResult]:
        """Sound runs at a Poisson rate, one per seed."""
        for seed in seeds:
            result = self.measure(policy, poisson_offsets(rate, self._run_s, seed=seed))
            if result.void_reason:
                self.voids += 1
            else:
                yield result


def _endpoint(policy: str) -> str:
    return policy.replace(" ", "-")


def _write_config(folder: Path, cell: Cell) -> Path:
    artefact = SleepArtefact(base_s=cell.base_s, per_row_s=cell.per_row_s, jitter=0.03)
    models = []
    for name, batching in POLICIES.items():
        path = write_artefact(folder / f"{_endpoint(name)}.sleep.json", artefact)
        slo = f"p99={(cell.deadline_s - OVERHEAD_S) * 1e3:.3f}ms"
        models.append(
            {
                "name": _endpoint(name),
                "path": str(path),
                "slo": slo,
                "runtime": {"name": "sleep"},
                "batching": {**batching, "rows_max": ROWS_MAX},
            }
        )
    config = folder / "headrace.yaml"
    config.write_text(json.dumps({"server": {"workers": 1}, "models": models}))  # JSON is YAML
    return config


def bench_cell(cell: Cell, *, run_s: float, runs: int, advance: Any) -> dict[str, Any]:
    """Every figure of one cell."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ServerProcess(_write_config(folder, cell), folder / "home") as server:
            bench = Bench(cell, server, run_s)
            seeds = range(1, runs + 1)
            figures: dict[str, Any] = {
                "cell": cell.name, "deadline_ms": cell.deadline_s * 1e3, "sustainable": cell.sustainable,
                "in_time": {}, "overload": {}, "idle_latency_ms": {}, "refusal_p99_ms": {}, "late_share": {},
            }  # fmt: skip
            for factor in (0.8, 0.9, 1.0, 1.1):
                rate = factor * cell.sustainable
                shares: dict[str, list[float]] = {policy: [] for policy in POLICIES}
                for seed in seeds:
                    for policy in POLICIES:
                        for result in bench.shares(policy, rate, range(seed, seed + 1)):
                            shares[policy].append(result.in_time / len(result.outcomes))
                        advance()
                figures["in_time"][f"{factor:g}"] = {p: _median(values) for p, values in shares.items()}
            for factor in (1.5, 3.0, 10.0):
                rate = factor * cell.sustainable
                for policy in ("priced", "greedy"):
                    results = list(bench.shares(policy, rate, seeds))
                    advance(runs)
                    key = f"{policy} {factor:g}"
                    figures["overload"][key] = _median([r.goodput_per_s / cell.fluid(rate) for r in results])
                    figures["refusal_p99_ms"][key] = _median([r.refusal_s(0.99) * 1e3 for r in results])
                    figures["late_share"][key] = _median([_late_share(r) for r in results])
            for policy in ("priced", "greedy", "delay 5 ms"):
                results = list(bench.shares(policy, 0.2 * cell.sustainable, seeds))
                advance(runs)
                figures["idle_latency_ms"][policy] = _median([float(np.mean(r.latencies_s)) * 1e3 for r in results])
            figures["recovery_deadlines"] = _recovery(bench, run_s)
            advance()
            figures["voids"] = bench.voids
    return figures


def _late_share(result: LoadResult) -> float:
    answered = len(result.latencies_s)
    return 1 - result.in_time / answered if answered else 0.0


def _recovery(bench: Bench, run_s: float) -> float:
    """Deadlines from the end of a spike (0.5 → 3 → 0.5 × U2) to the first window of one deadline with 99 % in time."""
    cell = bench.cell
    parts = [
        start + poisson_offsets(factor * cell.sustainable, run_s / 2, seed=seed)
        for seed, (start, factor) in enumerate(((0.0, 0.5), (run_s / 2, 3.0), (run_s, 0.5)))
    ]
    result = bench.measure("priced", np.concatenate(parts), 1.5 * run_s)
    took_s = result.done_s - result.scheduled_s
    is_good = (result.statuses == 200) & (took_s <= cell.deadline_s)
    step_s = cell.deadline_s / 4
    start_s = run_s
    while start_s < 1.5 * run_s:
        window = (result.scheduled_s >= start_s) & (result.scheduled_s < start_s + cell.deadline_s)
        if window.any() and is_good[window].mean() >= TARGET:
            return (start_s - run_s) / cell.deadline_s
        start_s += step_s
    return math.inf


def _median(values: list[float]) -> float | None:
    sound = [value for value in values if not math.isnan(value)]
    return statistics.median(sound) if sound else None


def rate_at_target(in_time: dict[str, dict[str, float | None]], policy: str) -> float:
    """Highest rate, as a share of U2, with 99 % in time: interpolated between the measured rates."""
    points = sorted((float(factor), shares[policy]) for factor, shares in in_time.items())
    best = 0.0
    previous: tuple[float, float] | None = None
    for factor, share in points:
        if share is None:
            continue
        if share >= TARGET:
            best = factor
        elif previous is not None and previous[1] >= TARGET:
            best = previous[0] + (factor - previous[0]) * (previous[1] - TARGET) / (previous[1] - share)
        previous = (factor, share)
    return best


def show(console: Console, figures: list[dict[str, Any]]) -> None:
    """The tables."""
    for cell in figures:
        title = f"{cell['cell']} · deadline {cell['deadline_ms']:.0f} ms · U2 {cell['sustainable']:.0f}/s"
        table = Table(title=title, title_justify="left", width=80)
        table.add_column("in time at x U2")
        for factor in cell["in_time"]:
            table.add_column(factor, justify="right")
        table.add_column("99 % at", justify="right")
        for policy in POLICIES:
            row = [_percent(cell["in_time"][factor][policy]) for factor in cell["in_time"]]
            table.add_row(policy, *row, f"{rate_at_target(cell['in_time'], policy):.2f}")
        console.print(table)
        over = Table(width=80)
        for heading in ("offered", "in time / G", "executed late", "told no after p99"):
            over.add_column(heading, justify="right" if heading != "offered" else "left")
        for key, share in cell["overload"].items():
            late, told = cell["late_share"][key], cell["refusal_p99_ms"][key]
            over.add_row(f"{key} x U2", _percent(share), _percent(late), "-" if told is None else f"{told:.1f} ms")
        console.print(over)
        idle = ", ".join(f"{policy} {value:.2f} ms" for policy, value in cell["idle_latency_ms"].items() if value)
        console.print(f"mean latency at 0.2 x U2: {idle}")
        console.print(
            f"99 % again {cell['recovery_deadlines']:.2f} deadlines after a spike; void runs {cell['voids']}\n"
        )


def _percent(value: float | None) -> str:
    return "void" if value is None else f"{value:.1%}"


def main(arguments: list[str] | None = None) -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(prog="goodput", description="Goodput of batch policies over the real HTTP path.")
    parser.add_argument("--quick", action="store_true", help="one run of 4 s each instead of three of 10 s")
    parser.add_argument("--cells", type=int, default=len(CELLS), help="how many of the cells")
    parser.add_argument("-o", choices=("table", "json"), default="table", help="output")
    options = parser.parse_args(arguments)
    run_s, runs = (4.0, 1) if options.quick else (10.0, 3)
    console = Console(stderr=True)
    if os.cpu_count() and len(os.sched_getaffinity(0)) > 1:
        console.print("the server and the generator share this machine; stop other work on it")
    steps = runs * (4 * len(POLICIES) + 6 + 3) + 1
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("goodput", total=steps * options.cells)
        figures = [
            bench_cell(cell, run_s=run_s, runs=runs, advance=lambda n=1: progress.advance(task, n))
            for cell in CELLS[: options.cells]
        ]
    if options.o == "json":
        json.dump(figures, sys.stdout, indent=1)
    else:
        show(Console(width=80), figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
