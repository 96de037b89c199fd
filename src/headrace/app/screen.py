"""The start screen: what is served, where, how fast, how much, and what is wrong. As wide as the terminal, at most 80.

Lines are built as plain text with marks of meaning; a terminal gets them in colour through rich, anything else gets
the same text. Both are imported while the workers load, so the screen costs no time to the first answer.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, Literal

from headrace.app.example import base_url, example_request, fetch_metadata, host_in_url, json_lines
from headrace.app.observe import age_s, is_serving
from headrace.config import Settings
from headrace.home import Home
from headrace.report import ReplicaReport, WorkerReport

Mark = Literal["", "title", "good", "bad", "dim", "link"]
Line = tuple[tuple[str, Mark], ...]

COLUMNS: Final = 80
COLUMNS_MIN: Final = 40  # a narrower terminal wraps by itself
LABELS_MAX: Final = 8
RUN_S_MIN: Final = 1e-7  # no run is shorter: what is below was not measured
BLOCKS_MAX: Final = 4  # more endpoints than this are counted, not described
_STYLES: Final[dict[Mark, str]] = {
    "": "",
    "title": "bold",
    "good": "green",
    "bad": "bold yellow",
    "dim": "dim",
    "link": "cyan",
}
_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class StartScreen:
    """Writes to standard output."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._can_redraw = self._is_terminal and os.environ.get("TERM", "dumb") != "dumb"
        self._ready_s: float | None = None
        # Counted from the moment the command was typed, not from this line.
        self._began_s = time.monotonic() - age_s(os.getpid())
        self._frames = 0

    @property
    def tick_s(self) -> float:
        return 0.1 if self._can_redraw else 0.02

    def loading(self, reports: Sequence[WorkerReport]) -> None:
        """A spinner with what is being loaded; nothing when the output is no terminal."""
        if not self._can_redraw:
            return
        frame = _FRAMES[self._frames % len(_FRAMES)]
        self._frames += 1
        text = f"{frame} {progress(reports)} · {time.monotonic() - self._began_s:.1f} s"
        # Back to the first column, so that what is logged meanwhile does not hang on to our line.
        _write("\r\x1b[2K" + text[: self._columns() - 1] + "\r")

    def ready(self, home: Home, settings: Settings, reports: Sequence[WorkerReport]) -> None:
        """The screen itself."""
        self._clear()
        metadata: dict[str, dict[str, Any] | None] = {}
        for name in _default_names(reports)[:BLOCKS_MAX]:
            metadata[name] = fetch_metadata(settings, name)
            if metadata[name] is None:
                break  # one that does not answer within a second is enough to wait for
        self._ready_s = time.monotonic()
        lines = start_lines(settings, reports, metadata, self._ready_s - self._began_s, self._columns())
        if self._is_terminal:
            _print_colour(lines)
        else:
            _write("\n".join("".join(text for text, _ in line) for line in lines) + "\n")

    def close(self) -> None:
        """Take the spinner away; to whoever read the screen, say that it is over."""
        self._clear()
        if self._ready_s is not None and self._is_terminal:
            _write(f"\nHeadrace has stopped; it was up for {_span(time.monotonic() - self._ready_s)}\n")
        self._ready_s = None

    def _clear(self) -> None:
        if self._frames:
            _write("\r\x1b[2K")
            self._frames = 0

    def _columns(self) -> int:
        """Columns to use: those of the terminal, at most 80; 80 when there is none."""
        try:
            width = os.get_terminal_size(sys.stdout.fileno()).columns
        except (OSError, ValueError):
            return COLUMNS
        return max(COLUMNS_MIN, min(COLUMNS, width)) if width else COLUMNS


def progress(reports: Sequence[WorkerReport]) -> str:
    """One phrase on what is happening."""
    replicas = [replica for report in reports for replica in report.replicas]
    busy = sorted({replica.endpoint for replica in replicas if replica.state.value in ("loading", "warming")})
    if not busy:
        return "starting workers"
    is_warming = any(replica.state.value == "warming" for replica in replicas)
    return ("measuring " if is_warming else "loading ") + ", ".join(busy)


