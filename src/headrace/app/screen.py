"""The start screen: what is served, where, how fast, how much, and what is wrong. At most 80 columns, once.

Lines are built as plain text with marks of meaning; a terminal gets them in colour through rich, anything else gets
the same text. Both are imported while the workers load, so the screen costs no time to the first answer.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, Literal

from headrace.app.observe import age_s, is_serving
from headrace.config import Settings
from headrace.home import Home
from headrace.report import ReplicaReport, WorkerReport

Mark = Literal["", "title", "good", "bad", "dim", "link"]
Line = tuple[tuple[str, Mark], ...]

COLUMNS: Final = 80
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
_SAMPLES: Final[dict[str, object]] = {"BOOL": True, "BYTES": "text"}


class StartScreen:
    """Writes to standard output."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        # Counted from the moment the command was typed, not from this line.
        self._began_s = time.monotonic() - age_s(os.getpid())
        self._frames = 0

    @property
    def tick_s(self) -> float:
        return 0.1 if self._is_terminal else 0.02

    def loading(self, reports: Sequence[WorkerReport]) -> None:
        """A spinner with what is being loaded; nothing when the output is no terminal."""
        if not self._is_terminal:
            return
        frame = _FRAMES[self._frames % len(_FRAMES)]
        self._frames += 1
        text = f"{frame} {progress(reports)} · {time.monotonic() - self._began_s:.1f} s"
        _write("\r\x1b[2K" + text[: COLUMNS - 1])

    def ready(self, home: Home, settings: Settings, reports: Sequence[WorkerReport]) -> None:
        """The screen itself."""
        self.close()
        metadata: dict[str, dict[str, Any] | None] = {}
        for name in _default_names(reports)[:BLOCKS_MAX]:
            metadata[name] = fetch_metadata(settings, name)
            if metadata[name] is None:
                break  # one that does not answer within a second is enough to wait for
        lines = start_lines(settings, reports, metadata, time.monotonic() - self._began_s)
        if self._is_terminal:
            _print_colour(lines)
        else:
            _write("\n".join("".join(text for text, _ in line) for line in lines) + "\n")

    def close(self) -> None:
        """Take the spinner away."""
        if self._is_terminal and self._frames:
            _write("\r\x1b[2K")
            self._frames = 0


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
) -> list[Line]:
    """The whole screen.

    Args:
        reports: Of every worker.
        metadata: Model metadata by endpoint, for inputs and outputs; None where it could not be had.
        started_s: Time from start to ready.
    """
    serving = [report for report in reports if is_serving(report)]
    base = base_url(settings)
    names = _default_names(reports)
    lines: list[Line] = [_heading(reports, started_s)]
    for name in names[:BLOCKS_MAX]:
        lines += [(), *_endpoint_lines(name, serving, metadata.get(name))]
    if len(names) > BLOCKS_MAX:
        more = f"and {len(names) - BLOCKS_MAX} more endpoints: headrace get endpoints shows all"
        lines += [(), ((more, ""),)]
    lines += [(), *_failed_lines(reports)]
    first = next(iter(names), None)
    if first is not None:
        lines += _address_lines(base, first, settings, metadata.get(first))
    workers = f"{_count(len(serving), 'worker')} × {_count(settings.threads, 'thread')}"
    if len(serving) < settings.workers:
        workers += f" ({settings.workers - len(serving)} not up)"
    lines += [
        (("metrics  ", "dim"), (f"http://{_host(settings.admin_host)}:{settings.admin_port}/metrics", "link")),
        (("workers  ", "dim"), (workers, "")),
        (("stop     ", "dim"), ("Ctrl-C finishes requests in flight; twice stops at once", "")),
    ]
    return lines


def _heading(reports: Sequence[WorkerReport], started_s: float) -> Line:
    if any(report.state == "ready" for report in reports):
        return (("Headrace", "title"), (f" is ready after {started_s:.1f} s", ""))
    # Load balancers are told the same: ready asks for every endpoint of the first snapshot.
    return (("Headrace", "title"), (" serves what it can, and is not ready: a model failed to load", "bad"))


def _default_names(reports: Sequence[WorkerReport]) -> list[str]:
    return sorted(
        {replica.endpoint for report in reports for replica in report.replicas if replica.state.value == "ready"}
    )


def _endpoint_lines(name: str, reports: Sequence[WorkerReport], metadata: dict[str, Any] | None) -> list[Line]:
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
        lines += [(("  in     ", "dim"), (text, "")) for text in _tensors(metadata.get("inputs"))]
        lines += [(("  out    ", "dim"), (text, "")) for text in _tensors(metadata.get("outputs"))]
    lines += _speed_lines(default, [replica for replica in replicas if replica.version == default.version])
    return lines


