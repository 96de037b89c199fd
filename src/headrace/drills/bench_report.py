"""From measurements to the page: ratios, verdicts, tables and the plot. Nothing here measures or knows a result.

This is one file although it is long: every figure of the page is beside the rule that judges it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from headrace.drills.bench_load import Sample, spread
from headrace.drills.bench_profile import FREE_STAGES
from headrace.drills.bench_svg import chart

__all__ = ["PEER_FACTORS", "Verdict", "judge", "plot", "ratios", "report_lines", "summarise"]

TITLES: Final = {
    "headrace": "Headrace", "echo": "bare echo", "mlserver": "MLServer", "litserve": "LitServe",
    "kserve": "KServe SDK", "pytriton": "PyTriton", "bentoml": "BentoML",
}  # fmt: skip
PEER_FACTORS: Final = {"mlserver": 16.0, "litserve": 25.0, "kserve": 22.0, "pytriton": 15.0}
"""What the acceptance figures ask of Headrace over each of these peers at 16 connections."""

GENERATOR_SHARE_MAX: Final = 0.95
MB: Final = 1e6


@dataclass(frozen=True, slots=True)
class Verdict:
    """One acceptance figure against its measurement.

    Attributes:
        figure: What is compared.
        wanted: The bound.
        is_least: True when the bound is the least, False when it is the most.
        measured: Median; None when it was not measured.
        note: Why not, or the smallest and largest.
    """

    figure: str
    wanted: float
    is_least: bool
    measured: float | None
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """None when it was not measured."""
        if self.measured is None or math.isnan(self.measured):
            return None
        return self.measured >= self.wanted if self.is_least else self.measured <= self.wanted


def ratios(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], key: str) -> dict[str, float]:
    """Ours over theirs, taken within each repetition: median, smallest, largest."""
    return spread([one[key] / other[key] for one, other in zip(ours, theirs, strict=True)])


def summarise(pairs: dict[int, list[tuple[Sample, Sample]]]) -> list[dict[str, Any]]:
    """Medians and spreads of (Headrace, echo) per number of connections; ratios are taken within a repetition."""
    rows = []
    for connections, samples in pairs.items():
        ours, theirs = [asdict(one) for one, _ in samples], [asdict(other) for _, other in samples]
        rows.append(
            {
                "connections": connections,
                "headrace_requests_per_s": spread([each["requests_per_s"] for each in ours]),
                "echo_requests_per_s": spread([each["requests_per_s"] for each in theirs]),
                "requests_ratio": ratios(ours, theirs, "requests_per_s"),
                "headrace_p50_s": spread([each["p50_s"] for each in ours]),
                "headrace_p99_s": spread([each["p99_s"] for each in ours]),
                "echo_p99_s": spread([each["p99_s"] for each in theirs]),
                "p99_ratio": ratios(ours, theirs, "p99_s"),
                "errors": sum(each["errors"] for each in (*ours, *theirs)),
                "generator_cpu_share": max(each["generator_cpu_share"] for each in (*ours, *theirs)),
                "samples": [{"headrace": one, "echo": other} for one, other in zip(ours, theirs, strict=True)],
            }
        )
    return rows


# ----------------------------------------------------------------------------------------------------------- verdicts


def judge(results: Mapping[str, Any]) -> list[Verdict]:
    """Every acceptance figure, measured or not.

    Args:
        results: As `bench.bench` returns them; parts that were not run are missing.
    """
    verdicts = []

    def add(figure: str, wanted: float, is_least: bool, found: Mapping[str, float] | None, note: str) -> None:
        if found is None:
            verdicts.append(Verdict(figure, wanted, is_least, None, note))
        else:
            between = f"{_short(found['min'])}–{_short(found['max'])}"
            verdicts.append(Verdict(figure, wanted, is_least, found["median"], between))

    pairs = {row["connections"]: row for row in results.get("echo", ())}
    for connections in (16, 64):
        row = pairs.get(connections)
        add(
            f"requests/s over the bare echo, {connections} connections", 0.35, True, row and row["requests_ratio"],
            "not run",
        )  # fmt: skip
    for name, factor in PEER_FACTORS.items():
        found, note = _over_peer(results, "tabular", 16, name)
        add(f"requests/s over {_title(results, name)}, 16 connections", factor, True, found, note)
    row = pairs.get(16)
    add("p99 over the bare echo's, 16 connections", 3.0, False, row and row["p99_ratio"], "not run")
    for task, connections, factor, figure in (
        ("tabular", 1, 8.0, "one connection: requests/s over the best of these peers"),
        ("cnn", 16, 1.0, "10 ms CNN, 16 connections: requests/s over the best peer"),
    ):
        names = list(PEER_FACTORS) if task == "tabular" else [peer["name"] for peer in results.get("peers", ())]
        best = _best(results, task, connections, names)
        found, note = _over_peer(results, task, connections, best) if best else (None, "no peer was measured")
        add(f"{figure} ({_title(results, best)})" if best else figure, factor, True, found, note)
    forms, durability = results.get("forms"), results.get("durability")
    add("binary tensors over JSON, 64 rows a request", 3.0, True, forms and forms["ratio"], "not run")
    if durability and durability["filesystem"] in ("tmpfs", "ramfs", "overlay"):
        add("strict over buffered records", 0.6, True, None, f"the home lies on {durability['filesystem']}")
    else:
        add(
            "strict over buffered records, 64 connections", 0.6, True, durability and durability["ratio"], "not run"
        )  # fmt: skip
    shares = results.get("profile", {}).get("cpu_by_stage")
    verdicts.append(
        Verdict(
            "CPU of all stages but parse, model and write, share of the worker's time",
            0.40,
            False,
            stages_share(shares) if shares else None,
            "" if shares else results.get("profile", {}).get("note", "not run"),
        )
    )
    own = next((each for each in results.get("starts", ()) if each["name"] == "headrace"), None)
    add("first reply after start, seconds", 1.5, False, own and own["first_reply_s"], "not run")
    megabytes = own and {key: value / MB for key, value in own["worker_rss_bytes"].items()}
    add("idle memory of a worker (resident), MB", 100.0, False, megabytes, "not run")
    return verdicts


def stages_share(shares: Mapping[str, float]) -> float:
    """Share of the worker's time that the stages take, without parse, model, write, and the event loop itself."""
    return sum(share for stage, share in shares.items() if stage not in FREE_STAGES)


