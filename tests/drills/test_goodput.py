"""The goodput drill: what it reads off a run, how it judges, and that it says what it could not measure."""

import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.drills.bench_report import Verdict
from headrace.drills.goodput import plot
from headrace.drills.goodput_cells import CELLS, OURS, RIVALS, Overhead, policies
from headrace.drills.goodput_cost import decision_cost
from headrace.drills.goodput_judge import Rate, judge, rate_at_target
from headrace.drills.goodput_parts import recovery_s
from headrace.drills.goodput_report import report_lines
from headrace.drills.goodput_stage import Endpoint, Measured, Sample, Shot, Stage
from headrace.drills.load import constant_offsets
from headrace.testing.sleep_runtime import SleepArtefact, SleepRuntime

MIXED = CELLS[1]


def sample(what: str, load: float, share: float, repetition: int = 1, **figures: Any) -> Sample:
    """A run of 1,000 requests in 10 s of which a share was in time, the others refused."""
    known: dict[str, Any] = {
        "offered_per_s": 100.0, "in_time_per_s": 100.0 * share, "in_time_share": share, "late_share": 0.0,
        "refusal_p99_s": 0.01, "mean_s": 0.02, "errors": 0, "lag_p99_s": 0.0, "void_reason": "",
    }  # fmt: skip
    return Sample(what, load, repetition, 1000, **(known | figures))


def measured(scheduled_s: list[float], is_in_time: list[bool], answered_s: list[float] | None = None) -> Measured:
    """A run of requests of one row."""
    rows = np.ones(len(scheduled_s), dtype=np.int64)
    return Measured(
        sample(OURS, 1.0, 1.0), np.array(scheduled_s), np.array(answered_s or scheduled_s), np.array(is_in_time), rows
    )


def cell_results(share_of: dict[str, float], **figures: Any) -> dict[str, Any]:
    """A cell in which every policy misses nothing at 70/s and has the given share in time at 90/s and 100/s."""
    runs = [
        asdict(sample(what, load, 1.0 if load == 70.0 else share_of[what], repetition, **figures))
        for what in (OURS, *RIVALS)
        for load in (70.0, 90.0, 100.0)
        for repetition in (1, 2, 3)
    ]
    overload = [
        asdict(sample(what, load, 0.5, repetition)) | {"fluid_per_s": 52.0, "batch_p99_s": 0.009}
        for what in (OURS, "greedy")
        for load in (1.5, 3.0, 10.0)
        for repetition in (1, 2, 3)
    ]
    idle = [asdict(sample(what, 0.2, 1.0, number)) for what in (OURS, "greedy", "5 ms delay") for number in (1, 2, 3)]
    spike = [asdict(sample(what, 3.0, 0.5)) | {"recovery_s": 0.06, "watched_s": 4.0} for what in (OURS, "greedy")]
    return {
        "cell": asdict(MIXED), "sustainable_per_s": 100.0, "rows_max": 28, "budget_s": 0.05, "delay_s": 0.002,
        "predicted_per_s": {OURS: [95.0] * 3} | {name: [80.0] for name in RIVALS}, "optimal_per_s": [100.0] * 3,
        "rates": runs, "overload": overload, "idle": idle, "spike": {"owed_s": 9.0, "runs": spike},
    }  # fmt: skip


def results(**cells: dict[str, Any]) -> dict[str, Any]:
    """A complete document around some cells."""
    return {
        "command": "scripts/bench --goodput", "date": "2026-01-01T00:00:00+00:00", "took_s": 60.0, "repetitions": 3,
        "machine": {"cores": "2"}, "placement": "", "voids": [], "plot": "goodput.svg",
        "overhead": asdict(Overhead(0.001, 1e-4)), "cells": cells,
    }  # fmt: skip


def verdict(found: dict[str, Any], goal: str, words: str) -> Verdict:
    """The one verdict of a goal whose figure has these words."""
    (one,) = [each for name, each in judge(found) if name == goal and words in each.figure]
    return one


