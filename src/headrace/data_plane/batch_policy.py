"""Which waiting rows run next, which wait, and which are refused: a pure decision.

Times and deadlines go in, a ``Decision`` comes out, and ``batch.py`` carries it out. There is no clock, loop or
randomness here, so the same object runs in the server, in the simulator and in a debugger.

``PricedPolicy`` (priced batches, deadline first) takes one decision in five steps:

1. refuse what even a batch of its own would answer late;
2. when more waits than a batch holds, refuse the heads whose success is a coin toss;
3. if everything fits the earliest deadline, run it all, or hold it where waiting pays (``D < 2a + c``);
4. otherwise price the choice: rows in the batch, less the worth of the executor's time, plus those left behind;
5. when the curve is not to be trusted, fall back to feedback on lateness.

Pieces and rows: a request is cut by the caller into pieces of at most ``rows_max`` rows that share its deadline.
``shed`` and ``run`` count pieces; rates, batch sizes and bounds count rows.

Source: early drop is Nexus's (SOSP'19), deadline-first batches with a learned profile are Clockwork's (OSDI'20),
feedback on latency is Clipper's (NSDI'17); the price, the margin and the rule for holding are derived in
``docs/concepts/scheduling.md``.

This is one file although it is long: a decision is read from top to bottom, beside the constants that it is made of.
What it knows of the model is in ``batch_curve.py``, what other servers do in ``batch_rivals.py``.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import Protocol

from headrace.data_plane.batch_curve import (
    CurveLearner,
    LatencyCurve,
    fluid_rate,
    rate_ceiling,
    sustainable_rate,
)

__all__ = [
    "AimdCap",
    "ArrivalMeter",
    "BatchPolicy",
    "Decision",
    "PolicyFacts",
    "PricedPolicy",
    "feasible_duration_s",
    "pieces_within",
]

_EPS_S = 1e-9  # deadlines closer than a nanosecond are the same
_REFRESH_DECISIONS = 16
_REFRESH_SLOS = 1 / 64  # nothing moves faster, and a cheap model decides thousands of times in an objective
_CANDIDATES = 8  # steps between the smallest and the largest size; 9 sizes are scored
_PROBE_SLOS = 4.0
_DOOR_FACTOR = 8.0  # the last line, for a caller that does not trim its queue to Little's bound
_SIGMA_TRUSTED_MAX = 0.5
_EDGE_SIGMAS = 2.0
_quantile = NormalDist().inv_cdf


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with the waiting pieces, earliest deadline first.

    **Invariant**: ``0 <= hopeless <= shed``, ``shed + run <= len(waiting)``, and when nothing runs and nothing
    is held every waiting piece was shed. No piece is ever reordered.

    Args:
        shed: The first ``shed`` pieces are refused now, as hopeless or priced out.
        hopeless: How many of those could not have met their deadline even alone; they are the first ones.
        run: The next ``run`` pieces form a batch; 0 when nothing runs now.
        hold_until_s: Decide again at this time although nothing arrives; None when nothing is held.
        urgency_s: Laxity of the batch: head deadline - now - expected duration; infinite when nothing runs.
    """

    shed: int
    hopeless: int
    run: int
    hold_until_s: float | None
    urgency_s: float


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """What a policy knows, for the start screen, metrics and statistics. Rates are in rows per second.

    Args:
        name: The policy.
        curve: The latency curve as learned so far.
        rows_max: ``B``, rows of the largest batch.
        slo_s: ``D``, the latency objective in seconds.
        one_row_s: ``l(1)``, expected seconds of a batch of one row.
        rate_ceiling: ``U1``; no schedule does better.
        sustainable_rate: ``U2``; what can be kept up without loss.
        arrival_rate: ``lambda`` over at least three objectives and 64 arrivals.
        pressure: ``phi`` in [0, 1], how far the arrival rate has risen from ``1 / l(1)`` to U2.
        is_fallback: Whether feedback on lateness decides because the curve is not to be trusted.
    """

    name: str
    curve: LatencyCurve
    rows_max: int
    slo_s: float
    one_row_s: float
    rate_ceiling: float
    sustainable_rate: float
    arrival_rate: float
    pressure: float
    is_fallback: bool = False


