"""The catalogue of metrics, and the fold that turns records into most of them.

`CATALOGUE` is the one list: the exposition, `docs/reference/metrics.md` and the tests are made from it. What is not in
it is not exposed. Names here are without the prefix `headrace_`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Final, Literal

import numpy as np

from headrace.records import Record
from headrace.telemetry.slots import Cell, Histogram, SlotWriter
from headrace.types import Ending

PREFIX: Final = "headrace_"

Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["records", "ledger", "worker", "reader"]
Merge = Literal["sum", "min", "max"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: Without prefix; counters end in `_total`.
        kind: As Prometheus means it.
        source: Who counts: `records` (the fold below), `ledger` (received and endings), `worker` (its plane and
            process), `reader` (worked out while the metrics are read).
        help: One sentence.
        labels: Names.
        buckets: Upper bounds of a histogram.
        merge: How the values of several workers become one.
    """

    name: str
    kind: Kind
    source: Source
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    merge: Merge = "sum"


# 50 µs to 10 s in steps of at most 2: three per octave of the range where SLOs lie would be finer than anyone reads.
SECONDS_BUCKETS: Final = (
    50e-6, 75e-6, 100e-6, 150e-6, 250e-6, 500e-6, 750e-6,
    1e-3, 1.5e-3, 2.5e-3, 5e-3, 7.5e-3,
    10e-3, 15e-3, 25e-3, 50e-3, 75e-3,
    0.1, 0.15, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
ROWS_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

_VERSION: Final = ("endpoint", "model", "version")
STAGES: Final = ("decode", "queue", "run", "respond")

CATALOGUE: Final[tuple[Metric, ...]] = (
    Metric("received_total", "counter", "ledger", "Requests received.", ("endpoint",)),
    Metric(
        "requests_total", "counter", "records",
        "Requests ended, by ending and error code (empty when answered). code=worker_lost: held by a worker that died.",
        (*_VERSION, "ending", "code"),
    ),
    Metric("request_seconds", "histogram", "records", "Time from receipt to ending.", _VERSION, SECONDS_BUCKETS),
    Metric(
        "stage_seconds", "histogram", "records", "Time that requests spent in each stage that they reached.",
        ("endpoint", "stage"), SECONDS_BUCKETS,
    ),
    Metric("in_flight", "gauge", "ledger", "Requests received and not ended.", ("endpoint",)),
    Metric(
        "conservation_difference", "gauge", "ledger",
        "Requests received minus endings minus in flight; anything but zero is a defect of Headrace.", ("endpoint",),
    ),
    Metric("queue_requests", "gauge", "worker", "Requests waiting for a batch.", _VERSION),
    Metric(
        "batch_rows", "histogram", "records", "Rows of the batch that a request ran in, one observation per request.",
        _VERSION, ROWS_BUCKETS,
    ),
    Metric("rejected_total", "counter", "records", "Requests rejected, by error code.", (*_VERSION, "reason")),
    Metric(
        "validation_failures_total", "counter", "records", "Requests whose input broke the signature or the contract.",
        (*_VERSION, "field", "reason"),
    ),
    Metric("degraded_total", "counter", "records", "Answers that were degraded.", (*_VERSION, "reason")),
    Metric(
        "cold_starts_total", "counter", "records", "Requests that met a version which was not warm yet.", _VERSION
    ),
    Metric("replica_restarts_total", "counter", "worker", "Replicas replaced after a failure.", _VERSION),
    Metric("replicas", "gauge", "worker", "Replicas by state.", (*_VERSION, "state")),
    Metric(
        "records_total", "counter", "worker",
        "Records by what became of them: written or dropped (disk slower than traffic, or not writable).",
        ("outcome",),
    ),
    Metric("record_segments_removed_total", "counter", "worker", "Record segments removed to stay within the bound."),
    Metric("records_disk_bytes", "gauge", "worker", "Disk space that record segments take."),
    Metric("records_writable", "gauge", "worker", "1 while every worker can write its records.", merge="min"),
    Metric("connections", "gauge", "reader", "Open connections.", ("worker",)),
    Metric("worker_up", "gauge", "reader", "1 while the worker's loop turns, 0 when it stopped doing so.", ("worker",)),
    Metric("worker_starts_total", "counter", "reader", "Times this worker was started.", ("worker",)),
    Metric("memory_bytes", "gauge", "worker", "Resident memory.", ("worker",)),
    Metric("cpu_seconds_total", "counter", "worker", "Processor time used.", ("worker",)),
    Metric(
        "gc_pause_seconds_total", "counter", "worker", "Time that the interpreter's garbage collector held the worker.",
        ("worker",),
    ),
    Metric(
        "snapshot_info", "gauge", "worker", "1 for every snapshot that some worker serves.", ("snapshot_id",),
        merge="max",
    ),
    Metric("build_info", "gauge", "reader", "1, with the version in the labels.", ("version", "python")),
    Metric("slots_dropped_total", "counter", "reader", "Metric look-ups that found no room in a worker's slots file."),
    Metric("slots_unreadable", "gauge", "reader", "Workers' slots files that could not be read."),
)  # fmt: skip

BY_NAME: Final[dict[str, Metric]] = {metric.name: metric for metric in CATALOGUE}


class Meter:
    """The cells of catalogued metrics: refuses names and labels that are not in the catalogue.

    Args:
        slots: Where the cells live.
    """

    def __init__(self, slots: SlotWriter) -> None:
        self._slots = slots

    def counter(self, name: str, *values: str) -> Cell:
        """A counter.

        Args:
            name: In the catalogue.
            values: Of its labels, in the catalogue's order.
        """
        return self._slots.counter(name, _labels(name, "counter", values))

    def gauge(self, name: str, *values: str) -> Cell:
        """A gauge; arguments as for `counter`."""
        return self._slots.gauge(name, _labels(name, "gauge", values))

    def histogram(self, name: str, *values: str) -> Histogram:
        """A histogram; arguments as for `counter`."""
        return self._slots.histogram(name, _labels(name, "histogram", values), BY_NAME[name].buckets)


def _labels(name: str, kind: Kind, values: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    metric = BY_NAME[name]
    if metric.kind != kind or len(metric.labels) != len(values):
        raise ValueError(f"{name} is a {metric.kind} with the labels {metric.labels}; asked for {kind} with {values}")
    return tuple(zip(metric.labels, values, strict=True))


Column = np.ndarray[tuple[int], np.dtype[np.float64]]

_ANSWERED: Final = Ending.ANSWERED.value
_numbers_of = attrgetter("total_s", "decode_s", "queue_s", "run_s", "respond_s", "batch_rows")


@dataclass(frozen=True, slots=True)
class VersionRecords:
    """Records of one version that ended in one turn, and their numbers as columns.

    Attributes:
        endpoint, model, version: What they have in common.
        records: In the order in which they ended.
        total_s, stages_s, batch_rows: A column each; `stages_s` in the order of `STAGES`.
        troubled: Those that were not answered, or were degraded.
    """

    endpoint: str
    model: str
    version: str
    records: Sequence[Record]
    total_s: Column
    stages_s: Sequence[Column]
    batch_rows: Column
    troubled: Sequence[Record]


def by_version(records: Iterable[Record]) -> list[VersionRecords]:
    """Group records by version and lay their numbers out in columns; about 0.4 µs a record."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    endpoint = model = version = None
    members: list[Record] = []
    for record in records:
        if record.version is not version or record.endpoint is not endpoint or record.model is not model:
            endpoint, model, version = record.endpoint, record.model, record.version
            members = groups.setdefault((endpoint, model, version), [])
        members.append(record)
    return [_columns(key, members) for key, members in groups.items()]


def _columns(key: tuple[str, str, str], records: list[Record]) -> VersionRecords:
    flat = np.fromiter(chain.from_iterable(map(_numbers_of, records)), np.float64, count=6 * len(records))
    total_s, *stages_s, batch_rows = np.ascontiguousarray(flat.reshape(-1, 6).T)
    troubled = [record for record in records if record.code or record.degraded or record.ending != _ANSWERED]
    return VersionRecords(*key, records, total_s, stages_s, batch_rows, troubled)


class _Distribution:
    """A histogram as an array over the mapped cells, so that many values are added in a few operations."""

    __slots__ = ("_bounds", "_cells")

    def __init__(self, histogram: Histogram) -> None:
        self._bounds = np.asarray(histogram.bounds)
        self._cells = np.frombuffer(histogram.cells, dtype=np.float64)  # type: ignore[call-overload]  # a memoryview

    def add(self, values: Column) -> None:
        """Count finite values."""
        above = len(self._bounds)
        self._cells[: above + 1] += np.bincount(np.searchsorted(self._bounds, values), minlength=above + 1)
        self._cells[above + 1] += values.sum()


def _reached(column: Column) -> Column:
    """Without the zeros, which mean that a request did not get that far."""
    return column if column.min() > 0.0 else column[column > 0.0]


class _Series:
    """Cells of one version, looked up once."""

    __slots__ = ("_meter", "_names", "batch_rows", "request", "requests", "stages")

    def __init__(self, meter: Meter, endpoint: str, model: str, version: str) -> None:
        self._meter = meter
        self._names = (endpoint, model, version)
        self.requests: dict[tuple[str, str], Cell] = {}
        self.request = _Distribution(meter.histogram("request_seconds", *self._names))
        self.batch_rows = _Distribution(meter.histogram("batch_rows", *self._names))
        self.stages = [_Distribution(meter.histogram("stage_seconds", endpoint, stage)) for stage in STAGES]

    def fold(self, ended: VersionRecords) -> None:
        """Count records of this version."""
        troubled = ended.troubled
        if len(troubled) < len(ended.records):
            self._count(_ANSWERED, "", len(ended.records) - len(troubled))
        self.request.add(ended.total_s)
        for distribution, spent_s in zip(self.stages, ended.stages_s, strict=True):
            distribution.add(_reached(spent_s))
        self.batch_rows.add(_reached(ended.batch_rows))
        if troubled:
            for (ending, code), count in Counter([(record.ending, record.code) for record in troubled]).items():
                self._count(ending, code, count)
            for record in troubled:
                self._count_trouble(record)

    def _count(self, ending: str, code: str, count: int) -> None:
        cell = self.requests.get((ending, code))
        if cell is None:
            cell = self.requests[ending, code] = self._meter.counter("requests_total", *self._names, ending, code)
        cell.add(count)

    def _count_trouble(self, record: Record) -> None:
        """The rarer counters."""
        if record.ending == Ending.REJECTED:
            self._meter.counter("rejected_total", *self._names, record.code).add()
            if record.reason:
                names = (*self._names, record.field, record.reason)
                self._meter.counter("validation_failures_total", *names).add()
            if record.code == "model_loading":
                self._meter.counter("cold_starts_total", *self._names).add()
        if record.degraded:
            self._meter.counter("degraded_total", *self._names, record.degraded).add()


_SERIES_MAX: Final = 10_000


class RecordFold:
    """Folds records into the metrics whose source is `records`.

    A record is folded once, when its request's ending is final; received and endings of the ledger are counted by the
    pipeline, at the instant they happen. Costs about 40 µs per call and version, and under 1 µs per record.

    Concurrency: the thread that owns the slots.
    """

    def __init__(self, slots: SlotWriter) -> None:
        self._meter = Meter(slots)
        self._series: dict[tuple[str, str, str], _Series] = {}

    def fold(self, ended: Iterable[VersionRecords]) -> None:
        """Count these records."""
        for group in ended:
            key = (group.endpoint, group.model, group.version)
            series = self._series.get(key)
            if series is None:
                series = self._open(key)
            series.fold(group)

    def _open(self, key: tuple[str, str, str]) -> _Series:
        if len(self._series) >= _SERIES_MAX:
            # Only the look-ups are cached here, so starting over loses nothing; it bounds memory.
            self._series.clear()
        series = self._series[key] = _Series(self._meter, *key)
        return series


def reference_page(metrics: Iterable[Metric] = CATALOGUE) -> str:
    """`docs/reference/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Made from `headrace.telemetry.metrics.CATALOGUE` by `scripts/generate-docs`.",
        "",
        "Served at `/metrics` of the admin port, in Prometheus text format or, when asked for, OpenMetrics. The values",
        "of all workers are added up (or combined as stated). Counters go on when a worker restarts, gauges do not.",
        "",
        "| Metric | Kind | Labels | Source | Meaning |",
        "|---|---|---|---|---|",
    ]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
        combined = "" if metric.merge == "sum" else f" Workers are combined by {metric.merge}."
        lines.append(
            f"| `{PREFIX}{metric.name}` | {metric.kind} | {labels} | {metric.source} | {metric.help}{combined} |"
        )
    lines += ["", "Sources:", ""]
    lines += [
        "* *records*: a fold over the records of ended requests, every 10 ms.",
        "* *ledger*: one row per endpoint and worker, consistent at every moment; what a killed worker held is failed.",
        "* *worker*: the worker's own state.",
        "* *reader*: worked out by the process that serves `/metrics`.",
        "",
        "## Buckets",
        "",
    ]
    named: list[tuple[str, Callable[[float], str], tuple[float, ...]]] = [
        ("Seconds", _seconds, SECONDS_BUCKETS),
        ("Rows", lambda bound: f"{bound:g}", ROWS_BUCKETS),
    ]
    for title, render, buckets in named:
        users = ", ".join(f"`{metric.name}`" for metric in metrics if metric.buckets == buckets)
        lines += [f"{title} ({users}): " + ", ".join(render(bound) for bound in buckets) + ".", ""]
    return "\n".join(lines).rstrip() + "\n"


def _seconds(bound: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if bound >= factor:
            return f"{bound / factor:g} {unit}"
    return f"{bound:g} s"
