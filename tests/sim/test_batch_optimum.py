"""The clairvoyant optimum: right where every schedule can be tried, and how near the policy comes to it."""

from itertools import combinations

import numpy as np
import pytest
from harness import CELLS, CURVES, ROWS_MAX, Traffic, play, rate_at_99, slo_of, warmed_learner

from headrace.data_plane.batch_curve import LatencyCurve, fluid_rate, sustainable_rate
from headrace.data_plane.batch_policy import PricedPolicy
from headrace.testing.batch_optimum import fewest_misses, optimal_rate_at_99

LONG = [(name, multiple) for name, multiple in CELLS if slo_of(CURVES[name], multiple) >= 0.010]


def priced(learner, slo_s):
    return PricedPolicy(learner, ROWS_MAX, slo_s)


def fewest_misses_by_trying(arrivals: list[float], curve: LatencyCurve, slo_s: float, rows_max: int) -> int:
    """Tries every subset of the arrivals, and every way to cut it into batches in order of arrival."""

    def fits(chosen: tuple[float, ...], free_s: float) -> bool:
        return not chosen or any(
            finish_s <= chosen[0] + slo_s + 1e-9 and fits(chosen[rows:], finish_s)
            for rows in range(1, min(rows_max, len(chosen)) + 1)
            if (finish_s := max(free_s, chosen[rows - 1]) + curve.duration_s(rows))
        )

    return min(
        len(arrivals) - count
        for count in range(len(arrivals) + 1)
        if any(fits(chosen, 0.0) for chosen in combinations(arrivals, count))
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_optimum_is_what_trying_every_schedule_finds(seed):
    """X2: on eight arrivals the search misses exactly as many as the best of all schedules."""
    dice = np.random.default_rng(seed)
    curve = LatencyCurve(float(dice.uniform(0.5, 3)), float(dice.uniform(0.1, 2)))
    slo_s, rows_max = float(dice.uniform(1.0, 3.0)) * curve.duration_s(1), int(dice.integers(1, 5))
    arrivals = np.sort(dice.uniform(0, 8, 8)).tolist()

    found = fewest_misses(arrivals, curve, slo_s, rows_max, misses_max=8)

    assert fewest_misses_by_trying(arrivals, curve, slo_s, rows_max) == found


def test_the_search_gives_up_where_it_was_told_to():
    """X2: of four arrivals at once, one at a time, two miss; asked for at most one, the search says none."""
    curve = LatencyCurve(1.0, 0.0)

    found = [fewest_misses([0.0] * 4, curve, 2.0, rows_max=1, misses_max=limit) for limit in (4, 2, 1)]

    assert [2, 2, None] == found


def test_nothing_arrives_and_nothing_is_missed():
    """X2: an empty trace, and a model that is slower than its objective, have their obvious optimum."""
    curve = LatencyCurve(1.0, 1.0)

    assert 0 == fewest_misses([], curve, 4.0, 8, misses_max=0)
    assert 3 == fewest_misses([0.0, 1.0, 2.0], curve, 1.5, 8, misses_max=3)


def _shares(name: str, multiple: float, seed: int, requests: int) -> tuple[float, float]:
    """The policy over the optimum: R99, and in-time answers at 1.5 x U2; jitter off."""
    curve = LatencyCurve(CURVES[name].base_s, CURVES[name].per_row_s)
    slo_s = slo_of(curve, multiple)
    sustainable = sustainable_rate(curve, slo_s, ROWS_MAX)
    traffic = Traffic(slo_s, requests / sustainable, 2.5 * sustainable, seed, sigma=0.0)
    rate = rate_at_99(priced, traffic, curve, slo_s) / optimal_rate_at_99(traffic, curve, slo_s, ROWS_MAX)
    arrivals = traffic.at(1.5 * sustainable)[:requests]
    policy = priced(warmed_learner(curve, traffic.jitter), slo_s)
    mine = play(policy, arrivals, slo_s, lambda _, rows, __: curve.duration_s(rows))
    misses = fewest_misses(arrivals, curve, slo_s, ROWS_MAX, misses_max=len(arrivals) - mine.in_time)
    return rate, mine.in_time / (len(arrivals) - (len(arrivals) - mine.in_time if misses is None else misses))


@pytest.mark.parametrize(("name", "multiple"), LONG)
def test_the_99_percent_rate_is_near_the_clairvoyant_one(name, multiple):
    """X2: R99 is at least 0.80x what a scheduler that knew every arrival reaches on the same trace."""
    curve = LatencyCurve(CURVES[name].base_s, CURVES[name].per_row_s)
    slo_s = slo_of(curve, multiple)
    sustainable = sustainable_rate(curve, slo_s, ROWS_MAX)
    traffic = Traffic(slo_s, 2_000 / sustainable, 2 * sustainable, seed=7, sigma=0.0)

    share = rate_at_99(priced, traffic, curve, slo_s) / optimal_rate_at_99(traffic, curve, slo_s, ROWS_MAX)

    assert share >= 0.80


@pytest.mark.parametrize(("name", "multiple"), CELLS)
def test_the_fluid_optimum_is_a_fair_yardstick(name, multiple):
    """S2: at 1.5 x U2 the clairvoyant optimum is within 12 % of G, so a share of G is a share of the possible."""
    curve = LatencyCurve(CURVES[name].base_s, CURVES[name].per_row_s)
    slo_s = slo_of(curve, multiple)
    rate = 1.5 * sustainable_rate(curve, slo_s, ROWS_MAX)
    arrivals = Traffic(slo_s, 600 / rate, rate, seed=7, sigma=0.0).at(rate)

    misses = fewest_misses(arrivals, curve, slo_s, ROWS_MAX, misses_max=len(arrivals))

    fluid = fluid_rate(curve, slo_s, ROWS_MAX, len(arrivals) / (arrivals[-1] - arrivals[0]))
    possible = (len(arrivals) - misses) / (arrivals[-1] + slo_s - arrivals[0])
    assert possible == pytest.approx(fluid, rel=0.12)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [7, 21])
@pytest.mark.parametrize(("name", "multiple"), CELLS)
def test_the_full_table_against_the_clairvoyant_holds(name, multiple, seed):
    """X2: in every cell R99 is at least 0.80x and overload at least 0.93x the clairvoyant optimum."""
    rate, overload = _shares(name, multiple, seed, 2_000)

    assert (rate >= 0.80, overload >= 0.93) == (True, True), (rate, overload)
