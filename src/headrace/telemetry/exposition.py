"""Adds up the slots of all workers and says them in Prometheus text format or OpenMetrics.

Any process that can read the files can do this: the control process for all workers, a worker started alone for itself.
"""

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

import headrace
from headrace.clock import Clock, SystemClock
from headrace.telemetry.metrics import CATALOGUE, PREFIX, Metric
from headrace.telemetry.slots import HistogramValues, SlotsUnreadable, SlotValues, read_slots
from headrace.types import Ending

__all__ = ["SlotsCollector", "render"]

LabelValues = tuple[str, ...]
_LOST_CODE: Final = "worker_lost"


def render(collector: Collector, accept: str = "") -> tuple[bytes, str]:
    """The body and the content type of an answer to `GET /metrics`.

    Args:
        collector: Usually a `SlotsCollector`.
        accept: The request's Accept header; OpenMetrics when it asks for that.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is none; what we say by default is better than no answer
        encode, content_type = choose_encoder("")
    return encode(collector), content_type


class SlotsCollector(Collector):
    """Reads every worker's slots at each scrape.

    Args:
        paths: Says which files there are now; files of workers that are gone keep their counters.
        clock: To tell live workers by their heartbeat.
    """

    def __init__(self, paths: Callable[[], Iterable[Path]], clock: Clock | None = None) -> None:
        self._paths = paths
        self._clock = clock or SystemClock()

    def collect(self) -> Iterator[Family]:
        """One family per metric of the catalogue that has a sample."""
        now_s = self._clock.now_s()
        workers: list[SlotValues] = []
        unreadable = 0
        for path in sorted(self._paths()):
            try:
                workers.append(read_slots(path))
            except FileNotFoundError:
                pass  # removed between the listing and now
            except (SlotsUnreadable, OSError):
                unreadable += 1
        totals = _Totals(workers, unreadable, now_s)
        for metric in CATALOGUE:
            family = _family(metric, totals)
            if family.samples:
                yield family


@dataclass(frozen=True, slots=True)
class _Totals:
    """What all workers said.

    Attributes:
        workers: Every readable file; their counters count whether the worker lives or not.
        unreadable: Files that are not.
        now_s: Monotonic seconds of the scrape.
    """

    workers: Sequence[SlotValues]
    unreadable: int
    now_s: float


def _family(metric: Metric, totals: _Totals) -> Family:
    name, documentation = PREFIX + metric.name, metric.help
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(name, documentation, labels=metric.labels)
        for labels, (buckets, total) in sorted(_histogram_samples(metric, totals).items()):
            histogram.add_metric(labels, buckets=buckets, sum_value=total)
        return histogram
    samples = _ledger_samples(metric, totals) if metric.source == "ledger" else _reader_samples(metric, totals)
    if samples is None:
        samples = _cell_samples(metric, totals)
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.kind == "counter":
        family = CounterMetricFamily(name, documentation, labels=metric.labels)
    else:
        family = GaugeMetricFamily(name, documentation, labels=metric.labels)
    for labels, value in sorted(samples.items()):
        if value or not metric.name.endswith("_info"):
            family.add_metric(labels, value)
    return family


def _ledger_samples(metric: Metric, totals: _Totals) -> dict[LabelValues, float]:
    """Sums of rows, each of which is consistent in itself: so the differences of the sums are those of the rows."""
    samples: dict[LabelValues, float] = defaultdict(float)
    for worker in totals.workers:
        for endpoint, row in worker.ledgers.items():
            if metric.name == "received_total":
                samples[(endpoint,)] += row.received
            elif metric.name == "in_flight":
                samples[(endpoint,)] += row.in_flight
            else:
                samples[(endpoint,)] += row.difference
    return samples


def _reader_samples(metric: Metric, totals: _Totals) -> dict[LabelValues, float] | None:
    """What needs no cell; None for all other metrics."""
    if metric.source != "reader":
        return None
    # Other processes (the supervisor) count in slots too, but have no loop that could stop and no connections.
    workers = [worker for worker in totals.workers if worker.path.stem.startswith("worker-")]
    if metric.name == "build_info":
        return {(headrace.__version__, platform.python_version()): 1.0}
    if metric.name == "slots_dropped_total":
        return {(): float(sum(worker.dropped for worker in totals.workers))}
    if metric.name == "slots_unreadable":
        return {(): float(totals.unreadable)}
    if metric.name == "worker_starts_total":
        return {(_name(worker),): float(worker.starts) for worker in workers}
    # A worker that stopped on purpose (heartbeat 0) has no connections and is not missed.
    started = [worker for worker in workers if worker.heartbeat_s]
    if metric.name == "worker_up":
        return {(_name(worker),): float(worker.is_alive(totals.now_s)) for worker in started}
    return {(_name(worker),): float(worker.connections) for worker in started if worker.is_alive(totals.now_s)}


def _cell_samples(metric: Metric, totals: _Totals) -> dict[LabelValues, float]:
    samples: dict[LabelValues, float] = {}
    for worker in totals.workers:
        if metric.kind == "gauge" and not worker.is_alive(totals.now_s):
            continue  # what a dead worker last said about its state is no longer so
        for labels, value in worker.counters(metric.name) if metric.kind == "counter" else worker.gauges(metric.name):
            key = _values(metric, labels)
            before = samples.get(key)
            if before is None:
                samples[key] = value
            elif metric.merge == "sum":
                samples[key] = before + value
            else:
                samples[key] = min(before, value) if metric.merge == "min" else max(before, value)
    if metric.name == "requests_total":
        for worker in totals.workers:
            for endpoint, row in worker.ledgers.items():
                if row.lost:
                    key = (endpoint, "", "", Ending.FAILED.value, _LOST_CODE)
                    samples[key] = samples.get(key, 0.0) + row.lost
    return samples


def _histogram_samples(metric: Metric, totals: _Totals) -> dict[LabelValues, tuple[list[tuple[str, float]], float]]:
    """Per label values: cumulative buckets and the sum.

    Counts that an earlier release filed under other bounds go to the first of today's bounds that is not below theirs,
    so the cumulative counts stay true as upper estimates and the total stays exact.
    """
    counts: dict[LabelValues, list[float]] = {}
    sums: dict[LabelValues, float] = defaultdict(float)
    for worker in totals.workers:
        for labels, values in worker.histograms(metric.name):
            key = _values(metric, labels)
            ours = counts.setdefault(key, [0.0] * (len(metric.buckets) + 1))
            for index, count in _filed(values, metric.buckets):
                ours[index] += count
            sums[key] += values.sum
    samples: dict[LabelValues, tuple[list[tuple[str, float]], float]] = {}
    for key, ours in counts.items():
        buckets: list[tuple[str, float]] = []
        cumulative = 0.0
        for bound, count in zip((*metric.buckets, float("inf")), ours, strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), cumulative))
        samples[key] = (buckets, sums[key])
    return samples


def _filed(values: HistogramValues, bounds: tuple[float, ...]) -> Iterator[tuple[int, float]]:
    if values.bounds == bounds:
        yield from enumerate(values.counts)
        return
    for bound, count in zip((*values.bounds, float("inf")), values.counts, strict=True):
        yield next((index for index, ours in enumerate(bounds) if ours >= bound), len(bounds)), count


def _values(metric: Metric, labels: dict[str, str]) -> LabelValues:
    return tuple(labels.get(name, "") for name in metric.labels)


def _name(worker: SlotValues) -> str:
    """`worker-1.slots` is worker `1`."""
    return worker.path.stem.removeprefix("worker-")
