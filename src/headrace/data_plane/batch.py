"""The batch stage: waiting lists in front of executors. The policy decides, this shell carries it out.

Concurrency: everything here runs on the event loop, except `run_batch`, which an executor may run on its own thread and
which touches nothing but its batch. Events drive it (a request arrives, an executor falls free, a hold ends, a caller
leaves); nothing polls.

A request of many rows waits as several pieces, none larger than the largest batch; its answer is put together when
the last piece has come back.

This is one file although it is long: waiting lists, executors and the lane between them change the same pieces, and
whether a piece can be lost or run twice is only seen with all three in view.
"""

import asyncio
import queue
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from headrace.clock import Clock
from headrace.data_plane.batch_curve import CurveLearner
from headrace.data_plane.batch_policy import BatchPolicy, Decision
from headrace.data_plane.ticket import BatchOutputs, OutputRows, Ticket
from headrace.errors import (
    CapacityError,
    DeadlineError,
    DeadlineUnreachable,
    HeadraceError,
    ModelFailed,
    QueueFull,
    Shed,
)
from headrace.ports import Runtime
from headrace.tensors import Array

INFINITY = float("inf")


class Piece:
    """A run of consecutive rows of one ticket: what a batch is made of."""

    __slots__ = ("error", "first_row", "outputs", "rows", "ticket")

    def __init__(self, ticket: Ticket, first_row: int, rows: int) -> None:
        self.ticket = ticket
        self.first_row = first_row
        self.rows = rows
        self.outputs: OutputRows | None = None
        self.error: HeadraceError | None = None


class WaitingList:
    """Pieces that wait for one replica, earliest deadline first.

    **Invariant**: `deadlines_s`, `rows` and `pieces` run in parallel and `deadlines_s` is sorted.

    Attributes:
        runtime: Executes the batches.
        output_names: All outputs of the model, in the signature's order.
        policy: Decides when and with whom.
        learner: The latency curve that the policy decides by.
        rows_max: Largest batch.
        is_batched: Inputs may be concatenated along their first dimension.
        deadline_s: The policy's objective: time allowed to a request that brings no deadline of its own.
    """

    def __init__(
        self,
        runtime: Runtime,
        policy: BatchPolicy,
        learner: CurveLearner,
        rows_max: int,
        is_batched: bool,
        deadline_s: float = INFINITY,
    ) -> None:
        self.runtime = runtime
        self.learner = learner
        self.output_names = [spec.name for spec in runtime.signature.outputs]
        self.policy = policy
        self.rows_max = rows_max
        self.is_batched = is_batched
        self.deadline_s = deadline_s
        self.deadlines_s: list[float] = []
        self.rows: list[int] = []
        self.pieces: list[Piece] = []
        self.rows_waiting = 0

    def insert(self, piece: Piece) -> None:
        """Queue behind every piece with the same or an earlier deadline."""
        deadline_s = piece.ticket.deadline_at_s
        deadlines = self.deadlines_s
        if not deadlines or deadlines[-1] <= deadline_s:
            deadlines.append(deadline_s)
            self.rows.append(piece.rows)
            self.pieces.append(piece)
        else:
            at = bisect_right(deadlines, deadline_s)
            deadlines.insert(at, deadline_s)
            self.rows.insert(at, piece.rows)
            self.pieces.insert(at, piece)
        self.rows_waiting += piece.rows

    def rows_due_by(self, time_s: float) -> int:
        """Rows whose deadline is not after a time."""
        if not self.deadlines_s or self.deadlines_s[-1] <= time_s:
            return self.rows_waiting
        return self.rows_waiting - sum(self.rows[bisect_right(self.deadlines_s, time_s) :])

    def take(self, count: int) -> list[Piece]:
        """Remove and return the first `count` pieces."""
        taken = self.pieces[:count]
        del self.pieces[:count], self.rows[:count], self.deadlines_s[:count]
        for piece in taken:
            self.rows_waiting -= piece.rows
        return taken

    def remove(self, ticket: Ticket) -> None:
        """Forget every piece of a ticket."""
        first = bisect_left(self.deadlines_s, ticket.deadline_at_s)
        end = bisect_right(self.deadlines_s, ticket.deadline_at_s)
        # Cut out at once: one by one, a request of a hundred thousand pieces would hold the loop for seconds.
        kept = [piece for piece in self.pieces[first:end] if piece.ticket is not ticket]
        kept_rows = [piece.rows for piece in kept]
        self.rows_waiting -= sum(self.rows[first:end]) - sum(kept_rows)
        self.pieces[first:end] = kept
        self.rows[first:end] = kept_rows
        self.deadlines_s[first:end] = [ticket.deadline_at_s] * len(kept)


