"""Record segments: what damage costs, what a kill costs, what a full disk costs."""

import asyncio
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import headrace
from headrace.clock import ManualClock, SystemClock
from headrace.config import Settings
from headrace.records import COLUMNS, Amendment, Record
from headrace.storage import segments
from headrace.storage.segments import SegmentDamage, SegmentWriter, iter_records, read_segment
from headrace.testing import fuzz_segments

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(headrace.__file__).parents[1])}


def a_record(request_id: str, inputs: bytes | None = None) -> Record:
    return Record(
        request_id, "0" * 32, 1e9, "snap", "flower", "iris", "1", "", "baseline", 1.0, "http", "answered", "", 200, "",
        "", "", "", 1, 1, 1, 10, 20, 0.1, 0.01, 0.001, 0.002, 0.003, 0.004, inputs,
    )  # fmt: skip


class Writer:
    """A segment writer with its outcomes counted."""

    def __init__(self, folder: Path, settings: Settings | None = None, clock: object = None) -> None:
        self.outcomes: Counter[str] = Counter()
        self.sink = SegmentWriter(
            folder,
            settings or Settings(),
            asyncio.get_running_loop().call_soon_threadsafe,
            clock or SystemClock(),  # type: ignore[arg-type]
            lambda outcome, count: self.outcomes.update({outcome: count}),
        )

    def commit(self, *records: Record | Amendment) -> Awaitable[bool]:
        answer = asyncio.get_running_loop().create_future()
        self.sink.commit(records, answer.set_result)
        return answer


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not is_so():
            await asyncio.sleep(0.005)


async def make_segment(folder: Path, *records: Record | Amendment) -> Path:
    writer = Writer(folder)
    assert await writer.commit(*records)
    await writer.sink.close()
    return max(folder.glob("*.seg"))


def frame_offsets(content: bytes) -> list[int]:
    """Where each frame begins, and the end."""
    (header_bytes,) = struct.unpack_from("<I", content, 8)
    offsets = [16 + header_bytes]
    while offsets[-1] < len(content):
        (length,) = struct.unpack_from("<I", content, offsets[-1])
        offsets.append(offsets[-1] + 9 + length)
    return offsets


def read(path: Path) -> tuple[list[str], list[SegmentDamage]]:
    damages: list[SegmentDamage] = []
    return [record.request_id for record in read_segment(path, damages.append)], damages


# ---------------------------------------------------------------------------------------------------- damage


async def test_a_tail_torn_at_any_byte_costs_the_last_record_only(tmp_path: Path) -> None:
    """Wherever a killed writer stopped inside the last frame, all records before it are read, nothing raises (O3)."""
    path = await make_segment(tmp_path, a_record("a"), a_record("b", b"payload"), a_record("c"))
    content = path.read_bytes()
    *_, last, end = frame_offsets(content)
    torn = tmp_path / "torn.seg"
    for cut in range(last, end):
        torn.write_bytes(content[:cut])
        found, damages = read(torn)

        assert ["a", "b"] == found
        assert [("torn_tail", last, cut - last, True)] * (cut > last) == [
            (damage.kind, damage.offset, damage.lost_bytes, damage.is_end) for damage in damages
        ]


async def test_any_changed_byte_in_the_middle_costs_that_record_only(tmp_path: Path) -> None:
    """A frame whose checksum is wrong is skipped, reported, and its neighbours are read (O3)."""
    path = await make_segment(tmp_path, a_record("a"), a_record("b", b"payload"), a_record("c"))
    content = path.read_bytes()
    _, start, end, _ = frame_offsets(content)
    changed = tmp_path / "changed.seg"
    for at in range(start + 4, end):  # the four bytes before are the length
        changed.write_bytes(content[:at] + bytes((content[at] ^ 0x41,)) + content[at + 1 :])
        found, damages = read(changed)

        assert ["a", "c"] == found
        assert [("bad_checksum", start, end - start, False)] == [
            (damage.kind, damage.offset, damage.lost_bytes, damage.is_end) for damage in damages
        ]