def _rows(results: Mapping[str, Any], task: str, connections: int) -> dict[str, Any]:
    rows: dict[str, Any] = results.get("servers", {}).get(task, {}).get(str(connections), {})
    return rows


def _best(results: Mapping[str, Any], task: str, connections: int, names: Sequence[str]) -> str | None:
    rows = _rows(results, task, connections)
    rates = {name: rows[name]["requests_per_s"]["median"] for name in names if name in rows}
    return max(rates, key=lambda name: rates[name]) if rates else None


def _over_peer(
    results: Mapping[str, Any], task: str, connections: int, name: str
) -> tuple[dict[str, float] | None, str]:
    rows = _rows(results, task, connections)
    if name in rows and "headrace" in rows:
        return ratios(rows["headrace"]["samples"], rows[name]["samples"], "requests_per_s"), ""
    peers = {peer["name"]: peer for peer in results.get("peers", ())}
    return None, peers.get(name, {}).get("reason") or "not run"


def _title(results: Mapping[str, Any], name: str) -> str:
    return next((peer["title"] for peer in results.get("peers", ()) if peer["name"] == name), TITLES.get(name, name))


# --------------------------------------------------------------------------------------------------------------- text


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _cell(values: Mapping[str, float], scale: float = 1.0, show: Callable[[float], str] = _short) -> str:
    middle, least, most = (show(values[key] * scale) for key in ("median", "min", "max"))
    return f"{middle} ({least}–{most})"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A Markdown table; the first `left` columns are texts."""
    rule = "|".join("---" if column < left else "---:" for column in range(len(heads)))
    return [f"| {' | '.join(heads)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows), ""]


def report_lines(results: Mapping[str, Any]) -> list[str]:
    """`results.md`."""
    lines = [
        "# Headrace beside its peers" if results.get("peers") else "# Headrace over a bare echo",
        "",
        f"Made by `{results['command']}` on {results['date'][:10]} in {results['took_s'] / 60:.0f} minutes; nothing "
        "below was typed. Medians, with the smallest and the largest repetition in brackets. Keep the ratios: the "
        "rates belong to the machine.",
        "",
        "## Acceptance figures",
        "",
        *_verdict_table([each for each in judge(results) if results.get("echo") or each.measured is not None]),
    ]
    if results.get("plot"):
        lines += [f"![Requests per second of every server]({results['plot']})", ""]
    lines += _echo_lines(results)
    for task, heading in (("tabular", "Side by side: tabular model"), ("cnn", "Side by side: 10 ms CNN")):
        lines += _server_lines(results, task, heading)
    lines += _tried_lines(results) + _own_lines(results) + _start_lines(results) + _profile_lines(results)
    return lines + _method_lines(results)


def _verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    words = {True: "yes", False: "**no**", None: "not measured"}
    rows = []
    for each in verdicts:
        measured = "–" if each.measured is None else _short(each.measured)
        bound = f"{'≥' if each.is_least else '≤'} {each.wanted:g}"
        rows.append([each.figure, bound, measured, each.note, words[each.is_met]])
    return _table(["figure", "wanted", "measured", "spread, or why not", "met"], rows)


def _echo_lines(results: Mapping[str, Any]) -> list[str]:
    if not results.get("echo"):
        return []
    rows = [
        [
            str(each["connections"]), _cell(each["echo_requests_per_s"]), _cell(each["headrace_requests_per_s"]),
            f"**{_cell(each['requests_ratio'])}**", _cell(each["echo_p99_s"], 1e3), _cell(each["headrace_p99_s"], 1e3),
            _cell(each["p99_ratio"]), f"{each['generator_cpu_share']:.0%}",
        ]
        for each in results["echo"]
    ]  # fmt: skip
    errors = sum(each["errors"] for each in results["echo"])
    most = max(each["generator_cpu_share"] for each in results["echo"])
    verdict = (
        "so it was not the bottleneck" if most < GENERATOR_SHARE_MAX
        else "**so it may have been the bottleneck and the ratios may flatter Headrace**"
    )  # fmt: skip
    return [
        "## One core: what Headrace's work costs", "",
        "A is `headrace serve --workers 1`; B answers A's own bytes from `httptools` and `uvloop` without doing "
        "anything for them. Each alone on one core, the generator on another, measured in turn A B A B.", "",
        *_table(
            ["connections", "echo, requests/s", "Headrace, requests/s", "ratio", "echo p99, ms", "Headrace p99, ms",
             "ratio", "generator CPU"], rows, left=0,
        ),
        f"Requests not answered with 200: {errors}. {results['placement']} The generator ({results['generator']}) took "
        f"at most {most:.0%} of its core, {verdict}.", "",
    ]  # fmt: skip


def _server_lines(results: Mapping[str, Any], task: str, heading: str) -> list[str]:
    groups: Mapping[str, Any] = results.get("servers", {}).get(task, {})
    if not groups:
        return []
    lines = [f"## {heading}", "", results["tasks"][task], ""]
    for connections, rows in groups.items():
        ours = rows.get("headrace")
        order = sorted(rows, key=lambda name: -rows[name]["requests_per_s"]["median"])
        table = []
        for name in order:
            row = rows[name]
            factor = (
                ""
                if name == "headrace" or not ours
                else _cell(ratios(ours["samples"], row["samples"], "requests_per_s"))
            )
            latencies = [_cell(row["p50_s"], 1e3), _cell(row["p99_s"], 1e3)]
            rate = _cell(row["requests_per_s"])
            table.append([_title(results, name), row["variant"], rate, factor, *latencies, str(row["errors"])])
        heads = ["server", "form", "requests/s", "Headrace over it", "p50, ms", "p99, ms", "not 200"]
        lines += [f"**{connections} connection{'s' if connections != '1' else ''}**", "", *_table(heads, table, left=2)]
    lost = []
    for connections, rows in groups.items():
        for name in rows.keys() - {"headrace", "echo"}:
            factor = rows[name]["requests_per_s"]["median"] / rows["headrace"]["requests_per_s"]["median"]
            if factor > 1:
                lost.append(f"{_title(results, name)} at {connections} ({factor:.2f} ×)")
    return [*lines, f"Peers that were faster than Headrace here: {', '.join(lost) or 'none'}.", ""]


def _tried_lines(results: Mapping[str, Any]) -> list[str]:
    tried = results.get("tried", ())
    missing = [
        f"* **{peer['title']}**: not measured: {peer['reason']}" for peer in results.get("peers", ()) if peer["reason"]
    ]
    if not tried:
        return missing
    rows = [
        [
            _title(results, each["name"]), each["variant"], each["task"],
            *(_short(each["requests_per_s"].get(key, math.nan)).replace("nan", "") for key in ("1", "16", "64")),
            each["reason"],
        ]
        for each in tried
    ]  # fmt: skip
    return [
        "## Forms of configuration that were tried", "",
        "Each peer's forms were measured once, shortly, in this run; above stands the best one for each model and "
        "number of connections.", "",
        *_table(["peer", "form", "model", "1 connection", "16", "64", "trouble"], rows, left=3), *missing, "",
    ]  # fmt: skip


def _own_lines(results: Mapping[str, Any]) -> list[str]:
    lines = []
    if forms := results.get("forms"):
        lines += [
            "## Binary tensors and JSON", "",
            f"Headrace on one core, {forms['rows']} rows a request, {forms['connections']} connections: JSON "
            f"{_cell(forms['json']['requests_per_s'])} requests/s, binary {_cell(forms['binary']['requests_per_s'])}, "
            f"ratio {_cell(forms['ratio'])}.", "",
        ]  # fmt: skip
    if durability := results.get("durability"):
        lines += [
            "## Records before answers", "",
            f"Headrace with all cores, {durability['connections']} connections, state on {durability['filesystem']} "
            f"({durability['device']}; one synchronised write of 4 kB takes {durability['sync_s'] * 1e3:.2f} ms "
            f"there): " + "; ".join(
                f"{name} {_cell(durability[name]['requests_per_s'])} requests/s, "
                f"p99 {_cell(durability[name]['p99_s'], 1e3)} ms" for name in ("buffered", "strict")
            ) + f"; ratio {_cell(durability['ratio'])}.", "",
        ]  # fmt: skip
    return lines


def _start_lines(results: Mapping[str, Any]) -> list[str]:
    if not results.get("starts"):
        return []
    rows = [
        [
            _title(results, each["name"]), each["variant"], _cell(each["first_reply_s"]),
            _cell(each["worker_rss_bytes"], 1 / MB), _short(median(each["total_bytes"]) / MB), str(each["processes"]),
            f"{max(each['idle_cpu_share']):.1%}",
        ]
        for each in results["starts"]
    ]  # fmt: skip
    return [
        "## Start, memory, idling", "",
        "From the start of the process to the first right answer over HTTP; memory after the load, idle. A worker is "
        "the largest process of a server; the total counts shared pages once.", "",
        *_table(["server", "form", "first reply, s", "worker, resident MB", "all processes, MB", "processes",
                 "idle CPU, of one core"], rows, left=2),
    ]  # fmt: skip


def _profile_lines(results: Mapping[str, Any]) -> list[str]:
    found = results.get("profile")
    if not found:
        return []
    elapsed = [f"{found['request_s'] * 1e6:,.0f}", *(f"{seconds * 1e6:,.0f}" for seconds in found["stages_s"].values())]
    lines = [
        "## Where the time goes", "",
        f"Mean per request at {found['connections']} connections, one worker on one core, µs of elapsed time; a "
        "batch's run counts for each of its requests.", "",
        *_table(
            ["total", *found["stages_s"], "worker CPU", "rows in a batch"],
            [[*elapsed, f"{found['cpu_s'] * 1e6:,.0f}", f"{found['batch_rows']:,.1f}"]], left=0,
        ),
    ]  # fmt: skip
    shares = found.get("cpu_by_stage")
    if not shares:
        return [*lines, f"By stage: {found.get('note')}.", ""]
    stages = [
        [stage, f"{share:.1%}", f"{share * found['cpu_s'] * 1e6:.1f}", "" if stage in FREE_STAGES else "yes"]
        for stage, share in shares.items()
    ]
    functions = [
        [f"`{each['function']}`", f"{each['self_share']:.1%}", f"{each['total_share']:.1%}"]
        for each in found["functions"]
    ]
    return [
        *lines,
        f"The worker's processor time by stage, from {found['samples']:,} samples of py-spy. `loop` is uvloop itself: "
        "epoll, reading sockets, callbacks; a bare echo spends it too, so it is no stage and not in the sum of those "
        "that count "
        f"(**{stages_share(shares):.1%}**; with the loop {stages_share(shares) + shares['loop']:.1%}).", "",
        *_table(["stage", "share", "µs a request", "counts"], stages),
        *_table(["function", "on top", "on the stack"], functions),
    ]  # fmt: skip


def _method_lines(results: Mapping[str, Any]) -> list[str]:
    facts = "; ".join(f"{name} {value}" for name, value in results["machine"].items())
    peers = [
        f"* {peer['title']}: {', '.join(f'{name} {version}' for name, version in peer['versions'].items())}; "
        f"see [{peer['file'].rpartition('/')[2]}]({peer['file']})"
        for peer in results.get("peers", ())
    ]
    return [
        "## Method", "",
        f"Machine: {facts}. Generator: {results['generator']}.", "",
        "Every server runs the same ONNX file in ONNX Runtime with one thread a worker, answers both outputs, and is "
        "checked against ONNX Runtime's own numbers before it is measured. Headrace has everything on that it has by "
        "default: validation, deadline-aware batching, metrics, buffered records. A peer speaks the Open Inference "
        "Protocol where it can, else its own JSON with the same numbers. Side by side, every server is started afresh "
        "for each measurement, has all cores as it would be deployed, and shares them with the generator, which costs "
        "the fastest server most; the order rotates between repetitions. wrk is a closed loop: its latencies compare "
        "servers, they are no user's.", "",
        *peers, *([""] if peers else []),
        f"Again: `scripts/bench` ({results['repetitions']} repetitions of {results['seconds']:g} s; more for the "
        "echo); `--quick` without peers; `--peers mlserver,litserve` for some. The raw figures are in `results.json` "
        "beside this page.",
    ]  # fmt: skip


def plot(results: Mapping[str, Any]) -> str | None:
    """The chart of the side-by-side runs of the tabular model; None without them."""
    groups: Mapping[str, Any] = results.get("servers", {}).get("tabular", {})
    panels = {
        f"{connections} connection{'s' if connections != '1' else ''}": {
            _title(results, name): tuple(row["requests_per_s"][key] for key in ("median", "min", "max"))
            for name, row in rows.items()
        }
        for connections, rows in groups.items()
    }
    names = sorted(
        {name for panel in panels.values() for name in panel},
        key=lambda name: -max(panel.get(name, (0.0,))[0] for panel in panels.values()),
    )
    if len(names) < 2:
        return None
    note = "Tabular ONNX model, 30 features, 100 trees; JSON; cores shared with the generator; logarithmic; medians"
    return chart("Requests per second", note, panels, names)
