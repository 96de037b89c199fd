"""The latest records of all workers, in the order of their time."""

import heapq
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from headrace.home import Home
from headrace.records import Amendment, Record
from headrace.storage.segments import iter_records, read_segment


def last_records(home: Home, count: int) -> list[Record | Amendment]:
    """The last `count` records; of a large log only the last segments are read."""
    workers = [_last_of_worker(folder, count) for folder in sorted(home.records.glob("worker-*"))]
    merged = heapq.merge(*workers, key=lambda record: record.time_unix_s)
    return list(deque(merged, maxlen=count))


def _last_of_worker(folder: Path, count: int) -> list[Record | Amendment]:
    found: list[Record | Amendment] = []
    for segment in sorted(folder.glob("*.seg"), reverse=True):
        try:
            # Newest segment first; within it the newest records are at the end.
            found = [*deque(read_segment(segment), maxlen=count), *found][-count:]
        except OSError:
            continue  # the writer has just removed it to keep to its bound
        if len(found) >= count:
            break
    # Written in order of ending, shown in order of arrival.
    return sorted(found, key=lambda record: record.time_unix_s)


def follow_records(home: Home, since_unix_s: float) -> Iterator[Record | Amendment]:
    """Every record from now on, for ever."""
    for record in iter_records(home.records, follow=True):
        if record.time_unix_s >= since_unix_s:
            yield record
