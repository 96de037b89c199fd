"""Records on disk: append-only segment files, one writer thread, group commit.

    <dir>/NNNNNNNN.seg     header, then frames; a new segment per start and per ~16 MiB
    header                 magic (8 bytes) · u32 length · u32 crc32 · MessagePack map: format, schema, columns, …
    frame                  u32 length · u32 crc32 of kind and payload · u8 kind · MessagePack payload

Numbers are little-endian. A segment names its columns, so readers of any later release map them by name. A reader
trusts nothing: a torn tail (the writer was killed, or is writing) ends the segment; a frame whose checksum is wrong is
skipped when its length can be right; both are told to whoever asks.

What is written and acknowledged:

* `write` is on disk (in the page cache: it survives the process, not the machine) within `records_flush_s`.
* `commit` says True after fdatasync of the file, and of the directory when the file is new.
* A write or sync that fails is undone: the file is cut back to the frame before it and never written again, the next
  attempt begins a new one. After a failed fsync the kernel may have forgotten which pages are dirty, and a reader
  that follows may already have seen what was cut off.

This is one file although it is long: writer and reader are the two halves of one format.

Source: "fsyncgate" (PostgreSQL, 2018) for never trusting a file after a failed fsync.
"""

import asyncio
import contextlib
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import msgspec

from headrace.clock import Clock
from headrace.config import Settings
from headrace.records import COLUMNS, RECORD_SCHEMA, Amendment, Record

__all__ = [
    "SEGMENT_FORMAT",
    "SegmentDamage",
    "SegmentWriter",
    "iter_records",
    "read_frames",
    "read_segment",
]

SEGMENT_FORMAT: Final = 1
SEGMENT_BYTES: Final = 16 * 1024 * 1024
FRAME_BYTES_MAX: Final = 1 << 30
QUEUED_RECORDS_MAX: Final = 100_000
QUEUED_BYTES_MAX: Final = 256 * 1024 * 1024
STALL_S_MAX: Final = 5.0

Outcome = Literal["written", "dropped", "segments_removed"]
DamageKind = Literal["bad_header", "torn_tail", "bad_length", "bad_checksum", "bad_payload"]

_MAGIC: Final = b"HRSEGMNT"
_HEAD: Final = struct.Struct("<II")
_FRAME: Final = struct.Struct("<IIB")
_HEADER_BYTES_MAX: Final = 1 << 20
_RECORD, _AMENDMENT = 1, 2
_CRC_SEED: Final = {kind: zlib.crc32(bytes((kind,))) for kind in (_RECORD, _AMENDMENT)}
# Encoding holds the interpreter lock, the write that follows lets go of it: some 0.5 ms at most in between, so that the
# event loop never waits for long.
_ENCODE_CHUNK: Final = 256
_RETRY_FIRST_S: Final = 0.1
_RETRY_LAST_S: Final = 5.0
_PROBE_BYTES: Final = 64 * 1024
# A file takes at least a block, whatever it holds; so many tiny segments cannot outgrow the bound.
_BLOCK_BYTES: Final = 4096
# About what a record without payloads takes; only for cutting what is queued into batches.
_ENVELOPE_BYTES: Final = 512


# ------------------------------------------------------------------------------------------------------------ writing


@dataclass(slots=True)
class _Parcel:
    """What one call handed over; `done` is None for `write`."""

    records: tuple[Record | Amendment, ...]
    payload_bytes: int
    done: Callable[[bool], None] | None


@dataclass(slots=True)
class _Open:
    """The open segment; `good_bytes` is where its last good frame ends."""

    number: int
    fd: int
    header_bytes: int
    good_bytes: int


