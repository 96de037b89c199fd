"""The parts of the goodput drill: each starts its server, takes its runs and returns figures; nothing judges here.

In every part the policies take turns on the same arrivals, so that what the machine does to one it does to all, and
bounds and predictions are computed for those very arrivals, with the overhead that was measured first.

The file is long because it is a list: the parts have the same form, and one is understood by its neighbours.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from headrace.data_plane.batch_policy import BatchPolicy, PricedPolicy
from headrace.data_plane.batch_rivals import FixedDelayPolicy, GreedyPolicy
from headrace.drills.bench_machine import usage
from headrace.drills.goodput_cells import (
    CELLS,
    DRIFT_CELLS,
    DRIFT_FACTOR,
    MODELS_CURVE,
    MODELS_SLO_S,
    OURS,
    RIVALS,
    SIGMA,
    Cell,
    Overhead,
    delays_s,
    policies,
)
from headrace.drills.goodput_stage import PATIENCE_S, Endpoint, Measured, Shot, Stage
from headrace.drills.load import constant_offsets, poisson_offsets
from headrace.testing.batch_optimum import fewest_misses, optimal_rate_at_99
from headrace.testing.batch_world import (
    JITTERS,
    TARGET,
    Build,
    FrozenLearner,
    Outcome,
    Traffic,
    play,
    play_curve,
    play_shared,
    rate_at_99,
    warmed_learner,
)
from headrace.testing.sleep_runtime import SleepArtefact

__all__ = ["FULL", "QUICK", "Parts", "Plan", "recovery_s"]

OVERLOADS: Final = (1.5, 3.0, 10.0)
RIVAL_OVERLOADS: Final = (1.5, 3.0)
IDLE: Final = 0.2
BURST_LOAD: Final = 0.8
ROW_LOADS: Final = (1.5, 3.0)
ROWS_OF_A_REQUEST: Final = 8
DRIFT_LOAD: Final = 1.2
SETTLING_BATCHES: Final = 64
LOST: Final = 0.97
"""A policy with a smaller share in time is far past its 99 % rate: it is not asked at higher rates."""

CALIBRATIONS: Final = 3

OWED_S: Final = 5.0
"""Where a spike leaves a server without deadlines less work than this, its recovery is no contrast."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often; seconds of one run of each part.

    Attributes:
        repetitions: Of everything.
        factors: Rates around the predicted 99 % rate.
        model_factors: The same where several models share the executor; their share in time falls more gently.
        spike_s: Before, during and after the spike.
        watched_s: How long a server without deadlines is watched after the spike; longer is told as "not within".
        drift_s: Before the drift, and after it has had 64 batches.
        tries: How often a void run may be tried altogether.
    """

    repetitions: int
    run_s: float
    overload_s: float
    idle_s: float
    burst_s: float
    models_s: float
    rows_s: float
    spike_s: tuple[float, float, float]
    watched_s: float
    drift_s: tuple[float, float]
    factors: tuple[float, ...] = (0.75, 0.9, 1.05)
    model_factors: tuple[float, ...] = (0.7, 0.9, 1.1)
    tries: int = 2


FULL: Final = Plan(
    repetitions=3, run_s=10.0, overload_s=5.0, idle_s=4.0, burst_s=10.0, models_s=8.0, rows_s=5.0,
    spike_s=(2.0, 5.0, 4.0), watched_s=8.0, drift_s=(2.0, 6.0),
)  # fmt: skip
QUICK: Final = Plan(
    repetitions=1, run_s=2.2, overload_s=1.7, idle_s=1.5, burst_s=3.0, models_s=3.0, rows_s=2.0,
    spike_s=(1.0, 5.0, 2.0), watched_s=4.0, drift_s=(1.0, 4.0), tries=1,
)  # fmt: skip


class Parts:
    """One drill.

    Args:
        plan: Lengths.
        folder: For servers' files.
        say: Told what happens.

    Attributes:
        voids: Runs that prove nothing, and why.
        overhead: As measured; zero before `calibrate`.
    """

    def __init__(self, plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
        self.plan, self.say = plan, say
        self.voids: list[dict[str, Any]] = []
        self.overhead = Overhead()
        self._folder = folder
        self._count = 0

    def _stage(self, endpoints: Sequence[Endpoint]) -> Stage:
        self._count += 1
        stage = Stage(self._folder / f"server-{self._count}", endpoints, self.say)
        stage.voids = self.voids
        return stage

    def _turns(self, names: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Every name in every repetition, each repetition beginning with another one."""
        for repetition in range(1, self.plan.repetitions + 1):
            turn = (repetition - 1) % len(names)
            for name in (*names[turn:], *names[:turn]):
                yield repetition, name

    # ------------------------------------------------------------------------------------------------------ overhead

    def calibrate(self) -> dict[str, Any]:
        """What this machine adds to the curve: the fixed overhead one request at a time, and processor time."""
        self.say("overhead of the server")
        base_s, seconds = 0.005, 1.0
        endpoint, shot = Endpoint("calibrate", SleepArtefact(base_s=base_s), 1.0, {}), Shot("calibrate", 1.0, 1.0)
        fixed_s, per_request_s = [], []
        with self._stage([endpoint]) as stage:
            (pid,) = stage.server.worker_pids()
            for number in range(1, CALIBRATIONS + 1):
                alone = stage.measure("alone", 0, number, [shot], constant_offsets(50.0, seconds), seconds, tries=1)
                before_s = usage([pid]).cpu_s
                offsets_s = poisson_offsets(1000.0, 2 * seconds, seed=number)
                stage.measure("busy", 0, number, [shot], offsets_s, 2 * seconds, tries=1)
                per_request_s.append((usage([pid]).cpu_s - before_s) / len(offsets_s))
                if alone.sample.mean_s is not None:
                    fixed_s.append(max(0.0, alone.sample.mean_s - base_s))
        if not fixed_s:
            raise RuntimeError("the server answered none of the requests of the calibration")
        # The least of them: what a neighbour adds is no overhead, and a smaller one asks more of every figure.
        self.overhead = Overhead(min(fixed_s), min(per_request_s))
        return asdict(self.overhead)

    # --------------------------------------------------------------------------------------------------- rates, a cell

    def cell(self, bare: Cell) -> dict[str, Any]:
        """Everything about one cell: rates around the predicted one, overload, idling, the spike."""
        cell = bare.with_overhead(self.overhead)
        self.say(f"{cell.name}: predictions")
        traffics = [self._traffic(cell, self.plan.run_s, 1.6, number) for number in self._repetitions()]
        delay_s = max(delays_s(cell), key=lambda each: self._predict(cell, traffics[0], _delayed(cell, each)))
        known = policies(cell, delay_s)
        ours = [self._predict(cell, traffic, known[OURS][1]) for traffic in traffics]
        predicted = {OURS: ours} | {name: [self._predict(cell, traffics[0], known[name][1])] for name in RIVALS}
        optimal = [optimal_rate_at_99(traffic, cell.curve, cell.slo_s, cell.rows_max) for traffic in traffics]
        endpoints = [
            Endpoint(_url(name), cell.artefact(), cell.budget_s, batching) for name, (batching, _) in known.items()
        ]
        with self._stage(endpoints) as stage:
            return {
                "cell": asdict(cell), "sustainable_per_s": cell.sustainable, "rows_max": cell.rows_max,
                "budget_s": cell.budget_s, "delay_s": delay_s, "predicted_per_s": predicted, "optimal_per_s": optimal,
                "rates": self._rates(stage, cell, median(ours), traffics),
                "overload": self._overload(stage, cell),
                "idle": self._idle(stage, cell),
                "spike": self._spike(stage, cell),
            }  # fmt: skip

    def _repetitions(self) -> range:
        return range(1, self.plan.repetitions + 1)

    def _traffic(self, cell: Cell, seconds: float, load_max: float, seed: int, is_bursty: bool = False) -> Traffic:
        return Traffic(cell.slo_s, seconds, load_max * cell.sustainable, seed, is_bursty, SIGMA)

    def _predict(self, cell: Cell, traffic: Traffic, build: Build) -> float:
        return rate_at_99(build, traffic, cell.curve, cell.slo_s, rows_max=cell.rows_max)

    def _rates(self, stage: Stage, cell: Cell, predicted: float, traffics: Sequence[Traffic]) -> list[dict[str, Any]]:
        names, found = (OURS, *RIVALS), []
        lost: set[tuple[int, str]] = set()
        for factor in self.plan.factors:
            rate = factor * predicted
            for repetition, name in self._turns(names):
                if (repetition, name) in lost:
                    continue
                self.say(f"{cell.name}: {name} at {rate:.0f}/s, repetition {repetition}")
                sample = stage.measure(
                    name, rate, repetition, [_shot(cell, name)], traffics[repetition - 1].at(rate), self.plan.run_s,
                    tries=self.plan.tries,
                ).sample  # fmt: skip
                found.append(sample.as_dict())
                if not sample.void_reason and sample.in_time_share < LOST:
                    lost.add((repetition, name))
        return found

    def _overload(self, stage: Stage, cell: Cell) -> list[dict[str, Any]]:
        found = []
        for load in OVERLOADS:
            names = (OURS, "greedy") if load in RIVAL_OVERLOADS else (OURS,)
            for repetition, name in self._turns(names):
                self.say(f"{cell.name}: {name} at {load:g} x U2, repetition {repetition}")
                traffic = self._traffic(cell, self.plan.overload_s, max(OVERLOADS), 100 + repetition)
                measured = stage.measure(
                    name, load, repetition, [_shot(cell, name)], traffic.at(load * cell.sustainable),
                    self.plan.overload_s, tries=self.plan.tries,
                )  # fmt: skip
                extra = {
                    "fluid_per_s": cell.fluid(measured.sample.offered_per_s),
                    "batch_p99_s": measured.batch_p99_s(cell.base_s / 4),
                }
                found.append(measured.sample.as_dict() | extra)
        return found

    def _idle(self, stage: Stage, cell: Cell) -> list[dict[str, Any]]:
        found = []
        for repetition, name in self._turns((OURS, "greedy", "5 ms delay")):
            self.say(f"{cell.name}: {name} at {IDLE:g} x U2, repetition {repetition}")
            offsets_s = self._traffic(cell, self.plan.idle_s, 1.0, 200 + repetition).at(IDLE * cell.sustainable)
            measured = stage.measure(
                name, IDLE, repetition, [_shot(cell, name)], offsets_s, self.plan.idle_s, tries=self.plan.tries
            )
            found.append(measured.sample.as_dict())
        return found

    # ---------------------------------------------------------------------------------------------------------- spike

    def _spike(self, stage: Stage, cell: Cell) -> dict[str, Any]:
        """A spike of three times U2, and how long its traces last; greedy where it owes much work afterwards."""
        spike_s = self.plan.spike_s[1]
        capacity = cell.rows_max / (cell.base_s + cell.per_row_s * cell.rows_max)
        owed_s = max(0.0, (3 * cell.sustainable - capacity) * spike_s / capacity)
        names: list[tuple[int, str]] = [(number, OURS) for number in self._repetitions()]
        if owed_s >= OWED_S:
            names.append((1, "greedy"))
        runs = []
        for repetition, name in names:
            self.say(f"{cell.name}: {name} through a spike, repetition {repetition}")
            before_s, _, after_s = self.plan.spike_s
            shot = _shot(cell, name)
            if name == "greedy":
                # As it is shipped: without a queue timeout, and nobody tells it by when an answer is wanted.
                shot, after_s = Shot(shot.endpoint, cell.deadline_s, PATIENCE_S), self.plan.watched_s
            parts, start_s = [], 0.0
            for number, (seconds, load) in enumerate(((before_s, 0.5), (spike_s, 3.0), (after_s, 0.5))):
                traffic = self._traffic(cell, seconds, 3.0, 300 + 10 * repetition + number)
                parts += [start_s + at_s for at_s in traffic.at(load * cell.sustainable)]
                start_s += seconds
            measured = stage.measure(name, 3.0, repetition, [shot], parts, start_s, tries=self.plan.tries)
            took_s = recovery_s(measured, before_s + spike_s, start_s - cell.deadline_s, cell.deadline_s)
            runs.append(measured.sample.as_dict() | {"recovery_s": took_s, "watched_s": after_s})
        return {"owed_s": owed_s, "runs": runs}

    # --------------------------------------------------------------------------------------------- bursts, many rows

    def bursts(self) -> dict[str, Any]:
        """Traffic in bursts, all policies, beside what a clairvoyant would do."""
        cell = CELLS[1].with_overhead(self.overhead)
        seconds, rate = self.plan.burst_s, BURST_LOAD * cell.sustainable
        known = policies(cell, delays_s(cell)[0])
        names = (OURS, *RIVALS)
        endpoints = [Endpoint(_url(name), cell.artefact(), cell.budget_s, known[name][0]) for name in names]
        runs, optimal = [], []
        for number in self._repetitions():
            self.say(f"bursts: what a clairvoyant would do, repetition {number}")
            traffic = self._traffic(cell, seconds, 1.0, 400 + number, is_bursty=True)
            mine = play_curve(known[OURS][1], traffic, rate, cell.curve, cell.slo_s, cell.rows_max)
            arrivals = traffic.at(rate)
            known_misses = len(arrivals) - mine.in_time
            misses = fewest_misses(arrivals, cell.curve, cell.slo_s, cell.rows_max, known_misses)
            optimal.append(1 - (known_misses if misses is None else misses) / len(arrivals))
        with self._stage(endpoints) as stage:
            for repetition, name in self._turns(names):
                self.say(f"bursts: {name}, repetition {repetition}")
                arrivals = self._traffic(cell, seconds, 1.0, 400 + repetition, is_bursty=True).at(rate)
                measured = stage.measure(
                    name, BURST_LOAD, repetition, [_shot(cell, name)], arrivals, seconds, tries=self.plan.tries
                )
                runs.append(measured.sample.as_dict())
        return {"cell": cell.name, "load": BURST_LOAD, "optimal_share": optimal, "runs": runs}

    def rows(self) -> dict[str, Any]:
        """Requests of one to eight rows in overload."""
        cell = CELLS[1].with_overhead(self.overhead)
        runs = []
        with self._stage([Endpoint(_url(OURS), cell.artefact(), cell.budget_s, {})]) as stage:
            for load in ROW_LOADS:
                for repetition in self._repetitions():
                    self.say(f"requests of many rows at {load:g} x U2, repetition {repetition}")
                    dice = np.random.default_rng(repetition)
                    mean = (1 + ROWS_OF_A_REQUEST) / 2
                    offsets_s = self._traffic(cell, self.plan.rows_s, 10.0, 500 + repetition).at(
                        load * cell.sustainable / mean
                    )
                    shots = [
                        Shot(_url(OURS), cell.deadline_s, cell.budget_s, rows=int(rows))
                        for rows in dice.integers(1, ROWS_OF_A_REQUEST + 1, len(offsets_s))
                    ]
                    sample = stage.measure(
                        OURS, load, repetition, shots, offsets_s, self.plan.rows_s, tries=self.plan.tries
                    ).sample
                    runs.append(sample.as_dict() | {"fluid_per_s": cell.fluid(sample.offered_per_s)})
        return {"cell": cell.name, "rows_of_a_request_max": ROWS_OF_A_REQUEST, "runs": runs}

    # ---------------------------------------------------------------------------------------------------------- models

    def models(self) -> dict[str, Any]:
        """Four models with objectives eightfold apart on one executor: ours, and a server that knows no deadlines."""
        cells = [
            Cell(f"{slo_s * 1e3:.0f} ms", MODELS_CURVE.base_s, MODELS_CURVE.per_row_s, slo_s, 1.0, self.overhead)
            for slo_s in MODELS_SLO_S
        ]
        longest = cells[-1]
        endpoints: list[Endpoint] = []
        shots: dict[str, list[Shot]] = {OURS: [], "arrival order": []}
        for number, cell in enumerate(cells):
            # One objective for all, so that nothing is left to order by but the arrival.
            for name, told, batching in ((OURS, cell, {}), ("arrival order", longest, {"policy": "greedy"})):
                endpoint = Endpoint(f"{_url(name)}-{number}", cell.artefact(), told.budget_s, batching)
                endpoints.append(endpoint)
                shots[name].append(Shot(endpoint.name, cell.deadline_s, told.budget_s))
        predicted: dict[str, list[float]] = {}
        for kind in (OURS, "arrival order", "round robin"):
            self.say(f"four models: prediction, {kind}")
            predicted[kind] = [self._models_rate(kind, cells, number) for number in self._repetitions()]
        runs = []
        with self._stage(endpoints) as stage:
            for factor in self.plan.model_factors:
                for repetition, name in self._turns(tuple(shots)):
                    rate = factor * median(predicted[name])
                    self.say(f"four models: {name} at {rate:.0f}/s, repetition {repetition}")
                    traffics = self._models_traffic(cells, self.plan.models_s, repetition)
                    arrivals = sorted(
                        (at_s, number)
                        for number, traffic in enumerate(traffics)
                        for at_s in traffic.at(rate / len(cells))
                    )
                    measured = stage.measure(
                        name, rate, repetition, [shots[name][number] for _, number in arrivals],
                        [at_s for at_s, _ in arrivals], self.plan.models_s, tries=self.plan.tries,
                    )  # fmt: skip
                    runs.append(measured.sample.as_dict())
        return {"slos_s": MODELS_SLO_S, "predicted_per_s": predicted, "runs": runs}

    def _models_traffic(self, cells: Sequence[Cell], seconds: float, seed: int) -> list[Traffic]:
        rate_max = 2.0 / cells[0].curve.duration_s(1)
        return [
            Traffic(cell.slo_s, seconds, rate_max, 600 + 10 * seed + number, sigma=SIGMA)
            for number, cell in enumerate(cells)
        ]

    def _models_rate(self, kind: str, cells: Sequence[Cell], seed: int) -> float:
        """The 99 % rate of all models together, by the simulator; bisection."""
        traffics = self._models_traffic(cells, self.plan.models_s, seed)
        jitter, curve = traffics[0].jitter, cells[0].curve
        slos_s = [cells[-1].slo_s] * len(cells) if kind == "arrival order" else [cell.slo_s for cell in cells]

        def share(rate: float) -> float:
            arrivals = [traffic.at(rate / len(cells)) for traffic in traffics]
            built: list[BatchPolicy] = []
            for cell, slo_s in zip(cells, slos_s, strict=True):
                learner = warmed_learner(curve, jitter)
                if kind == OURS:
                    built.append(PricedPolicy(learner, cell.rows_max, slo_s))
                else:
                    built.append(GreedyPolicy(learner, cell.rows_max, slo_s, queue_timeout_s=slo_s))
            outcomes = play_shared(
                built, arrivals, slos_s, lambda index, rows, _: curve.duration_s(rows) * jitter[index % JITTERS],
                is_in_turns=kind == "round robin", rows_max=cells[-1].rows_max,
            )  # fmt: skip
            in_time = sum(
                _in_time(outcome, times, cell.slo_s)
                for outcome, times, cell in zip(outcomes, arrivals, cells, strict=True)
            )
            return in_time / max(1, sum(map(len, arrivals)))

        low, high = 0.0, 2.0 / curve.duration_s(1) * len(cells)
        for _ in range(9):
            middle = (low + high) / 2
            low, high = (middle, high) if share(middle) >= TARGET else (low, middle)
        return low

    # ----------------------------------------------------------------------------------------------------------- drift

    def drift(self) -> list[dict[str, Any]]:
        """A model that becomes 40 % slower under way, beside the same policy with a profile frozen at load time."""
        found = []
        for bare in DRIFT_CELLS:
            fast = bare.with_overhead(self.overhead)
            slow = fast.slowed(DRIFT_FACTOR)
            rate = DRIFT_LOAD * slow.sustainable
            switch_s, measured_s = self.plan.drift_s
            begin_s = switch_s + SETTLING_BATCHES * slow.fluid_batch_s(rate)
            end_s = begin_s + measured_s
            runs = []
            with self._stage([Endpoint(_url(OURS), fast.artefact(), slow.budget_s, {})]) as stage:
                for repetition in self._repetitions():
                    self.say(f"drift, {fast.name}, repetition {repetition}")
                    traffic = self._traffic(slow, end_s + slow.deadline_s, 2.0, 700 + repetition)
                    arrivals = traffic.at(rate)
                    shots = [
                        Shot(_url(OURS), slow.deadline_s, slow.budget_s, value=1.0 if at_s < switch_s else DRIFT_FACTOR)
                        for at_s in arrivals
                    ]
                    measured = stage.measure(
                        OURS, DRIFT_LOAD, repetition, shots, arrivals, traffic.horizon_s, tries=self.plan.tries
                    )
                    frozen = _drifted(fast, slow, traffic, rate, switch_s)
                    count = sum(begin_s <= at_s < end_s for at_s in arrivals)
                    kept = _in_time(frozen, arrivals, slow.slo_s, begin_s, end_s)
                    runs.append(
                        measured.sample.as_dict()
                        | {
                            "settled_per_s": measured.in_time_per_s(begin_s, end_s),
                            "settling_per_s": measured.in_time_per_s(switch_s, begin_s),
                            "frozen_per_s": kept / (end_s - begin_s),
                            "fluid_per_s": slow.fluid(count / (end_s - begin_s)),
                        }
                    )
            found.append({"cell": asdict(fast), "factor": DRIFT_FACTOR, "runs": runs})
        return found