Dropped = tuple[WaitingList, list[Piece], int]
"""Pieces taken out of a list to be refused, and how many of them, from the front, were hopeless."""


class Batch:
    """Pieces that run together, and what became of them.

    Attributes:
        rows: Rows altogether; 1 when the model is not batched.
        expected_s: Duration that the latency curve predicts.
        started_at_s, took_s: When it started and how long it ran, set by the executor.
    """

    __slots__ = ("expected_s", "pieces", "rows", "started_at_s", "took_s", "waiting_list")

    def __init__(self, waiting_list: WaitingList, pieces: list[Piece]) -> None:
        self.waiting_list = waiting_list
        self.pieces = pieces
        self.rows = sum([piece.rows for piece in pieces]) if waiting_list.is_batched else 1
        self.expected_s = 0.0
        self.started_at_s = 0.0
        self.took_s = 0.0


def run_batch(batch: Batch, clock: Clock) -> None:
    """Execute a batch and give each piece its outputs or its error; never raises.

    If a batch of several pieces fails, each runs again by itself, so that a request that the model cannot take fails
    alone and its neighbours are answered.
    """
    batch.started_at_s = clock.now_s()
    pieces = batch.pieces
    error = _attempt(batch.waiting_list, pieces)
    if error is not None:
        if len(pieces) == 1:
            pieces[0].error = error
        else:
            for piece in pieces:
                piece.error = _attempt(batch.waiting_list, [piece])
    batch.took_s = clock.now_s() - batch.started_at_s


def _attempt(waiting_list: WaitingList, pieces: Sequence[Piece]) -> HeadraceError | None:
    """Run pieces together; what goes wrong comes back, whatever it is: it ends these pieces, not the executor."""
    try:
        _run_together(waiting_list, pieces)
    except HeadraceError as error:
        return error
    except BaseException as error:  # a foreign runtime (SystemExit would end the thread), or memory that has run out
        return ModelFailed(f"the model raised {type(error).__name__}: {error}")
    return None


def _run_together(waiting_list: WaitingList, pieces: Sequence[Piece]) -> None:
    first = pieces[0]
    request = first.ticket.request
    assert request is not None
    if len(pieces) == 1 and (first.rows == request.rows or not waiting_list.is_batched):
        inputs = request.inputs
    else:
        inputs = {}
        for name in request.inputs:
            rows_of_pieces = [_rows_of(piece, name) for piece in pieces]
            inputs[name] = rows_of_pieces[0] if len(pieces) == 1 else np.concatenate(rows_of_pieces)
    outputs = waiting_list.runtime.run(inputs, waiting_list.output_names)
    if len(outputs) != len(waiting_list.output_names):
        raise ModelFailed(f"the model returned {len(outputs)} outputs instead of {len(waiting_list.output_names)}")
    if not waiting_list.is_batched:
        first.outputs = OutputRows(BatchOutputs(outputs, 1))
        return
    rows = sum([piece.rows for piece in pieces])
    for name, output in zip(waiting_list.output_names, outputs, strict=True):
        if not output.shape or output.shape[0] != rows:
            raise ModelFailed(f"output {name!r} has shape {list(output.shape)} for a batch of {rows} rows")
    batch_outputs = BatchOutputs(outputs, rows)
    if len(pieces) == 1:
        first.outputs = OutputRows(batch_outputs)
        return
    at = 0
    for piece in pieces:
        piece.outputs = OutputRows(batch_outputs, at, piece.rows)
        at += piece.rows


def _rows_of(piece: Piece, name: str) -> Array:
    request = piece.ticket.request
    assert request is not None
    array = request.inputs[name]
    return array if piece.rows == request.rows else array[piece.first_row : piece.first_row + piece.rows]


class Executor(Protocol):
    """Runs batches one at a time per slot and reports on the event loop.

    Attributes:
        is_inline: Runs on the loop itself, inside `start`.
    """

    is_inline: bool

    def has_free_slot(self) -> bool: ...

    def free_at_s(self, now_s: float) -> float:
        """When a slot will be free, as far as estimates tell; `now_s` when one is free now."""
        ...

    def start(self, batch: Batch, done: Callable[[Batch], None]) -> None: ...

    def close(self) -> None: ...