def start_lines(
    settings: Settings,
    reports: Sequence[WorkerReport],
    metadata: dict[str, dict[str, Any] | None],
    started_s: float,
    columns: int = COLUMNS,
) -> list[Line]:
    """The whole screen.

    Args:
        reports: Of every worker.
        metadata: Model metadata by endpoint, for inputs and outputs; None where it could not be had.
        started_s: Time from start to ready.
        columns: Widest line, where the content can be broken.
    """
    serving = [report for report in reports if is_serving(report)]
    base = base_url(settings)
    names = _default_names(reports)
    lines: list[Line] = [*_heading(reports, started_s, columns)]
    for name in names[:BLOCKS_MAX]:
        lines += [(), *_endpoint_lines(name, serving, metadata.get(name), columns)]
    if len(names) > BLOCKS_MAX:
        more = f"and {len(names) - BLOCKS_MAX} more endpoints: headrace get endpoints shows all"
        lines += [(), ((more, ""),)]
    lines += [(), *_failed_lines(reports, columns)]
    first = next(iter(names), None)
    if first is not None:
        lines += _address_lines(base, names, settings, metadata.get(first), columns)
    workers = f"{_count(len(serving), 'worker')} × {_count(settings.threads, 'thread')}"
    if len(serving) < settings.workers:
        workers += f" ({settings.workers - len(serving)} not up)"
    lines += [
        (("metrics  ", "dim"), (f"http://{host_in_url(settings.admin_host)}:{settings.admin_port}/metrics", "link")),
        (("workers  ", "dim"), (workers, "")),
        *_labelled("stop     ", "Ctrl-C finishes requests in flight; twice stops at once", columns),
    ]
    return lines


def _heading(reports: Sequence[WorkerReport], started_s: float, columns: int) -> list[Line]:
    if any(report.state == "ready" for report in reports):
        return [(("Headrace", "title"), (f" is ready after {started_s:.1f} s", ""))]
    # Load balancers are told the same: ready asks for every endpoint of the first snapshot.
    first, *more = _wrap("Headrace serves what it can, and is not ready: a model failed to load", columns)
    return [(("Headrace", "title"), (first.removeprefix("Headrace"), "bad")), *(((line, "bad"),) for line in more)]


def _default_names(reports: Sequence[WorkerReport]) -> list[str]:
    return sorted(
        {replica.endpoint for report in reports for replica in report.replicas if replica.state.value == "ready"}
    )


def _endpoint_lines(
    name: str, reports: Sequence[WorkerReport], metadata: dict[str, Any] | None, columns: int
) -> list[Line]:
    replicas = [
        replica
        for report in reports
        for replica in report.replicas
        if replica.endpoint == name and replica.state.value == "ready"
    ]
    if not replicas:
        return []
    default = next((replica for replica in replicas if replica.is_default), replicas[0])
    others = sorted({replica.version for replica in replicas} - {default.version})
    also = f" (also {', '.join(others)})" if others else ""
    objective = f"SLO {default.slo}" if default.slo else f"no SLO; deadline {_duration(default.deadline_s)}"
    lines: list[Line] = [((name, "title"), (f"  version {default.version}{also} · {objective}", ""))]
    if metadata is not None:
        lines += [(("  in     ", "dim"), (text, "")) for text in _tensors(metadata.get("inputs"), columns)]
        lines += [(("  out    ", "dim"), (text, "")) for text in _tensors(metadata.get("outputs"), columns)]
        lines += _label_lines(metadata, columns)
    lines += _speed_lines(default, [replica for replica in replicas if replica.version == default.version], columns)
    return lines


def _label_lines(metadata: dict[str, Any], columns: int) -> list[Line]:
    """The class labels, and a warning when there are more or fewer of them than classes."""
    labels = [str(label) for label in (metadata.get("parameters") or {}).get("labels") or []]
    if not labels:
        return []
    shown = ", ".join(labels[:LABELS_MAX]) + (f", … ({len(labels)} in all)" if len(labels) > LABELS_MAX else "")
    lines = _labelled("  labels ", shown, columns)
    scores = {
        tensor["name"]: tensor["shape"][-1]
        for tensor in metadata.get("outputs") or []
        if tensor["datatype"].startswith("FP") and len(tensor["shape"]) > 1 and tensor["shape"][-1] > 1
    }
    if scores and len(labels) not in scores.values():
        wide = ", ".join(f"{name} has {width} columns" for name, width in scores.items())
        text = f"warning: {_count(len(labels), 'label')}, but {wide}; accepted: one label per class, in their order"
        lines += [(("  ", ""), (part, "bad")) for part in _wrap(text, columns - 2)]
    return lines


def _labelled(label: str, text: str, columns: int, mark: Mark = "") -> list[Line]:
    """A label of nine columns and its text; lines that follow are indented under the text."""
    first, *more = _wrap(text, columns - 9)
    return [((label, "dim"), (first, mark)), *(((" " * 9, ""), (line, mark)) for line in more)]


