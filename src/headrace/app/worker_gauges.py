"""What a worker measures of itself while the clock ticks: queues, replicas, memory, processor time."""

import os
import resource
from collections import Counter

from headrace.data_plane.plane import Plane
from headrace.storage.segments import SegmentWriter
from headrace.telemetry.metrics import Meter
from headrace.telemetry.slots import Cell, SlotWriter


class WorkerGauges:
    """Gauges of one worker, brought up to date at every tick.

    Attributes:
        gc_pause: Seconds that the garbage collector held the worker; the worker's collector callback adds to it.
    """

    def __init__(self, slots: SlotWriter, number: int) -> None:
        self._meter = Meter(slots)
        self._worker = str(number)
        self.gc_pause = self._meter.counter("gc_pause_seconds_total", self._worker)
        self._cpu = self._meter.counter("cpu_seconds_total", self._worker)
        self._memory = self._meter.gauge("memory_bytes", self._worker)
        self._is_writable = self._meter.gauge("records_writable")
        self._disk_bytes = self._meter.gauge("records_disk_bytes")
        self._records = {
            "written": self._meter.counter("records_total", "written"),
            "dropped": self._meter.counter("records_total", "dropped"),
            "segments_removed": self._meter.counter("record_segments_removed_total"),
        }
        self._cpu_before_s = 0.0
        self._seen: set[Cell] = set()
        self._snapshot_id = ""

    def count_records(self, outcome: str, count: int) -> None:
        """Count what became of records: `written`, `dropped`, or `segments_removed`."""
        self._records[outcome].add(count)

    def update(self, plane: Plane, sink: SegmentWriter, snapshot_id: str) -> None:
        """Write the present values."""
        self._memory.set(_resident_bytes())
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = usage.ru_utime + usage.ru_stime
        self._cpu.add(cpu_s - self._cpu_before_s)
        self._cpu_before_s = cpu_s
        self._is_writable.set(float(sink.is_writable))
        self._disk_bytes.set(float(sink.disk_bytes))
        self._update_replicas(plane)
        if snapshot_id != self._snapshot_id:
            for old, value in ((self._snapshot_id, 0.0), (snapshot_id, 1.0)):
                if old:
                    self._meter.gauge("snapshot_info", old).set(value)
            self._snapshot_id = snapshot_id

    def _update_replicas(self, plane: Plane) -> None:
        states: Counter[tuple[str, str, str, str]] = Counter()
        for report in plane.reports():
            states[report.endpoint, report.model, report.version, report.state.value] += 1
        present: dict[Cell, float] = {
            self._meter.gauge("replicas", *labels): float(count) for labels, count in states.items()
        }
        for replica in plane.replicas():
            cell = self._meter.gauge("queue_requests", replica.endpoint.name, replica.model, replica.version)
            present[cell] = float(replica.pieces_waiting)
        for gone in self._seen - present.keys():
            gone.set(0.0)
        for cell, value in present.items():
            cell.set(value)
        self._seen = set(present)


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