class InlineExecutor:
    """Runs on the event loop: right for models cheaper than a round trip to a thread (about 60 µs)."""

    is_inline = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def has_free_slot(self) -> bool:
        return True

    def free_at_s(self, now_s: float) -> float:
        return now_s

    def start(self, batch: Batch, done: Callable[[Batch], None]) -> None:
        run_batch(batch, self._clock)
        done(batch)

    def close(self) -> None:
        return


class ThreadExecutor:
    """Runs on `width` named threads; the runtime releases the interpreter lock while it computes."""

    is_inline = False

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock, width: int = 1) -> None:
        self._loop = loop
        self._clock = clock
        self._jobs: queue.SimpleQueue[tuple[Batch, Callable[[Batch], None]] | None] = queue.SimpleQueue()
        self._free = width
        self._ends_s: list[float] = []
        self._width = width
        self._running: list[Batch] = []
        for number in range(width):
            threading.Thread(target=self._work, name=f"headrace-executor-{number}", daemon=True).start()

    def has_free_slot(self) -> bool:
        return self._free > 0

    def free_at_s(self, now_s: float) -> float:
        return now_s if self._free else max(now_s, min(self._ends_s, default=now_s))

    def oldest_start_s(self) -> float:
        """When the longest-running batch started; infinity when none runs."""
        return min((batch.started_at_s or INFINITY for batch in self._running), default=INFINITY)

    def running(self) -> Sequence[Batch]:
        return self._running

    def start(self, batch: Batch, done: Callable[[Batch], None]) -> None:
        self._free -= 1
        self._ends_s.append(self._clock.now_s() + batch.expected_s)
        self._running.append(batch)
        self._jobs.put((batch, done))

    def _finished(self, batch: Batch, done: Callable[[Batch], None]) -> None:
        self._free += 1
        at = self._running.index(batch)
        del self._running[at], self._ends_s[at]
        done(batch)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch, done = job
            run_batch(batch, self._clock)
            try:
                self._loop.call_soon_threadsafe(self._finished, batch, done)
            except RuntimeError:  # the loop has been closed: the worker is on its way out
                return
            del job, batch, done  # or this thread would hold the requests while it waits for the next ones

    def close(self) -> None:
        for _ in range(self._width):
            self._jobs.put(None)


