"""A seeded discrete-event world for batch policies: one executor, a jittered curve, a clock that is moved.

The world does for a policy what the server's batch shell does, and nothing more: it reports arrivals, asks at
the door, asks for decisions when the executor is idle, and reports finished batches. It also checks the
contract of every decision, so each test that runs it is a test of that contract.

It has two uses: the tests of the policies, and the predictions that the goodput drill holds its measurements against.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from headrace.data_plane.batch_curve import CurveLearner, LatencyCurve, sustainable_rate
from headrace.data_plane.batch_policy import BatchPolicy, Decision

__all__ = [
    "JITTERS", "ROWS_MAX", "SIGMA", "TARGET", "WARMUP_SIZES", "Batch", "Build", "FrozenLearner", "Outcome", "Traffic",
    "play", "play_curve", "play_shared", "rate_at_99", "warmed_learner",
]  # fmt: skip

SIGMA: Final = 0.03
ROWS_MAX: Final = 64
WARMUP_SIZES: Final = (1, 1, 1, 8, 8, 8)
JITTERS: Final = 4096
TARGET: Final = 0.99
_EPS_S: Final = 1e-9

Build = Callable[[CurveLearner, float], BatchPolicy]
"""Makes a policy from a warmed learner and the objective in seconds."""


class Traffic:
    """Arrivals at any mean rate from one set of random numbers, so that rates and policies compare.

    Args:
        slo_s: The objective; the length of bursts is counted in it.
        horizon_s: Arrivals lie in [0, horizon_s).
        rate_max: The highest rate that will be asked for.
        seed: Same seed, same arrivals.
        is_bursty: A two-state Markov-modulated Poisson process: 2.2 times the rate for 10 objectives on average, 0.6
            times for 30; the mean stays.
        sigma: Relative spread of the executor's time.

    Attributes:
        jitter: Factors on the duration of successive batches, log-normal; taken in rotation.
    """

    def __init__(
        self, slo_s: float, horizon_s: float, rate_max: float, seed: int, is_bursty: bool = False, sigma: float = SIGMA
    ) -> None:
        rng = np.random.default_rng(seed)
        self.horizon_s = horizon_s
        times, work, is_hot = [0.0], [0.0], False
        while is_bursty and times[-1] < horizon_s:
            stay_s = rng.exponential((10 if is_hot else 30) * slo_s)
            times.append(times[-1] + stay_s)
            work.append(work[-1] + stay_s * (2.2 if is_hot else 0.6))
            is_hot = not is_hot
        if not is_bursty:
            times, work = [0.0, horizon_s], [0.0, horizon_s]
        self._times = np.array(times)
        self._work = np.array(work) * (horizon_s / np.interp(horizon_s, times, work))
        self._unit = np.cumsum(rng.exponential(size=int(rate_max * horizon_s * 1.1) + 64))
        self.jitter: list[float] = np.exp(rng.normal(0, sigma, JITTERS)).tolist()

    def at(self, rate: float) -> list[float]:
        """Ascending arrival times in seconds at a mean rate per second."""
        count = int(np.searchsorted(self._unit, rate * self.horizon_s))
        arrivals: list[float] = np.interp(self._unit[:count] / rate, self._work, self._times).tolist()
        return arrivals


@dataclass(slots=True)
class Batch:
    """One executed batch."""

    start_s: float
    finish_s: float
    pieces: tuple[int, ...]
    rows: int
    late_rows: int


@dataclass(slots=True)
class Outcome:
    """Where every row went; ``received`` is the sum of the other four once the world has run dry."""

    received: int = 0
    in_time: int = 0
    late: int = 0
    shed: int = 0
    refused: int = 0
    latency_sum_s: float = 0.0
    batches: list[Batch] = field(default_factory=list)

    @property
    def in_time_share(self) -> float:
        """Share of the received rows."""
        return self.in_time / max(1, self.received)

    @property
    def late_share(self) -> float:
        """Share of the executed rows."""
        return self.late / max(1, self.in_time + self.late)


class FrozenLearner(CurveLearner):
    """Keeps the profile of load time for ever: what learning while serving is compared with."""

    def see(self, rows: int, took_s: float) -> None:
        """Learn nothing."""


def warmed_learner(
    curve: LatencyCurve, jitter: Sequence[float], kind: type[CurveLearner] = CurveLearner
) -> CurveLearner:
    """A learner after the six timed runs of load time."""
    return kind([(rows, curve.duration_s(rows) * jitter[-1 - index]) for index, rows in enumerate(WARMUP_SIZES)])


def _check(decision: Decision, now_s: float, rows: Sequence[int], rows_max: int) -> None:
    waiting = len(rows)
    if not (0 <= decision.hopeless <= decision.shed and decision.shed + decision.run <= waiting):
        raise AssertionError(f"{decision} does not add up with {waiting} waiting")
    if sum(rows[decision.shed : decision.shed + decision.run]) > rows_max:
        raise AssertionError(f"{decision} exceeds {rows_max} rows")
    if decision.run == 0 and decision.shed < waiting and not (decision.hold_until_s or 0) > now_s:
        raise AssertionError(f"{decision} at {now_s} neither runs, holds nor sheds all of {waiting}")


class _Queue:
    """What waits in front of one policy, earliest deadline first, and what became of the rest."""

    def __init__(
        self, policy: BatchPolicy, arrivals: Sequence[float], slo_s: float, rows: Sequence[int] | None, rows_max: int
    ) -> None:
        self.policy, self.slo_s, self.rows_max = policy, slo_s, rows_max
        self.outcome = Outcome()
        self.deadlines_s: list[float] = []
        self.rows: list[int] = []
        self.wake_s: float | None = None
        self.ran_at_s = -1.0
        self._arrivals, self._rows_of = arrivals, rows
        self._ids: list[int] = []
        self._next, self._rows_waiting = 0, 0

    @property
    def next_arrival_s(self) -> float:
        """Infinite after the last."""
        return self._arrivals[self._next] if self._next < len(self._arrivals) else float("inf")

    def arrive_until(self, time_s: float, free_at_s: float) -> None:
        """Let in, or refuse at the door, whoever arrives up to a time."""
        while self.next_arrival_s <= time_s:
            self._arrive(self._next, free_at_s)
            self._next += 1

    def _arrive(self, index: int, free_at_s: float) -> None:
        at_s, size, outcome = self._arrivals[index], self._rows_of[index] if self._rows_of else 1, self.outcome
        outcome.received += size
        self.policy.arrived(at_s, size)
        if not self.policy.admits(at_s, at_s + self.slo_s, size, free_at_s, self._rows_waiting):
            outcome.refused += size
            return
        excess = self._rows_waiting + size - self.policy.waiting_rows_max
        self.deadlines_s.append(at_s + self.slo_s)
        self.rows.append(size)
        self._ids.append(index)
        self._rows_waiting += size
        count = evicted = 0
        while evicted < excess and count < len(self.rows) - 1:
            evicted += self.rows[count]
            count += 1
        self._shed(count)

    def _shed(self, count: int) -> None:
        if count:
            self.outcome.shed += sum(self.rows[:count])
            self._take(count)

    def _take(self, count: int) -> tuple[list[float], list[int], list[int]]:
        taken = self.deadlines_s[:count], self.rows[:count], self._ids[:count]
        del self.deadlines_s[:count], self.rows[:count], self._ids[:count]
        self._rows_waiting -= sum(taken[1])
        return taken

    def decide(self, now_s: float) -> Decision:
        """The policy's decision, checked against its contract."""
        decision = self.policy.decide(now_s, self.deadlines_s, self.rows)
        _check(decision, now_s, self.rows, self.rows_max)
        return decision

    def rest(self, decision: Decision) -> None:
        """Carry out a decision that runs nothing."""
        self._shed(decision.shed)
        self.wake_s = decision.hold_until_s

    def start(self, decision: Decision, now_s: float) -> tuple[list[float], list[int], list[int]]:
        """Take the batch of a decision out: its deadlines, rows and numbers of its pieces."""
        self._shed(decision.shed)
        self.ran_at_s = now_s
        return self._take(decision.run)

    def finish(self, batch: tuple[list[float], list[int], list[int]], now_s: float, took_s: float) -> None:
        """Book a finished batch and tell the policy."""
        deadlines_s, sizes, ids = batch
        finish_s, outcome, batch_rows = now_s + took_s, self.outcome, sum(sizes)
        late_rows = sum(sizes[: bisect_right(deadlines_s, finish_s - _EPS_S)])
        outcome.late += late_rows
        outcome.in_time += batch_rows - late_rows
        outcome.latency_sum_s += sum(
            (finish_s - at_s + self.slo_s) * size for at_s, size in zip(deadlines_s, sizes, strict=True)
        )
        outcome.batches.append(Batch(now_s, finish_s, tuple(ids), batch_rows, late_rows))
        self.policy.executed(finish_s, batch_rows, took_s, finish_s - deadlines_s[0])