class BatchPolicy(Protocol):
    """Forms the batches of one model on its executors.

    Concurrency: plain state, no locks; every call comes from the event loop's thread.
    """

    name: str

    def arrived(self, now_s: float, rows: int) -> None:
        """Count a request as offered load; call it before ``admits``, for refused requests too."""

    def admits(self, now_s: float, deadline_s: float, rows: int, free_at_s: float, waiting_rows: int) -> bool:
        """Whether a request may queue; False refuses it at the door.

        Args:
            now_s: The current time.
            deadline_s: Its absolute deadline.
            rows: Rows of the whole request; may exceed the batch cap.
            free_at_s: When the earliest executor is expected to be free; a past time when one is idle.
            waiting_rows: Rows in the queue, this request not included.
        """

    @property
    def waiting_rows_max(self) -> float:
        """Rows that may wait; the caller refuses the earliest deadlines beyond it when it lets a request in."""

    def decide(self, now_s: float, deadlines_s: Sequence[float], rows: Sequence[int]) -> Decision:
        """Choose what an idle executor does now.

        Args:
            now_s: The current time.
            deadlines_s: Absolute deadlines of the waiting pieces, ascending; not empty.
            rows: Their rows, each 1..rows_max, in the same order.
        """

    def executed(self, now_s: float, rows: int, took_s: float, lateness_s: float) -> None:
        """Learn from a finished batch of ``rows`` rows that took ``took_s`` seconds.

        Args:
            now_s: The current time.
            rows: Rows in the batch.
            took_s: Seconds it took.
            lateness_s: Finish less deadline of the batch's head; negative when in time.
        """

    def snapshot(self, now_s: float | None = None) -> PolicyFacts:
        """The policy's figures as of ``now_s``, or as of the last call when None."""


class ArrivalMeter:
    """Arrival rate over the last 64 marks and at least ``window_s`` seconds, in constant memory.

    A mark is set at an arrival unless the last mark is younger than a 64th of the window. So a slow stream is
    measured over 64 arrivals and a fast one over the window, whatever the rate.

    Args:
        window_s: The shortest window in seconds; positive.
        floor_s: The shortest time that a count is divided by, for the moments after the first arrival.
    """

    __slots__ = ("_floor_s", "_marks", "_rows", "_spacing_s")

    def __init__(self, window_s: float, floor_s: float) -> None:
        self._spacing_s = window_s / 64
        self._floor_s = floor_s
        self._marks: deque[tuple[float, int]] = deque(maxlen=64)
        self._rows = 0

    def arrived(self, now_s: float, rows: int) -> None:
        """Count ``rows`` arriving now."""
        marks = self._marks
        if not marks:
            marks.append((now_s, 0))
            self._rows += rows
            return
        self._rows += rows
        if now_s - marks[-1][0] >= self._spacing_s:
            marks.append((now_s, self._rows))

    def rate(self, now_s: float) -> float:
        """Rows per second up to now; 0 before the first arrival."""
        if not self._marks:
            return 0.0
        since_s, rows_before = self._marks[0]
        return (self._rows - rows_before) / max(now_s - since_s, self._floor_s)


class AimdCap:
    """A batch cap by feedback: one more after a full batch in time, a tenth less after a late one.

    Source: Clipper, NSDI'17, section 4.3.
    """

    __slots__ = ("_cap", "_rows_max")

    def __init__(self, rows_max: int) -> None:
        self._cap = 1.0
        self._rows_max = rows_max

    @property
    def rows(self) -> int:
        """The cap now, 1..rows_max."""
        return int(self._cap)

    def executed(self, rows: int, is_late: bool) -> None:
        """Adapt to a batch of ``rows`` rows."""
        if is_late:
            self._cap = max(1.0, self._cap * 0.9)
        elif rows >= int(self._cap):
            self._cap = min(float(self._rows_max), self._cap + 1.0)


def pieces_within(rows: Sequence[int], first: int, rows_limit: int) -> tuple[int, int]:
    """How many pieces from ``first`` on fit into ``rows_limit`` rows (at least one), and their rows."""
    window = rows[first : first + max(1, rows_limit)]  # a piece has at least one row
    total = sum(window)
    if total <= rows_limit:
        return len(window), total
    pieces, total = 1, window[0]
    for more in window[1:]:
        if total + more > rows_limit:
            break
        total += more
        pieces += 1
    return pieces, total


