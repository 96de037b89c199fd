"""Counters that outlive the process that counts: one memory-mapped file of float64 cells per worker.

A worker adds to cells; any other process maps the same file and reads them, while the worker lives and after it was
killed. Nothing is locked and nothing is copied on the request path: an addition is one store into mapped memory.

    file        header (2 cache lines) | entry | entry | … up to `used` | zeros
    entry       24 bytes of sizes and checksum | key (MessagePack) | cells
    ledger      [seq, received, answered, rejected, failed, expired, abandoned, in_flight] [lost, …]   one per endpoint
    histogram   [count per bucket …, count above the last, sum]

The directory only grows, and `used` is stored last, so a reader that walks it at any moment sees whole entries only.
Stores of eight aligned bytes are single instructions; a process that is killed leaves each cell old or new, never half.

Concurrency: one writer process per file (an advisory lock says so), one thread in it. Readers need no permission. The
order in which a reader sees a ledger's stores is that of x86-64 (total store order); CPython gives no fence to ask for
more on weaker machines, there the interpreter's many instructions between two stores are all that separates them.

Writer and readers stand in one file, although it is long, because they are the two halves of one layout.

Source: the sequence lock is Linux `seqlock_t` (Documentation/locking/seqlock.rst).
"""

import fcntl
import math
import mmap
import os
import struct
import time
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final, Protocol

import msgspec

from headrace.clock import Clock, SystemClock
from headrace.types import Ending

SLOTS_BYTES: Final = 4 * 1024 * 1024
ALIVE_S_MAX: Final = 5.0
OVERFLOW_ENDPOINT: Final = "overflow"

Labels = tuple[tuple[str, str], ...]

_MAGIC: Final = b"HRSLOT01"
_HEADER_BYTES: Final = 128
_ENTRY: Final = struct.Struct("<IIIIIB3x")  # entry bytes, key bytes, first cell's offset, cells, crc of the key, kind
_RESERVE_STEP_BYTES: Final = 64 * 1024
_DOUBLE: Final = struct.Struct("<d")

# Cells of the header; 0 holds the magic. The second cache line is the writer's alone, so that a neighbour who polls
# `connections` does not slow it down.
_USED, _HEARTBEAT, _CONNECTIONS, _PID, _STARTS, _IS_TAKING = 1, 2, 3, 4, 5, 6
_DROPPED, _OVERFLOW = 8, 9

_LEDGER_CELLS: Final = 16
_LEDGER_READ: Final = struct.Struct("<9d")
_SEQ, _RECEIVED, _IN_FLIGHT, _LOST = 0, 1, 7, 8
_COLUMN: Final[dict[str, int]] = {
    Ending.ANSWERED: 2,
    Ending.REJECTED: 3,
    Ending.FAILED: 4,
    Ending.EXPIRED: 5,
    Ending.ABANDONED: 6,
}
_ROW_PATIENCE_S: Final = 0.02


class SlotKind(IntEnum):
    """What an entry's cells mean."""

    LEDGER = 1
    COUNTER = 2
    GAUGE = 3
    HISTOGRAM = 4


class SlotsUnreadable(ValueError):
    """The file is not a slots file of this layout."""


class SlotsInUse(RuntimeError):
    """The file belongs to a worker that is alive."""


class _Cells(Protocol):
    """A memoryview of doubles (typeshed calls every memoryview one of ints)."""

    def __getitem__(self, index: int, /) -> float: ...
    def __setitem__(self, index: int, value: float, /) -> None: ...


class Cell:
    """One number."""

    __slots__ = ("_cells",)

    def __init__(self, cells: _Cells) -> None:
        self._cells = cells

    def add(self, amount: float = 1.0) -> None:
        """Add; about 80 ns."""
        self._cells[0] += amount

    def set(self, value: float) -> None:
        """Replace."""
        self._cells[0] = value

    @property
    def value(self) -> float:
        """What the cell holds now."""
        return self._cells[0]


class Histogram:
    """Counts per bucket, not cumulative, and a sum.

    Attributes:
        bounds: Upper bounds, inclusive, rising.
        cells: One count per bound, the count above them all, the sum.
    """

    __slots__ = ("_above", "_sum_at", "bounds", "cells")

    def __init__(self, cells: _Cells, bounds: Sequence[float]) -> None:
        self.cells = cells
        self.bounds = list(bounds)
        self._above = len(self.bounds)
        self._sum_at = self._above + 1

    def observe(self, value: float) -> None:
        """Count one value; NaN and infinities, which would poison the sum for ever, are left out."""
        if value - value != 0.0:
            return
        cells = self.cells
        cells[bisect_left(self.bounds, value)] += 1.0
        cells[self._sum_at] += value