def play(
    policy: BatchPolicy,
    arrivals: Sequence[float],
    slo_s: float,
    duration_s: Callable[[int, int, float], float],
    rows: Sequence[int] | None = None,
    rows_max: int = ROWS_MAX,
) -> Outcome:
    """Run the world until nothing waits.

    Args:
        policy: The policy under test.
        arrivals: Ascending arrival times in seconds, one piece each.
        slo_s: Relative deadline of each.
        duration_s: ``(batch index, rows, start) -> seconds`` of the executor.
        rows: Rows of each piece; all ones when None.
        rows_max: The batch cap that no decision may exceed.
    """
    queue = _Queue(policy, arrivals, slo_s, rows, rows_max)
    _run([queue], duration_s, is_in_turns=False)
    return queue.outcome


def play_shared(
    policies: Sequence[BatchPolicy],
    arrivals: Sequence[Sequence[float]],
    slos_s: Sequence[float],
    duration_s: Callable[[int, int, float], float],
    *,
    is_in_turns: bool = False,
    rows_max: int = ROWS_MAX,
) -> list[Outcome]:
    """Several models on one executor: who is next is decided as the server's lane does, by least laxity.

    Args:
        policies: One of each model.
        arrivals: Of each model, ascending.
        slos_s: Of each model.
        duration_s: ``(batch index, rows, start) -> seconds``, the same for all models.
        is_in_turns: Whose last batch is the longest ago goes next instead: round robin, which knows no deadlines.
        rows_max: The batch cap that no decision may exceed.
    """
    queues = [_Queue(*each, None, rows_max) for each in zip(policies, arrivals, slos_s, strict=True)]
    _run(queues, duration_s, is_in_turns=is_in_turns)
    return [queue.outcome for queue in queues]


