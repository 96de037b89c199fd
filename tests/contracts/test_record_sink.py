"""What every record sink promises, held against the segment files and the memory."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from headrace.clock import SystemClock
from headrace.config import Settings
from headrace.ports import RecordSink
from headrace.records import Amendment, Record
from headrace.storage.memory import MemorySink
from headrace.storage.segments import SegmentWriter, iter_records


def a_record(request_id: str, inputs: bytes | None = None) -> Record:
    return Record(
        request_id, "0" * 32, 1e9, "snap", "flower", "iris", "1", "", "baseline", 1.0, "http", "answered", "", 200, "",
        "", "", "", 1, 1, 1, 10, 20, 0.1, 0.01, 0.001, 0.002, 0.003, 0.004, inputs,
    )  # fmt: skip


class Harness:
    """A sink, how to read it back, and how to break and mend what is under it."""

    def __init__(self, kind: str, tmp_path: Path, *, is_broken: bool) -> None:
        loop = asyncio.get_running_loop()
        self.outcomes: Counter[str] = Counter()
        self.sink: RecordSink
        self.read_back: Callable[[], list[Record | Amendment]]
        self.mend: Callable[[], object]
        if kind == "memory":
            memory = MemorySink(loop.call_soon_threadsafe, self._count)
            if is_broken:
                memory.fail()
            self.sink, self.mend, self.read_back = memory, memory.heal, lambda: list(memory.records)
        else:
            folder = tmp_path / "records"
            if is_broken:
                folder.write_text("a file where the folder should be")
            self.sink = SegmentWriter(
                folder / "worker-1", Settings(), loop.call_soon_threadsafe, SystemClock(), self._count
            )
            self.mend, self.read_back = folder.unlink, lambda: list(iter_records(folder))

    def _count(self, outcome: str, count: int) -> None:
        self.outcomes[outcome] += count

    async def commit(self, *records: Record | Amendment) -> bool:
        answer = asyncio.get_running_loop().create_future()
        self.sink.commit(records, answer.set_result)
        return await answer

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not is_so():
                await asyncio.sleep(0.005)


@pytest.fixture(params=["memory", "segments"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def sound(kind: str, tmp_path: Path) -> AsyncIterator[Harness]:
    harness = Harness(kind, tmp_path, is_broken=False)
    yield harness
    await harness.sink.close()


@pytest.fixture
async def broken(kind: str, tmp_path: Path) -> AsyncIterator[Harness]:
    harness = Harness(kind, tmp_path, is_broken=True)
    await harness.until(lambda: not harness.sink.is_writable)
    yield harness
    await harness.sink.close()


async def test_what_was_written_comes_back_in_order(sound: Harness) -> None:
    """Records and amendments come back equal and in the order they were handed over (O3)."""
    handed: list[Record | Amendment] = [a_record(f"r{index}", inputs=b"x" * index) for index in range(600)]
    handed.append(Amendment("r1", 1e9, "abandoned", "send_failed"))
    for record in handed:
        sound.sink.write((record,))
    await sound.sink.close()

    assert handed == sound.read_back()
    assert {"written": 601} == dict(sound.outcomes)


async def test_a_commit_is_answered_after_its_records_can_be_read(sound: Harness) -> None:
    """`done(True)` comes on the event loop, not before `commit` returned, and the records are there (O3)."""
    found: list[list[str]] = []
    answered = asyncio.Event()

    def done(is_on_disk: bool) -> None:
        assert is_on_disk
        asyncio.get_running_loop()  # raises anywhere but on the event loop
        found.append([record.request_id for record in sound.read_back()])
        answered.set()

    sound.sink.commit([a_record("a"), a_record("b")], done)
    assert found == []
    await answered.wait()

    assert [["a", "b"]] == found


async def test_many_commits_are_each_answered_once(sound: Harness) -> None:
    """Commits that share a batch lose no answer and get none twice (O3)."""
    answers: Counter[int] = Counter()
    for index in range(300):
        sound.sink.commit([a_record(f"r{index}")], lambda is_on_disk, index=index: answers.update({index: is_on_disk}))
    await sound.until(lambda: len(answers) == 300)
    await asyncio.sleep(0.01)

    assert dict.fromkeys(range(300), 1) == dict(answers)


async def test_an_empty_commit_is_answered_too(sound: Harness) -> None:
    """Nobody waits for ever because there was nothing to write (O3)."""
    assert await sound.commit()


async def test_a_callback_that_raises_keeps_nobody_else_waiting(sound: Harness) -> None:
    """One caller's trouble stays with that caller (O3)."""
    troubles: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: troubles.append(context["exception"]))

    def raises(is_on_disk: bool) -> None:
        raise ZeroDivisionError

    sound.sink.commit([a_record("a")], raises)

    assert await sound.commit(a_record("b"))
    assert [ZeroDivisionError] == [type(trouble) for trouble in troubles]


async def test_what_cannot_be_written_is_refused_at_once_and_counted(broken: Harness) -> None:
    """While the sink takes nothing, commits answer False, writes are dropped, both are counted, nothing raises (O3)."""
    broken.sink.write([a_record("lost")] * 3)
    before = asyncio.get_running_loop().time()
    is_on_disk = await broken.commit(a_record("refused"))

    assert not is_on_disk
    assert asyncio.get_running_loop().time() - before < 0.5
    assert {"dropped": 4} == dict(broken.outcomes)


async def test_a_mended_sink_takes_records_again(broken: Harness) -> None:
    """Recovery needs nobody: once the trouble is over, records are taken; those that were refused stay away (O3)."""
    assert not await broken.commit(a_record("refused"))
    broken.mend()
    await broken.until(lambda: broken.sink.is_writable)

    assert await broken.commit(a_record("taken"))
    assert ["taken"] == [record.request_id for record in broken.read_back()]


async def test_a_closed_sink_takes_nothing_and_may_be_closed_again(sound: Harness) -> None:
    """`close` writes what was taken, is idempotent, and afterwards everything is refused (O3)."""
    sound.sink.write([a_record("a")])
    await asyncio.gather(sound.sink.close(), sound.sink.close())
    await sound.sink.close()
    sound.sink.write([a_record("late")])

    assert not await sound.commit(a_record("later"))
    assert not sound.sink.is_writable
    assert ["a"] == [record.request_id for record in sound.read_back()]
    assert {"written": 1, "dropped": 2} == dict(sound.outcomes)
