"""The learned latency curve and the rates computed from it."""

import math
import random

import pytest
from harness import CURVES, SIGMA, WARMUP_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data_plane.batch_curve import (
    CurveLearner,
    LatencyCurve,
    fluid_rate,
    lossy_rate_limit,
    rate_ceiling,
    sustainable_rate,
)

MID = CURVES["mid"]
WARMUP = [(rows, MID.duration_s(rows)) for rows in WARMUP_SIZES]


def feed(learner: CurveLearner, sizes: list[int], factor: float = 1.0, seed: int = 5) -> None:
    rng = random.Random(seed)
    for rows in sizes:
        learner.see(rows, MID.duration_s(rows) * factor * rng.lognormvariate(0, SIGMA))


def mixed_sizes(count: int, seed: int = 6) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(1, 12) for _ in range(count)]


def worst_error(learner: CurveLearner, factor: float = 1.0) -> float:
    return max(abs(learner.curve.duration_s(rows) / (factor * MID.duration_s(rows)) - 1) for rows in (1, 4, 8, 12))


def test_warm_up_runs_without_jitter_give_the_exact_curve():
    """X2: six timed runs are enough to know base and per-row time."""
    curve = CurveLearner(WARMUP).curve

    assert (curve.base_s, curve.per_row_s) == (pytest.approx(MID.base_s), pytest.approx(MID.per_row_s))


def test_serving_with_jitter_keeps_the_curve_within_five_percent():
    """X2: 3 % jitter leaves the curve within 5 % and sigma near 3 %."""
    learner = CurveLearner(WARMUP)

    feed(learner, mixed_sizes(400))

    assert (worst_error(learner) < 0.05, 0.02 < learner.curve.sigma < 0.045) == (True, True)


def test_jitter_alone_seldom_raises_the_drift_alarm():
    """X2: a steady curve is alarmed during less than 5 % of its batches, or the memory would never be long."""
    learner, alarmed = CurveLearner(WARMUP), 0

    for rows in mixed_sizes(60):
        feed(learner, [rows], seed=rows)  # settle sigma
    for index, rows in enumerate(mixed_sizes(4_000, seed=9)):
        feed(learner, [rows], seed=index)
        alarmed += learner.is_alarmed

    assert alarmed / 4_000 < 0.05


@pytest.mark.parametrize("factor", [1.4, 1 / 1.4, 2.0])
def test_a_drifted_curve_is_learned_within_64_batches(factor):
    """X2: after the curve moves by 40 % or 100 %, 64 batches bring the estimate within 6 %."""
    learner = CurveLearner(WARMUP)
    feed(learner, mixed_sizes(300))

    feed(learner, mixed_sizes(64, seed=8), factor)

    assert worst_error(learner, factor) < 0.06


def test_a_drift_is_followed_even_when_only_one_size_runs():
    """X2: at low load every batch has one row; the level follows although the shape cannot be seen."""
    learner = CurveLearner(WARMUP)
    feed(learner, [1] * 3_000)

    feed(learner, [1] * 64, 1.4)

    assert learner.curve.duration_s(1) == pytest.approx(1.4 * MID.duration_s(1), rel=0.06)


def test_a_tenfold_slowdown_is_learned_within_a_dozen_batches():
    """X2: outliers in a row are not stalls: the fourth moves the level."""
    learner = CurveLearner(WARMUP)
    feed(learner, mixed_sizes(300))

    feed(learner, mixed_sizes(12, seed=8), 10.0)

    assert worst_error(learner, 10.0) < 0.15


@pytest.mark.parametrize("ratio", [100.0, 0.01])
def test_one_garbage_measurement_moves_the_curve_by_at_most_a_fifth(ratio):
    """X2: a run of 100x or 1/100 the time, a stall or a batch that failed at once, does not poison."""
    learner = CurveLearner(WARMUP)
    feed(learner, mixed_sizes(300))

    learner.see(4, MID.duration_s(4) * ratio)

    assert (worst_error(learner) < 0.2, learner.curve.sigma < 0.15) == (True, True)


@pytest.mark.parametrize(("rows", "took_s"), [(0, 0.01), (-1, 0.01), (1, 0.0), (1, -1.0), (1, math.nan), (1, math.inf)])
def test_a_report_that_is_no_measurement_is_counted_and_ignored(rows, took_s):
    """X2: zero rows or a time that is not finite and positive changes nothing but the counter."""
    learner = CurveLearner(WARMUP)
    before = learner.curve

    learner.see(rows, took_s)

    assert (learner.curve, learner.ignored_runs) == (before, 1)