async def test_a_length_that_cannot_be_ends_the_segment_with_a_report(tmp_path: Path) -> None:
    """Behind an impossible length nothing can be trusted: reading stops and says how much is lost (O3)."""
    path = await make_segment(tmp_path, a_record("a"), a_record("b"), a_record("c"))
    content = bytearray(path.read_bytes())
    _, start, _, end = frame_offsets(content)
    content[start : start + 4] = bytes(4)
    path.write_bytes(content)

    assert (["a"], [SegmentDamage(path, start, "bad_length", end - start, True)]) == read(path)


async def test_a_damaged_header_loses_the_segment_and_says_so(tmp_path: Path) -> None:
    """Without its column list a segment is not guessed at (O3)."""
    path = await make_segment(tmp_path, a_record("a"))
    content = path.read_bytes()
    (header_end, _) = frame_offsets(content)
    for at in range(header_end):
        path.write_bytes(content[:at] + bytes((content[at] ^ 0x41,)) + content[at + 1 :])
        found, damages = read(path)

        assert [] == found
        assert 1 == len(damages)
        assert damages[0].is_end


def test_damaged_segments_never_crash_the_reader() -> None:
    """5,000 segments damaged at random: no crash, no loop, no record that was not written (O3)."""
    report = fuzz_segments.run(5_000, seed=random.randrange(2**32))

    assert 5_000 == report.executions
    assert report.records > 1_000
    assert report.damages > 1_000


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(10))
def test_a_million_damaged_segments_never_crash_the_reader(seed: int) -> None:
    """A million in ten parts (O3)."""
    assert 100_000 == fuzz_segments.run(100_000, seed).executions


# ---------------------------------------------------------------------------------------------------- other releases


def write_by_hand(path: Path, columns: tuple[str, ...], *frames: tuple[int, object]) -> Path:
    body = msgspec.msgpack.encode({"format": 1, "schema": 0, "columns": columns, "from_the_future": [1]})
    content = b"HRSEGMNT" + struct.pack("<II", len(body), zlib.crc32(body)) + body
    for kind, row in frames:
        payload = msgspec.msgpack.encode(row)
        content += struct.pack("<IIB", len(payload), zlib.crc32(bytes((kind,)) + payload), kind) + payload
    path.write_bytes(content)
    return path


def test_an_older_column_list_is_read_by_name(tmp_path: Path) -> None:
    """Columns that a segment lacks get their default, columns nobody knows are passed over, order is free (O3)."""
    path = write_by_hand(
        tmp_path / "old.seg", ("endpoint", "colour", "request_id", "status"), (1, ("flower", "red", "r1", 404))
    )
    (record,) = read_segment(path)
    assert isinstance(record, Record)

    assert ("r1", "flower", 404, "", 0.0, None) == (
        record.request_id, record.endpoint, record.status, record.model, record.total_s, record.inputs,
    )  # fmt: skip


def test_columns_added_by_a_later_release_are_passed_over(tmp_path: Path) -> None:
    """A segment of a later release, with more columns and a kind we do not know, gives what we know (O3)."""
    ours = msgspec.to_builtins(a_record("r1"))
    path = write_by_hand(tmp_path / "new.seg", (*COLUMNS, "later"), (1, (*ours, "x")), (7, "?"), (1, (*ours, "y")))

    assert (["r1", "r1"], []) == read(path)


def test_a_row_that_is_no_record_is_reported(tmp_path: Path) -> None:
    """A frame with a right checksum and a wrong content is skipped and reported (O3)."""
    path = write_by_hand(tmp_path / "odd.seg", COLUMNS, (1, ["r1", 17]), (1, msgspec.to_builtins(a_record("r2"))))
    found, damages = read(path)

    assert ["r2"] == found
    assert ["bad_payload"] == [damage.kind for damage in damages]


# ---------------------------------------------------------------------------------------------------- the writer


