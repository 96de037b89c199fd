"""A seeded discrete-event world for batch policies: one executor, a jittered curve, a clock that is moved.

The world does for a policy what the server's batch shell does, and nothing more: it reports arrivals, asks at
the door, asks for decisions when the executor is idle, and reports finished batches. It also checks the
contract of every decision, so each test that runs it is a test of that contract.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.data_plane.batch_curve import CurveLearner, LatencyCurve, sustainable_rate
from headrace.data_plane.batch_policy import BatchPolicy, Decision

SIGMA = 0.03
ROWS_MAX = 64
WARMUP_SIZES = (1, 1, 1, 8, 8, 8)
CURVES = {
    "gpu": LatencyCurve(0.004, 0.00015, SIGMA),
    "mid": LatencyCurve(0.002, 0.001, SIGMA),
    "cpu": LatencyCurve(0.0005, 0.002, SIGMA),
}
SLO_MULTIPLES = (2.5, 4.0, 10.0)  # of l(1)
CELLS = [(name, multiple) for name in CURVES for multiple in SLO_MULTIPLES]

Build = Callable[[CurveLearner, float], BatchPolicy]


def slo_of(curve: LatencyCurve, multiple: float) -> float:
    return multiple * curve.duration_s(1)


class Traffic:
    """Arrivals at any mean rate from one set of random numbers, so that rates and policies compare."""

    def __init__(self, slo_s: float, horizon_s: float, rate_max: float, seed: int, is_bursty: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.horizon_s = horizon_s
        times, work, is_hot = [0.0], [0.0], False
        while is_bursty and times[-1] < horizon_s:  # MMPP: 2.2x for 10 SLOs, 0.6x for 30, mean 1.0x
            stay_s = rng.exponential((10 if is_hot else 30) * slo_s)
            times.append(times[-1] + stay_s)
            work.append(work[-1] + stay_s * (2.2 if is_hot else 0.6))
            is_hot = not is_hot
        if not is_bursty:
            times, work = [0.0, horizon_s], [0.0, horizon_s]
        self._times = np.array(times)
        self._work = np.array(work) * (horizon_s / np.interp(horizon_s, times, work))
        self._unit = np.cumsum(rng.exponential(size=int(rate_max * horizon_s * 1.1) + 64))
        self.jitter = np.exp(rng.normal(0, SIGMA, 4096)).tolist()

    def at(self, rate: float) -> list[float]:
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
        return self.in_time / max(1, self.received)

    @property
    def late_share(self) -> float:
        return self.late / max(1, self.in_time + self.late)


def warmed_learner(curve: LatencyCurve, jitter: Sequence[float]) -> CurveLearner:
    return CurveLearner(
        [(rows, curve.duration_s(rows) * jitter[-1 - index]) for index, rows in enumerate(WARMUP_SIZES)]
    )


def _check(decision: Decision, now_s: float, rows: Sequence[int], rows_max: int) -> None:
    waiting = len(rows)
    if not (0 <= decision.hopeless <= decision.shed and decision.shed + decision.run <= waiting):
        raise AssertionError(f"{decision} does not add up with {waiting} waiting")
    if sum(rows[decision.shed : decision.shed + decision.run]) > rows_max:
        raise AssertionError(f"{decision} exceeds {rows_max} rows")
    if decision.run == 0 and decision.shed < waiting and not (decision.hold_until_s or 0) > now_s:
        raise AssertionError(f"{decision} at {now_s} neither runs, holds nor sheds all of {waiting}")


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
    outcome = Outcome()
    deadlines: list[float] = []
    sizes: list[int] = []
    ids: list[int] = []
    sizes_of = [1] * len(arrivals) if rows is None else rows
    upcoming, end, waiting_rows, free_at_s = 0, len(arrivals), 0, 0.0
    wake_s: float | None = None

    def arrive(index: int) -> int:
        at_s, size = arrivals[index], sizes_of[index]
        outcome.received += size
        policy.arrived(at_s, size)
        if not policy.admits(at_s, at_s + slo_s, size, free_at_s, waiting_rows):
            outcome.refused += size
            return 0
        deadlines.append(at_s + slo_s)
        sizes.append(size)
        ids.append(index)
        excess, evicted, count = waiting_rows + size - policy.waiting_rows_max, 0, 0
        while evicted < excess and count < len(sizes) - 1:
            evicted += sizes[count]
            count += 1
        if count:
            outcome.shed += evicted
            del deadlines[:count], sizes[:count], ids[:count]
        return size - evicted

    while upcoming < end or deadlines:
        now_s = free_at_s
        if not deadlines or wake_s is not None:  # idle: the next arrival or the timer
            next_s = arrivals[upcoming] if upcoming < end else float("inf")
            now_s = max(now_s, next_s if wake_s is None else min(next_s, wake_s))
        while upcoming < end and arrivals[upcoming] <= now_s:
            waiting_rows += arrive(upcoming)
            upcoming += 1
        wake_s = None
        if not deadlines:
            free_at_s = now_s
            continue
        decision = policy.decide(now_s, deadlines, sizes)
        _check(decision, now_s, sizes, rows_max)
        shed, stop = decision.shed, decision.shed + decision.run
        shed_rows = sum(sizes[:shed])
        outcome.shed += shed_rows
        batch_rows = sum(sizes[shed:stop])
        waiting_rows -= shed_rows + batch_rows
        batch_deadlines, batch_sizes, batch_ids = deadlines[shed:stop], sizes[shed:stop], tuple(ids[shed:stop])
        del deadlines[:stop], sizes[:stop], ids[:stop]
        if not decision.run:
            wake_s = decision.hold_until_s
            free_at_s = now_s
            continue
        took_s = duration_s(len(outcome.batches), batch_rows, now_s)
        finish_s = now_s + took_s
        free_at_s = finish_s
        while upcoming < end and arrivals[upcoming] <= finish_s:
            waiting_rows += arrive(upcoming)
            upcoming += 1
        late_pieces = bisect_right(batch_deadlines, finish_s - 1e-9)
        late_rows = sum(batch_sizes[:late_pieces])
        outcome.late += late_rows
        outcome.in_time += batch_rows - late_rows
        outcome.latency_sum_s += sum(
            (finish_s - at_s + slo_s) * size for at_s, size in zip(batch_deadlines, batch_sizes, strict=True)
        )
        outcome.batches.append(Batch(now_s, finish_s, batch_ids, batch_rows, late_rows))
        policy.executed(finish_s, batch_rows, took_s, finish_s - batch_deadlines[0])
    return outcome


def play_curve(build: Build, traffic: Traffic, rate: float, curve: LatencyCurve, slo_s: float) -> Outcome:
    """One run of a fresh policy on a steady curve."""
    jitter = traffic.jitter
    policy = build(warmed_learner(curve, jitter), slo_s)
    return play(policy, traffic.at(rate), slo_s, lambda index, rows, _: curve.duration_s(rows) * jitter[index & 4095])


def rate_at_99(
    build: Build, traffic: Traffic, curve: LatencyCurve, slo_s: float, steps: int = 6, looks: int = 5
) -> float:
    """Highest offered rate with 99 % in time; bisection, then up to 10 % further, since short traces dip."""

    def is_good(rate: float) -> bool:
        outcome = play_curve(build, traffic, rate, curve, slo_s)
        return outcome.received < 20 or outcome.in_time >= 0.99 * outcome.received

    low, high = 0.0, 1.25 * sustainable_rate(curve, slo_s, ROWS_MAX)
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_good(middle) else (low, middle)
    better = [low * (1 + 0.02 * look) for look in range(1, looks + 1)]
    return max([low, *(rate for rate in better if is_good(rate))])
