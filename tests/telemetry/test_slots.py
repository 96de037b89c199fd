"""Slots: what a reader in another process may rely on, and what a kill leaves behind."""

import errno
import os
import random
import signal
import struct
import subprocess
import sys
import textwrap
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.clock import ManualClock
from headrace.telemetry import slots
from headrace.telemetry.slots import (
    OVERFLOW_ENDPOINT,
    HistogramValues,
    LedgerRow,
    SlotsInUse,
    SlotsUnreadable,
    SlotWriter,
    peek_connections,
    read_slots,
    settle,
)
from headrace.types import Ending

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(headrace.__file__).parents[1])}

HAMMER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from headrace.telemetry.slots import SlotWriter
    from headrace.types import Ending

    writer = SlotWriter.open(Path(sys.argv[1]))
    endings = list(Ending)
    first, second = writer.ledger("a"), writer.ledger("b")
    print("ready", flush=True)
    turn = 0
    while True:
        turn += 1
        for _ in range(turn % 7):
            first.received(); second.received()
        for index in range(turn % 7):
            first.ended(endings[(turn + index) % 5]); second.ended(endings[index % 5])
        if turn % 1000 == 0:
            writer.counter("growing", {"turn": str(turn)}).add()
            first.received()
    """
)


@contextmanager
def hammering(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A worker process that does nothing but count."""
    process = subprocess.Popen(
        [sys.executable, "-c", HAMMER, str(path)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stdout is not None
    try:
        assert "ready\n" == process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker-1.slots"


def reopened(writer: SlotWriter) -> SlotWriter:
    """As after a kill: nobody says goodbye, the lock goes with the process."""
    os.close(writer._fd)
    writer._fd = -1
    writer._map = None  # type: ignore[assignment]
    for name in ("_cells", "_ledgers", "_single", "_histograms", "connections", "is_taking", "_dropped", "_overflow"):
        delattr(writer, name)
    return SlotWriter.open(writer.path)


# ---------------------------------------------------------------------------------------------------- conservation


def test_a_reader_sees_the_law_hold_at_every_moment_while_a_worker_hammers(path: Path) -> None:
    """In another process, every row that is read says received = endings + in flight, for two seconds (O1)."""
    with hammering(path):
        readings, received, until_s = 0, 0, time.monotonic() + 2.0
        while time.monotonic() < until_s:
            values = read_slots(path)
            for row in values.ledgers.values():
                assert 0 == row.difference
                assert 0 <= row.in_flight <= row.received
            assert values.ledgers["a"].received >= received
            received = values.ledgers["a"].received
            readings += 1

    assert readings > 100
    assert received > 10_000


@pytest.mark.parametrize("attempt", range(6))
def test_the_law_holds_after_a_kill_at_any_instant(path: Path, attempt: int) -> None:
    """kill -9 at random: before `settle` the law holds, afterwards nothing is in flight and what was is failed (O1)."""
    with hammering(path) as process:
        time.sleep(random.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
        before = read_slots(path).ledgers
        lost = settle(path)
        after = read_slots(path).ledgers

    assert {"a", "b"} == set(after)
    for endpoint, row in after.items():
        assert (0, 0) == (before[endpoint].difference, row.difference)
        assert (before[endpoint].in_flight, 0) == (lost.get(endpoint, 0), row.in_flight)
        assert before[endpoint].failed + before[endpoint].in_flight == row.failed
        assert row.lost == lost.get(endpoint, 0)
    assert {} == settle(path)
    assert after == read_slots(path).ledgers


def test_a_worker_stopped_between_any_two_stores_is_read_and_settled_right(path: Path) -> None:
    """After each single store of `received` and `ended` the row reads lawful, and `settle` makes it whole (O1)."""

    class Stopped(Exception):
        pass

    class Row:
        """A row that lets a number of stores through."""

        def __init__(self, cells: slots._Cells, stores: int) -> None:
            self.cells, self.stores = cells, stores

        def __getitem__(self, index: int) -> float:
            return self.cells[index]

        def __setitem__(self, index: int, value: float) -> None:
            if self.stores == 0:
                raise Stopped
            self.stores -= 1
            self.cells[index] = value

    for step in ("received", "ended"):
        for stores in range(4):
            path.unlink(missing_ok=True)
            writer = SlotWriter.open(path)
            ledger = writer.ledger("a")
            ledger.received()
            ledger.received()
            torn = slots.Ledger(Row(ledger._row, stores))
            with pytest.raises(Stopped):
                torn.received() if step == "received" else torn.ended(Ending.ANSWERED)
            row = read_slots(path).ledgers["a"]
            writer.close()
            settle(path)
            after = read_slots(path).ledgers["a"]

            assert (0, 0, 0) == (row.difference, after.difference, after.in_flight), (step, stores)
            assert after.received == after.answered + after.failed


def test_settling_again_after_new_work_counts_only_what_is_newly_lost(path: Path) -> None:
    """The second worker's losses add to the first's, nothing is counted twice (O1)."""
    writer = SlotWriter.open(path)
    writer.ledger("a").received()
    writer = reopened(writer)  # settles by itself
    writer.ledger("a").received()
    writer.ledger("a").received()
    writer.ledger("a").ended(Ending.REJECTED)
    writer.close()

    assert {"a": 1} == settle(path)
    assert LedgerRow(received=3, rejected=1, failed=2, lost=2) == read_slots(path).ledgers["a"]


def test_a_live_worker_cannot_be_settled_nor_its_file_taken(path: Path) -> None:
    """The file is locked as long as its worker lives, so a mistaken supervisor does no harm (O1)."""
    writer = SlotWriter.open(path)
    writer.ledger("a").received()

    with pytest.raises(SlotsInUse, match="alive"):
        settle(path)
    with pytest.raises(SlotsInUse, match="alive"):
        SlotWriter.open(path)
    assert 1 == read_slots(path).ledgers["a"].in_flight


# ---------------------------------------------------------------------------------------------------- restarts


def test_counters_go_on_and_gauges_start_anew_after_a_restart(path: Path) -> None:
    """A restarted worker adopts its file: rates stay right, stale state is not shown (O1)."""
    writer = SlotWriter.open(path)
    writer.counter("c", {"k": "v"}).add(3.0)
    writer.gauge("g").set(7.0)
    writer.histogram("h", {}, (1.0, 2.0)).observe(1.5)
    writer.ledger("a").received()
    writer.ledger("a").ended(Ending.ANSWERED)
    writer = reopened(writer)
    writer.counter("c", {"k": "v"}).add()
    writer.histogram("h", {}, (1.0, 2.0)).observe(5.0)
    values = read_slots(path)

    assert [({"k": "v"}, 4.0)] == list(values.counters("c"))
    assert [({}, 0.0)] == list(values.gauges("g"))
    assert [({}, HistogramValues((1.0, 2.0), (0.0, 1.0, 1.0), 6.5))] == list(values.histograms("h"))
    assert 1 == values.ledgers["a"].answered
    assert 2 == values.starts


def test_an_entry_that_was_never_published_is_not_seen_and_its_place_is_used_again(path: Path) -> None:
    """A worker killed while it added a key leaves bytes behind that nobody reads (O1)."""
    writer = SlotWriter.open(path)
    writer.counter("before").add()
    used = int(writer._cells[slots._USED])
    writer._map[used : used + 400] = b"\xff" * 400
    assert ["before"] == [name for _, name in read_slots(path).series]

    writer = reopened(writer)
    writer.counter("after").add(2.0)
    values = read_slots(path)
    assert [({}, 1.0)] == list(values.counters("before"))
    assert [({}, 2.0)] == list(values.counters("after"))


@pytest.mark.parametrize("content", [b"", b"x" * 50, b"x" * 5000, b"HRSLOT01" + bytes(20)])
def test_a_file_that_is_none_of_ours_is_refused_by_readers_and_replaced_by_the_worker(
    path: Path, content: bytes
) -> None:
    """Rubbish neither crashes a scrape nor keeps a worker from starting (O1)."""
    path.write_bytes(content)
    with pytest.raises(SlotsUnreadable):
        read_slots(path)
    with pytest.raises(SlotsUnreadable):
        settle(path)
    SlotWriter.open(path).counter("c").add()

    assert [({}, 1.0)] == list(read_slots(path).counters("c"))


@given(data=st.data())
def test_a_damaged_file_never_crashes_a_reader(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever eight bytes are overwritten, reading gives what is sound or says that the file is unreadable (O1)."""
    path = tmp_path_factory.mktemp("slots") / "worker-1.slots"
    writer = SlotWriter.open(path, size_bytes=4096)
    writer.ledger("a").received()
    writer.histogram("h", {"k": "v"}, (1.0,)).observe(0.5)
    writer.counter("c").add()
    writer.close()
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, 760))
    content[at : at + 8] = data.draw(
        st.one_of(st.binary(min_size=8, max_size=8), st.floats().map(lambda x: struct.pack("<d", x)))
    )
    path.write_bytes(content[: data.draw(st.sampled_from([1000, 1001, 4096]))])
    try:
        read_slots(path)
        settle(path)
    except SlotsUnreadable:
        assert at < 8
    SlotWriter.open(path).counter("c").add()


# ---------------------------------------------------------------------------------------------------- no room


def test_a_full_file_loses_detail_and_says_so(path: Path) -> None:
    """When no key fits any more, counting goes on without error, the loss is counted, the law still holds (O1)."""
    writer = SlotWriter.open(path, size_bytes=4096)
    for index in range(100):
        writer.counter("c", {"k": str(index)}).add()
        writer.gauge("g", {"k": str(index)}).set(1.0)
        writer.histogram("h", {"k": str(index)}, (1.0,)).observe(0.5)
        ledger = writer.ledger(f"endpoint-{index}")
        ledger.received()
        ledger.ended(Ending.ANSWERED)
    values = read_slots(path)

    assert values.dropped > 250
    assert 100 == sum(row.received for row in values.ledgers.values())
    assert 100 == sum(row.answered for row in values.ledgers.values())
    assert values.ledgers[OVERFLOW_ENDPOINT].received > 50


def test_a_full_disk_costs_keys_and_not_the_worker(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is claimed before it is used, since a store into a hole on a full disk would kill the worker (O1)."""
    writer = SlotWriter.open(path)
    writer.counter("early").add()

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(slots.os, "posix_fallocate", full)
    for index in range(2_000):
        writer.counter("late", {"k": str(index)}).add()
    values = read_slots(path)

    assert values.dropped > 0
    assert [({}, 1.0)] == list(values.counters("early"))
    assert path.stat().st_blocks * 512 <= 128 * 1024


@pytest.mark.parametrize("kept_bytes", [0, 7, 128, 200, 256, 400, 1000, 4096, 5000])
def test_a_file_that_was_cut_short_is_taken_on_with_what_is_left_of_it(path: Path, kept_bytes: int) -> None:
    """O1: whatever somebody left of the file, the next worker starts, counts on, and has room for its keys."""
    first = SlotWriter.open(path)
    first.counter("early").add(3)
    for number in range(100):
        ledger = first.ledger(f"m{number}")
        ledger.received()
    first.close()
    del first, ledger
    os.truncate(path, kept_bytes)
    second = SlotWriter.open(path)
    second.counter("late").add()
    for number in range(100):
        second.ledger(f"m{number}").received()
    values = read_slots(path)

    assert 0 == values.dropped
    assert [({}, 1.0)] == list(values.counters("late"))
    assert {1} == {values.ledgers[f"m{number}"].in_flight for number in range(100)}
    assert {0} == {row.difference for row in values.ledgers.values()}


def test_the_last_page_of_a_full_disk_is_enough_to_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O1, F7: there is room for one page and no more; the worker starts and counts what fits."""

    def nearly_full(fd: int, offset: int, length: int) -> None:
        if offset + length > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(slots.os, "posix_fallocate", nearly_full)
    writer = SlotWriter.open(path)
    for number in range(100):
        writer.ledger(f"m{number}").received()
    values = read_slots(path)

    assert values.dropped > 0
    assert 100 == sum(row.received for row in values.ledgers.values())


# ---------------------------------------------------------------------------------------------------- neighbours


def test_connections_of_live_neighbours_can_be_peeked_at(path: Path) -> None:
    """A neighbour's connections are known while it lives; silent, stopped or missing it does not count (O1)."""
    clock = ManualClock(now_s=100.0)
    assert peek_connections(path, clock.now_s()) is None
    writer = SlotWriter.open(path, clock=clock)
    writer.connections.add(3.0)
    assert peek_connections(path, clock.now_s()) is None  # it takes none yet
    writer.is_taking.set(1.0)

    assert 3 == peek_connections(path, clock.now_s())
    clock.advance(slots.ALIVE_S_MAX + 1)
    assert peek_connections(path, clock.now_s()) is None
    writer.beat()
    assert 3 == peek_connections(path, clock.now_s())
    assert peek_connections(path, 5.0) is None  # the machine has booted since
    writer.close()
    writer.close()
    assert peek_connections(path, clock.now_s()) is None


# ---------------------------------------------------------------------------------------------------- numbers


def test_a_key_is_the_same_whatever_the_order_of_its_labels(path: Path) -> None:
    """Labels are a set (O1)."""
    writer = SlotWriter.open(path)
    writer.counter("c", {"a": "1", "b": "2"}).add()
    writer.counter("c", (("b", "2"), ("a", "1"))).add()

    assert [({"a": "1", "b": "2"}, 2.0)] == list(read_slots(path).counters("c"))


def test_counting_is_cheap(path: Path) -> None:
    """About 80 ns per addition and 180 to 270 ns per ledger step on the reference machine; ten times that is wrong
    anywhere (O1)."""
    writer = SlotWriter.open(path)
    cell, ledger = writer.counter("c"), writer.ledger("a")

    def nanoseconds(step: object) -> float:
        return min(timeit.repeat(step, number=2_000, repeat=20)) / 2_000 * 1e9  # type: ignore[arg-type]

    assert nanoseconds(lambda: cell.add(1.0)) < 1_000
    assert nanoseconds(ledger.received) < 2_500
    assert nanoseconds(lambda: ledger.ended(Ending.ANSWERED)) < 4_000