async def test_commits_of_one_turn_share_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Group commit: 200 commits made together cost a few syncs, not 200 (O3)."""
    syncs = 0
    fdatasync = os.fdatasync

    def counting(fd: int) -> None:
        nonlocal syncs
        syncs += 1
        fdatasync(fd)

    writer = Writer(tmp_path)
    assert await writer.commit(a_record("first"))
    monkeypatch.setattr(segments.os, "fdatasync", counting)
    answers = await asyncio.gather(*(writer.commit(a_record(f"r{index}")) for index in range(200)))
    monkeypatch.undo()
    await writer.sink.close()

    assert all(answers)
    assert 1 <= syncs <= 3


async def test_a_disk_that_hangs_holds_neither_the_loop_nor_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a sync does not come back the queue fills to its bound, the rest is dropped and counted; after 5 s the
    sink says that it is not writable and commits answer False at once (O3)."""
    monkeypatch.setattr(segments, "QUEUED_RECORDS_MAX", 50)
    hanging, release = threading.Event(), threading.Event()
    fdatasync = os.fdatasync

    def hang(fd: int) -> None:
        hanging.set()
        release.wait(20)
        fdatasync(fd)

    clock = ManualClock(now_s=1.0)
    writer = Writer(tmp_path, clock=clock)
    assert await writer.commit(a_record("first"))
    monkeypatch.setattr(segments.os, "fdatasync", hang)
    stuck = writer.commit(a_record("stuck"))
    await until(hanging.is_set)
    for index in range(60):
        writer.sink.write([a_record(f"r{index}")])

    assert 11 == writer.outcomes["dropped"]
    assert writer.sink.is_writable
    clock.advance(6.0)
    assert not writer.sink.is_writable
    assert not await writer.commit(a_record("refused"))

    release.set()
    assert await stuck
    assert writer.sink.is_writable
    await writer.sink.close()


async def test_a_failed_sync_takes_its_records_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records whose commit said False are not found later, and the file whose sync failed is never written again (O3,
    fsyncgate)."""
    writer = Writer(tmp_path)
    assert await writer.commit(a_record("before"))
    fdatasync = os.fdatasync

    def fail_once(fd: int) -> None:
        monkeypatch.setattr(segments.os, "fdatasync", fdatasync)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(segments.os, "fdatasync", fail_once)
    assert not await writer.commit(a_record("refused"))
    await until(lambda: writer.sink.is_writable)
    assert await writer.commit(a_record("after"))
    await writer.sink.close()

    assert [["before"], ["after"]] == [read(path)[0] for path in sorted(tmp_path.glob("*.seg"))]


async def test_the_disk_bound_removes_the_oldest_and_keeps_the_newest(tmp_path: Path) -> None:
    """Segments stay within `records_bytes_max`; the open one is never removed; removals are counted (O3)."""
    bound = 1 << 20
    (tmp_path / "00000003.seg").write_bytes(bytes(300_000))  # of an earlier start
    writer = Writer(tmp_path, Settings(records_bytes_max=bound))
    for index in range(400):
        assert await writer.commit(a_record(f"r{index}", inputs=bytes(10_000)))
        assert sum(path.stat().st_size for path in tmp_path.glob("*.seg")) <= bound + 300_000
    await writer.sink.close()
    found = [record.request_id for record in iter_records(tmp_path)]

    assert not (tmp_path / "00000003.seg").exists()
    assert writer.outcomes["segments_removed"] > 5
    assert [f"r{index}" for index in range(400 - len(found), 400)] == found
    assert len(found) > 50
    assert writer.sink.disk_bytes <= bound


async def test_starts_without_requests_leave_nothing_behind(tmp_path: Path) -> None:
    """A worker that restarts in a loop does not fill the folder with empty segments (O3)."""
    for _ in range(3):
        writer = Writer(tmp_path)
        await until(lambda: any(tmp_path.glob("*.seg")))
        await writer.sink.close()

    assert [] == list(tmp_path.iterdir())


async def test_a_record_that_cannot_be_encoded_keeps_its_envelope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A payload too large for a frame, or text that is no UTF-8, is dropped or mended; the record is written, and so
    are its neighbours in the batch (O3)."""
    monkeypatch.setattr(segments, "FRAME_BYTES_MAX", 1000)
    path = await make_segment(tmp_path, a_record("a\udcff"), a_record("b", bytes(2000)), a_record("c"))

    assert (["a?", "b", "c"], []) == read(path)