def _speed_lines(default: ReplicaReport, replicas: Sequence[ReplicaReport]) -> list[Line]:
    one_s = default.base_s + default.per_row_s
    curve = f"1 row {_duration(one_s)}"
    if default.rows_max > 1:
        curve += f", {default.rows_max} rows {_duration(default.base_s + default.per_row_s * default.rows_max)}"
        curve += f" · batches up to {default.rows_max}"
    elif default.batching and default.batching != "batched":
        curve += f" · not batched: {default.batching}"
    rate = sum(replica.sustainable_rate for replica in replicas)
    lines: list[Line] = [(("  speed  ", "dim"), (text, "")) for text in _wrap(curve)]
    if default.lossy_rate is None:
        load = f"sustains {rate:,.0f} rows/s over {_count(len(replicas), 'worker')}"
        lines.append((("  load   ", "dim"), (load, "good")))
    if provider := default.facts.get("provider") or default.facts.get("providers"):
        lines.append((("  runs   ", "dim"), (provider[: COLUMNS - 9], "")))
    if default.lossy_rate is not None:
        lossy_rate = sum(replica.lossy_rate or 0.0 for replica in replicas)
        text = (
            f"warning: the SLO leaves {_duration(default.deadline_s)}, less than two runs of {_duration(one_s)}. "
            f"99 % make it up to {lossy_rate:,.0f} rows/s; an SLO of {_duration(2.2 * one_s)} or more would hold "
            "at the full rate."
        )
        lines += [(("  ", ""), (part, "bad")) for part in _wrap(text, COLUMNS - 2)]
    return lines


def _failed_lines(reports: Sequence[WorkerReport]) -> list[Line]:
    failed = {
        (replica.endpoint, replica.version): replica.problem
        for report in reports
        for replica in report.replicas
        if replica.state.value == "failed"
    }
    lines: list[Line] = []
    for (endpoint, version), problem in sorted(failed.items()):
        text = f"failed: {endpoint} version {version}: {problem}"
        lines += [((part, "bad"),) for part in _wrap(text, COLUMNS)]
    return [*lines, ()] if lines else []


def _address_lines(base: str, name: str, settings: Settings, metadata: dict[str, Any] | None) -> list[Line]:
    url = f"{base}/v2/models/{name}/infer"
    lines: list[Line] = [(("serving  ", "dim"), (url, "link"))]
    example = example_request(metadata)
    if example is not None:
        insecure = "-k " if settings.tls_cert else ""
        lines.append((("try      ", "dim"), (f"curl {insecure}{url} -d '", "")))
        # Line breaks inside the quotes are white space of the JSON, so the lines paste as one command.
        lines += [((part, ""),) for part in _json_lines(example)]
    return lines


def _json_lines(request: dict[str, Any]) -> list[str]:
    """JSON in lines of at most 80 columns, broken between values only."""
    pieces: list[str] = []
    for index, tensor in enumerate(request["inputs"]):
        head = json.dumps({key: value for key, value in tensor.items() if key != "data"}, separators=(",", ":"))
        pieces += ['{"inputs":[' + head[:-1] if index == 0 else head[:-1], '"data":[' + _json(tensor["data"][0])]
        pieces += [_json(value) for value in tensor["data"][1:]]
        pieces[-1] += "]}" if index < len(request["inputs"]) - 1 else "]}]}'"
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) + 2 > COLUMNS:
            lines[-1] += ","
            lines.append(piece)
        else:
            lines[-1] += f",{piece}"
    return lines


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def example_request(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """A request of one row that the model takes; None when its inputs are not known or too large to paste."""
    inputs = [] if metadata is None else metadata.get("inputs") or []
    tensors = []
    for tensor in inputs:
        shape = [1 if dimension < 0 else dimension for dimension in tensor["shape"]]
        count = 1
        for dimension in shape:
            count *= dimension
        if not 0 < count <= 128:
            return None
        data = [_SAMPLES.get(tensor["datatype"], 0)] * count
        tensors.append({"name": tensor["name"], "shape": shape, "datatype": tensor["datatype"], "data": data})
    return {"inputs": tensors} if tensors else None


def fetch_metadata(settings: Settings, name: str) -> dict[str, Any] | None:
    """Ask the data plane for a model's inputs and outputs; None when it does not say within a second."""
    host = settings.http_host if settings.http_host not in ("0.0.0.0", "::", "") else "localhost"
    import http.client  # 20 ms, paid after the workers were started

    connection: http.client.HTTPConnection
    if settings.tls_cert:
        import ssl

        # Only shapes are read, from our own socket, whose certificate names the outside.
        connection = http.client.HTTPSConnection(
            host, settings.http_port, timeout=1.0, context=ssl._create_unverified_context()
        )
    else:
        connection = http.client.HTTPConnection(host, settings.http_port, timeout=1.0)
    try:
        connection.request("GET", f"/v2/models/{name}")
        response = connection.getresponse()
        content = json.loads(response.read())
        return content if response.status == 200 and isinstance(content, dict) else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def base_url(settings: Settings) -> str:
    """Where the data plane is reached from this machine."""
    return f"{'https' if settings.tls_cert else 'http'}://{_host(settings.http_host)}:{settings.http_port}"


def _host(host: str) -> str:
    if host in ("0.0.0.0", "::", ""):
        return "localhost"
    return f"[{host}]" if ":" in host else host


def _tensors(tensors: object) -> list[str]:
    if not isinstance(tensors, list):
        return []
    texts = [
        f"{tensor['name']} {tensor['datatype']} [{', '.join('any' if d < 0 else str(d) for d in tensor['shape'])}]"
        for tensor in tensors
    ]
    more = [f"… and {len(texts) - 4} more"] if len(texts) > 4 else []
    return [text[: COLUMNS - 9] for text in texts[:4]] + more


def _duration(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _wrap(text: str, columns: int = COLUMNS - 9) -> list[str]:
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