def test_a_batch_counts_as_its_bucket_when_the_runtime_pads():
    """X2: with buckets 1, 4, 16 a batch of 3 is learned and predicted as one of 4."""
    learner = CurveLearner([(1, 0.003), (3, 0.006)], row_buckets=(1, 4, 16))

    curve = learner.curve

    assert [curve.duration_s(rows) for rows in (2, 4, 5, 16)] == [
        pytest.approx(expected) for expected in (0.006, 0.006, 0.018, 0.018)
    ]
    assert [curve.rows_within(seconds, 16) for seconds in (0.002, 0.0031, 0.01, 0.02)] == [0, 1, 4, 16]


@given(
    runs=st.lists(
        st.tuples(st.integers(-2, 300), st.floats(allow_nan=True, allow_infinity=True)),
        max_size=80,
    )
)
@settings(max_examples=60, deadline=None)
def test_no_sequence_of_reports_breaks_the_curve(runs):
    """X2: whatever is reported, the curve stays finite with base >= 0 and a positive time per row."""
    learner = CurveLearner(WARMUP)

    for rows, took_s in runs:
        if not 1e-9 < abs(took_s) < 1e9:
            took_s = 0.0  # squares of subnormals are not times of batches
        learner.see(rows, took_s)

    curve = learner.curve
    assert (math.isfinite(curve.base_s), curve.base_s >= 0, 0 < curve.per_row_s < math.inf) == (True, True, True)


def test_the_bounds_have_their_textbook_values():
    """X2: U1 = b/l(b) with l(b) <= D; U2 with l(b) = D/2; G lies between U2 and U1 beyond U2."""
    slo_s = 0.012

    bounds = rate_ceiling(MID, slo_s, 64), sustainable_rate(MID, slo_s, 64), fluid_rate(MID, slo_s, 64, 1000.0)

    assert bounds == (pytest.approx(10 / 0.012), pytest.approx(4 / 0.006), pytest.approx(5 / 0.007))


def test_the_fluid_rate_equals_the_offered_rate_below_the_sustainable_one():
    """X2: up to U2 nothing need be lost."""
    rate = sustainable_rate(MID, 0.012, 64)

    assert [fluid_rate(MID, 0.012, 64, share * rate) for share in (0.1, 0.5, 1.0)] == [
        pytest.approx(share * rate) for share in (0.1, 0.5, 1.0)
    ]


def test_the_lossy_limit_is_the_published_formula():
    """X2: below 2 l(1) the 99 % rate is 1 / ((2 l(1) - D) / 0.01 - (D - l(1))); beyond it is no obstacle."""
    one_row_s = MID.duration_s(1)

    limits = [lossy_rate_limit(MID, multiple * one_row_s) for multiple in (0.9, 1.5, 2.0, 5.0)]

    assert limits == [0.0, pytest.approx(1 / (50 * one_row_s - 0.5 * one_row_s)), math.inf, math.inf]


@given(
    base_s=st.sampled_from([0.0, 1e-9, 1e-3, 10.0]),
    per_row_s=st.sampled_from([0.0, 1e-12, 1e-6, 1e-3, 10.0]),
    slo_s=st.sampled_from([1e-6, 1e-3, 0.1, 100.0]),
    rows_max=st.sampled_from([1, 7, 4096]),
    rate=st.sampled_from([0.0, 1e-3, 1e3, 1e9]),
)
@settings(max_examples=200, deadline=None)
def test_degenerate_curves_have_finite_ordered_bounds(base_s, per_row_s, slo_s, rows_max, rate):
    """X2: free rows, no base cost or a hopeless objective give finite rates with G at most the offered."""
    curve = LatencyCurve(base_s, per_row_s)

    ceiling, sustainable = rate_ceiling(curve, slo_s, rows_max), sustainable_rate(curve, slo_s, rows_max)
    fluid, limit = fluid_rate(curve, slo_s, rows_max, rate), lossy_rate_limit(curve, slo_s)

    assert all(0 <= value < math.inf for value in (ceiling, sustainable, fluid))
    assert limit >= 0
    assert fluid <= rate


@pytest.mark.parametrize("values", [(-1.0, 0.1, 0.0, ()), (0.1, math.nan, 0.0, ()), (0.1, 0.1, 0.0, (4, 2))])
def test_an_impossible_curve_is_refused(values):
    """X2: negative or undefined times and unordered buckets are named in the error."""
    with pytest.raises(ValueError, match="must be"):
        LatencyCurve(*values)