async def test_records_of_all_workers_are_read_in_order_and_followed(tmp_path: Path) -> None:
    """`iter_records` reads worker by worker in order of writing; a follower sees what comes later, and new
    workers (O3)."""
    await make_segment(tmp_path / "worker-2", a_record("2a"), a_record("2b"))
    await make_segment(tmp_path / "worker-1", a_record("1a"))
    await make_segment(tmp_path / "worker-1", a_record("1b"))
    assert ["1a", "1b", "2a", "2b"] == [record.request_id for record in iter_records(tmp_path)]

    follower = iter_records(tmp_path, follow=True, poll_s=0.01)
    followed = [next(follower).request_id for _ in range(4)]
    writer = Writer(tmp_path / "worker-2")
    assert await writer.commit(a_record("2c"))
    followed.append(next(follower).request_id)
    assert await writer.commit(a_record("2d"))
    followed.append(next(follower).request_id)
    await make_segment(tmp_path / "worker-3", a_record("3a"))
    followed.append(next(follower).request_id)
    await writer.sink.close()
    follower.close()

    assert ["1a", "1b", "2a", "2b", "2c", "2d", "3a"] == followed


# ---------------------------------------------------------------------------------------------------- kills and disks

COMMITTER = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from test_segments import Writer, a_record

    async def main():
        writer = Writer(Path(sys.argv[1]))
        index = 0
        async def one():
            nonlocal index
            while True:
                index += 1
                name = f"r{index}"
                writer.sink.write([a_record(f"buffered-{name}")])
                assert await writer.commit(a_record(name, b"x" * 500))
                sys.stdout.write(name + chr(10))
                sys.stdout.flush()
        await asyncio.gather(*(one() for _ in range(8)))

    asyncio.run(main())
    """
)


@pytest.mark.parametrize("attempt", range(3))
def test_a_killed_writer_has_lost_nothing_it_acknowledged(tmp_path: Path, attempt: int) -> None:
    """kill -9 at a random instant: every record whose commit said True is read back (O3)."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMITTER, str(tmp_path), str(Path(__file__).parent)],
        stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stdout is not None
    acknowledged = [process.stdout.readline().strip() for _ in range(20)]
    threading.Timer(random.uniform(0.05, 0.3), process.send_signal, (signal.SIGKILL,)).start()
    acknowledged += process.stdout.read().split()
    process.stdout.close()
    assert -signal.SIGKILL == process.wait()
    damages: list[SegmentDamage] = []
    found = {record.request_id for record in iter_records(tmp_path, on_damage=damages.append)}

    # The last line may be cut off by the kill; "r12" of "r123" was acknowledged earlier all the same.
    assert set(acknowledged) <= found
    assert len(acknowledged) > 20
    assert all(damage.kind == "torn_tail" for damage in damages)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB; only root can mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


async def test_a_full_disk_is_survived_and_left_behind(small_disk: Path) -> None:
    """Disk full: commits say False at once, writes are dropped and counted; with room again records are taken; what was
    acknowledged is there, what was refused is not, and no frame is broken (O3)."""
    writer = Writer(small_disk / "worker-1")
    promised, refused = [], []
    for index in range(2_000):
        is_on_disk = await writer.commit(a_record(f"r{index}", random.randbytes(5_000)))
        (promised if is_on_disk else refused).append(f"r{index}")
        if len(refused) == 10:
            break
    assert not writer.sink.is_writable
    assert "No space left" in writer.sink.problem
    writer.sink.write([a_record("dropped")])
    assert writer.outcomes["dropped"] >= 11

    first = min((small_disk / "worker-1").glob("*.seg"))
    kept = first.read_bytes()
    first.write_bytes(b"")  # as an operator would make room
    await until(lambda: writer.sink.is_writable)
    assert await writer.commit(a_record("after"))
    await writer.sink.close()
    later, damages = [], []
    for path in sorted((small_disk / "worker-1").glob("*.seg"))[1:]:
        later += [record.request_id for record in read_segment(path, damages.append)]
    small = small_disk.parent / "kept.seg"
    small.write_bytes(kept)

    assert [*promised, "after"] == read(small)[0] + later
    assert [] == damages + read(small)[1]
    assert len(promised) > 50