class Lane:
    """Waiting lists that share an executor: chooses whose batch is next by least laxity (Clockwork, OSDI '20).

    Args:
        loop: The worker's event loop.
        clock: Monotonic time.
        executor: Where batches run.
        executed: Told about every finished batch.
        refused: Told about every ticket that is dropped from a waiting list.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        executor: Executor,
        executed: Callable[[Batch], None],
        refused: Callable[[Ticket, HeadraceError], None],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self.executor = executor
        self._executed = executed
        self._refused = refused
        self._busy_lists: dict[WaitingList, None] = {}
        self._is_decision_due = False
        self._hold: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._expiry_at_s = INFINITY

    @property
    def pieces_waiting(self) -> int:
        return sum(len(waiting_list.pieces) for waiting_list in self._busy_lists)

    def submit(self, waiting_list: WaitingList, ticket: Ticket) -> None:
        """Queue a decoded ticket, in pieces no larger than the largest batch.

        Raises:
            headrace.errors.DeadlineUnreachable: It cannot be answered in time.
            headrace.errors.QueueFull: It could be, but the waiting list is at its bound.
        """
        request = ticket.request
        assert request is not None
        now_s = ticket.decoded_at_s
        rows = request.rows if waiting_list.is_batched else 1
        policy, executor = waiting_list.policy, self.executor
        policy.arrived(now_s, rows)
        is_free = executor.has_free_slot()
        free_at_s = now_s if is_free else executor.free_at_s(now_s)
        due_s = now_s + waiting_list.deadline_s
        deadline_s = ticket.deadline_at_s
        # Who is in a hurry goes before the patient, and is not turned away because of them.
        rows_ahead = waiting_list.rows_waiting if deadline_s > due_s else waiting_list.rows_due_by(due_s)
        if not policy.admits(now_s, deadline_s, rows, free_at_s, rows_ahead):
            raise self._turned_away(waiting_list, ticket, rows, now_s, free_at_s)
        if rows <= waiting_list.rows_max:
            ticket.pieces = 1
            waiting_list.insert(Piece(ticket, 0, rows))
        else:
            starts = range(0, rows, waiting_list.rows_max)
            ticket.pieces = len(starts)
            for first_row in starts:
                waiting_list.insert(Piece(ticket, first_row, min(waiting_list.rows_max, rows - first_row)))
        self._busy_lists[waiting_list] = None
        if waiting_list.rows_waiting > policy.waiting_rows_max:
            self._trim(waiting_list, due_s)
        if is_free:
            if not self._is_decision_due:
                self._decide_soon()
        elif deadline_s < self._expiry_at_s:
            self._watch_expiry()

    def _turned_away(
        self, waiting_list: WaitingList, ticket: Ticket, rows: int, now_s: float, free_at_s: float
    ) -> CapacityError:
        """Why the policy refuses at the door: the request alone is too late already, or else too many wait."""
        alone_s = _duration_alone_s(waiting_list, rows)
        left_s = ticket.deadline_at_s - now_s
        text = f"{rows} row{'s' if rows != 1 else ''} cannot be answered within {left_s * 1e3:.3g} ms: "
        if alone_s > left_s:
            text += f"running alone takes about {alone_s * 1e3:.3g} ms; send fewer rows or allow more time"
        else:
            waiting_rows, busy_s = waiting_list.rows_waiting, max(0.0, free_at_s - now_s)
            if busy_s + alone_s <= left_s and waiting_rows + rows > waiting_list.policy.waiting_rows_max:
                text = (
                    f"{waiting_rows} rows are waiting and {rows} more are too many; send fewer rows or come back later"
                )
                return QueueFull(text, retry_after_s=_duration_alone_s(waiting_list, waiting_rows))
            text += f"{waiting_rows} rows are waiting and the model is busy for {busy_s * 1e3:.3g} ms"
        return DeadlineUnreachable(text, retry_after_s=waiting_list.learner.duration_s(1))

    def forget(self, waiting_list: WaitingList, ticket: Ticket) -> None:
        """Drop what still waits of a ticket that has ended; pieces that already run come back and are ignored."""
        if waiting_list.pieces:
            waiting_list.remove(ticket)
            if not waiting_list.pieces:
                self._busy_lists.pop(waiting_list, None)

    def _decide_soon(self) -> None:
        # One decision after all sockets of this loop turn were read: requests that came together go together.
        if not self._is_decision_due:
            self._is_decision_due = True
            self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._is_decision_due = False
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
        while self._busy_lists and self.executor.has_free_slot():
            chosen, pieces, dropped, hold_until_s = self._choose()
            # Only now: telling a caller may bring in its next request, and the decisions are about the lists as they
            # were. Before the batch: refusing one piece of a request withdraws its others, which may be in there.
            for waiting_list, refused, hopeless in dropped:
                self._refuse(waiting_list, refused, hopeless)
            if chosen is None:
                if hold_until_s < INFINITY:
                    self._hold = self._loop.call_later(max(0.0, hold_until_s - self._clock.now_s()), self._decide)
                    return
                break
            is_started = self._start(chosen, pieces)
            if self.executor.is_inline and is_started:
                # Let the loop read its sockets between batches; what arrives meanwhile joins the next one.
                if self._busy_lists:
                    self._decide_soon()
                return
        self._watch_expiry()

    def _choose(self) -> tuple[WaitingList | None, list[Piece], list[Dropped], float]:
        """Ask every policy, and take out of the lists what runs and what is refused; nobody is told yet.

        Returns:
            Whose batch is next, its pieces, what is refused, and until when nothing happens if there is no batch.
        """
        now_s = self._clock.now_s()
        chosen: WaitingList | None = None
        best: Decision | None = None
        dropped: list[Dropped] = []
        hold_until_s = INFINITY
        for waiting_list in list(self._busy_lists):
            decision = waiting_list.policy.decide(now_s, waiting_list.deadlines_s, waiting_list.rows)
            if not decision.run:
                # Nothing runs from this list now: what cannot be saved goes at once, the others wait.
                dropped.append((waiting_list, self._take(waiting_list, decision.shed), decision.hopeless))
                if decision.hold_until_s is not None:
                    hold_until_s = min(hold_until_s, decision.hold_until_s)
            elif best is None or decision.urgency_s < best.urgency_s:
                chosen, best = waiting_list, decision
        if chosen is None or best is None:
            return None, [], dropped, hold_until_s
        taken = self._take(chosen, best.shed + best.run)
        dropped.append((chosen, taken[: best.shed], best.hopeless))
        return chosen, taken[best.shed :], dropped, INFINITY

    def _trim(self, waiting_list: WaitingList, due_s: float) -> None:
        """Keep the queue at the policy's bound: what is nearest its deadline goes, since it gains least by waiting.

        The bound is about rows that are due within the objective (Little's law). Those that have longer take nothing
        from them, and the policy bounds them at the door.
        """
        excess_rows = waiting_list.rows_due_by(due_s) - waiting_list.policy.waiting_rows_max
        count = 0
        while excess_rows > 0 and count < len(waiting_list.rows) - 1:
            excess_rows -= waiting_list.rows[count]
            count += 1
        self._drop(waiting_list, count, 0)

    def _start(self, waiting_list: WaitingList, pieces: Sequence[Piece]) -> bool:
        """Start a batch of what has not ended meanwhile; False when nothing is left."""
        pieces = [piece for piece in pieces if piece.ticket.ending is None]
        if not pieces:
            return False
        batch = Batch(waiting_list, pieces)
        batch.expected_s = waiting_list.learner.duration_s(batch.rows)
        self.executor.start(batch, self._done)
        return True

    def _drop(self, waiting_list: WaitingList, count: int, hopeless: int) -> None:
        if count:
            self._refuse(waiting_list, self._take(waiting_list, count), hopeless)

    def _take(self, waiting_list: WaitingList, count: int) -> list[Piece]:
        taken = waiting_list.take(count)
        if not waiting_list.pieces:
            self._busy_lists.pop(waiting_list, None)
        return taken

    def _refuse(self, waiting_list: WaitingList, dropped: Sequence[Piece], hopeless: int) -> None:
        """Tell the tickets of dropped pieces; the first `hopeless` were late, the others are shed."""
        for number, piece in enumerate(dropped):
            ticket = piece.ticket
            if ticket.ending is not None:
                continue
            retry_after_s = waiting_list.learner.duration_s(1)
            if number < hopeless:
                error: HeadraceError = DeadlineError(
                    "the deadline could no longer be met while the request waited for a batch; "
                    "allow more time or come back later",
                    stage="queue",
                    retry_after_s=retry_after_s,
                )
            else:
                error = Shed(
                    "overloaded: the request was dropped so that more of the others are answered in time",
                    retry_after_s=retry_after_s,
                )
            self._refused(ticket, error)

    def _done(self, batch: Batch) -> None:
        now_s = self._clock.now_s()
        # A batch that failed took as long as its pieces one by one. Learned, that would have the policy refuse others
        # because of one caller whose requests make the model raise.
        if not any(piece.error is not None for piece in batch.pieces):
            lateness_s = now_s - batch.pieces[0].ticket.deadline_at_s
            batch.waiting_list.policy.executed(now_s, batch.rows, batch.took_s, lateness_s)
        if not self.executor.is_inline and self._busy_lists:
            self._decide_soon()
        self._executed(batch)

    def _watch_expiry(self) -> None:
        """While the executor is busy nobody decides; a request is refused by its deadline all the same."""
        if not self._busy_lists:
            return
        earliest_s = min(waiting_list.deadlines_s[0] for waiting_list in self._busy_lists)
        if earliest_s >= self._expiry_at_s:
            return  # the timer goes off before, finds nobody late, and is set again
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry_at_s = earliest_s
        self._expiry = self._loop.call_later(max(0.0, earliest_s - self._clock.now_s()), self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self._expiry_at_s = INFINITY
        now_s = self._clock.now_s()
        for waiting_list in list(self._busy_lists):
            late = bisect_right(waiting_list.deadlines_s, now_s)
            self._drop(waiting_list, late, late)
        self._watch_expiry()

    def close(self) -> None:
        """Stop the timers and the executor."""
        for timer in (self._hold, self._expiry):
            if timer is not None:
                timer.cancel()
        self.executor.close()


def _duration_alone_s(waiting_list: WaitingList, rows: int) -> float:
    curve = waiting_list.learner
    whole, rest = divmod(rows, waiting_list.rows_max)
    return whole * curve.duration_s(waiting_list.rows_max) + (curve.duration_s(rest) if rest else 0.0)
