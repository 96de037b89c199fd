"""From runs to verdicts: 99 % rates and a verdict per goal. Nothing here measures or knows a result.

A figure is taken within each repetition, since only there the arrivals were the same; the page shows the median of the
repetitions and their spread. Runs that are void take part in nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from headrace.drills.bench_load import spread
from headrace.drills.bench_report import Verdict
from headrace.drills.goodput_cells import OURS, RIVALS
from headrace.testing.batch_world import TARGET

__all__ = ["Rate", "Runs", "figures", "judge", "over", "rate_at_target", "rates_of", "short", "sound"]

REFUSAL_SLACK_S: Final = 0.002
Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Rate:
    """A 99 % rate.

    Attributes:
        per_s: The rate.
        side: `<` when the lowest rate that was tried was too much already, `>` when the highest was not, else empty.
    """

    per_s: float
    side: str = ""

    def __str__(self) -> str:
        return f"{self.side + ' ' if self.side else ''}{self.per_s:,.0f}"


def sound(runs: Runs, what: str, load: float | None = None) -> dict[int, Mapping[str, Any]]:
    """The runs that count, by repetition."""
    return {
        run["repetition"]: run
        for run in runs
        if run["what"] == what and (load is None or run["load"] == load) and not run["void_reason"]
    }


def rate_at_target(points: Sequence[tuple[float, float | None, int]]) -> Rate | None:
    """Highest rate with 99 % in time.

    Args:
        points: (rate, share in time, requests), in any order; the share is None where the run was void.

    Returns:
        Between the two rates around the first crossing. The logarithm of the share that misses is taken to grow
        linearly with the rate, as the tail of a queue does. None where a void run hides the crossing.
    """
    before: tuple[float, float] | None = None
    for rate, share, requests in sorted(points, key=lambda point: point[0]):
        if share is None:
            return None
        miss = math.log(max(1 - share, 0.5 / max(1, requests)))
        if share < TARGET:
            if before is None:
                return Rate(rate, "<")
            part = (math.log(1 - TARGET) - before[1]) / (miss - before[1])
            return Rate(before[0] + (rate - before[0]) * min(1.0, max(0.0, part)))
        before = rate, miss
    return Rate(before[0], ">") if before else None


def rates_of(runs: Runs, what: str) -> dict[int, Rate]:
    """The 99 % rate in each repetition that shows one."""
    found = {}
    for repetition in sorted({run["repetition"] for run in runs}):
        rate = rate_at_target(
            [
                (run["load"], None if run["void_reason"] else run["in_time_share"], run["requests"])
                for run in runs
                if run["what"] == what and run["repetition"] == repetition
            ]
        )
        if rate is not None:
            found[repetition] = rate
    return found


def over(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    """Ours over theirs in each repetition that has both."""
    return {number: ours[number] / theirs[number] for number in ours.keys() & theirs.keys() if theirs[number] > 0}


def _mean_over_cells(each: Sequence[Mapping[int, float]]) -> list[float]:
    """Geometric mean over the cells, per repetition that all of them have."""
    common = set.intersection(*(set(cell) for cell in each)) if each else set()
    return [math.exp(sum(math.log(max(cell[number], 1e-9)) for cell in each) / len(each)) for number in sorted(common)]


def judge(results: Mapping[str, Any]) -> list[tuple[str, Verdict]]:
    """Every goal with its verdict; a part that was not run, or was void, is not measured."""
    cells: Mapping[str, Mapping[str, Any]] = results.get("cells", {})
    verdicts: list[tuple[str, Verdict]] = []

    def add(
        goal: str, figure: str, wanted: float, values: Sequence[float], *, is_least: bool = True, note: str = ""
    ) -> None:
        if not values:
            verdicts.append((goal, Verdict(figure, wanted, is_least, None, "not run, or void")))
            return
        found = spread(list(values))
        between = f"{short(found['min'])}–{short(found['max'])}"
        verdicts.append(
            (goal, Verdict(figure, wanted, is_least, found["median"], f"{between}{', ' if note else ''}{note}"))
        )

    def add_worst(
        goal: str, figure: str, wanted: float, each: Mapping[str, Sequence[float]], *, is_least: bool = True
    ) -> None:
        missing = [name for name, values in each.items() if not values]
        if missing or not each:
            # Without one cell nobody knows the worst one.
            verdicts.append((goal, Verdict(figure, wanted, is_least, None, f"void: {'; '.join(missing) or 'all'}")))
            return
        name = (min if is_least else max)(each, key=lambda key: median(each[key]))
        add(goal, figure, wanted, each[name], is_least=is_least, note=name)

    rates = {
        name: {what: _per_s(rates_of(cell["rates"], what), what) for what in (OURS, *RIVALS)}
        for name, cell in cells.items()
    }
    fixed = {name: _best([each["greedy"], each["fixed delay"]]) for name, each in rates.items()}
    best = {name: _best([each[rival] for rival in RIVALS]) for name, each in rates.items()}
    ours = {name: each[OURS] for name, each in rates.items()}
    for figure, wanted, theirs in (
        ("R99 over the best fixed size and delay", 1.10, fixed),
        ("R99 over AIMD", 1.15, {name: each["aimd"] for name, each in rates.items()}),
        ("R99 over cork", 1.0, {name: each["cork"] for name, each in rates.items()}),
    ):
        add(
            "G1",
            f"{figure}, geometric mean",
            wanted,
            _mean_over_cells([over(ours[key], theirs[key]) for key in cells]),
        )
    add_worst(
        "G1", "R99 over the best rival of the cell, worst cell", 0.90,
        {name: list(over(ours[name], best[name]).values()) for name in cells},
    )  # fmt: skip
    for figure, wanted, limits in (
        ("simulator's", 0.90, {name: cell["predicted_per_s"][OURS] for name, cell in cells.items()}),
        ("clairvoyant's", 0.80, {name: cell["optimal_per_s"] for name, cell in cells.items()}),
    ):
        add_worst(
            "G2", f"R99 over the {figure} on the same arrivals, worst cell", wanted,
            {name: list(over(ours[name], dict(enumerate(limits[name], 1))).values()) for name in cells},
        )  # fmt: skip
    _judge_overload(cells, add, add_worst)
    _judge_recovery(cells, add_worst)
    for figure, wanted, rival in (
        ("greedy's", 1.05, "greedy"),
        ("a 5 ms delay's (at the cell's scale)", 0.6, "5 ms delay"),
    ):
        ratios = [
            over(figures(sound(cell["idle"], OURS), "mean_s"), figures(sound(cell["idle"], rival), "mean_s"))
            for cell in cells.values()
        ]
        add(
            "G5",
            f"mean latency at 0.2 x U2 over {figure}, geometric mean",
            wanted,
            _mean_over_cells(ratios),
            is_least=False,
        )
    models = results.get("models")
    if models:
        shared = models["runs"]
        mine = _per_s(rates_of(shared, OURS), OURS)
        by_arrival = _per_s(rates_of(shared, "arrival order"), "arrival order")
        turns = dict(enumerate(models["predicted_per_s"]["round robin"], 1))
        add(
            "G6",
            "four models: R99 over round robin (simulated on the same arrivals)",
            3.0,
            list(over(mine, turns).values()),
        )
        add("G6", "four models: R99 over arrival order (measured)", 1.0, list(over(mine, by_arrival).values()))
    else:
        add("G6", "four models: R99 over round robin", 3.0, ())
    drifts = results.get("drift", ())
    for figure, wanted, key in (
        ("in time over the new G from the 65th batch on, worst cell", 0.85, "fluid_per_s"),
        ("in time over a frozen profile (simulated on the same arrivals), worst cell", 1.3, "frozen_per_s"),
    ):
        settled: dict[str, list[float]] = {}
        for drifted in drifts:
            runs = sound(drifted["runs"], OURS)
            settled[drifted["cell"]["name"]] = list(over(figures(runs, "settled_per_s"), figures(runs, key)).values())
        add_worst("G7", f"after l(b) rose by 40 %: {figure}", wanted, settled)
    decision = results.get("decision")
    waiting = decision["waiting"] if decision else 256
    add(
        "G8",
        f"a decision with {waiting} waiting, µs",
        30.0,
        [decision["decision_s"] * 1e6] if decision else (),
        is_least=False,
    )
    add(
        "G8",
        f"a request with {waiting} waiting, µs",
        5.0,
        [decision["request_s"] * 1e6] if decision else (),
        is_least=False,
    )
    _judge_rows(results.get("rows"), add)
    return verdicts


def _judge_overload(cells: Mapping[str, Any], add: Callable[..., None], add_worst: Callable[..., None]) -> None:
    kept: dict[float, dict[str, dict[int, float]]] = {}
    for load in (1.5, 3.0, 10.0):
        kept[load] = {
            name: figures(sound(cell["overload"], OURS, load), "in_time_per_s") for name, cell in cells.items()
        }
        shares = {
            name: list(over(kept[load][name], figures(sound(cell["overload"], OURS, load), "fluid_per_s")).values())
            for name, cell in cells.items()
        }
        add_worst("G3", f"in time over G at {load:g} x U2, worst cell", 0.85, shares)
    for lower, higher in ((1.5, 3.0), (3.0, 10.0)):
        each = {name: list(over(kept[higher][name], kept[lower][name]).values()) for name in cells}
        add_worst("G3", f"in time at {higher:g} x U2 over that at {lower:g} x, worst cell", 0.97, each)
    for load, wanted in ((1.5, 4.0), (3.0, 25.0)):
        ratios = [
            over(
                kept[load][name],
                # One answer in time at least, or a rival that gives none would be infinitely worse.
                {
                    number: max(run["in_time_per_s"], 0.2)
                    for number, run in sound(cell["overload"], "greedy", load).items()
                },
            )
            for name, cell in cells.items()
        ]
        add(
            "G3",
            f"in time over greedy with a queue timeout at {load:g} x U2, geometric mean",
            wanted,
            _mean_over_cells(ratios),
        )
    late = {
        f"{name}, {load:g} x U2": list(figures(sound(cell["overload"], OURS, load), "late_share").values())
        for name, cell in cells.items()
        for load in (1.5, 3.0, 10.0)
    }
    add_worst("G3", "executed requests that end late, worst cell and load", 0.06, late, is_least=False)
    told = {}
    for name, cell in cells.items():
        for load in (1.5, 3.0, 10.0):
            told[f"{name}, {load:g} x U2"] = [
                run["refusal_p99_s"] / min(cell["cell"]["deadline_s"], run["batch_p99_s"] + REFUSAL_SLACK_S)
                for run in sound(cell["overload"], OURS, load).values()
                if run["refusal_p99_s"] is not None and run["batch_p99_s"] is not None
            ]
    figure = "p99 of the time to a 503 over min(D, p99 of a batch's duration + 2 ms), worst cell and load"
    add_worst("G4", figure, 1.0, told, is_least=False)


def _judge_recovery(cells: Mapping[str, Any], add_worst: Callable[..., None]) -> None:
    mine: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    for name, cell in cells.items():
        deadline_s, runs = cell["cell"]["deadline_s"], cell["spike"]["runs"]
        # What did not recover while it was watched took longer than that.
        took = {
            number: run["watched_s"] if run["recovery_s"] is None else run["recovery_s"]
            for number, run in sound(runs, OURS).items()
        }
        mine[name] = [seconds / deadline_s for seconds in took.values()]
        for number, run in sound(runs, "greedy").items():
            if number in took:
                theirs = run["watched_s"] if run["recovery_s"] is None else run["recovery_s"]
                ratios[name] = [theirs / max(took[number], deadline_s / 4)]
    figure = "deadlines from the end of a spike (5 s at 3 x U2) to 99 % in time for good, worst cell"
    add_worst("G4", figure, 2.0, mine, is_least=False)
    add_worst("G4", "time to recover, greedy without a timeout over ours (at least), worst cell", 50.0, ratios)


def _judge_rows(rows: Mapping[str, Any] | None, add: Callable[..., None]) -> None:
    if not rows:
        return
    for load in sorted({run["load"] for run in rows["runs"]}):
        runs = sound(rows["runs"], OURS, load)
        kept = list(over(figures(runs, "in_time_per_s"), figures(runs, "fluid_per_s")).values())
        add(
            "rows",
            f"requests of 1 to {rows['rows_of_a_request_max']} rows: rows in time over G at {load:g} x U2",
            0.85,
            kept,
        )
        late = list(figures(runs, "late_share").values())
        add("rows", f"the same: executed rows that end late at {load:g} x U2", 0.06, late, is_least=False)


def figures(runs: Mapping[int, Mapping[str, Any]], key: str) -> dict[int, float]:
    """One figure of each repetition that has it."""
    return {number: run[key] for number, run in runs.items() if run[key] is not None}


def _per_s(rates: Mapping[int, Rate], what: str) -> dict[int, float]:
    """What is counted: of a rival the lowest rate where even that was too much, of ours nothing."""
    return {number: 0.0 if what == OURS and rate.side == "<" else rate.per_s for number, rate in rates.items()}


def _best(each: Sequence[Mapping[int, float]]) -> dict[int, float]:
    numbers = {number for rates in each for number in rates}
    return {number: max(rates[number] for rates in each if number in rates) for number in numbers}


def short(value: float) -> str:
    """Three digits, or whole thousands."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