READ_ONLY = textwrap.dedent(
    """
    import asyncio, os, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from test_segments import Writer, a_record, until

    # After the imports: the interpreter may lie where nobody else can read.
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)

    async def main():
        writer = Writer(Path(sys.argv[1]))
        await until(lambda: not writer.sink.is_writable)
        assert not await writer.commit(a_record("a"))
        writer.sink.write([a_record("b")])
        await writer.sink.close()
        print(dict(writer.outcomes), writer.sink.problem)

    asyncio.run(main())
    """
)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_that_may_not_be_written_stops_nothing_but_records(tmp_path: Path) -> None:
    """As an unprivileged user on a read-only folder the sink starts, refuses, counts and says why (O3)."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    finished = subprocess.run(
        [sys.executable, "-B", "-c", READ_ONLY, str(tmp_path), str(Path(__file__).parent)],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=30,
    )  # fmt: skip

    assert "" == finished.stderr
    assert "{'dropped': 2}" in finished.stdout
    assert "Permission denied" in finished.stdout


async def test_a_segment_that_somebody_deletes_takes_no_later_record_with_it(tmp_path: Path) -> None:
    """O3: writes to a deleted file succeed and vanish; a strict answer must not rest on one."""
    folder = tmp_path / "worker-1"
    writer = Writer(folder)
    assert await writer.commit(a_record("before"))
    for path in folder.glob("*.seg"):
        path.unlink()
    assert await writer.commit(a_record("after"))
    folder_gone = [record.request_id for record in iter_records(folder)]
    shutil.rmtree(folder)
    assert await writer.commit(a_record("after the folder"))
    found = [record.request_id for record in iter_records(folder)]
    await writer.sink.close()

    assert ["after"] == folder_gone
    assert ["after the folder"] == found


async def test_what_has_queued_behind_a_slow_disk_keeps_to_the_disk_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O3: twenty times the bound arrives while one sync hangs; it is written in portions, so that the oldest can go."""
    bound = 1 << 20
    go_on = threading.Event()
    fdatasync = os.fdatasync

    def hang(fd: int) -> None:
        go_on.wait(10)
        fdatasync(fd)

    writer = Writer(tmp_path, Settings(records_bytes_max=bound))
    await until(lambda: writer.sink.is_writable)
    monkeypatch.setattr(segments.os, "fdatasync", hang)
    first = writer.commit(a_record("first"))
    most_bytes = 0

    def watch(outcome: str, count: int) -> None:
        nonlocal most_bytes
        most_bytes = max(most_bytes, sum(path.stat().st_size for path in tmp_path.glob("*.seg")))

    for index in range(200):
        writer.sink.write([a_record(f"r{index}", inputs=bytes(100_000))])
    writer.sink._on_outcome = watch
    go_on.set()
    assert await first
    await writer.sink.close()
    sizes = [path.stat().st_size for path in tmp_path.glob("*.seg")]
    found = [record.request_id for record in iter_records(tmp_path)]

    assert sum(sizes) <= bound + 200_000
    assert most_bytes <= bound + 400_000
    assert f"r{199}" == found[-1]


async def test_a_reader_whose_segments_are_removed_under_it_reads_the_others(tmp_path: Path) -> None:
    """O3: keeping to the disk bound deletes what a reader has listed, or holds open, and never ends it."""
    for index in range(3):
        await make_segment(tmp_path, a_record(f"{index}-a"), a_record(f"{index}-b"))
    paths = sorted(tmp_path.glob("*.seg"))
    reader = iter_records(tmp_path)
    first = next(reader)
    for path in paths[:2]:
        path.unlink()
    rest = [record.request_id for record in reader]

    assert "0-a" == first.request_id
    assert ["0-b", "2-a", "2-b"] == rest
