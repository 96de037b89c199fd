"""What a scheduler that knew every arrival beforehand could do with a trace: no policy can beat it.

With one relative deadline for all, some best schedule serves its requests in arrival order and, before each batch,
drops only requests that would be late in it. So a state is (next request, when the executor is free, drops so far),
and of two states with the same next request one that is neither earlier nor has fewer drops can be forgotten. Exact for
an executor without jitter.

Source: dynamic programming over Pareto-optimal states; the argument is exchange of two requests with equal objectives.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from headrace.data_plane.batch_curve import LatencyCurve, rate_ceiling
from headrace.testing.batch_world import TARGET, Traffic

__all__ = ["fewest_misses", "optimal_rate_at_99"]

_EPS_S = 1e-9


def fewest_misses(
    arrivals: Sequence[float], curve: LatencyCurve, slo_s: float, rows_max: int, misses_max: int
) -> int | None:
    """Fewest arrivals that any schedule answers late or not at all.

    Args:
        arrivals: Ascending, seconds; one row each.
        curve: Of the executor; its spread is not used.
        slo_s: Relative deadline of each.
        rows_max: Largest batch.
        misses_max: Give up beyond so many. The search is the faster the fewer they are.

    Returns:
        The number; None when it is above `misses_max`.
    """
    end, times = len(arrivals), np.asarray(arrivals)
    largest = curve.rows_within(slo_s, rows_max)
    if not largest:
        return end if end <= misses_max else None
    took_s = [curve.duration_s(rows) for rows in range(largest + 1)]
    starts = [[], *(_possible_starts(times, rows, slo_s - took_s[rows]) for rows in range(1, largest + 1))]
    ceiling, last_s = rate_ceiling(curve, slo_s, rows_max), (arrivals[-1] if end else 0.0) + slo_s
    states: dict[int, list[tuple[float, int]]] = {0: [(0.0, 0)]}
    best = misses_max + 1
    for first in range(end):
        fewest = misses_max + 1
        for free_s, misses in sorted(states.pop(first, ())):
            if misses >= fewest:
                continue  # a state that is free earlier has no more misses
            fewest = misses
            best = min(best, misses + end - first)
            # Even at the highest rate there is, so many of the rest find no place.
            surplus = end - first - ceiling * (last_s - max(free_s, arrivals[first]))
            if misses + max(0.0, surplus) >= best:
                continue
            for rows in range(1, largest + 1):
                earliest = bisect_left(arrivals, free_s + took_s[rows] - slo_s - _EPS_S, first)
                if earliest >= end:
                    break
                begin = starts[rows][earliest]
                after, missed = begin + rows, misses + begin - first
                if after > end or missed >= best:
                    continue
                if after == end:
                    best = missed
                else:
                    states.setdefault(after, []).append((max(free_s, arrivals[after - 1]) + took_s[rows], missed))
    if not end:
        return 0
    return best if best <= misses_max else None


def _possible_starts(times: "np.ndarray[tuple[int], np.dtype[np.float64]]", rows: int, room_s: float) -> list[int]:
    """For each index the first one from there on whose `rows` arrivals are close enough to share a batch."""
    end = len(times)
    nowhere = 2 * end + rows
    index = np.full(end + 1, nowhere)
    if end >= rows:
        is_close = times[rows - 1 :] - times[: end - rows + 1] <= room_s + _EPS_S
        index[: end - rows + 1] = np.where(is_close, np.arange(end - rows + 1), nowhere)
    found: list[int] = np.minimum.accumulate(index[::-1])[::-1].tolist()
    return found


def optimal_rate_at_99(traffic: Traffic, curve: LatencyCurve, slo_s: float, rows_max: int, steps: int = 7) -> float:
    """Highest offered rate at which some schedule answers 99 % of this traffic in time; bisection."""
    low, high = 0.0, 1.25 * rate_ceiling(curve, slo_s, rows_max)
    for _ in range(steps):
        middle = (low + high) / 2
        arrivals = traffic.at(middle)
        allowed = int((1 - TARGET) * len(arrivals) + 1e-6)
        is_good = len(arrivals) < 20 or fewest_misses(arrivals, curve, slo_s, rows_max, allowed) is not None
        low, high = (middle, high) if is_good else (low, middle)
    return low