def _run(queues: Sequence[_Queue], duration_s: Callable[[int, int, float], float], *, is_in_turns: bool) -> None:
    free_at_s, batches = 0.0, 0
    while True:
        busy = [queue for queue in queues if queue.deadlines_s]
        next_s = min(queue.next_arrival_s for queue in queues)
        now_s = free_at_s
        if not busy or all(queue.wake_s is not None for queue in busy):  # idle: the next arrival or a timer
            next_s = min([next_s, *(queue.wake_s for queue in busy if queue.wake_s is not None)])
            if next_s == float("inf"):
                return
            now_s = max(now_s, next_s)
        for queue in queues:
            queue.arrive_until(now_s, free_at_s)
        free_at_s = now_s
        best: tuple[float, _Queue, Decision] | None = None
        for queue in queues:
            queue.wake_s = None
            if not queue.deadlines_s:
                continue
            decision = queue.decide(now_s)
            if not decision.run:
                queue.rest(decision)
                continue
            order = queue.ran_at_s if is_in_turns else decision.urgency_s
            if best is None or order < best[0]:
                best = order, queue, decision
        if best is None:
            continue
        _, queue, decision = best
        batch = queue.start(decision, now_s)
        took_s = duration_s(batches, sum(batch[1]), now_s)
        batches += 1
        free_at_s = now_s + took_s
        for each in queues:
            each.arrive_until(free_at_s, free_at_s)
        queue.finish(batch, now_s, took_s)


def play_curve(
    build: Build, traffic: Traffic, rate: float, curve: LatencyCurve, slo_s: float, rows_max: int = ROWS_MAX
) -> Outcome:
    """One run of a fresh policy on a steady curve."""
    jitter = traffic.jitter
    policy = build(warmed_learner(curve, jitter), slo_s)
    return play(
        policy, traffic.at(rate), slo_s,
        lambda index, rows, _: curve.duration_s(rows) * jitter[index % JITTERS], rows_max=rows_max,
    )  # fmt: skip


def rate_at_99(
    build: Build, traffic: Traffic, curve: LatencyCurve, slo_s: float, steps: int = 6, looks: int = 5,
    rows_max: int = ROWS_MAX,
) -> float:  # fmt: skip
    """Highest offered rate with 99 % in time; bisection, then up to 10 % further, since short traces dip."""

    def is_good(rate: float) -> bool:
        outcome = play_curve(build, traffic, rate, curve, slo_s, rows_max)
        return outcome.received < 20 or outcome.in_time >= TARGET * outcome.received

    low, high = 0.0, 1.25 * sustainable_rate(curve, slo_s, rows_max)
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_good(middle) else (low, middle)
    better = [low * (1 + 0.02 * look) for look in range(1, looks + 1)]
    return max([low, *(rate for rate in better if is_good(rate))])