class SegmentWriter:
    """The `RecordSink` that keeps records in segment files of one directory.

    Args:
        directory: Of this worker alone; made when missing.
        settings: `records_flush_s` and `records_bytes_max`.
        call_soon: `loop.call_soon_threadsafe`.
        clock: Monotonic time for back-off and stalls, wall clock for the header.
        on_outcome: Told on the event loop how many records were written or dropped, or segments removed.
        worker: Number of the worker, for the header.

    Concurrency: the loop appends to a deque and, when the thread sleeps, sets an event; it takes no lock that is held
    across I/O and waits for nothing. Everything else, files included, belongs to the writer thread. The two counters of
    what is queued have one writer each (`_in` the loop, `_out` the thread), so their difference needs no lock.
    """

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        call_soon: Callable[..., object],
        clock: Clock,
        on_outcome: Callable[[Outcome, int], None] = lambda outcome, count: None,
        *,
        worker: int = 0,
    ) -> None:
        self._directory = directory
        self._flush_s = settings.records_flush_s
        self._bytes_max = settings.records_bytes_max
        self._segment_bytes = min(SEGMENT_BYTES, self._bytes_max // 4)
        self._call_soon = call_soon
        self._clock = clock
        self._on_outcome = on_outcome
        self._worker = worker

        self._queue: deque[_Parcel] = deque()
        self._records_in = self._bytes_in = 0
        self._records_out = self._bytes_out = 0
        self._has_work = threading.Event()
        self._is_urgent = threading.Event()
        self._is_closing = False
        self._closed: list[asyncio.Future[None]] = []
        self._is_stopped = False

        self._is_sound = True
        self._busy_since_s = 0.0
        self._problem = ""
        self._retry_s = _RETRY_FIRST_S
        self._open: _Open | None = None
        self._next_number = 1
        self._older: deque[tuple[int, int]] = deque()
        self._disk_bytes = 0

        self._encode = msgspec.msgpack.Encoder().encode
        # A daemon: a disk that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="record-segments", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------- on the event loop

    def write(self, records: Sequence[Record | Amendment]) -> None:
        """See `RecordSink.write`; about 1 µs."""
        if not self._is_sound or not self._put(records, None):
            self._on_outcome("dropped", len(records))

    def commit(self, records: Sequence[Record | Amendment], done: Callable[[bool], None]) -> None:
        """See `RecordSink.commit`; `done` is never called before this returns."""
        if not self.is_writable or not self._put(records, done):
            self._on_outcome("dropped", len(records))
            self._later(done, False)

    @property
    def is_writable(self) -> bool:
        """False after a failed write until a retry succeeds, and while the disk has not answered for 5 s."""
        busy_since_s = self._busy_since_s
        is_stalled = busy_since_s > 0.0 and self._clock.now_s() - busy_since_s > STALL_S_MAX
        return self._is_sound and not is_stalled and not self._is_closing

    @property
    def problem(self) -> str:
        """Why nothing can be written; empty when it can."""
        return self._problem

    @property
    def disk_bytes(self) -> int:
        """What the segments take on disk."""
        return self._disk_bytes

    async def close(self) -> None:
        """Write and sync everything that was taken, then stop. Idempotent."""
        if self._is_stopped:
            return
        closed = asyncio.get_running_loop().create_future()
        self._closed.append(closed)
        self._is_closing = True
        self._has_work.set()
        self._is_urgent.set()
        # Whoever saw `_is_stopped` False gets here before the loop runs `_resolve_closed`, which resolves them all.
        await closed

    def _put(self, records: Sequence[Record | Amendment], done: Callable[[bool], None] | None) -> bool:
        if self._is_closing:
            return False
        payload_bytes = 0
        for record in records:
            if type(record) is Record and record.inputs is not None:
                payload_bytes += len(record.inputs) + len(record.outputs or b"")
        queued = self._records_in - self._records_out + len(records)
        queued_bytes = self._bytes_in - self._bytes_out + payload_bytes
        if queued > QUEUED_RECORDS_MAX or (queued_bytes > QUEUED_BYTES_MAX and payload_bytes):
            return False
        self._records_in += len(records)
        self._bytes_in += payload_bytes
        self._queue.append(_Parcel(tuple(records), payload_bytes, done))
        # Setting an event costs a lock, so it is done for the first parcel of a batch only. No wake-up is lost: the
        # thread clears the event before it looks at the queue.
        if not self._has_work.is_set():
            self._has_work.set()
        if done is not None and not self._is_urgent.is_set():
            self._is_urgent.set()
        return True

    def _resolve_closed(self) -> None:
        for future in self._closed:
            if not future.done():
                future.set_result(None)

    # -------------------------------------------------------------------------------- on the writer thread

    def _later(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._call_soon(function, *arguments)
        except RuntimeError:
            pass  # the loop is closed; nobody is left to be told

    def _run(self) -> None:
        try:
            self._try_again()
            while not self._is_closing:
                self._turn()
            if self._is_sound:
                self._write_queued()
            self._finish_segment()
        finally:
            # Even a defect of ours must strand neither a commit nor whoever waits in `close`.
            self._is_sound = False
            self._is_closing = True
            self._refuse_all()
            self._is_stopped = True
            self._later(self._resolve_closed)

    def _turn(self) -> None:
        if self._is_sound:
            self._has_work.wait()
            # Buffered records wait for company; a commit ends the wait. What arrives while a batch is written or
            # synced forms the next batch: that is the group commit.
            self._is_urgent.wait(self._flush_s)
            self._is_urgent.clear()
            self._has_work.clear()
            self._write_queued()
            return
        self._is_urgent.clear()
        self._has_work.clear()
        self._refuse_all()
        if self._is_closing:  # set before the event that has just been cleared
            return
        self._is_urgent.wait(self._retry_s)
        if not self._is_closing:
            self._try_again()

    def _take(self) -> list[_Parcel]:
        """At most what was there on entry, so that a fast producer cannot make a batch endless."""
        return [self._queue.popleft() for _ in range(len(self._queue))]

    def _write_queued(self) -> None:
        """Write what is queued, no more of it at a time than a segment should hold: the bound on disk space is kept by
        removing whole segments."""
        parcels = self._take()
        while parcels:
            count = batch_bytes = 0
            while count < len(parcels) and batch_bytes < self._segment_bytes:
                batch_bytes += parcels[count].payload_bytes + _ENVELOPE_BYTES * len(parcels[count].records)
                count += 1
            self._write_batch(parcels[:count])
            del parcels[:count]

    def _write_batch(self, parcels: list[_Parcel]) -> None:
        if not self._is_sound:  # the batch before this one could not be written
            self._settle(parcels, is_done=False)
            return
        self._busy_since_s = self._clock.now_s()
        try:
            segment = self._open
            if segment is None or segment.good_bytes >= self._segment_bytes or _is_removed(segment):
                self._finish_segment()
                segment = self._begin_segment()
            self._append(segment, parcels)
        except Exception as error:  # OSError, or a defect of ours, which must not end the thread
            self._failed(error)
        finally:
            self._busy_since_s = 0.0
        self._settle(parcels, is_done=self._is_sound)
        if self._is_sound:
            self._remove_old()

    def _append(self, segment: _Open, parcels: list[_Parcel]) -> None:
        """Write a batch, and sync it when somebody waits for that; all of it or nothing."""
        start_bytes = segment.good_bytes
        records = [record for parcel in parcels for record in parcel.records]
        try:
            for first in range(0, len(records), _ENCODE_CHUNK):
                frames = self._frames(records[first : first + _ENCODE_CHUNK])
                _write_all(segment.fd, frames)
                segment.good_bytes += len(frames)
            if any(parcel.done is not None for parcel in parcels):
                os.fdatasync(segment.fd)
        except BaseException:
            # Records that are answered with False must not be found on disk later.
            segment.good_bytes = start_bytes
            with contextlib.suppress(OSError):
                os.ftruncate(segment.fd, start_bytes)
            self._finish_segment()
            raise

    def _frames(self, records: Sequence[Record | Amendment]) -> bytes:
        try:
            payloads = [self._encode(record) for record in records]
        except (UnicodeEncodeError, OverflowError, TypeError, ValueError):
            payloads = [self._payload(record) for record in records]
        if max(map(len, payloads)) > FRAME_BYTES_MAX:
            payloads = [self._payload(record) for record in records]
        kinds = [_RECORD if type(record) is Record else _AMENDMENT for record in records]
        heads = [
            _FRAME.pack(len(payload), zlib.crc32(payload, _CRC_SEED[kind]), kind)
            for payload, kind in zip(payloads, kinds, strict=True)
        ]
        return b"".join(chain.from_iterable(zip(heads, payloads, strict=True)))

    def _payload(self, record: Record | Amendment) -> bytes:
        """Encode; a record that cannot be encoded as it is loses what stands in the way, never its envelope."""
        try:
            payload = self._encode(record)
            if len(payload) <= FRAME_BYTES_MAX:
                return payload
        except (UnicodeEncodeError, OverflowError, TypeError, ValueError):
            pass
        return self._encode(type(record)(*(_plain(getattr(record, name)) for name in record.__struct_fields__)))

    def _settle(self, parcels: list[_Parcel], *, is_done: bool) -> None:
        """Tell everybody what became of their records."""
        count = sum(len(parcel.records) for parcel in parcels)
        self._records_out += count
        self._bytes_out += sum(parcel.payload_bytes for parcel in parcels)
        waiting = [parcel.done for parcel in parcels if parcel.done is not None]
        self._later(self._tell, waiting, is_done, count)

    def _tell(self, waiting: list[Callable[[bool], None]], is_done: bool, count: int) -> None:
        """On the event loop: one wake-up for a whole batch."""
        if count:
            self._on_outcome("written" if is_done else "dropped", count)
        for done in waiting:
            try:
                done(is_done)
            except Exception as error:  # one caller's trouble must not keep the others waiting
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a commit's callback raised", "exception": error}
                )

    def _refuse_all(self) -> None:
        parcels = self._take()
        if parcels:
            self._settle(parcels, is_done=False)

    def _failed(self, error: Exception) -> None:
        self._is_sound = False
        self._problem = f"{self._directory}: {error}"

    def _try_again(self) -> None:
        """Begin a segment, if the disk takes more than its header: one with room for just that would flap."""
        self._busy_since_s = self._clock.now_s()
        try:
            self._probe()
            self._begin_segment()
        except Exception as error:
            self._failed(error)
            self._retry_s = min(2 * self._retry_s, _RETRY_LAST_S)
        else:
            self._retry_s = _RETRY_FIRST_S
            self._problem = ""
            self._is_sound = True
        finally:
            self._busy_since_s = 0.0

    def _probe(self) -> None:
        """Write and sync 64 KiB beside the segments, where no reader looks.

        Raises:
            OSError: The disk does not take it.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / "probe"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        try:
            _write_all(fd, bytes(_PROBE_BYTES))
            os.fdatasync(fd)
        finally:
            os.close(fd)
            path.unlink()

    def _begin_segment(self) -> _Open:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._take_stock()
        header = _encode_header(self._worker, self._clock.unix_s())
        path = _segment_path(self._directory, self._next_number)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            _write_all(fd, header)
            os.fsync(fd)
            # Without this a power cut may lose the name, and with it every record committed under it.
            directory_fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory_fd)
            finally:
                os.close(directory_fd)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        segment = self._open = _Open(self._next_number, fd, len(header), len(header))
        self._next_number += 1
        self._remove_old()
        return segment

    def _finish_segment(self) -> None:
        """Close the open segment; one without a record is removed, so that restarts leave nothing behind."""
        segment, self._open = self._open, None
        if segment is None:
            return
        with contextlib.suppress(OSError):
            if segment.good_bytes == segment.header_bytes:
                _segment_path(self._directory, segment.number).unlink()
            else:
                self._older.append((segment.number, segment.good_bytes))
                os.fdatasync(segment.fd)
        with contextlib.suppress(OSError):
            os.close(segment.fd)

    def _take_stock(self) -> None:
        """List what earlier writers left; their segments count towards the bound and go first."""
        self._older.clear()
        for path in _segment_paths(self._directory):
            with contextlib.suppress(OSError):
                self._older.append((int(path.stem), path.stat().st_size))
        if self._older:
            self._next_number = max(self._next_number, self._older[-1][0] + 1)

    def _remove_old(self) -> None:
        """Keep to `records_bytes_max`: the oldest segments go, the open one never."""
        open_bytes = self._open.good_bytes if self._open is not None else 0
        held = max(open_bytes, _BLOCK_BYTES) + sum(max(size, _BLOCK_BYTES) for _, size in self._older)
        removed = 0
        while self._older and held > self._bytes_max:
            number, size = self._older[0]
            try:
                _segment_path(self._directory, number).unlink(missing_ok=True)
            except OSError:
                break  # tried again after the next batch
            self._older.popleft()
            held -= max(size, _BLOCK_BYTES)
            removed += 1
        self._disk_bytes = held
        if removed:
            self._later(self._on_outcome, "segments_removed", removed)


def _is_removed(segment: _Open) -> bool:
    """Somebody has deleted the file: writes to it would succeed, and vanish with the descriptor."""
    return os.fstat(segment.fd).st_nlink == 0


def _plain(value: Any) -> Any:
    """What MessagePack can carry in any case."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int):
        return max(-(2**63), min(value, 2**63 - 1))
    return None if isinstance(value, bytes) else value


def _write_all(fd: int, content: bytes | bytearray) -> None:
    """Write everything; a disk that takes part of it and then no more raises."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def _encode_header(worker: int, unix_s: float) -> bytes:
    body = msgspec.msgpack.encode(
        {
            "format": SEGMENT_FORMAT,
            "schema": RECORD_SCHEMA,
            "columns": COLUMNS,
            "amendment_columns": Amendment.__struct_fields__,
            "worker": worker,
            "time_unix_s": unix_s,
        }
    )
    return _MAGIC + _HEAD.pack(len(body), zlib.crc32(body)) + body


# ------------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class SegmentDamage:
    """Something in a segment that could not be read.

    Attributes:
        path: The segment.
        offset: Byte at which the trouble begins.
        kind: `torn_tail` is how every segment ends whose writer was killed, or is writing now; the rest is damage.
        lost_bytes: Bytes passed over.
        is_end: Nothing behind it was read.
    """

    path: Path
    offset: int
    kind: DamageKind
    lost_bytes: int
    is_end: bool


class _Header(msgspec.Struct):
    format: int
    schema: int
    columns: tuple[str, ...]
    amendment_columns: tuple[str, ...] = Amendment.__struct_fields__


def read_segment(path: Path, on_damage: Callable[[SegmentDamage], None] | None = None) -> Iterator[Record | Amendment]:
    """Read a segment lazily, one frame in memory at a time.

    Args:
        path: The segment, finished or being written.
        on_damage: Told about everything that could not be read.

    Raises:
        OSError: The file cannot be opened or read.
    """
    with path.open("rb") as file:
        yield from read_frames(file, os.fstat(file.fileno()).st_size, path, on_damage)


def read_frames(
    file: BinaryIO, size_bytes: int, path: Path, on_damage: Callable[[SegmentDamage], None] | None = None
) -> Iterator[Record | Amendment]:
    """As `read_segment`, from an open file of which `size_bytes` exist."""
    reader = _FrameReader(file, path, on_damage)
    yield from reader.read(size_bytes)
    reader.report_tail(size_bytes)


class _FrameReader:
    """Reads whole frames up to a size and remembers where it stopped, so that a growing file can be followed."""

    def __init__(self, file: BinaryIO, path: Path, on_damage: Callable[[SegmentDamage], None] | None) -> None:
        self._file = file
        self._path = path
        self._on_damage = on_damage
        self._offset = 0
        self._is_over = False
        self._decoders: dict[int, Callable[[bytes], Record | Amendment]] = {}

    def read(self, size_bytes: int) -> Iterator[Record | Amendment]:
        """Every whole frame that lies between where the last call stopped and `size_bytes`."""
        if not self._decoders and not self._is_over:
            self._read_header(size_bytes)
        while self._decoders and not self._is_over and self._offset + _FRAME.size <= size_bytes:
            self._file.seek(self._offset)
            length, checksum, kind = _FRAME.unpack(self._file.read(_FRAME.size).ljust(_FRAME.size, b"\0"))
            if not 0 < length <= FRAME_BYTES_MAX:
                self._report("bad_length", size_bytes - self._offset, is_end=True)
                return
            end = self._offset + _FRAME.size + length
            if end > size_bytes:
                return  # torn, or still being written
            payload = self._file.read(length)
            if len(payload) < length:
                return  # the file has just become shorter
            if zlib.crc32(payload, zlib.crc32(bytes((kind,)))) != checksum:
                self._report("bad_checksum", end - self._offset)
                self._offset = end
                continue
            decode = self._decoders.get(kind)
            record = None
            if decode is not None:  # a kind of a later release is passed over in silence
                try:
                    record = decode(payload)
                except (msgspec.DecodeError, RecursionError):
                    self._report("bad_payload", end - self._offset)
            # Moved on before the yield: whoever drops the generator here and comes back must not see a frame twice.
            self._offset = end
            if record is not None:
                yield record

    def report_tail(self, size_bytes: int) -> None:
        """Say that the last frame is not whole, if so."""
        if not self._is_over and self._offset < size_bytes:
            kind: DamageKind = "torn_tail" if self._decoders or self._offset == 0 else "bad_header"
            self._report(kind, size_bytes - self._offset, is_end=True)

    def _read_header(self, size_bytes: int) -> None:
        lead_bytes = len(_MAGIC) + _HEAD.size
        self._file.seek(0)
        lead = self._file.read(lead_bytes)
        if lead[: len(_MAGIC)] != _MAGIC[: len(lead)]:
            self._report("bad_header", size_bytes, is_end=True)
            return
        if len(lead) < lead_bytes:
            return
        length, checksum = _HEAD.unpack_from(lead, len(_MAGIC))
        if length > _HEADER_BYTES_MAX:
            self._report("bad_header", size_bytes, is_end=True)
            return
        body = self._file.read(length)
        if len(body) < length:
            return
        try:
            header = msgspec.msgpack.decode(body, type=_Header)
        except (msgspec.DecodeError, RecursionError):
            header = None
        if header is None or zlib.crc32(body) != checksum or header.format != SEGMENT_FORMAT:
            self._report("bad_header", size_bytes, is_end=True)
            return
        self._decoders = {
            _RECORD: _decoder(Record, header.columns),
            _AMENDMENT: _decoder(Amendment, header.amendment_columns),
        }
        self._offset = lead_bytes + length

    def _report(self, kind: DamageKind, lost_bytes: int, *, is_end: bool = False) -> None:
        self._is_over = self._is_over or is_end
        if self._on_damage is not None:
            self._on_damage(SegmentDamage(self._path, self._offset, kind, lost_bytes, is_end))


def _decoder(type_: type[Record] | type[Amendment], columns: tuple[str, ...]) -> Callable[[bytes], Record | Amendment]:
    """Decode rows of these columns: directly when they are ours, by name when another release wrote them."""
    if columns == type_.__struct_fields__:
        return msgspec.msgpack.Decoder(type_).decode
    defaults = _defaults(type_)
    positions = {name: position for position, name in enumerate(columns)}
    rows = msgspec.msgpack.Decoder(list[Any])

    def decode_by_name(payload: bytes) -> Record | Amendment:
        row = rows.decode(payload)
        values = []
        for name, default in defaults.items():
            position = positions.get(name, len(row))
            values.append(row[position] if position < len(row) else default)
        return msgspec.convert(values, type_)

    return decode_by_name


def _defaults(type_: type[Record] | type[Amendment]) -> dict[str, Any]:
    """What stands in for a column that an older segment does not have: its default, or its type's zero."""
    defaults: dict[str, Any] = {}
    for field in msgspec.structs.fields(type_):
        if field.default is not msgspec.NODEFAULT:
            defaults[field.name] = field.default
        else:
            defaults[field.name] = field.type()
    return defaults


def iter_records(
    directory: Path,
    *,
    follow: bool = False,
    poll_s: float = 0.2,
    on_damage: Callable[[SegmentDamage], None] | None = None,
) -> Generator[Record | Amendment, None, None]:
    """Read every segment below a directory: worker by worker, each worker's records in the order they were written.

    Args:
        directory: Holds one subdirectory per worker, or segments.
        follow: Go on for ever with what is written from now on, including by workers that start later.
        poll_s: How often a follower looks, seconds.
        on_damage: Told about everything that could not be read.
    """
    tails: dict[Path, _Tail] = {}
    try:
        while True:
            has_news = False
            for folder in sorted({directory, *(path.parent for path in directory.glob("*/*.seg"))}):
                if folder not in tails:
                    tails[folder] = _Tail(folder, on_damage)
                for record in tails[folder].read(is_last_look=not follow):
                    has_news = True
                    yield record
            if not follow:
                return
            if not has_news:
                time.sleep(poll_s)
    finally:
        for tail in tails.values():
            tail.close()


class _Tail:
    """One worker's segments in order, from where the last look stopped."""

    def __init__(self, folder: Path, on_damage: Callable[[SegmentDamage], None] | None) -> None:
        self._folder = folder
        self._on_damage = on_damage
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._reader: _FrameReader | None = None

    def read(self, *, is_last_look: bool) -> Iterator[Record | Amendment]:
        while True:
            # Listed before the read: when a later segment exists, the one at hand will not grow any more.
            later = [path for path in _segment_paths(self._folder) if self._path is None or path.name > self._path.name]
            if self._file is not None and self._reader is not None:
                size_bytes = os.fstat(self._file.fileno()).st_size
                yield from self._reader.read(size_bytes)
                if later or is_last_look:
                    self._reader.report_tail(size_bytes)
                    self.close()
            if not later or self._file is not None:
                return
            self._path = later[0]
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                continue  # the writer has just removed it to keep to its bound
            self._reader = _FrameReader(self._file, self._path, self._on_damage)

    def close(self) -> None:
        """Let go of the file at hand. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._file = self._reader = None


def _segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08d}.seg"


def _segment_paths(directory: Path) -> list[Path]:
    """Segments in the order of their numbers."""
    return sorted(path for path in directory.glob("*.seg") if path.stem.isascii() and path.stem.isdigit())