def _drifted(fast: Cell, slow: Cell, traffic: Traffic, rate: float, switch_s: float) -> Outcome:
    """The simulator's outcome with a profile that stays as it was at load time."""
    jitter = traffic.jitter
    policy = PricedPolicy(warmed_learner(fast.curve, jitter, FrozenLearner), fast.rows_max, slow.slo_s)
    return play(
        policy, traffic.at(rate), slow.slo_s,
        lambda index, rows, start_s: (
            (fast if start_s < switch_s else slow).curve.duration_s(rows) * jitter[index % JITTERS]
        ),
        rows_max=fast.rows_max,
    )  # fmt: skip


def _in_time(
    outcome: Outcome, arrivals: Sequence[float], slo_s: float, from_s: float = 0.0, until_s: float = math.inf
) -> int:
    """Arrivals of an interval that were answered within an objective, which need not be the policy's own."""
    return sum(
        from_s <= arrivals[piece] < until_s and batch.finish_s <= arrivals[piece] + slo_s
        for batch in outcome.batches
        for piece in batch.pieces
    )


def recovery_s(measured: Measured, from_s: float, until_s: float, deadline_s: float) -> float | None:
    """Time from the end of a spike until 99 % are in time, in the next deadline and from then on.

    Args:
        measured: The run.
        from_s: End of the spike.
        until_s: Last moment that is looked at.
        deadline_s: Length of the window; the answer is a multiple of a quarter of it.

    Returns:
        Seconds; None when it did not happen.
    """
    for step in range(int((until_s - from_s) / deadline_s * 4) + 1):
        begin_s = from_s + step * deadline_s / 4
        rest = measured.scheduled_s >= begin_s
        window = rest & (measured.scheduled_s < begin_s + deadline_s)
        if all(not mask.any() or measured.is_in_time[mask].mean() >= TARGET for mask in (window, rest)):
            return begin_s - from_s
    return None


def _delayed(cell: Cell, delay_s: float) -> Build:
    return lambda learner, slo_s: FixedDelayPolicy(learner, cell.rows_max, slo_s, delay_s, queue_timeout_s=slo_s)


def _url(name: str) -> str:
    return name.replace(" ", "-")


def _shot(cell: Cell, policy: str) -> Shot:
    return Shot(_url(policy), cell.deadline_s, cell.budget_s)