def feasible_duration_s(curve: LatencyCurve, rows: int, rows_max: int) -> float:
    """Seconds that a request of ``rows`` rows takes alone, cut into batches of at most ``rows_max``."""
    full, rest = divmod(rows, rows_max)
    return full * curve.duration_s(rows_max) + (curve.duration_s(rest) if rest else 0.0)


class PricedPolicy:
    """Priced batches, deadline first: batch cap and wait follow from the SLO and the learned curve.

    One exception keeps it from starving itself: once nothing has run for four SLOs because the curve says that
    everything is hopeless, one piece runs as a probe. A curve learned in a bad minute would otherwise refuse
    everything for ever, for want of the measurement that corrects it.

    Args:
        learner: Holds the latency curve; fed by ``executed``.
        rows_max: ``B``, rows of the largest batch; at least 1.
        slo_s: ``D``, seconds from arrival to answer; positive. Individual deadlines may differ.
        timer_slack_s: How late a timer may fire; a held batch is looked at that much earlier. Event loops on
            epoll round up to whole milliseconds.
    """

    name = "priced"

    __slots__ = (
        "_a",
        "_a_hi",
        "_buckets",
        "_c",
        "_c_hi",
        "_cap",
        "_curve",
        "_hold_factor",
        "_is_fallback",
        "_is_probing",
        "_learner",
        "_margin",
        "_margin_rate",
        "_meter",
        "_now_s",
        "_one_row_rate",
        "_one_row_s",
        "_ran_at_s",
        "_refresh_at_s",
        "_refresh_every",
        "_rows_max",
        "_slo_s",
        "_stale_in",
        "_sustainable",
        "_timer_slack_s",
        "_waiting_rows_max",
    )

    def __init__(self, learner: CurveLearner, rows_max: int, slo_s: float, timer_slack_s: float = 0.001) -> None:
        if rows_max < 1:
            raise ValueError(f"rows_max is {rows_max!r}; it must be at least 1")
        if not slo_s > 0:
            raise ValueError(f"slo_s is {slo_s!r}; it must be above 0 seconds")
        self._learner = learner
        self._rows_max = rows_max
        self._slo_s = slo_s
        self._timer_slack_s = timer_slack_s
        self._meter = ArrivalMeter(window_s=3 * slo_s, floor_s=slo_s)
        self._cap = AimdCap(rows_max)
        self._now_s = -math.inf
        self._ran_at_s: float | None = None
        self._is_probing = False
        self._refresh_every = 1
        self._refresh(0.0)

    # ------------------------------------------------------------------ events

    def arrived(self, now_s: float, rows: int) -> None:
        """Count a request as offered load; see ``BatchPolicy``."""
        self._now_s = now_s
        if self._ran_at_s is None:
            self._ran_at_s = now_s
        self._meter.arrived(now_s, rows)

    def admits(self, now_s: float, deadline_s: float, rows: int, free_at_s: float, waiting_rows: int) -> bool:
        """Refuse what no schedule saves, and what overfills a queue that nobody trims; see ``BatchPolicy``."""
        start_s = free_at_s if free_at_s > now_s else now_s
        if rows <= self._rows_max and not self._buckets:
            alone_s = self._a + self._c * rows
        else:
            alone_s = feasible_duration_s(self._curve, rows, self._rows_max)
        if start_s + alone_s > deadline_s + _EPS_S:
            return waiting_rows == 0 and free_at_s <= now_s < deadline_s and self._is_probe_due(now_s)
        return waiting_rows == 0 or waiting_rows + rows <= _DOOR_FACTOR * self._waiting_rows_max

    @property
    def waiting_rows_max(self) -> float:
        """Little's bound ``U1 * D + B``: of more waiting rows some must miss, so the oldest may as well go now.

        It is the oldest who go, not the newcomer: a queue closed to newcomers is old by the time the executor is
        free, and sustains U2 at best where shedding the old sustains G.
        """
        return self._waiting_rows_max

    def executed(self, now_s: float, rows: int, took_s: float, lateness_s: float) -> None:
        """Learn from a finished batch; see ``BatchPolicy``."""
        self._now_s = self._ran_at_s = now_s
        self._learner.see(rows, took_s)
        self._cap.executed(rows, lateness_s > 0)
        if self._is_probing or self._learner.is_alarmed:
            self._is_probing = False
            self._stale_in, self._refresh_at_s = 0, now_s

    # ------------------------------------------------------------------ the decision

    def decide(self, now_s: float, deadlines_s: Sequence[float], rows: Sequence[int]) -> Decision:
        """Choose what an idle executor does now; see ``BatchPolicy``."""
        self._now_s = now_s
        if self._stale_in <= 0 and now_s >= self._refresh_at_s:
            self._refresh(now_s)
        self._stale_in -= 1
        end = len(deadlines_s)
        hopeless = first = self._first_hopeful(now_s, deadlines_s, rows)
        if first == end:
            if not self._is_probe_due(now_s) or deadlines_s[-1] <= now_s:
                return Decision(end, end, 0, None, math.inf)
            self._is_probing, self._ran_at_s = True, now_s
            return Decision(end - 1, end - 1, 1, None, deadlines_s[-1] - now_s - self._expected_s(rows[-1]))
        if self._is_fallback:
            return self._decide_by_feedback(now_s, deadlines_s, rows, first)
        first = self._drop_edge(now_s, deadlines_s, rows, first)
        allowed = self._rows_within(deadlines_s[first] - now_s)
        run, run_rows = pieces_within(rows, first, allowed)
        if first + run == end:
            hold_until_s = self._hold_until_s(deadlines_s[first], run_rows)
            if hold_until_s > now_s:
                return Decision(first, hopeless, 0, hold_until_s, math.inf)
        elif allowed < self._rows_max:
            first, run, run_rows = self._choose(now_s, deadlines_s, rows, first, run, run_rows)
        if self._margin < 1.0 and run_rows > run:
            run = self._without_hopeless(now_s, deadlines_s, rows, first, run)
            run_rows = sum(rows[first : first + run])
        return Decision(first, hopeless, run, None, deadlines_s[first] - now_s - self._expected_s(run_rows))

    def _first_hopeful(self, now_s: float, deadlines_s: Sequence[float], rows: Sequence[int]) -> int:
        """Index of the first piece that a batch of its own still answers in time, by the mean."""
        latest_s = now_s + self._one_row_s - _EPS_S
        if deadlines_s[0] >= latest_s and rows[0] == 1:
            return 0
        end = len(deadlines_s)
        first = bisect_left(deadlines_s, latest_s)
        while first < end and rows[first] > 1 and self._is_hopeless(now_s, deadlines_s[first], rows[first]):
            first += 1
        return first

    def _is_hopeless(self, now_s: float, deadline_s: float, rows: int) -> bool:
        return deadline_s < now_s + self._a + self._c * self._padded(rows) - _EPS_S

    def _without_hopeless(
        self, now_s: float, deadlines_s: Sequence[float], rows: Sequence[int], first: int, run: int
    ) -> int:
        """Pieces before the first hopeless one; a margin below one could let a large one slip in behind small."""
        for index in range(first + 1, first + run):
            if self._is_hopeless(now_s, deadlines_s[index], rows[index]):
                return index - first
        return run

    def _drop_edge(self, now_s: float, deadlines_s: Sequence[float], rows: Sequence[int], first: int) -> int:
        """When more than a batch waits, places are scarce: drop heads that a full batch may just miss."""
        end, rows_max = len(deadlines_s), self._rows_max
        edge_s = now_s + (self._a + self._c * rows_max) * (1 + _EDGE_SIGMAS * self._curve.sigma)
        if deadlines_s[first] >= edge_s:
            return first
        if end - first <= rows_max and sum(rows[first:]) <= rows_max:
            return first
        last = bisect_left(deadlines_s, edge_s, first)
        if sum(rows[max(first, end - rows_max) :]) == rows_max:
            keep_from = max(first, end - rows_max)
        else:
            kept_rows, keep_from = 0, end
            while kept_rows < rows_max and keep_from > first:  # a piece has at least one row: rows_max steps
                keep_from -= 1
                kept_rows += rows[keep_from]
        keep_from = min(last, keep_from)
        while keep_from > first and self._is_hopeless(now_s, deadlines_s[keep_from], rows[keep_from]):
            keep_from -= 1  # a large piece may be hopeless where the small one before it is not
        return keep_from

    def _hold_until_s(self, head_deadline_s: float, run_rows: int) -> float:
        """When a batch of everything must start; in the past when there is nothing to wait for.

        Whoever just misses a batch is lost when ``D < l(n) + l(1)``, and that loss per served request falls with
        ``n`` only if ``D < 2a + c``.
        """
        if run_rows >= self._rows_max or self._slo_s >= 2 * self._a_hi + self._c_hi:
            return -math.inf
        longer_s = (self._a + self._c * self._padded(run_rows + 1)) * self._hold_factor
        return head_deadline_s - longer_s - self._timer_slack_s

    def _choose(
        self, now_s: float, deadlines_s: Sequence[float], rows: Sequence[int], first: int, run: int, run_rows: int
    ) -> tuple[int, int, int]:
        """The head forces a choice: serve it in a small batch, or shed it and serve more of the younger.

        Returns:
            First piece, pieces and rows of the batch with the best score.
        """
        end = len(deadlines_s)
        a_hi, c_hi, one_row_s = self._a_hi, self._c_hi, self._one_row_s
        is_single = sum(rows[first:]) == end - first
        before: Sequence[int] = range(end + 1) if is_single else list(accumulate(rows, initial=0))
        total = before[end]
        largest = total - before[self._first_of_largest(now_s, deadlines_s, before, first)]
        if largest <= run_rows:
            return first, run, run_rows
        lam = self._meter.rate(now_s)
        if lam > 2 * self._margin_rate:
            self._stale_in, self._refresh_at_s = 0, now_s  # a surge: the margin was chosen for less than half of it
        phi = self._pressure(lam)
        price = phi * self._time_worth(lam)
        best_score, best = -math.inf, (first, run, run_rows)
        for size in self._sizes(run_rows, largest):
            if size == run_rows:
                start, stop = first, first + run
            else:
                start = bisect_left(deadlines_s, now_s + a_hi + c_hi * size - _EPS_S, first)
                stop = start + size if is_single else bisect_right(before, before[start] + size) - 1
            got = before[stop] - before[start]
            took_s = a_hi + c_hi * self._padded(got)
            still = bisect_left(deadlines_s, now_s + took_s + one_row_s - _EPS_S, first)
            left = total - before[still if still > stop else stop]
            score = got - price * took_s + (1 - phi) * left
            if got and score > best_score + 1e-9 and not self._is_hopeless(now_s, deadlines_s[start], rows[start]):
                best_score, best = score, (start, stop - start, got)
        return best

    def _first_of_largest(self, now_s: float, deadlines_s: Sequence[float], before: Sequence[int], first: int) -> int:
        """Start of the longest run of latest deadlines that fits one batch and all its deadlines."""
        end = len(deadlines_s)
        low, high = max(first, end - self._rows_max), end
        while low < high:
            middle = (low + high) // 2
            size = before[end] - before[middle]
            finish_s = now_s + self._a_hi + self._c_hi * self._padded(size)
            if size <= self._rows_max and deadlines_s[middle] >= finish_s - _EPS_S:
                high = middle
            else:
                low = middle + 1
        return low

    def _sizes(self, smallest: int, largest: int) -> list[int]:
        """At most nine batch sizes to score, ascending; whole buckets when the runtime pads."""
        if self._buckets:
            between = [size for size in self._buckets if smallest < size < largest]
            between = between[:: -(-len(between) // (_CANDIDATES - 1)) or 1]
            return [smallest, *between, largest]
        step = -(-(largest - smallest) // _CANDIDATES)
        return [*range(smallest, largest, step), largest]

    def _decide_by_feedback(
        self, now_s: float, deadlines_s: Sequence[float], rows: Sequence[int], first: int
    ) -> Decision:
        """The curve is unknown or the work depends on the input: cap by AIMD, shed heads that a full batch misses."""
        hopeless, end = first, len(deadlines_s)
        cap = self._cap.rows
        run, run_rows = pieces_within(rows, first, cap)
        while first + 1 < end and deadlines_s[first] < now_s + self._a + self._c * self._padded(run_rows) - _EPS_S:
            first += 1
            run, run_rows = pieces_within(rows, first, cap)
        if self._is_hopeless(now_s, deadlines_s[first], rows[first]):
            return Decision(end, hopeless, 0, None, math.inf)
        run = self._without_hopeless(now_s, deadlines_s, rows, first, run)
        run_rows = sum(rows[first : first + run])
        return Decision(first, hopeless, run, None, deadlines_s[first] - now_s - self._expected_s(run_rows))

    # ------------------------------------------------------------------ derived constants

    def _refresh(self, now_s: float) -> None:
        """Recompute what follows from the curve; every sixteenth decision is often enough while nothing moves."""
        curve = self._curve = self._learner.curve
        self._is_fallback = self._learner.distinct_sizes < 2 or curve.sigma > _SIGMA_TRUSTED_MAX
        self._buckets = curve.row_buckets
        a, c = self._a, self._c = curve.base_s, max(curve.per_row_s, 1e-9)
        one_row_s = self._one_row_s = curve.duration_s(1)
        self._one_row_rate = 1 / max(one_row_s, 1e-9)
        self._sustainable = max(sustainable_rate(curve, self._slo_s, self._rows_max), self._one_row_rate * 1.001)
        self._waiting_rows_max = rate_ceiling(curve, self._slo_s, self._rows_max) * self._slo_s + self._rows_max
        # One more row at the edge, in time with chance p, takes c seconds, each worth `worth` answers, and
        # pushes the c * lam rows next to it over the edge with chance 1 - p. It pays from p >= c * worth +
        # c * lam * (1 - p) on, and the normal quantile of that p is how many sigmas to keep clear.
        lam = self._margin_rate = self._meter.rate(now_s)
        worth = max(self._sustainable, fluid_rate(curve, self._slo_s, self._rows_max, lam))
        chance = c * (worth + lam) / (1 + c * lam)
        self._margin = max(0.05, 1 + curve.sigma * _quantile(min(0.98, max(0.05, chance))))
        self._a_hi, self._c_hi = a * self._margin, c * self._margin
        self._hold_factor = max(1.0, self._margin)  # never hold a batch past its expected latest start
        self._refresh_every = min(_REFRESH_DECISIONS, 2 * self._refresh_every)  # the first figures are the worst
        self._stale_in = 1 if self._learner.is_alarmed else self._refresh_every
        self._refresh_at_s = now_s + _REFRESH_SLOS * self._slo_s if self._refresh_every == _REFRESH_DECISIONS else now_s

    def _padded(self, rows: int) -> int:
        return self._curve.padded_rows(rows) if self._buckets else rows

    def _expected_s(self, rows: int) -> float:
        return self._a_hi + self._c_hi * self._padded(rows)

    def _rows_within(self, duration_s: float) -> int:
        """Rows that end within ``duration_s``, margin included; at least 1, at most ``rows_max``."""
        if self._buckets:
            return max(1, self._curve.rows_within(duration_s / self._margin, self._rows_max))
        return max(1, int(min(float(self._rows_max), (duration_s - self._a_hi) / self._c_hi + 1e-9)))

    def _pressure(self, lam: float) -> float:
        return min(1.0, max(0.0, (lam - self._one_row_rate) / (self._sustainable - self._one_row_rate)))

    def _time_worth(self, lam: float) -> float:
        """Answers per second of the fluid optimum's batch size: the price of the executor's time."""
        size = min(float(self._rows_max), (self._slo_s - self._a_hi) / (self._c_hi + 1 / max(lam, 1e-9)))
        return size / (self._a_hi + self._c_hi * size) if size > 0 else 0.0

    def _is_probe_due(self, now_s: float) -> bool:
        return self._ran_at_s is not None and now_s - self._ran_at_s >= _PROBE_SLOS * self._slo_s

    def snapshot(self, now_s: float | None = None) -> PolicyFacts:
        """The policy's figures; see ``BatchPolicy``."""
        curve = self._learner.curve
        lam = self._meter.rate(self._now_s if now_s is None else now_s)
        return PolicyFacts(
            name=self.name,
            curve=curve,
            rows_max=self._rows_max,
            slo_s=self._slo_s,
            one_row_s=curve.duration_s(1),
            rate_ceiling=rate_ceiling(curve, self._slo_s, self._rows_max),
            sustainable_rate=sustainable_rate(curve, self._slo_s, self._rows_max),
            arrival_rate=lam,
            pressure=self._pressure(lam),
            is_fallback=self._is_fallback,
        )
