"""The shell around the policies: waiting lists, lanes, expiry."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from headrace.clock import SystemClock
from headrace.data_plane.batch import Batch, Lane, WaitingList
from headrace.data_plane.batch_curve import CurveLearner
from headrace.data_plane.batch_policy import Decision, PolicyFacts
from headrace.data_plane.ticket import BatchOutputs, InferRequest, OutputRows, Ticket
from headrace.errors import DeadlineUnreachable, HeadraceError, QueueFull
from headrace.testing.rig import FunctionRuntime, Rig, RigCall
from headrace.types import Ending


@dataclass
class ScriptedPolicy:
    """Answers what the test wrote down."""

    decisions: list[Decision] = field(default_factory=list)
    admitted: bool = True
    waiting_rows_max: float = float("inf")
    name: str = "scripted"

    def arrived(self, now_s: float, rows: int) -> None: ...

    def admits(self, now_s: float, deadline_s: float, rows: int, free_at_s: float, waiting_rows: int) -> bool:
        return self.admitted

    def decide(self, now_s: float, deadlines_s: Sequence[float], rows: Sequence[int]) -> Decision:
        return self.decisions.pop(0)

    def executed(self, now_s: float, rows: int, took_s: float, lateness_s: float) -> None: ...

    def snapshot(self, now_s: float | None = None) -> PolicyFacts:
        raise NotImplementedError


class RecordingExecutor:
    """Starts batches and never finishes them."""

    is_inline = False

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.is_free = True

    def has_free_slot(self) -> bool:
        return self.is_free

    def free_at_s(self, now_s: float) -> float:
        return now_s

    def start(self, batch: Batch, done: Callable[[Batch], None]) -> None:
        self.batches.append(batch)
        self.is_free = False

    def close(self) -> None: ...


class Bench:
    """One waiting list, one lane, a scripted policy."""

    def __init__(self, rows_max: int = 4) -> None:
        self.policy = ScriptedPolicy()
        self.executor = RecordingExecutor()
        self.refusals: list[tuple[Ticket, HeadraceError]] = []
        runtime = FunctionRuntime(lambda rows: rows)
        learner = CurveLearner([(1, 0.001), (8, 0.002)])
        self.waiting = WaitingList(runtime, self.policy, learner, rows_max, is_batched=True)
        self.lane = Lane(asyncio.get_running_loop(), SystemClock(), self.executor, lambda batch: None, self.refuse)

    def refuse(self, ticket: Ticket, error: HeadraceError) -> None:
        ticket.ending = error.ending
        self.refusals.append((ticket, error))
        self.lane.forget(self.waiting, ticket)

    def submit(self, rows: int, within_s: float) -> Ticket:
        array = np.zeros((rows, 1), np.float32)
        now_s = SystemClock.now_s()
        ticket = Ticket(RigCall(array), "r", "t", now_s, deadline_at_s=now_s + within_s, decoded_at_s=now_s)
        ticket.request = InferRequest(None, {}, {"x": array}, rows, ())
        self.lane.submit(self.waiting, ticket)
        return ticket


async def test_shedding_one_piece_withdraws_its_siblings_and_does_not_pull_strangers_into_the_batch() -> None:
    """X2: of a request in three pieces the first is shed; the two others, which were to run, run no more."""
    bench = Bench()
    big = bench.submit(rows=12, within_s=5)
    small = bench.submit(rows=1, within_s=6)
    late = bench.submit(rows=1, within_s=7)
    bench.policy.decisions = [Decision(shed=1, hopeless=1, run=3, hold_until_s=None, urgency_s=0.0)]
    await asyncio.sleep(0)

    assert [big] == [ticket for ticket, _ in bench.refusals]
    assert [[small]] == [[piece.ticket for piece in batch.pieces] for batch in bench.executor.batches]
    assert [late] == [piece.ticket for piece in bench.waiting.pieces]
    assert 1 == bench.waiting.rows_waiting


async def test_the_waiting_list_stays_sorted_whatever_the_order_of_deadlines() -> None:
    """X2: earliest deadline first, arrival order among equals."""
    bench = Bench()
    bench.executor.is_free = False
    tickets = [bench.submit(1, within_s) for within_s in (5, 3, 4, 1, 2)]

    assert sorted(bench.waiting.deadlines_s) == bench.waiting.deadlines_s
    assert [tickets[at] for at in (3, 4, 1, 2, 0)] == [piece.ticket for piece in bench.waiting.pieces]


async def test_a_waiting_request_is_told_by_its_deadline_though_the_executor_is_stuck() -> None:
    """S2, F6: nobody waits for an executor that does not come back."""
    bench = Bench()
    bench.executor.is_free = False
    ticket = bench.submit(1, within_s=0.02)
    await asyncio.sleep(0.06)

    assert Ending.EXPIRED is ticket.ending
    assert [] == bench.waiting.pieces


async def test_the_queue_keeps_to_the_bound_of_the_policy_by_dropping_what_is_nearest_its_deadline() -> None:
    """S2: every queue has a bound."""
    bench = Bench()
    bench.executor.is_free = False
    bench.policy.waiting_rows_max = 3
    tickets = [bench.submit(1, within_s=1 + number) for number in range(5)]

    assert tickets[:2] == [ticket for ticket, _ in bench.refusals]
    assert {"shed"} == {error.code for _, error in bench.refusals}
    assert 3 == bench.waiting.rows_waiting


async def test_a_refusal_at_the_door_says_what_would_fit() -> None:
    """S2: the message has the numbers."""
    bench = Bench()
    bench.policy.admitted = False
    with pytest.raises(DeadlineUnreachable, match=r"100 rows cannot be answered within .* ms: running alone takes"):
        bench.submit(100, within_s=0.001)


async def test_a_refusal_because_too_many_wait_is_not_blamed_on_the_deadline() -> None:
    """S2: the door names the bound; `retry-after` is the time that those who wait take."""
    bench = Bench()
    bench.executor.is_free = False
    bench.submit(3, within_s=5)
    bench.policy.admitted = False
    bench.policy.waiting_rows_max = 3
    with pytest.raises(QueueFull, match="3 rows are waiting and 1 more are too many") as refusal:
        bench.submit(1, within_s=5)

    assert ("queue_full", 503) == (refusal.value.code, refusal.value.http_status)
    assert pytest.approx(bench.waiting.learner.curve.duration_s(3)) == refusal.value.retry_after_s


async def test_requests_of_zero_rows_may_share_a_batch(tmp_path: Path) -> None:
    """P3, X2: nothing is divided by the rows of a batch that has none."""
    async with Rig(tmp_path, {"m": lambda rows: rows * 2}) as rig:
        calls = [rig.start("m", np.zeros((0, 1)))[1] for _ in range(3)]
        answers = await asyncio.gather(*(call.answer for call in calls))

    assert [(0, 1)] * 3 == [answer.shape for answer in answers]


def test_a_view_of_a_batch_is_its_rows_in_every_form() -> None:
    """X6: array, and shape with flat elements, whatever the dimensions behind the rows."""
    batch = BatchOutputs([np.arange(4), np.arange(12.0).reshape(4, 3), np.arange(8).reshape(4, 1, 2)], 4)
    middle, none, whole = OutputRows(batch, 1, 2), OutputRows(batch, 2, 0), OutputRows(batch)

    assert [((2,), [1, 2]), ((2, 3), [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]), ((2, 1, 2), [2, 3, 4, 5])] == [
        middle.leaves(index) for index in range(3)
    ]
    assert [((0,), []), ((0, 3), [])] == [none.leaves(index) for index in range(2)]
    assert ((4, 3), batch.arrays[1].ravel().tolist()) == whole.leaves(1)
    assert [[1, 2], [0, 1, 2, 3]] == [each.array(0).tolist() for each in (middle, whole)]
