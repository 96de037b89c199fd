"""What one caller or one runtime can do to the loop that serves everybody."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace.errors import HeadraceError, ModelFailed
from headrace.snapshot import RecordPolicy
from headrace.tensors import Array
from headrace.testing.rig import FunctionRuntime, Gate, Rig


async def test_leaving_a_request_of_very_many_pieces_does_not_hold_the_loop(tmp_path: Path) -> None:
    """X5, S2: a body of 64 MB is 125,000 pieces; forgetting them is linear in their number."""
    gate = Gate()
    async with Rig(tmp_path, {"m": gate}) as rig:
        rig.use_thread_lane("m")
        gate.is_closed_to_trials = True
        rig.start("m", [1.0], timeout_s=60.0)
        await asyncio.to_thread(gate.entered.wait, 10)
        giant, _ = rig.start("m", np.zeros(16_000_000, np.float32), timeout_s=3600.0)
        _, neighbour = rig.start("m", [1.0], timeout_s=3600.0)
        pieces = rig.plane.thread_lane.pieces_waiting
        began_s = time.perf_counter()
        rig.pipeline.abandon(giant)
        took_s = time.perf_counter() - began_s
        gate.is_open.set()
        answer = await asyncio.wait_for(neighbour.answer, 20)

    assert pieces > 100_000
    assert took_s < 0.5, "3.5 s when each piece is cut out by itself"
    assert not isinstance(answer, HeadraceError)


async def test_a_run_that_leaves_by_system_exit_fails_and_the_executor_lives(tmp_path: Path) -> None:
    """P3: foreign code may call `sys.exit`; that must not end the thread which everybody's batches run on."""

    def leaves(rows: Array) -> Array:
        if (rows == 13).any():
            raise SystemExit(2)
        return rows

    class Leaving(FunctionRuntime):
        def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
            return [leaves(inputs["x"])]

    async with Rig(tmp_path, {"m": Leaving(leaves)}) as rig:
        rig.use_thread_lane("m")
        broken = await rig.infer("m", [13.0])
        sound = await rig.infer("m", [1.0])

    assert isinstance(broken, ModelFailed)
    assert not isinstance(sound, HeadraceError)


class Odd(FunctionRuntime):
    """Answers with objects that are neither text nor numbers, once it was taken."""

    is_odd = False

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        if not self.is_odd:
            return super().run(inputs, outputs)
        answer = np.empty((len(inputs["x"]), 1), object)
        answer[:, 0] = [object() for _ in range(len(answer))]
        return [answer]


async def test_a_payload_that_cannot_be_written_down_costs_the_payload_and_not_the_ending(tmp_path: Path) -> None:
    """O3: a request whose sampled outputs MessagePack cannot carry ends like any other, or a drain waits for it."""
    model = Odd(lambda rows: rows)
    async with Rig(tmp_path, {"m": model}, changes={"m": {"records": RecordPolicy(payload_rate=1.0)}}) as rig:
        model.is_odd = True
        calls = [rig.start("m", [1.0])[1] for _ in range(2)]
        await asyncio.gather(*(call.answer for call in calls))
        await asyncio.wait_for(rig.idle(), 10)
        row = rig.ledger("m")

    assert (2, 0, 0) == (row.received, row.in_flight, row.difference)
