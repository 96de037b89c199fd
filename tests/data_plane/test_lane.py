"""Requests with different deadlines and shapes beside one another: who waits, who goes, who is told."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from tests.data_plane.test_batch import RecordingExecutor, ScriptedPolicy

from headrace.clock import SystemClock
from headrace.data_plane.batch import Batch, Lane, WaitingList
from headrace.data_plane.batch_curve import CurveLearner
from headrace.data_plane.batch_policy import Decision
from headrace.data_plane.ticket import InferRequest, Ticket
from headrace.data_plane.trial import TRIAL_ELEMENTS_MAX, try_out
from headrace.errors import HeadraceError, ModelFailed
from headrace.snapshot import BatchingPolicy, Slo
from headrace.tensors import Array, Datatype, Signature, TensorSpec
from headrace.testing.rig import FunctionRuntime, Gate, Rig, RigCall
from headrace.types import Ending


async def test_a_hasty_request_behind_a_patient_one_is_told_by_its_own_deadline(tmp_path: Path) -> None:
    """S2: the timer that was set for the patient one is brought forward."""
    gate = Gate()
    async with Rig(tmp_path, {"m": gate}) as rig:
        rig.use_thread_lane("m")
        gate.is_closed_to_trials = True
        rig.start("m", [0], timeout_s=30)
        await asyncio.to_thread(gate.entered.wait)
        rig.start("m", [1], timeout_s=8)
        began_s = time.monotonic()
        hasty, call = rig.start("m", [2], timeout_s=0.1)
        await asyncio.wait_for(call.answer, 5)
        took_s = time.monotonic() - began_s
        gate.is_open.set()
        await rig.idle()

    assert Ending.EXPIRED is hasty.ending
    assert took_s < 2


def costly(rows: Array) -> Array:
    time.sleep(0.0001 + len(rows) * 1e-6)
    return rows * 2


@pytest.mark.parametrize("is_threaded", [True, False])
async def test_a_request_of_more_rows_than_may_be_due_at_once_is_answered_if_it_brings_the_time(
    tmp_path: Path, is_threaded: bool
) -> None:
    """X2: the bound of the queue is about what is due within the objective; 50 000 rows with 20 s are not shed by an
    idle server."""
    async with Rig(tmp_path, {"m": costly}, changes={"m": {"slo": Slo(0.99, 0.01)}}) as rig:
        if is_threaded:
            rig.use_thread_lane("m")
        reply = await rig.infer("m", np.arange(50_000), timeout_s=20)

    assert not isinstance(reply, HeadraceError), reply
    np.testing.assert_array_equal(2 * np.arange(50_000, dtype=np.float32), reply[:, 0])


async def test_a_large_patient_request_neither_sheds_those_who_wait_nor_shuts_the_door_behind_it(
    tmp_path: Path,
) -> None:
    """X2, F6: one caller with many rows and much time takes nothing from those in a hurry, before or after it."""
    gate = Gate()

    def costly_behind_the_gate(rows: Array) -> Array:
        time.sleep(0.001 + len(rows) * 1e-4)
        return gate(rows)

    async with Rig(tmp_path, {"m": costly_behind_the_gate}, changes={"m": {"slo": Slo(0.99, 1.0)}}) as rig:
        rig.use_thread_lane("m")
        (replica,) = rig.plane.replicas()
        bound = replica.waiting_list(InferRequest(None, {}, {}, 1, ())).policy.waiting_rows_max
        assert 1000 < bound < 20_000
        gate.is_closed_to_trials = True
        rig.start("m", [0], timeout_s=30)
        await asyncio.to_thread(gate.entered.wait)
        before = [rig.start("m", [value])[1] for value in range(20)]
        large = rig.start("m", np.zeros(int(4 * bound)), timeout_s=600)[0]
        after = [rig.start("m", [value])[1] for value in range(20)]
        gate.is_open.set()
        replies = [await asyncio.wait_for(call.answer, 30) for call in before + after]
        rig.pipeline.abandon(large)

    assert [] == [reply for reply in replies if isinstance(reply, HeadraceError)]


class TwoLists:
    """One lane with two waiting lists; whoever is refused sends the next request at once, as a pipelining caller."""

    def __init__(self) -> None:
        self.executor = RecordingExecutor()
        runtime = FunctionRuntime(lambda rows: rows)
        self.policies = [ScriptedPolicy(), ScriptedPolicy()]
        learner = CurveLearner([(1, 0.001), (8, 0.002)])
        self.lists = [WaitingList(runtime, policy, learner, 4, is_batched=True) for policy in self.policies]
        self.lane = Lane(asyncio.get_running_loop(), SystemClock(), self.executor, lambda batch: None, self.refuse)
        self.followed_by: Ticket | None = None

    def refuse(self, ticket: Ticket, error: HeadraceError) -> None:
        ticket.ending = error.ending
        self.followed_by = self.submit(0, rows=4, within_s=1)

    def submit(self, number: int, rows: int, within_s: float) -> Ticket:
        array = np.zeros((rows, 1), np.float32)
        now_s = SystemClock.now_s()
        ticket = Ticket(RigCall(array), "r", "t", now_s, deadline_at_s=now_s + within_s, decoded_at_s=now_s)
        ticket.request = InferRequest(None, {}, {"x": array}, rows, ())
        self.lane.submit(self.lists[number], ticket)
        return ticket


async def test_a_request_that_arrives_while_another_is_refused_does_not_slip_into_a_decision_made_before_it() -> None:
    """X2: the batch is what the policy saw; otherwise it may exceed the largest batch, or shed the newcomer."""
    bench = TwoLists()
    runs = bench.submit(0, rows=1, within_s=5)
    bench.submit(1, rows=1, within_s=5)
    bench.policies[0].decisions = [Decision(shed=0, hopeless=0, run=1, hold_until_s=None, urgency_s=0.0)]
    bench.policies[1].decisions = [Decision(shed=1, hopeless=1, run=0, hold_until_s=None, urgency_s=0.0)]
    await asyncio.sleep(0)

    batches: list[Batch] = bench.executor.batches
    assert [[runs]] == [[piece.ticket for piece in batch.pieces] for batch in batches]
    assert [bench.followed_by] == [piece.ticket for piece in bench.lists[0].pieces]


class Variable(FunctionRuntime):
    """Takes FP32 [N, any, …]; refuses every input of more than `elements_max` elements."""

    def __init__(self, dimensions: int, elements_max: float = float("inf"), *, is_batched: bool = True) -> None:
        super().__init__(lambda rows: rows.reshape(len(rows), -1)[:, :1], is_batched=is_batched)
        self._elements_max = elements_max
        self.largest = 0
        self._signature = Signature(
            (TensorSpec("x", Datatype.FP32, (-1,) * dimensions),),
            (TensorSpec("y", Datatype.FP32, (-1, 1)),),
            is_batched,
            "function",
        )

    def run(self, inputs, outputs):  # type: ignore[no-untyped-def]  # as FunctionRuntime's
        self.largest = max(self.largest, inputs["x"].size)
        if inputs["x"].size > self._elements_max:
            raise ModelFailed("too large")
        return super().run(inputs, outputs)


@pytest.mark.parametrize(("dimensions", "is_batched"), [(2, True), (1, False)])
async def test_a_model_whose_input_has_no_largest_size_does_not_run_on_the_event_loop(
    tmp_path: Path, dimensions: int, is_batched: bool
) -> None:
    """F6: cheap on a small trial input says nothing about a large one, and on the loop it would hold up everybody."""
    async with Rig(tmp_path, {"m": Variable(dimensions, is_batched=is_batched)}) as rig:
        (report,) = rig.plane.reports()

    assert not report.is_inline


async def test_lists_of_shapes_that_nobody_uses_any_more_are_given_up(tmp_path: Path) -> None:
    """F1: callers choose the shapes, so their number is bounded; looking for a ticket makes no list."""
    async with Rig(tmp_path, {"m": Variable(2)}) as rig:
        (replica,) = rig.plane.replicas()
        for width in range(1, 200):
            request = InferRequest(None, {}, {"x": np.zeros((1, width), np.float32)}, 1, ())
            replica.waiting_list(request)
        kept = list(replica._lists)
        ticket = Ticket(RigCall(np.zeros((1, 1), np.float32)), "r", "t", 0.0, pieces=1)
        ticket.request = InferRequest(None, {}, {"x": np.zeros((1, 999), np.float32)}, 1, ())
        replica.forget(ticket)

        assert 64 == len(kept)
        assert kept == list(replica._lists)


def test_no_trial_input_is_made_that_memory_may_not_hold() -> None:
    """X3: four variable dimensions at the largest trial size would be 20 GB; the model is served, not tried further."""
    model = Variable(5, elements_max=0)
    trial = try_out(model, SystemClock(), rows_max=None)

    assert "not batched: it took no generated input" in trial.batching
    assert 0 < model.largest <= TRIAL_ELEMENTS_MAX


async def test_a_caller_whose_requests_make_the_model_raise_does_not_make_it_look_slow(tmp_path: Path) -> None:
    """X2: batches that failed and ran again piece by piece are no measurement, or others were refused for them."""

    def raises_on_thirteen(rows: Array) -> Array:
        time.sleep(0.002)
        if (rows == 13).any():
            raise ValueError("thirteen")
        return rows

    async with Rig(tmp_path, {"m": raises_on_thirteen}, changes={"m": {"slo": Slo(0.99, 0.2)}}) as rig:
        for _ in range(10):
            calls = [rig.start("m", [value])[1] for value in (*range(8), 13)]
            await asyncio.gather(*(call.answer for call in calls))
        (report,) = rig.plane.reports()

    assert report.base_s < 0.006, "a run takes 2 ms"


async def test_a_model_that_is_not_batched_reports_the_time_of_its_run(tmp_path: Path) -> None:
    """X2: it is measured at one size, which must not be taken for a cost per row alone and shown as no time at all."""

    def takes_two_ms(rows: Array) -> Array:
        time.sleep(0.002)
        return rows

    async with Rig(tmp_path, {"m": takes_two_ms}, changes={"m": {"batching": BatchingPolicy(rows_max=1)}}) as rig:
        (report,) = rig.plane.reports()

    assert "not batched: rows_max is 1" == report.batching
    assert 0.0 == report.per_row_s
    assert report.base_s >= 0.002
