"""The page of the goodput drill, from its raw figures: verdicts, tables, method. Nothing here measures or judges."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Final

from headrace.drills.bench_report import Verdict
from headrace.drills.goodput_cells import OURS, RIVALS
from headrace.drills.goodput_judge import figures, judge, over, rates_of, short, sound
from headrace.drills.goodput_stage import RETRIES_MAX

__all__ = ["report_lines"]

VOIDS_SHOWN: Final = 20


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.3g}"


def _text(values: Sequence[float], show: Callable[[float], str] = short) -> str:
    if not values:
        return "void"
    if len(values) == 1:
        return show(values[0])
    return f"{show(median(values))} ({show(min(values))}–{show(max(values))})"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    rule = "|".join("---" if column < left else "---:" for column in range(len(heads)))
    return [f"| {' | '.join(heads)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows), ""]


def report_lines(results: Mapping[str, Any]) -> list[str]:
    """`goodput.md`."""
    overhead, repetitions = results["overhead"], results["repetitions"]
    lines = [
        "# Goodput: who answers in time, and who collapses", "",
        f"Made by `{results['command']}` on {results['date'][:10]} in {results['took_s'] / 60:.0f} minutes; nothing "
        f"below was typed. Medians of {repetitions} repetition{'s' if repetitions != 1 else ''}, with the smallest and "
        "the largest in brackets.", "",
        "One server with one worker, the real HTTP path, a model that sleeps as long as its curve says. The policies "
        "are plug-ins of the same server and take turns on the same arrivals. In time counts from the scheduled send "
        "to the complete answer, and a refusal counts as missed, so that shedding cannot flatter. The bounds U2 and G "
        "are explained in [scheduling](../docs/concepts/scheduling.md).", "",
        f"Of every deadline {overhead['fixed_s'] * 1e3:.2f} ms are the server's and the way's, and every request costs "
        f"the worker {overhead['per_request_s'] * 1e6:.0f} µs of processor. Both were measured first (the least of "
        "several looks, which asks most of every figure) and are part of all bounds and predictions: `D - o` and "
        "`a + (c + s) b`.", "",
        "## Goals", "",
        *_verdict_table(judge(results)),
    ]  # fmt: skip
    if results.get("plot"):
        lines += [f"![In-time answers against offered load]({results['plot']})", ""]
    for cell in results.get("cells", {}).values():
        lines += _cell_lines(cell)
    return lines + _burst_lines(results) + _model_lines(results) + _drift_lines(results) + _method_lines(results)


def _verdict_table(verdicts: Sequence[tuple[str, Verdict]]) -> list[str]:
    words = {True: "yes", False: "**no**", None: "not measured"}
    rows = []
    for goal, each in verdicts:
        measured = "–" if each.measured is None else short(each.measured)
        bound = f"{'≥' if each.is_least else '≤'} {each.wanted:g}"
        rows.append([goal, each.figure, bound, measured, each.note, words[each.is_met]])
    return _table(["goal", "figure", "wanted", "measured", "spread", "met"], rows, left=2)


def _cell_lines(found: Mapping[str, Any]) -> list[str]:
    cell, u2 = found["cell"], found["sustainable_per_s"]
    lines = [
        f"## {cell['name'].capitalize()}: {cell['base_s'] * 1e3:g} + {cell['per_row_s'] * 1e3:g} b ms, deadline "
        f"{cell['deadline_s'] * 1e3:.3g} ms", "",
        f"U2 is {u2:,.0f}/s. The best fixed delay is {found['delay_s'] * 1e3:.3g} ms, by the simulator. A policy "
        "that fell below 97 % was not asked at higher rates in that repetition.", "",
    ]  # fmt: skip
    loads = sorted({run["load"] for run in found["rates"]})
    rows = []
    for what in (OURS, *RIVALS):
        shares = []
        for load in loads:
            asked = any(run["what"] == what and run["load"] == load for run in found["rates"])
            values = list(figures(sound(found["rates"], what, load), "in_time_share").values())
            shares.append(_text(values, _percent) if asked else "")
        rate = rates_of(found["rates"], what)
        sides = "".join(sorted({each.side for each in rate.values()}))
        text = _text([each.per_s for each in rate.values()])
        rows.append([what, *shares, f"{sides} {text}".strip(), _text(found["predicted_per_s"][what])])
    heads = [f"in time at {load:,.0f}/s ({load / u2:.2f} U2)" for load in loads]
    lines += _table(["policy", *heads, "99 % up to, /s", "simulator says"], rows)
    lines += [f"A clairvoyant would reach {_text(found['optimal_per_s'])}/s on these arrivals.", ""]
    rows = []
    for load in sorted({run["load"] for run in found["overload"]}):
        for what in (OURS, "greedy"):
            runs = sound(found["overload"], what, load)
            if not any(run["what"] == what and run["load"] == load for run in found["overload"]):
                continue
            kept = over(figures(runs, "in_time_per_s"), figures(runs, "fluid_per_s"))
            rows.append([
                f"{load:g} x U2", what, _text(list(figures(runs, "in_time_per_s").values())),
                _text(list(kept.values()), _percent), _text(list(figures(runs, "late_share").values()), _percent),
                _text(list(figures(runs, "refusal_p99_s").values()), _milliseconds),
                _text(list(figures(runs, "batch_p99_s").values()), _milliseconds),
            ])  # fmt: skip
    lines += _table(
        ["offered", "policy", "in time, /s", "of G", "executed late", "told no, p99, ms", "a batch, p99, ms"],
        rows,
        left=2,
    )
    means = {
        what: _text(list(figures(sound(found["idle"], what), "mean_s").values()), _milliseconds)
        for what in (OURS, "greedy", "5 ms delay")
    }
    lines += [
        f"Mean latency at 0.2 x U2, ms: {'; '.join(f'{what} {text}' for what, text in means.items())} "
        f"(the delay at the cell's scale, {5 * cell['scale']:g} ms).", "",
    ]  # fmt: skip
    spikes = []
    for run in found["spike"]["runs"]:
        took = (
            f"not within {run['watched_s']:g} s" if run["recovery_s"] is None else f"{run['recovery_s'] * 1e3:.3g} ms"
        )
        spikes.append(f"{run['what']} {'void' if run['void_reason'] else took}")
    return [
        *lines,
        f"After a spike that leaves {found['spike']['owed_s']:.1f} s of work to a server that refuses nobody, 99 % "
        f"are in time again after: {', '.join(spikes)}.", "",
    ]  # fmt: skip


def _burst_lines(results: Mapping[str, Any]) -> list[str]:
    bursts = results.get("bursts")
    if not bursts:
        return []
    rows = [
        [what, _text(list(figures(sound(bursts["runs"], what), "in_time_share").values()), _percent)]
        for what in (OURS, *RIVALS)
    ]
    return [
        "## Bursts", "",
        f"The {bursts['cell']} cell at {bursts['load']:g} x U2 on average, in bursts of 2.2 times that for 10 "
        "deadlines and 0.6 times for 30.", "",
        *_table(["policy", "in time"], [*rows, ["a clairvoyant", _text(bursts["optimal_share"], _percent)]]),
    ]  # fmt: skip


def _model_lines(results: Mapping[str, Any]) -> list[str]:
    models = results.get("models")
    if not models:
        return []
    rows = []
    for what, predicted in models["predicted_per_s"].items():
        rates = rates_of(models["runs"], what)
        sides = "".join(sorted({each.side for each in rates.values()}))
        measured = f"{sides} {_text([each.per_s for each in rates.values()])}".strip() if rates else "void"
        if not any(run["what"] == what for run in models["runs"]):
            measured = "simulated only"
        rows.append([what, measured, _text(predicted)])
    slos = ", ".join(f"{slo_s * 1e3:g}" for slo_s in models["slos_s"])
    return [
        "## Four models on one executor", "",
        f"The same curve and the same rate each, objectives of {slos} ms. Who knows no deadlines takes whoever waits "
        "longest (arrival order), or one model after the other (round robin, which is no plug-in of this server).", "",
        *_table(["who is next", "99 % up to, /s, all models", "simulator says"], rows),
    ]  # fmt: skip


def _drift_lines(results: Mapping[str, Any]) -> list[str]:
    if not results.get("drift"):
        return []
    keys, rows = ("settling", "settled", "frozen", "fluid"), []
    for each in results["drift"]:
        runs = sound(each["runs"], OURS)
        rows.append([
            each["cell"]["name"],
            *(_text(list(figures(runs, f"{key}_per_s").values())) for key in keys),
        ])  # fmt: skip
    return [
        "## The curve drifts", "",
        "The model becomes 40 % slower under way, at 1.2 x the new U2. In time per second:", "",
        *_table(["cell", "in the first 64 batches", "from the 65th on", "frozen profile, simulated", "new G"], rows),
    ]  # fmt: skip


def _method_lines(results: Mapping[str, Any]) -> list[str]:
    facts = "; ".join(f"{name} {value}" for name, value in results["machine"].items())
    voids, runs = results["voids"], _all_runs(results)
    reasons = [
        f"* {void['what']} at {void['load']:.3g}, repetition {void['repetition']}: {void['reason']}"
        for void in voids[:VOIDS_SHOWN]
    ]
    if len(voids) > VOIDS_SHOWN:
        reasons.append(f"* and {len(voids) - VOIDS_SHOWN} more, in `goodput.json`")
    unsound = sum(bool(run["void_reason"]) for run in runs)
    return [
        "## Method", "",
        f"Machine: {facts}. {results['placement']}", "",
        "A run is void when the p99 of its send lag is above 2 % of the deadline. It is repeated on the same arrivals "
        f"(the first {RETRIES_MAX}), and if it is void again it takes part in no figure; a goal about every cell is "
        f"then not measured. Void were "
        f"{len(voids)} of {len(runs) - unsound + len(voids)} runs, and {unsound} stayed void. Requests that ended with "
        f"neither an answer nor a refusal: {sum(run['errors'] for run in runs)}.", "",
        *reasons, *([""] if reasons else []),
        "The 99 % rate lies between the two rates around it. `<` means that the lowest rate that was tried was too "
        "much already: it counts for a rival, and nothing counts for Headrace. `>` means that the highest was not too "
        "much. Headrace's own policy has no batch setting but the SLO, in every cell. AIMD takes its feedback end to "
        "end; fixed delays and greedy have the batch cap that fits the objective and a queue timeout of one objective, "
        "but for the spike, where greedy is as it is shipped.", "",
        "Again: `scripts/bench --goodput`; with `--quick` in five minutes. The raw figures are in `goodput.json` "
        "beside this page.",
    ]  # fmt: skip


def _all_runs(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for cell in results.get("cells", {}).values():
        found += [*cell["rates"], *cell["overload"], *cell["idle"], *cell["spike"]["runs"]]
    for part in ("bursts", "rows", "models"):
        found += (results.get(part) or {}).get("runs", [])
    for each in results.get("drift", ()):
        found += each["runs"]
    return found
