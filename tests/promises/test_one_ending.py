"""Every request received ends exactly once, and the books balance at every moment."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headrace.errors import HeadraceError, MalformedJson
from headrace.records import Amendment, Record
from headrace.snapshot import RecordPolicy
from headrace.storage.memory import MemorySink
from headrace.telemetry.slots import LedgerRow
from headrace.tensors import Array
from headrace.testing.rig import Rig
from headrace.types import Ending


def slow_and_moody(rows: Array) -> Array:
    """Raises on 13; otherwise doubles."""
    if (rows == 13).any():
        raise ValueError("thirteen")
    return rows * 2


@pytest.mark.parametrize("durability", ["buffered", "strict"])
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_received_is_the_sum_of_all_endings_and_what_is_in_flight_at_every_moment(
    tmp_path: Path, seed: int, durability: str
) -> None:
    """O1, S2: under cancellations, malformed bodies, failing runs, late deadlines and vanished callers, at every
    look from outside, the law holds; and in the end each request has one record and its caller one reply at most."""
    dice = random.Random(seed)
    sink = MemorySink(asyncio.get_running_loop().call_soon)
    changes = {"m": {"records": RecordPolicy(durability=durability)}}
    async with Rig(tmp_path, {"m": slow_and_moody}, sink=sink, changes=changes) as rig:
        rig.use_thread_lane("m")
        started = []
        looks: list[LedgerRow] = []
        for _ in range(600):
            rows = [13.0 if dice.random() < 0.03 else 1.0] * dice.choice([1, 1, 1, 4, 300])
            broken = MalformedJson("broken") if dice.random() < 0.05 else None
            ticket, call = rig.start("m", rows, broken=broken, timeout_s=dice.choice([0.0005, 0.01, 1.0]))
            started.append((ticket, call))
            if dice.random() < 0.1:
                dice.choice(started)[1].is_connected = False
            if dice.random() < 0.1:
                rig.pipeline.abandon(dice.choice(started)[0])
            if dice.random() < 0.2:
                await asyncio.sleep(dice.choice([0, 0, 0.002]))
            looks.append(rig.ledger("m"))
        await rig.idle()
        looks.append(rig.ledger("m"))

        assert [0] * len(looks) == [look.difference for look in looks]
        last = looks[-1]
        assert (last.received, last.in_flight) == (600, 0)
        endings = Counter(ticket.ending for ticket, _ in started)
        assert {
            Ending.ANSWERED: last.answered,
            Ending.REJECTED: last.rejected,
            Ending.FAILED: last.failed,
            Ending.EXPIRED: last.expired,
            Ending.ABANDONED: last.abandoned,
        } == {ending: endings.get(ending, 0) for ending in Ending}
        assert min(last.answered, last.rejected, last.failed, last.abandoned) > 0
        for ticket, call in started:
            assert call.answers_sent == (0 if ticket.ending is Ending.ABANDONED else 1)
        records = Counter(record.request_id for record in sink.records if isinstance(record, Record))
        assert {ticket.request_id: 1 for ticket, _ in started} == dict(records)


async def test_a_request_for_no_known_model_is_counted_without_becoming_a_label(tmp_path: Path) -> None:
    """O1: unknown names never become labels."""
    async with Rig(tmp_path, {"m": lambda rows: rows}) as rig:
        reply = await rig.infer("nobody-has-this-name", [1])

        assert isinstance(reply, HeadraceError)
        assert reply.code == "unknown_model"
        assert (
            rig.ledger("unknown").received,
            rig.ledger("unknown").rejected,
            rig.ledger("unknown").difference,
        ) == (1, 1, 0)


async def test_a_strict_answer_leaves_only_after_its_record_is_on_disk(tmp_path: Path) -> None:
    """O3: encode, commit, send; and when the commit fails the caller is refused instead."""
    sink = MemorySink(asyncio.get_running_loop().call_soon)
    changes = {"m": {"records": RecordPolicy(durability="strict")}}
    async with Rig(tmp_path, {"m": lambda rows: rows}, sink=sink, changes=changes) as rig:
        await rig.infer("m", [1])
        written = len(sink.records)
        _, at_commit = rig.start("m", [1])
        sink.fail()
        at_door = await rig.infer("m", [1])
        replies = [await at_commit.answer, at_door]

        assert written == 1
        assert [(reply.code, reply.http_status) for reply in replies if isinstance(reply, HeadraceError)] == [
            ("records_unavailable", 503)
        ] * 2
        assert rig.ledger("m").difference == 0


async def test_a_send_that_fails_after_the_commit_is_amended(tmp_path: Path) -> None:
    """O3: the record on disk said answered; the amendment says that the caller had gone."""
    sink = MemorySink(asyncio.get_running_loop().call_soon)
    changes = {"m": {"records": RecordPolicy(durability="strict")}}
    async with Rig(tmp_path, {"m": lambda rows: rows}, sink=sink, changes=changes) as rig:
        ticket, call = rig.start("m", [1])
        call.is_connected = False
        await rig.idle()

        first, second = sink.records
        assert isinstance(first, Record)
        assert isinstance(second, Amendment)
        assert (first.ending, second.ending) == ("answered", "abandoned")
        assert Ending.ABANDONED is ticket.ending
        assert (rig.ledger("m").abandoned, rig.ledger("m").difference) == (1, 0)


class PatientSink(MemorySink):
    """Commits only when told to."""

    def commit(self, records: Sequence[Record | Amendment], done: Callable[[bool], None]) -> None:
        self.held = (records, done)

    def go_on(self, *, is_on_disk: bool) -> None:
        records, done = self.held
        if is_on_disk:
            self.write(records)
        done(is_on_disk)


@pytest.mark.parametrize("is_on_disk", [True, False])
async def test_a_caller_that_leaves_during_the_commit_has_one_record_whose_last_word_is_abandoned(
    tmp_path: Path, is_on_disk: bool
) -> None:
    """O3: the record on its way to the disk is amended, or written once when it did not get there."""
    sink = PatientSink(asyncio.get_running_loop().call_soon)
    changes = {"m": {"records": RecordPolicy(durability="strict")}}
    async with Rig(tmp_path, {"m": lambda rows: rows}, sink=sink, changes=changes) as rig:
        ticket, _ = rig.start("m", [1])
        while not hasattr(sink, "held"):  # the batch runs on this loop
            await asyncio.sleep(0)
        rig.pipeline.abandon(ticket)
        sink.go_on(is_on_disk=is_on_disk)
        await rig.idle()

        entries = [(type(entry), entry.ending) for entry in sink.records]
        amended = [(Record, "answered"), (Amendment, "abandoned")]
        assert (amended if is_on_disk else [(Record, "abandoned")]) == entries
        assert (1, 0) == (rig.ledger("m").abandoned, rig.ledger("m").difference)
