"""Requests of no rows and of more rows than a batch, among others, whatever the policy."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import HeadraceError
from headrace.snapshot import BatchingPolicy
from headrace.testing.rig import Gate, Rig

POLICIES = ("priced", "greedy", "fixed_delay", "aimd")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_threaded", [True, False], ids=["on a thread", "on the loop"])
async def test_requests_of_any_number_of_rows_are_answered_together(
    tmp_path: Path, policy: str, is_threaded: bool
) -> None:
    """X2, P3: none, one, some, more than the largest batch: each gets as many rows back as it sent, and its own."""
    changes = {"m": {"batching": BatchingPolicy(policy=policy, rows_max=4)}}  # type: ignore[arg-type]
    counts = (0, 0, 3, 0, 9, 0, 0, 1, 0)
    async with Rig(tmp_path, {"m": lambda rows: rows * 2}, changes=changes) as rig:
        if is_threaded:
            rig.use_thread_lane("m")
        calls = [rig.start("m", np.arange(count) + 100 * at)[1] for at, count in enumerate(counts)]
        answers = await asyncio.wait_for(asyncio.gather(*(call.answer for call in calls)), 20)
        for _ in range(50):
            await rig.infer("m", [])
        after = await rig.infer("m", [21])

    assert [[2 * (row + 100 * at) for row in range(count)] for at, count in enumerate(counts)] == [
        answer if isinstance(answer, HeadraceError) else answer.ravel().tolist() for answer in answers
    ]
    assert not isinstance(after, HeadraceError)


async def test_leaving_while_some_pieces_run_and_others_wait_disturbs_no_neighbour(tmp_path: Path) -> None:
    """X2, S2: the caller of a request of several batches leaves half-way; the pieces inside come back unseen, those
    that wait are forgotten, and the split requests behind it come back whole and in order."""
    gate = Gate()
    changes = {"m": {"batching": BatchingPolicy(rows_max=4)}}
    async with Rig(tmp_path, {"m": gate}, changes=changes) as rig:
        rig.use_thread_lane("m")
        gate.is_closed_to_trials = True
        leaving, _ = rig.start("m", np.arange(18), timeout_s=30)
        _, split = rig.start("m", np.arange(100, 111), timeout_s=31)
        _, small = rig.start("m", np.arange(200, 203), timeout_s=32)
        await asyncio.to_thread(gate.entered.wait, 10)
        await gate.let_one_batch_pass()
        rig.pipeline.abandon(leaving)
        gate.is_open.set()
        answers = await asyncio.wait_for(asyncio.gather(split.answer, small.answer), 20)
        await rig.idle()
        waiting = rig.plane.thread_lane.pieces_waiting
        row = rig.ledger("m")

    assert [2 * value for value in range(100, 111)] == np.ravel(answers[0]).tolist()
    assert [2 * value for value in range(200, 203)] == np.ravel(answers[1]).tolist()
    assert 0 == waiting
    assert (3, 2, 1, 0) == (row.received, row.answered, row.abandoned, row.difference)
