"""The priced policy while the curve moves under it: drift, stalls, and a bad minute that ends."""

import math

import pytest
from harness import CURVES, ROWS_MAX, FrozenLearner, Outcome, Traffic, play, slo_of, warmed_learner

from headrace.data_plane.batch_curve import CurveLearner, LatencyCurve, fluid_rate, sustainable_rate
from headrace.data_plane.batch_policy import PricedPolicy


def slower(curve: LatencyCurve, factor: float) -> LatencyCurve:
    return LatencyCurve(curve.base_s * factor, curve.per_row_s * factor, curve.sigma)


def drift(name: str, factor: float, load: float, is_frozen: bool = False) -> tuple[Outcome, float, int]:
    """A run whose executor turns ``factor`` slower after 400 batches, at ``load`` of the new U2.

    Returns:
        The outcome, the new fluid optimum in rows per second, and the index of the first slow batch.
    """
    fast, slow = CURVES[name], slower(CURVES[name], factor)
    slo_s = slo_of(fast, 4.0)
    rate = load * sustainable_rate(slow, slo_s, ROWS_MAX)
    traffic = Traffic(slo_s, 1_200 * slo_s, rate, seed=7)
    jitter = traffic.jitter
    learner = warmed_learner(fast, jitter, FrozenLearner if is_frozen else CurveLearner)
    outcome = play(
        PricedPolicy(learner, ROWS_MAX, slo_s),
        traffic.at(rate),
        slo_s,
        lambda index, rows, _: (fast if index < 400 else slow).duration_s(rows) * jitter[index & 4095],
    )
    return outcome, fluid_rate(slow, slo_s, ROWS_MAX, rate), 400


def goodput(outcome: Outcome, first_batch: int, last_batch: int | None = None) -> float:
    """In-time rows per second between two batches."""
    batches = outcome.batches[first_batch:last_batch]
    return sum(batch.rows - batch.late_rows for batch in batches) / (batches[-1].finish_s - batches[0].start_s)


@pytest.mark.parametrize("name", list(CURVES))
def test_a_forty_percent_drift_costs_little_from_the_65th_batch_on(name):
    """X2: after l(b) rises by 40 % goodput is at least 0.85 of the new G from the 65th batch on."""
    outcome, fluid, slow_from = drift(name, 1.4, load=1.2)

    assert goodput(outcome, slow_from + 64) >= 0.85 * fluid


@pytest.mark.parametrize("name", list(CURVES))
def test_a_drift_does_not_stop_service_while_it_is_being_learned(name):
    """X2: within the 64 batches after a 40 % drift goodput stays above half of the new G."""
    outcome, fluid, slow_from = drift(name, 1.4, load=1.2)

    assert goodput(outcome, slow_from, slow_from + 64) >= 0.5 * fluid


@pytest.mark.parametrize("name", ["mid", "cpu"])
def test_learning_beats_a_profile_frozen_at_load_time(name):
    """X2: after the drift goodput is at least 1.3x that of the same policy with a frozen profile."""
    learned, _, slow_from = drift(name, 1.4, load=1.2)
    frozen, _, _ = drift(name, 1.4, load=1.2, is_frozen=True)

    assert goodput(learned, slow_from + 64) >= 1.3 * goodput(frozen, slow_from + 64)


@pytest.mark.parametrize("name", list(CURVES))
def test_one_stall_of_a_hundred_batches_poisons_nothing(name):
    """X2: from one SLO after a 100x stall on, as many rows are in time as without the stall, within 1 %."""
    curve = CURVES[name]
    slo_s = slo_of(curve, 4.0)
    rate = 0.5 * sustainable_rate(curve, slo_s, ROWS_MAX)
    traffic = Traffic(slo_s, 1_000 * slo_s, rate, seed=3)

    def run(stall: float) -> Outcome:
        return play(
            PricedPolicy(warmed_learner(curve, traffic.jitter), ROWS_MAX, slo_s),
            traffic.at(rate),
            slo_s,
            lambda index, rows, _: (
                curve.duration_s(rows) * traffic.jitter[index & 4095] * (stall if index == 200 else 1)
            ),
        )

    stalled, calm = run(100.0), run(1.0)
    resumed_s = stalled.batches[200].finish_s + slo_s

    in_time, undisturbed = (
        sum(batch.rows - batch.late_rows for batch in outcome.batches if batch.start_s > resumed_s)
        for outcome in (stalled, calm)
    )
    assert in_time >= 0.99 * undisturbed