def test_the_99_percent_rate_lies_between_the_rates_around_the_crossing() -> None:
    """D1: the logarithm of the misses is interpolated, so 0.1 % at 80/s and 10 % at 100/s make 90/s."""
    found = rate_at_target([(100.0, 0.90, 10_000), (60.0, 1.0, 10_000), (80.0, 0.999, 10_000)])

    assert found is not None
    assert (pytest.approx(90.0), "") == (found.per_s, found.side)


def test_a_rate_outside_of_what_was_tried_says_so() -> None:
    """D1: below the lowest rate and above the highest one nothing is made up."""
    assert Rate(50.0, "<") == rate_at_target([(50.0, 0.98, 1000), (60.0, 0.5, 1000)])
    assert Rate(60.0, ">") == rate_at_target([(50.0, 1.0, 1000), (60.0, 0.995, 1000)])
    assert rate_at_target([]) is None


def test_a_void_run_hides_the_crossing_unless_it_comes_after() -> None:
    """D1: a rate is not told from the runs that are left over."""
    assert rate_at_target([(50.0, None, 1000), (60.0, 0.9, 1000)]) is None
    assert rate_at_target([(50.0, 1.0, 1000), (60.0, None, 1000)]) is None
    assert rate_at_target([(50.0, 1.0, 1000), (60.0, 0.5, 1000), (70.0, None, 1000)]) is not None


def test_what_was_not_measured_is_never_met() -> None:
    """D1: the page shows what is missing instead of leaving it out."""
    found = judge({})

    assert {None} == {each.is_met for _, each in found}
    assert {"G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8"} == {goal for goal, _ in found}


def test_ratios_are_judged_per_cell_and_repetition() -> None:
    """D1: a policy that keeps 99 % at all rates beats those that lose it at 90/s, and each bound has its side."""
    found = results(mixed=cell_results({OURS: 1.0} | dict.fromkeys(RIVALS, 0.9)))

    over_fixed = verdict(found, "G1", "best fixed")
    assert over_fixed.measured is not None
    assert 1.10 < over_fixed.measured < 100 / 70
    assert over_fixed.is_met is True
    assert 0.5 * 100 / 52 == pytest.approx(verdict(found, "G3", "over G at 3 x U2").measured)
    assert verdict(found, "G3", "greedy with a queue timeout at 3 x").is_met is False
    assert 0.01 / 0.011 == pytest.approx(verdict(found, "G4", "time to a 503").measured)
    assert 1.0 == pytest.approx(verdict(found, "G4", "deadlines from the end of a spike").measured)


def test_one_void_cell_makes_the_worst_cell_unknown() -> None:
    """D1: a goal about every cell is not met by the cells that happened to be sound."""
    good = cell_results({OURS: 1.0} | dict.fromkeys(RIVALS, 0.9))
    void = cell_results({OURS: 1.0} | dict.fromkeys(RIVALS, 0.9), void_reason="late")

    found = verdict(results(mixed=good, other=void), "G2", "simulator's")

    assert (None, "void: other") == (found.is_met, found.note)


def test_below_the_lowest_rate_counts_for_a_rival_and_not_for_us() -> None:
    """D1: what is not known is taken against Headrace."""
    lost = cell_results({OURS: 1.0} | dict.fromkeys(RIVALS, 0.9))
    for run in lost["rates"]:
        run["in_time_share"] = 0.9

    found = verdict(results(mixed=lost), "G2", "simulator's")

    assert (0.0, False) == (found.measured, found.is_met)


def test_recovery_is_the_first_moment_from_which_it_stays_good() -> None:
    """S2: a good window between two bad ones is no recovery."""
    scheduled_s = [step / 100 for step in range(200)]
    run = measured(scheduled_s, [not (1.0 <= at_s < 1.1 or 1.3 <= at_s < 1.35) for at_s in scheduled_s])
    never = measured(scheduled_s, [at_s < 1.0 for at_s in scheduled_s])

    assert pytest.approx(0.35) == recovery_s(run, 1.0, 1.9, deadline_s=0.1)
    assert recovery_s(never, 1.0, 1.9, deadline_s=0.1) is None


