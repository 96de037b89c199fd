"""Per-version counters in the form that the protocol's statistics route answers with.

They live in the worker's slots, so that any worker can add up what all of them have done, and they never go back while
a model stays loaded: clients read differences.

Source: Triton statistics extension; `inference_count` counts rows, `execution_count` batches, `success` requests.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from headrace.clock import Clock
from headrace.data_plane.batch import Batch
from headrace.telemetry.metrics import VersionRecords
from headrace.telemetry.slots import Cell, SlotValues, SlotWriter
from headrace.types import Ending

STATISTICS_METRIC = "statistics"
"""Name of the cells; not in the catalogue, hence never exposed as a metric."""


class VersionStatistics:
    """The cells of one version."""

    __slots__ = ("_batch", "_endpoint", "_slots", "_version", "cells")

    def __init__(self, slots: SlotWriter, endpoint: str, version: str) -> None:
        self._slots, self._endpoint, self._version = slots, endpoint, version
        self.cells = {
            field: self._cell(field)
            for field in (
                "success.count", "success.ns", "fail.count", "fail.ns", "queue.count", "queue.ns",
                "compute_input.ns", "compute_infer.ns", "compute_output.ns", "rows", "batches", "last_ms",
            )
        }  # fmt: skip
        self._batch: dict[int, tuple[Cell, Cell]] = {}

    def _cell(self, field: str) -> Cell:
        labels = {"endpoint": self._endpoint, "version": self._version, "field": field}
        return self._slots.counter(STATISTICS_METRIC, labels)

    def batch(self, rows: int) -> tuple[Cell, Cell]:
        """Count and nanoseconds of batches of this size."""
        cells = self._batch.get(rows)
        if cells is None:
            cells = self._batch[rows] = (self._cell(f"batch.{rows}.count"), self._cell(f"batch.{rows}.ns"))
        return cells


class ModelStatistics:
    """Writes the counters of this worker."""

    def __init__(self, slots: SlotWriter, clock: Clock) -> None:
        self._slots = slots
        self._clock = clock
        self._versions: dict[tuple[str, str], VersionStatistics] = {}

    def _of(self, endpoint: str, version: str) -> VersionStatistics:
        found = self._versions.get((endpoint, version))
        if found is None:
            found = self._versions[endpoint, version] = VersionStatistics(self._slots, endpoint, version)
        return found

    def batch_executed(self, batch: Batch) -> None:
        """Count one execution."""
        replica = batch.pieces[0].ticket.replica
        assert replica is not None
        statistics = self._of(replica.endpoint.name, replica.version)
        nanoseconds = batch.took_s * 1e9
        cells = statistics.cells
        cells["batches"].add(1)
        cells["compute_infer.ns"].add(nanoseconds)
        cells["rows"].add(batch.rows)
        cells["last_ms"].set(self._clock.unix_s() * 1e3)
        count, total = statistics.batch(batch.rows)
        count.add(1)
        total.add(nanoseconds)

    def fold(self, ended: Iterable[VersionRecords]) -> None:
        """Count requests that have ended and had reached a version."""
        for group in ended:
            if not group.version:
                continue
            cells = self._of(group.endpoint, group.version).cells
            decode_s, queue_s, _, respond_s = group.stages_s
            total_s = group.total_s
            if group.troubled:
                is_answered = np.array([record.ending == Ending.ANSWERED for record in group.records])
                failed_s = total_s[~is_answered]
                cells["fail.count"].add(len(failed_s))
                cells["fail.ns"].add(float(failed_s.sum()) * 1e9)
                total_s, decode_s, queue_s, respond_s = (
                    column[is_answered] for column in (total_s, decode_s, queue_s, respond_s)
                )
            cells["success.count"].add(len(total_s))
            cells["success.ns"].add(float(total_s.sum()) * 1e9)
            cells["queue.count"].add(len(queue_s))
            cells["queue.ns"].add(float(queue_s.sum()) * 1e9)
            cells["compute_input.ns"].add(float(decode_s.sum()) * 1e9)
            cells["compute_output.ns"].add(float(respond_s.sum()) * 1e9)


def add_up(workers: Iterable[SlotValues], wanted: Mapping[str, Iterable[str]]) -> list[dict[str, Any]]:
    """The `model_stats` of the wanted endpoints and versions over all workers.

    Args:
        workers: Slots of every worker.
        wanted: Endpoint name → versions.
    """
    sums: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for values in workers:
        for labels, value in values.counters(STATISTICS_METRIC):
            fields = sums[labels["endpoint"], labels["version"]]
            if labels["field"] == "last_ms":
                fields["last_ms"] = max(fields["last_ms"], value)
            else:
                fields[labels["field"]] += value
    return [
        _render(endpoint, version, sums[endpoint, version])
        for endpoint, versions in wanted.items()
        for version in versions
    ]


def _render(endpoint: str, version: str, fields: Mapping[str, float]) -> dict[str, Any]:
    def duration(count: str, nanoseconds: str) -> dict[str, int]:
        return {"count": int(fields.get(count, 0)), "ns": int(fields.get(nanoseconds, 0))}

    sizes = sorted(
        int(field.split(".")[1]) for field in fields if field.startswith("batch.") and field.endswith("count")
    )
    nothing = {"count": 0, "ns": 0}
    return {
        "name": endpoint,
        "version": version,
        "last_inference": int(fields.get("last_ms", 0)),
        "inference_count": int(fields.get("rows", 0)),
        "execution_count": int(fields.get("batches", 0)),
        "inference_stats": {
            "success": duration("success.count", "success.ns"),
            "fail": duration("fail.count", "fail.ns"),
            "queue": duration("queue.count", "queue.ns"),
            "compute_input": duration("success.count", "compute_input.ns"),
            "compute_infer": duration("success.count", "compute_infer.ns"),
            "compute_output": duration("success.count", "compute_output.ns"),
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": nothing,
                "compute_infer": duration(f"batch.{rows}.count", f"batch.{rows}.ns"),
                "compute_output": nothing,
            }
            for rows in sizes
        ],
        "memory_usage": [],
    }