def test_a_bad_minute_that_taught_hopelessness_is_unlearned():
    """S2: after an executor was 50x slower for a while and everything was refused, service resumes."""
    curve = CURVES["mid"]
    slo_s = slo_of(curve, 4.0)
    rate = 0.4 * sustainable_rate(curve, slo_s, ROWS_MAX)
    traffic = Traffic(slo_s, 2_000 * slo_s, rate, seed=3)
    bad_from_s, bad_until_s = 500 * slo_s, 900 * slo_s

    outcome = play(
        PricedPolicy(warmed_learner(curve, traffic.jitter), ROWS_MAX, slo_s),
        traffic.at(rate),
        slo_s,
        lambda _, rows, start_s: curve.duration_s(rows) * (50 if bad_from_s < start_s < bad_until_s else 1),
    )

    recovered_s = bad_until_s + 100 * slo_s
    arrivals = sum(at_s > recovered_s for at_s in traffic.at(rate))
    in_time = sum(batch.rows - batch.late_rows for batch in outcome.batches if batch.start_s > recovered_s)
    assert in_time >= 0.97 * arrivals


@pytest.mark.parametrize("name", list(CURVES))
def test_a_spike_is_forgotten_within_two_objectives(name):
    """S2: after 3x U2 for a while the share in time is back at 98 % two SLOs after the spike ends."""
    curve = CURVES[name]
    slo_s = slo_of(curve, 10.0)
    sustainable = sustainable_rate(curve, slo_s, ROWS_MAX)
    calm, spike = Traffic(slo_s, 400 * slo_s, sustainable, 4), Traffic(slo_s, 100 * slo_s, 3 * sustainable, 5)
    before = calm.at(0.5 * sustainable)
    during = [400 * slo_s + at_s for at_s in spike.at(3 * sustainable)]
    after = [500 * slo_s + at_s for at_s in before]

    outcome = play(
        PricedPolicy(warmed_learner(curve, calm.jitter), ROWS_MAX, slo_s),
        [*before, *during, *after],
        slo_s,
        lambda index, rows, _: curve.duration_s(rows) * calm.jitter[index & 4095],
    )

    settled_s = 502 * slo_s
    first_piece = sum(at_s <= settled_s for at_s in (*before, *during, *after))
    in_time = sum(
        sum(piece >= first_piece for piece in batch.pieces) for batch in outcome.batches if not batch.late_rows
    )
    assert in_time >= 0.98 * (outcome.received - first_piece)


def test_input_dependent_times_fall_back_to_feedback_and_still_serve():
    """X2: with times spread tenfold by the input the curve is not trusted, and 80 % at 20 % load are in time."""
    curve = CURVES["mid"]
    slo_s = slo_of(curve, 20.0)
    rate = 0.2 * sustainable_rate(curve, slo_s, ROWS_MAX)
    traffic = Traffic(slo_s, 400 * slo_s, rate, seed=3)
    policy = PricedPolicy(warmed_learner(curve, traffic.jitter), ROWS_MAX, slo_s)
    spread = [math.exp(0.9 * math.log(noise) / 0.03) for noise in traffic.jitter]

    outcome = play(
        policy, traffic.at(rate), slo_s, lambda index, rows, _: curve.duration_s(rows) * spread[index & 4095]
    )

    assert (policy.snapshot().is_fallback, outcome.in_time_share > 0.8) == (True, True), outcome.in_time_share