def test_a_batch_is_told_by_its_answers_coming_together() -> None:
    """D1: three batches 20 and 30 ms apart, whose answers trickle over a millisecond each."""
    answered_s = [start_s + late_s for start_s in (0.1, 0.12, 0.15) for late_s in (0.0, 0.0005, 0.001)]
    run = measured(answered_s, [True] * 9, answered_s)

    assert 0.03 == pytest.approx(run.batch_p99_s(gap_s=0.005), rel=0.01)
    assert measured([0.1], [True]).batch_p99_s(gap_s=0.005) is None


def test_the_page_and_the_plot_are_made_from_the_figures() -> None:
    """D1: every goal has its line, a void run is told with its reason, and the plot is a drawing."""
    found = results(mixed=cell_results({OURS: 1.0} | dict.fromkeys(RIVALS, 0.9)))
    found["voids"] = [{"what": "greedy", "load": 1.5, "repetition": 2, "reason": "the generator was late"}]

    page = "\n".join(report_lines(found))
    root = ElementTree.fromstring(plot(found))

    for goal in ("G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8"):
        assert f"| {goal} |" in page
    assert "greedy at 1.5, repetition 2: the generator was late" in page
    assert {OURS, *RIVALS} <= {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}


def test_bounds_take_the_overhead_off_the_deadline_and_put_it_on_the_curve() -> None:
    """D1: an overhead can only lower what is asked of the server, and the budget leaves room to answer a batch."""
    real = MIXED.with_overhead(Overhead(fixed_s=0.002, per_request_s=0.0001))

    assert real.sustainable < MIXED.sustainable
    assert real.fluid(3 * MIXED.sustainable) < MIXED.fluid(3 * MIXED.sustainable)
    assert real.budget_s < real.slo_s < real.deadline_s
    assert {} == policies(real, 0.001)[OURS][0], "no batch setting but the SLO"


def test_a_decision_costs_microseconds() -> None:
    """X2: the drill's own figures; their limits, 30 and 5 µs on a quiet core, are tripled for a busy machine."""
    found = decision_cost(rounds=300)

    assert found["decision_s"] < 90e-6
    assert found["request_s"] < 15e-6


def test_a_model_is_stretched_by_its_input() -> None:
    """D1: input above 1 makes a run so many times longer, for all rows of its batch; up to 1 it changes nothing."""
    runtime = SleepRuntime(SleepArtefact(base_s=0.02, is_stretched_by_input=True))
    took_s = []
    for value in (1.0, 3.0):
        began_s = time.perf_counter()
        runtime.run({"x": np.array([[0.5], [value]], np.float32)}, ["y"])
        took_s.append(time.perf_counter() - began_s)

    assert took_s[0] >= 0.02
    assert took_s[1] >= 0.06


def test_a_run_over_http_loses_no_request(tmp_path: Path) -> None:
    """D1: every request of a run ends with an answer or a refusal, and rows and deadlines are counted per request."""
    endpoints = [
        Endpoint("ours", SleepArtefact(base_s=0.002), 5.0, {}),
        Endpoint("greedy", SleepArtefact(base_s=0.002), 5.0, {"policy": "greedy"}),
    ]
    shots = [Shot("ours", 10.0, 5.0, rows=3), Shot("greedy", 0.0, 5.0, rows=1)]
    told: list[str] = []
    with Stage(tmp_path / "stage", endpoints, told.append) as stage:
        run = stage.measure("both", 1.0, 1, shots, constant_offsets(100.0, 0.5), 0.5, tries=1)

    assert (50, 0) == (run.sample.requests, run.sample.errors)
    assert 200.0 == run.sample.offered_per_s
    assert 0.75 == run.sample.in_time_share, "the greedy half has no time at all"
    assert len(told) == len(stage.voids)
