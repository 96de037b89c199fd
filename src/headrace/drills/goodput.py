"""Goodput of batch policies, measured through the real HTTP path: who answers most in time, and who collapses?

One server with one worker serves a sleeping model under every policy; the policies take turns on the same arrivals, so
that what the machine does to one it does to all. The executor sleeps, hence the processor is left to the server and
the generator, and the model's latency curve is exactly what the cell says. A run whose generator was late is void.

    scripts/bench --goodput              everything, about 35 minutes; writes benchmarks/goodput.{md,json,svg}
    scripts/bench --goodput --quick      five minutes, one short repetition; writes into the cache

The parts: `goodput_cells` says what is measured, `goodput_stage` runs a server and reads a run, `goodput_parts`
and `goodput_cost` measure, `goodput_judge` judges, `goodput_report` writes, `goodput_svg` draws.

Source: docs/concepts/scheduling.md for U2 and G; MLPerf Inference's Server scenario for the open loop.
"""

import datetime
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from headrace.drills.bench_machine import available_cores, machine_facts
from headrace.drills.goodput_cells import CELLS, OURS, RIVALS, Cell, Overhead
from headrace.drills.goodput_cost import decision_cost
from headrace.drills.goodput_judge import sound
from headrace.drills.goodput_parts import FULL, IDLE, QUICK, Parts
from headrace.drills.goodput_report import report_lines
from headrace.drills.goodput_svg import Line, chart

__all__ = ["measure", "plot"]

BOUND: Final = "the most there is (G)"


def measure(target: Path, *, is_quick: bool, is_json: bool, command: str) -> int:
    """Measure, write the page, the raw figures and the plot, and print the page.

    Args:
        target: Folder for the results.
        is_quick: One short repetition.
        is_json: Print the raw figures instead of the page.
        command: How it was called, for the page.

    Returns:
        Exit status.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: no server stays behind
    began_s = time.monotonic()
    plan = QUICK if is_quick else FULL
    cores = available_cores()
    with tempfile.TemporaryDirectory(prefix="headrace-goodput-") as name, _progress_on_stderr() as say:
        parts = Parts(plan, Path(name), say)
        try:
            found = _all_parts(parts)
        except KeyboardInterrupt:
            print("bench: stopped", file=sys.stderr)
            return 130
        except RuntimeError as error:
            print(f"bench: FAILED: {error}", file=sys.stderr)
            return 1
    results = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "took_s": time.monotonic() - began_s,
        "machine": machine_facts(),
        "placement": f"The server was on core {cores[0]}, the generator on core {cores[-1]}."
        if len(cores) > 1
        else "**Server and generator shared one core.**",
        "repetitions": plan.repetitions,
        **found,
        "voids": parts.voids,
        "plot": "goodput.svg",
    }
    target.mkdir(parents=True, exist_ok=True)
    text, document = "\n".join(report_lines(results)) + "\n", json.dumps(results, indent=1) + "\n"
    (target / "goodput.svg").write_text(plot(results))
    (target / "goodput.md").write_text(text)
    (target / "goodput.json").write_text(document)
    sys.stdout.write(document if is_json else text)
    print(f"bench: written to {target}", file=sys.stderr)
    return 0


def _all_parts(parts: Parts) -> dict[str, Any]:
    return {
        "overhead": parts.calibrate(),
        "cells": {cell.name: parts.cell(cell) for cell in CELLS},
        "bursts": parts.bursts(),
        "rows": parts.rows(),
        "models": parts.models(),
        "drift": parts.drift(),
        "decision": decision_cost(),
    }


def plot(results: Mapping[str, Any]) -> str:
    """The chart: in-time answers against offered load, both as multiples of U2."""
    panels: dict[str, dict[str, Line]] = {}
    for name, found in results["cells"].items():
        u2 = found["sustainable_per_s"]
        lines: dict[str, Line] = {}
        for what in (OURS, *RIVALS):
            points: dict[float, list[float]] = {}
            for part, unit in (("idle", 1.0), ("rates", 1 / u2), ("overload", 1.0)):
                for load in {run["load"] for run in found[part]}:
                    for run in sound(found[part], what, load).values():
                        points.setdefault(load * unit, []).append(run["in_time_per_s"] / u2)
            if points:
                lines[what] = sorted((load, sum(kept) / len(kept)) for load, kept in points.items())
        cell = Cell(**{**found["cell"], "overhead": Overhead(**found["cell"]["overhead"])})
        loads = [IDLE * 1.1**step for step in range(42)]
        lines[BOUND] = [(load, cell.fluid(load * u2) / u2) for load in loads if load <= 10]
        panels[f"{name}, deadline {cell.deadline_s * 1e3:.3g} ms"] = lines
    note = "In-time answers against offered load, both as multiples of U2; refusals count as missed; means"
    return chart("Goodput over HTTP, one worker", note, panels, BOUND)


@contextmanager
def _progress_on_stderr() -> Iterator[Callable[[str], None]]:
    """Tells what happens on stderr: one line that changes on a terminal, else a line each.

    The generator runs in this process, so nothing may draw while it does: no thread refreshes the line.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        began_s = time.monotonic()
        yield lambda text: console.print(f"bench: {time.monotonic() - began_s:5.0f} s  {text}", highlight=False)
        return
    columns = (
        TextColumn("goodput"),
        BarColumn(pulse_style="cyan"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        bar = progress.add_task("", total=None)
        yield lambda text: progress.update(bar, description=text, refresh=True)