class Ledger:
    """Received and endings of one endpoint in one cache line, consistent for a reader at every moment.

    **Invariant**: outside an update, received = answered + rejected + failed + expired + abandoned + in_flight (+ lost,
    which `settle` writes and readers add to failed).

    Concurrency: a sequence lock. `seq` is odd while the row is being changed; a reader takes the row only when it saw
    the same even `seq` before and after. The writer never waits. A writer killed inside an update leaves `seq` odd;
    the endings are stored before `in_flight`, so received − endings is right at every instant and `settle` uses that.
    """

    __slots__ = ("_row",)

    def __init__(self, row: _Cells) -> None:
        self._row = row

    def received(self) -> None:
        """A request has arrived."""
        row = self._row
        seq = row[0]
        row[0] = seq + 1.0
        row[1] += 1.0
        row[7] += 1.0
        row[0] = seq + 2.0

    def ended(self, ending: Ending, count: int = 1) -> None:
        """Requests that were received have ended."""
        row = self._row
        column = _COLUMN[ending]
        seq = row[0]
        row[0] = seq + 1.0
        row[column] += count
        row[7] -= count
        row[0] = seq + 2.0


class SlotWriter:
    """The worker's side of a slots file.

    A key that finds no room (file full, disk full) shares one overflow cell, or a scratch histogram, or the ledger of
    the endpoint `overflow`; `headrace_slots_dropped_total` counts how often that happened. Looking a metric up or
    counting never raises.

    Concurrency: one thread. Entries are cached by key, so a look-up is a dictionary access.
    """

    def __init__(self, fd: int, path: Path, clock: Clock) -> None:
        """Use `open`."""
        self.path = path
        self._fd = fd
        self._clock = clock
        self._bytes = os.fstat(fd).st_size // 8 * 8
        self._map = mmap.mmap(fd, self._bytes)
        self._cells = memoryview(self._map).cast("d")
        self._ledgers: dict[str, Ledger] = {}
        self._single: dict[tuple[SlotKind, str, Labels], Cell] = {}
        self._histograms: dict[tuple[str, Labels], Histogram] = {}
        self._reserved_bytes = 0
        # For an endpoint that finds no room, even in a file that has none at all.
        self._spare_ledger = Ledger(memoryview(bytearray(8 * _LEDGER_CELLS)).cast("d"))
        self.connections = Cell(self._slice(_CONNECTIONS, 1))
        self.is_taking = Cell(self._slice(_IS_TAKING, 1))
        self._dropped = Cell(self._slice(_DROPPED, 1))
        self._overflow = Cell(self._slice(_OVERFLOW, 1))

    @classmethod
    def open(cls, path: Path, *, size_bytes: int = SLOTS_BYTES, clock: Clock | None = None) -> "SlotWriter":
        """Create the file, or adopt the one that an earlier worker left.

        Adopted counters and histograms go on from where they stood; gauges start at zero; what the earlier worker
        still held is settled (see `settle`). A file of another layout is replaced.

        Args:
            path: `worker-N.slots`.
            size_bytes: Size of a new file; sparse, room is claimed in steps of 64 KiB as keys arrive.
            clock: Of the heartbeat; monotonic time is the same in every process of a machine.

        Raises:
            SlotsInUse: A live worker has the file.
            OSError: The file cannot be made.
        """
        fd = _open_locked(path)
        if fd is None:
            fd = _create_locked(path, size_bytes)
        try:
            if os.fstat(fd).st_size < size_bytes:  # cut short by somebody; what is left of it goes on
                os.ftruncate(fd, _align(size_bytes, mmap.PAGESIZE))
            writer = cls(fd, path, clock or SystemClock())
            writer._adopt()
        except BaseException:
            os.close(fd)
            raise
        return writer

    def ledger(self, endpoint: str) -> Ledger:
        """The ledger of an endpoint."""
        found = self._ledgers.get(endpoint)
        if found is None:
            row = self._append(SlotKind.LEDGER, "", (("endpoint", endpoint),), (), _LEDGER_CELLS)
            if row is None:
                return self._ledgers.get(OVERFLOW_ENDPOINT, self._spare_ledger)
            found = self._ledgers[endpoint] = Ledger(row)
        return found

    def counter(self, name: str, labels: Mapping[str, str] | Labels = ()) -> Cell:
        """The counter of this name (without `headrace_`) and these labels."""
        return self._cell(SlotKind.COUNTER, name, labels)

    def gauge(self, name: str, labels: Mapping[str, str] | Labels = ()) -> Cell:
        """The gauge of this name and these labels; zero again after a restart."""
        return self._cell(SlotKind.GAUGE, name, labels)

    def histogram(self, name: str, labels: Mapping[str, str] | Labels, buckets: Sequence[float]) -> Histogram:
        """The histogram of this name and these labels.

        Args:
            name: Without `headrace_`.
            labels: Any order.
            buckets: Upper bounds, inclusive, rising, without infinity. An adopted entry with other bounds (a newer
                release) keeps its counts under the old bounds and a new one begins.
        """
        key = (name, _canonical(labels))
        found = self._histograms.get(key)
        if found is None or found.bounds != list(buckets):
            cells = self._append(SlotKind.HISTOGRAM, name, key[1], tuple(buckets), len(buckets) + 2)
            if cells is None:
                return Histogram(memoryview(bytearray(8 * (len(buckets) + 2))).cast("d"), buckets)
            found = self._histograms[key] = Histogram(cells, buckets)
        return found

    def beat(self) -> None:
        """Say that this worker lives; more often than every `ALIVE_S_MAX` seconds."""
        self._cells[_HEARTBEAT] = self._clock.now_s()

    def close(self) -> None:
        """Say that the worker stopped on purpose and let the next one have the file. Idempotent."""
        if self._fd < 0:
            return
        self.connections.set(0.0)
        self.is_taking.set(0.0)
        self._cells[_HEARTBEAT] = 0.0
        # The map keeps a duplicate of the descriptor while cells are about, so closing ours would not unlock.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)
        self._fd = -1

    def _cell(self, kind: SlotKind, name: str, labels: Mapping[str, str] | Labels) -> Cell:
        key = (kind, name, _canonical(labels))
        found = self._single.get(key)
        if found is None:
            cells = self._append(kind, name, key[2], (), 1)
            if cells is None:
                return self._overflow
            found = self._single[key] = Cell(cells)
        return found

    def _slice(self, index: int, count: int) -> _Cells:
        return self._cells[index : index + count]

    def _adopt(self) -> None:
        """Take over what the file holds."""
        good_until = _HEADER_BYTES
        # A file that was truncated, or copied by a tool that makes holes of zeros, has no blocks in places.
        self._reserve(min(max(_whole(self._cells[_USED]), _HEADER_BYTES), self._bytes))
        for entry in _walk(self._map):
            good_until = entry.end
            cells = self._slice(entry.cells_at // 8, entry.cells)
            if entry.kind is SlotKind.LEDGER:
                _settle_row(cells)
                self._ledgers[dict(entry.labels)["endpoint"]] = Ledger(cells)
            elif entry.kind is SlotKind.HISTOGRAM:
                self._histograms[(entry.name, entry.labels)] = Histogram(cells, entry.buckets)
            else:
                if entry.kind is SlotKind.GAUGE:
                    cells[0] = 0.0
                self._single[(entry.kind, entry.name, entry.labels)] = Cell(cells)
        header: _Cells = self._cells
        header[_USED] = float(good_until)
        header[_CONNECTIONS] = header[_IS_TAKING] = 0.0
        header[_PID] = float(os.getpid())
        header[_STARTS] += 1.0
        if OVERFLOW_ENDPOINT not in self._ledgers:
            self.ledger(OVERFLOW_ENDPOINT)
        self.beat()

    def _append(
        self, kind: SlotKind, name: str, labels: Labels, buckets: tuple[float, ...], cells: int
    ) -> _Cells | None:
        """Add an entry; None when there is no room, which is counted."""
        key = msgspec.msgpack.encode((name, labels, buckets))
        start = int(self._cells[_USED])
        cells_at = _align(start + _ENTRY.size + len(key), 64 if kind is SlotKind.LEDGER else 8)
        end = cells_at + 8 * cells
        if end > self._bytes or not self._reserve(end):
            self._dropped.add()
            return None
        # A writer killed before it published may have left part of an entry here.
        self._map[start:end] = bytes(end - start)
        _ENTRY.pack_into(self._map, start, end - start, len(key), cells_at, cells, zlib.crc32(key), kind)
        self._map[start + _ENTRY.size : start + _ENTRY.size + len(key)] = key
        # Published last: until this store no reader and no successor knows the entry.
        self._cells[_USED] = float(end)
        return self._slice(cells_at // 8, cells)

    def _reserve(self, end: int) -> bool:
        """Claim disk blocks up to `end`. A store into a hole of a file on a full disk is a SIGBUS, which kills the
        worker, so every page is backed before it is used."""
        if end <= self._reserved_bytes:
            return True
        # The last page of a full disk is worth having too.
        for step_bytes in (_RESERVE_STEP_BYTES, mmap.PAGESIZE):
            wanted = min(_align(end, step_bytes), self._bytes)
            try:
                os.posix_fallocate(self._fd, 0, wanted)
            except OSError:
                continue
            self._reserved_bytes = wanted
            return True
        return False


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One endpoint's row, consistent. `lost` requests, held by a killed worker, are part of `failed`."""

    received: int = 0
    answered: int = 0
    rejected: int = 0
    failed: int = 0
    expired: int = 0
    abandoned: int = 0
    in_flight: int = 0
    lost: int = 0

    @property
    def difference(self) -> int:
        """received − endings − in_flight; anything but zero is a defect of Headrace."""
        endings = self.answered + self.rejected + self.failed + self.expired + self.abandoned
        return self.received - endings - self.in_flight


@dataclass(frozen=True, slots=True)
class HistogramValues:
    """Counts per bucket (the last is above all bounds), not cumulative."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float


@dataclass(slots=True)
class SlotValues:
    """What one worker's file said.

    Attributes:
        path: The file.
        heartbeat_s: Monotonic time of the last sign of life; 0 when the worker stopped on purpose.
        connections: Open connections.
        starts: How many workers have used this file.
        dropped: Look-ups that found no room.
        ledgers: By endpoint.
        series: Counters and gauges, by kind and name: labels (sorted by name) and value.
        histogram_series: By name: labels and values; the same labels twice when a release changed the bounds.
    """

    path: Path
    heartbeat_s: float = 0.0
    connections: int = 0
    starts: int = 0
    dropped: int = 0
    ledgers: dict[str, LedgerRow] = field(default_factory=dict)
    series: dict[tuple[SlotKind, str], list[tuple[Labels, float]]] = field(default_factory=dict)
    histogram_series: dict[str, list[tuple[Labels, HistogramValues]]] = field(default_factory=dict)

    def counters(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and value of every counter of this name."""
        return self._single(SlotKind.COUNTER, name)

    def gauges(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and value of every gauge of this name."""
        return self._single(SlotKind.GAUGE, name)

    def histograms(self, name: str) -> Iterator[tuple[dict[str, str], HistogramValues]]:
        """Labels and values of every histogram of this name."""
        for labels, values in self.histogram_series.get(name, ()):
            yield dict(labels), values

    def _single(self, kind: SlotKind, name: str) -> Iterator[tuple[dict[str, str], float]]:
        for labels, value in self.series.get((kind, name), ()):
            yield dict(labels), value

    def is_alive(self, now_s: float) -> bool:
        """The worker beat its heart lately; monotonic seconds. Perhaps after `now_s` was read; a time further
        in the future is from before a reboot."""
        return self.heartbeat_s > 0 and abs(now_s - self.heartbeat_s) <= ALIVE_S_MAX


def read_slots(path: Path) -> SlotValues:
    """Read a worker's file, whether the worker is alive or not.

    Raises:
        SlotsUnreadable: The file is not a slots file of this layout.
        OSError: It cannot be opened.
    """
    with path.open("rb") as file, _map_for_reading(file.fileno(), path) as mapped:
        read = _DOUBLE.unpack_from
        values = SlotValues(
            path,
            heartbeat_s=read(mapped, 8 * _HEARTBEAT)[0],
            connections=_whole(read(mapped, 8 * _CONNECTIONS)[0]),
            starts=_whole(read(mapped, 8 * _STARTS)[0]),
            dropped=_whole(read(mapped, 8 * _DROPPED)[0]),
        )
        for entry in _walk(mapped):
            if entry.kind is SlotKind.LEDGER:
                endpoint = dict(entry.labels).get("endpoint", "")
                row = _read_row(mapped, entry.cells_at)
                if row.received or endpoint != OVERFLOW_ENDPOINT:
                    values.ledgers[endpoint] = row
            elif entry.kind is SlotKind.HISTOGRAM:
                cells = struct.unpack_from(f"<{entry.cells}d", mapped, entry.cells_at)
                histogram = HistogramValues(entry.buckets, cells[:-1], cells[-1])
                values.histogram_series.setdefault(entry.name, []).append((entry.labels, histogram))
            else:
                value = read(mapped, entry.cells_at)[0]
                values.series.setdefault((entry.kind, entry.name), []).append((entry.labels, value))
        return values


def settle(path: Path) -> dict[str, int]:
    """End what a dead worker held: its requests in flight become failed with the code `worker_lost`.

    Idempotent, and whole even when it is itself interrupted: the only number it stores is `lost` = received − endings,
    as an absolute value; `failed` and `requests_total{ending="failed",code="worker_lost"}` are read from it.

    Returns:
        Requests newly lost, by endpoint; empty when there were none.

    Raises:
        SlotsInUse: The worker is alive.
        SlotsUnreadable: The file is not a slots file of this layout.
        OSError: It cannot be opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    lost: dict[str, int] = {}
    try:
        _lock(fd, path)
        with mmap.mmap(fd, os.fstat(fd).st_size // 8 * 8) as mapped:
            _check_magic(mapped, path)
            with memoryview(mapped) as raw, raw.cast("d") as cells:
                for entry in _walk(mapped):
                    if entry.kind is SlotKind.LEDGER:
                        first = entry.cells_at // 8
                        with cells[first : first + entry.cells] as row:
                            if count := _settle_row(row):
                                lost[dict(entry.labels).get("endpoint", "")] = count
                cells[_CONNECTIONS] = cells[_IS_TAKING] = 0.0
    except ValueError as error:  # mmap's word for an empty file
        raise SlotsUnreadable(f"{path} is not a slots file: {error}") from error
    finally:
        os.close(fd)
    return lost


def peek_heartbeat_s(path: Path) -> float:
    """When a worker last said that it lives, monotonic seconds; 0 when it stopped on purpose or cannot be read."""
    header = _peek_header(path)
    beat_s: float = 0.0 if header is None else _DOUBLE.unpack_from(header, 8 * _HEARTBEAT)[0]
    return beat_s


def peek_connections(path: Path, now_s: float) -> int | None:
    """How many connections a neighbour holds; None when it is not alive or takes none. About 6 µs.

    Args:
        path: The neighbour's file.
        now_s: Monotonic seconds.
    """
    header = _peek_header(path)
    if header is None:
        return None
    (heartbeat_s,) = _DOUBLE.unpack_from(header, 8 * _HEARTBEAT)
    if not (heartbeat_s > 0 and abs(now_s - heartbeat_s) <= ALIVE_S_MAX):
        return None
    if not _DOUBLE.unpack_from(header, 8 * _IS_TAKING)[0]:
        return None
    return _whole(_DOUBLE.unpack_from(header, 8 * _CONNECTIONS)[0])


def _peek_header(path: Path) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        header = os.pread(fd, _HEADER_BYTES, 0)
    except OSError:
        return None
    finally:
        os.close(fd)
    return header if len(header) == _HEADER_BYTES and header[:8] == _MAGIC else None


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: SlotKind
    name: str
    labels: Labels
    buckets: tuple[float, ...]
    cells_at: int
    cells: int
    end: int


_KEY_DECODER: Final = msgspec.msgpack.Decoder(tuple[str, Labels, tuple[float, ...]])


def _walk(mapped: mmap.mmap) -> Iterator[_Entry]:
    """Entries up to `used`, stopping before the first that does not hold together (pages lost in a power cut)."""
    (used,) = _DOUBLE.unpack_from(mapped, 8 * _USED)
    limit = min(_whole(used), len(mapped))
    at = _HEADER_BYTES
    while at + _ENTRY.size <= limit:
        size, key_bytes, cells_at, cells, crc, kind = _ENTRY.unpack_from(mapped, at)
        key_at = at + _ENTRY.size
        end = at + size
        is_sound = key_at + key_bytes <= cells_at and cells_at + 8 * cells == end <= limit and cells_at % 8 == 0
        if not is_sound or zlib.crc32(key := mapped[key_at : key_at + key_bytes]) != crc:
            return
        try:
            name, labels, buckets = _KEY_DECODER.decode(key)
            entry = _Entry(SlotKind(kind), name, labels, buckets, cells_at, cells, end)
        except (msgspec.DecodeError, ValueError):
            return
        if not _has_its_cells(entry):
            return
        yield entry
        at = end


def _has_its_cells(entry: _Entry) -> bool:
    if entry.kind is SlotKind.LEDGER:
        return entry.cells == _LEDGER_CELLS and [name for name, _ in entry.labels] == ["endpoint"]
    if entry.kind is SlotKind.HISTOGRAM:
        return entry.cells == len(entry.buckets) + 2
    return entry.cells == 1


def _read_row(mapped: mmap.mmap, at: int) -> LedgerRow:
    """A consistent ledger row, by sequence lock.

    `mmap` slices are one `memcpy` each, about 60 ns, so a writer that updates all the time still leaves gaps that are
    found within some tries. A row that stays odd belongs to a writer that was stopped or killed inside an update: then
    received − endings stands in for in_flight, which is right between any two of its stores.
    """
    patience_until_s = time.monotonic() + _ROW_PATIENCE_S
    tries = 0
    raw = b""
    is_stuck = False
    while not is_stuck:
        before = mapped[at : at + 8]
        raw = mapped[at : at + _LEDGER_READ.size]
        if mapped[at : at + 8] == before == raw[:8] and _DOUBLE.unpack(before)[0] % 2 == 0:
            values = [_whole(value) for value in _LEDGER_READ.unpack(raw)]
            return _row_of(values, in_flight=values[_IN_FLIGHT])
        tries += 1
        if tries % 256 == 0:
            is_odd_and_still = mapped[at : at + 8] == before
            is_stuck = is_odd_and_still and time.monotonic() > patience_until_s
            time.sleep(1e-4)
    values = [_whole(value) for value in _LEDGER_READ.unpack(raw)]
    return _row_of(values, in_flight=values[_RECEIVED] - sum(values[2:7]) - values[_LOST])


def _row_of(values: Sequence[int], *, in_flight: int) -> LedgerRow:
    lost = values[_LOST]
    return LedgerRow(
        received=values[_RECEIVED],
        answered=values[2],
        rejected=values[3],
        failed=values[4] + lost,
        expired=values[5],
        abandoned=values[6],
        in_flight=in_flight,
        lost=lost,
    )


def _settle_row(row: _Cells) -> int:
    """Turn what is in flight into `lost`; returns how many. The row's writer is dead."""
    seq = row[_SEQ]
    lost = row[_RECEIVED] - sum(row[column] for column in range(2, 7))
    before = row[_LOST]
    if seq % 2 == 0 and lost == before and row[_IN_FLIGHT] == 0.0:
        return 0
    odd = seq if seq % 2 else seq + 1.0
    row[_SEQ] = odd
    row[_LOST] = lost
    row[_IN_FLIGHT] = 0.0
    row[_SEQ] = odd + 1.0
    return _whole(lost - before)


def _open_locked(path: Path) -> int | None:
    """Open an existing slots file and lock it; None when there is none of this layout."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        _lock(fd, path)
        is_ours = os.fstat(fd).st_size >= _HEADER_BYTES and os.pread(fd, 8, 0) == _MAGIC
    except BaseException:
        os.close(fd)
        raise
    if not is_ours:
        os.close(fd)
        return None
    return fd


def _create_locked(path: Path, size_bytes: int) -> int:
    """Make a new file under another name, so that nobody ever sees half a header, and move it into place."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        _lock(fd, path)
        os.ftruncate(fd, max(_align(size_bytes, mmap.PAGESIZE), mmap.PAGESIZE))
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
        os.pwrite(fd, _MAGIC + _DOUBLE.pack(float(_HEADER_BYTES)), 0)
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        os.close(fd)
        raise
    return fd


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SlotsInUse(f"{path} belongs to a worker that is alive") from error


def _map_for_reading(fd: int, path: Path) -> mmap.mmap:
    try:
        mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    except ValueError as error:
        raise SlotsUnreadable(f"{path} is empty; a slots file begins with {_MAGIC!r}") from error
    _check_magic(mapped, path)
    return mapped


def _check_magic(mapped: mmap.mmap, path: Path) -> None:
    if len(mapped) < _HEADER_BYTES or mapped[:8] != _MAGIC:
        raise SlotsUnreadable(f"{path} begins with {mapped[:8]!r}; a slots file of this release with {_MAGIC!r}")


def _canonical(labels: Mapping[str, str] | Labels) -> Labels:
    pairs = labels.items() if isinstance(labels, Mapping) else labels
    return tuple(sorted(pairs))


def _align(offset: int, step: int) -> int:
    return -(-offset // step) * step


def _whole(value: float) -> int:
    """A count; 0 for what cannot be one (a damaged file must not end a scrape)."""
    return int(value) if math.isfinite(value) else 0