def _speed_lines(default: ReplicaReport, replicas: Sequence[ReplicaReport], columns: int) -> list[Line]:
    one_s = default.base_s + default.per_row_s
    is_batched = default.batching in ("", "batched")
    is_measured = one_s >= RUN_S_MIN
    curve = f"{'1 row' if is_batched else 'a request'} {_duration(one_s)}" if is_measured else "not measured"
    if default.rows_max > 1:
        curve += f", {default.rows_max} rows {_duration(default.base_s + default.per_row_s * default.rows_max)}"
        curve += f" · batches up to {default.rows_max}"
    elif default.batching == "batched":
        curve += " · largest batch 1 row"
    elif not is_batched:
        curve += f" · {default.batching}"
    rate = sum(replica.sustainable_rate for replica in replicas)
    lines = _labelled("  speed  ", curve, columns)
    if default.lossy_rate is None and is_measured:
        # Measured with requests of one row each; larger ones carry more rows for the same work.
        kind = "one-row requests/s" if is_batched else "requests/s"
        load = f"sustains {rate:,.0f} {kind} over {_count(len(replicas), 'worker')}"
        lines += _labelled("  load   ", load, columns, "good")
    if provider := default.facts.get("provider") or default.facts.get("providers"):
        place = "on the event loop" if default.is_inline else "on a thread of its own"
        lines += _labelled("  runs   ", f"{provider}, {place}", columns)
    if default.lossy_rate is not None:
        lossy_rate = sum(replica.lossy_rate or 0.0 for replica in replicas)
        text = (
            f"warning: the SLO leaves {_duration(default.deadline_s)}, less than two runs of {_duration(one_s)}. "
            + (f"99 % make it up to {lossy_rate:,.0f} requests/s" if lossy_rate >= 1 else "Hardly any make it")
            + f"; an SLO of {_duration(2.2 * one_s)} or more would hold at the full rate."
        )
        lines += [(("  ", ""), (part, "bad")) for part in _wrap(text, columns - 2)]
    return lines


def _failed_lines(reports: Sequence[WorkerReport], columns: int) -> list[Line]:
    failed = {
        (replica.endpoint, replica.version): replica.problem
        for report in reports
        for replica in report.replicas
        if replica.state.value == "failed"
    }
    lines: list[Line] = []
    for (endpoint, version), problem in sorted(failed.items()):
        text = f"failed: {endpoint} version {version}: {problem}"
        lines += [((part, "bad"),) for part in _wrap(text, columns)]
    return [*lines, ()] if lines else []


def _address_lines(
    base: str, names: Sequence[str], settings: Settings, metadata: dict[str, Any] | None, columns: int
) -> list[Line]:
    url = f"{base}/v2/models/{names[0]}/infer"
    pattern = url if len(names) == 1 else f"{base}/v2/models/NAME/infer"
    lines: list[Line] = [(("serving  ", "dim"), (pattern, "link"))]
    example = example_request(metadata)
    if example is not None:
        insecure = "-k " if settings.tls_cert else ""
        start = [f"curl {insecure}{url} -d '"]
        if len(start[0]) + 9 > columns:
            start = [f"curl {insecure}\\", f"{url} -d '"]
        lines += [(("try      ", "dim"), (start[0], "")), *(((part, ""),) for part in start[1:])]
        # Line breaks inside the quotes are white space of the JSON, so the lines paste as one command.
        lines += [((part, ""),) for part in json_lines(example, columns)]
    return lines


def _tensors(tensors: object, columns: int) -> list[str]:
    if not isinstance(tensors, list):
        return []
    texts = [
        f"{tensor['name']} {tensor['datatype']} [{', '.join('any' if d < 0 else str(d) for d in tensor['shape'])}]"
        for tensor in tensors
    ]
    more = [f"… and {len(texts) - 4} more"] if len(texts) > 4 else []
    return [text[: columns - 9] for text in texts[:4]] + more


def _duration(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _wrap(text: str, columns: int) -> list[str]:
    import textwrap  # with the rest of the screen, after the workers were started

    return textwrap.wrap(" ".join(text.split()), columns) or [""]


def _print_colour(lines: Sequence[Line]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print()
    for line in lines:
        console.print(Text.assemble(*((text, _STYLES[mark]) for text, mark in line)), soft_wrap=True)
    console.print()


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        pass  # whoever read us is gone; that is no reason to stop serving
