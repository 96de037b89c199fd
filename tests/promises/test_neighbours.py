"""What one caller does never hurts another."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import HeadraceError, MalformedJson, ModelFailed
from headrace.tensors import Array
from headrace.testing.rig import Gate, Rig
from headrace.types import Ending


def doubled_or_raises_on_thirteen(rows: Array) -> Array:
    if (rows == 13).any():
        raise ValueError("thirteen")
    return rows * 2


async def test_one_of_four_batched_requests_that_makes_the_model_raise_leaves_the_other_three_answered(
    tmp_path: Path,
) -> None:
    """X2: a batch that fails is run again one by one, so only the request at fault fails."""
    async with Rig(tmp_path, {"m": doubled_or_raises_on_thirteen}) as rig:
        replies = await asyncio.gather(*(rig.infer("m", [value]) for value in (1, 13, 3, 4)))

        assert [None if isinstance(r, HeadraceError) else float(r[0, 0]) for r in replies] == [2, None, 6, 8]
        assert isinstance(replies[1], ModelFailed)


async def test_one_of_four_malformed_requests_leaves_the_other_three_answered(tmp_path: Path) -> None:
    """P3: what cannot be decoded never reaches a batch."""
    async with Rig(tmp_path, {"m": lambda rows: rows * 2}) as rig:
        calls = [rig.start("m", [value], broken=MalformedJson("no") if value == 2 else None) for value in (1, 2, 3, 4)]
        replies = [await call.answer for _, call in calls]

        assert [None if isinstance(r, HeadraceError) else float(r[0, 0]) for r in replies] == [2, None, 6, 8]


@pytest.mark.parametrize("state", ["waiting", "running"])
async def test_one_of_four_cancelled_requests_leaves_the_other_three_answered(tmp_path: Path, state: str) -> None:
    """X2: a caller that leaves, whether it waits or runs, takes nobody along."""
    gate = Gate()
    async with Rig(tmp_path, {"m": gate}) as rig:
        rig.use_thread_lane("m")
        gate.is_closed_to_trials = True
        rig.start("m", [0], timeout_s=5)
        await asyncio.to_thread(gate.entered.wait)
        calls = [rig.start("m", [value], timeout_s=5) for value in (1, 2, 3, 4)]
        if state == "running":
            await gate.let_one_batch_pass()  # now the four are inside the model together
        rig.pipeline.abandon(calls[1][0])
        gate.is_open.set()
        replies = [await call.answer for ticket, call in calls if ticket.ending is not Ending.ABANDONED]

        assert [float(r[0, 0]) for r in replies if not isinstance(r, HeadraceError)] == [2, 6, 8]
        assert Ending.ABANDONED is calls[1][0].ending
        assert calls[1][1].answers_sent == 0
        assert rig.admission.tickets_open == 0


async def test_ten_thousand_cancelled_requests_leave_nothing_behind(tmp_path: Path) -> None:
    """X2: cancelling frees the place in the queue, the ticket and the memory."""
    gate = Gate()
    async with Rig(tmp_path, {"m": gate}) as rig:
        rig.use_thread_lane("m")
        gate.is_closed_to_trials = True
        rig.start("m", [0], timeout_s=30)
        await asyncio.to_thread(gate.entered.wait)
        for _ in range(100):
            tickets = [rig.start("m", [value], timeout_s=30)[0] for value in range(100)]
            for ticket in tickets:
                rig.pipeline.abandon(ticket)
        waiting = sum(replica.pieces_waiting for replica in rig.plane.replicas())
        gate.is_open.set()
        await rig.idle()
        row = rig.ledger("m")

        assert waiting == 0
        assert row.in_flight == 0
        assert row.difference == 0
        assert row.received == 10_001


async def test_batched_rows_come_back_to_their_own_callers(tmp_path: Path) -> None:
    """X2: with many sizes mixed and some requests split over several batches, everyone gets their own rows in order."""
    async with Rig(tmp_path, {"m": lambda rows: rows * 2}) as rig:
        random = np.random.default_rng(7)
        sent = [random.random(int(size)).astype(np.float32) for size in random.integers(1, 700, 60)]
        replies = await asyncio.gather(*(rig.infer("m", rows, timeout_s=20) for rows in sent))

        for rows, reply in zip(sent, replies, strict=True):
            assert not isinstance(reply, HeadraceError)
            np.testing.assert_array_equal(rows * 2, reply[:, 0])
