"""The contract of every batch policy: conservation, order, caps, holding, the door."""

import math
import random
from bisect import bisect_right
from statistics import NormalDist

import pytest
from harness import CURVES, WARMUP_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.data_plane.batch_curve import CurveLearner, LatencyCurve, fluid_rate, rate_ceiling, sustainable_rate
from headrace.data_plane.batch_policy import BatchPolicy, Decision, PricedPolicy
from headrace.data_plane.batch_rivals import POLICIES, AimdPolicy, FixedDelayPolicy, make_policy

ROWS_MAX = 16


def learner_of(curve: LatencyCurve, row_buckets: tuple[int, ...] = ()) -> CurveLearner:
    return CurveLearner([(rows, curve.duration_s(rows)) for rows in WARMUP_SIZES], row_buckets=row_buckets)


def priced(name: str = "mid", multiple: float = 4.0, rows_max: int = ROWS_MAX) -> tuple[PricedPolicy, float]:
    slo_s = multiple * CURVES[name].duration_s(1)
    return PricedPolicy(learner_of(CURVES[name]), rows_max, slo_s, timer_slack_s=0.0), slo_s


class PolicyMachine(RuleBasedStateMachine):
    """Drives one policy with pieces of any size and deadlines of any distance, and does what it says."""

    @initialize(
        policy=st.sampled_from(list(POLICIES)),
        curve=st.sampled_from(list(CURVES)),
        multiple=st.sampled_from([1.2, 1.8, 2.5, 4.0, 10.0]),
        buckets=st.sampled_from([(), (1, 4, 16)]),
    )
    def build(self, policy, curve, multiple, buckets):
        self.curve = LatencyCurve(CURVES[curve].base_s, CURVES[curve].per_row_s, 0.0, buckets)
        self.slo_s = multiple * self.curve.duration_s(1)
        self.learner = learner_of(self.curve, buckets)
        self.policy: BatchPolicy = make_policy(policy, self.learner, ROWS_MAX, self.slo_s)
        self.name = policy
        self.now_s = 1_000.0
        self.waiting: list[tuple[float, int, int]] = []  # deadline, arrival number, rows
        self.arrived, self.ran, self.shed = [], [], []
        self.running: tuple[float, int, float] | None = None

    @rule(gap=st.floats(0, 0.5), rows=st.integers(1, ROWS_MAX), share=st.sampled_from([1.0, 1.0, 1.0, 0.3, 0.7, 2.0]))
    def arrive(self, gap, rows, share):
        self.now_s += gap * self.slo_s * 0.2
        self.policy.arrived(self.now_s, rows)
        self._enqueue(rows, share)

    @rule(count=st.integers(2, 40), share=st.sampled_from([1.0, 0.4]))
    def burst(self, count, share):
        for _ in range(count):
            self.policy.arrived(self.now_s, 1)
            self._enqueue(1, share)

    def _enqueue(self, rows, share):
        number = len(self.arrived)
        self.arrived.append(number)
        self.waiting.insert(
            bisect_right(self.waiting, (self.now_s + share * self.slo_s, number, 0)),
            (self.now_s + share * self.slo_s, number, rows),
        )

    @precondition(lambda self: self.waiting and self.running is None)
    @rule(delay=st.sampled_from([0.0, 0.0, 0.1, 1.0]), slow=st.sampled_from([1.0, 1.0, 1.05, 0.9, 2.0, 30.0]))
    def decide(self, delay, slow):
        self.now_s += delay * self.slo_s
        deadlines, rows = [piece[0] for piece in self.waiting], [piece[2] for piece in self.waiting]
        before = self.learner.curve
        decision = self.policy.decide(self.now_s, deadlines, rows)
        self._check(decision, deadlines, rows, before)
        stop = decision.shed + decision.run
        batch = self.waiting[decision.shed : stop]
        self.shed += [piece[1] for piece in self.waiting[: decision.shed]]
        self.ran += [piece[1] for piece in batch]
        del self.waiting[:stop]
        if batch:
            batch_rows = sum(piece[2] for piece in batch)
            took_s = self.curve.duration_s(batch_rows) * slow
            self.running = (took_s, batch_rows, batch[0][0])

    def _check(self, decision: Decision, deadlines, rows, curve):
        assert 0 <= decision.hopeless <= decision.shed
        assert decision.shed + decision.run <= len(rows)
        assert sum(rows[decision.shed : decision.shed + decision.run]) <= ROWS_MAX
        if decision.run:
            assert decision.hold_until_s is None
            assert math.isfinite(decision.urgency_s)
        else:
            assert decision.urgency_s == math.inf
            assert decision.shed == len(rows) or decision.hold_until_s > self.now_s
        if self.name == "priced" and not self.policy.snapshot().is_fallback:
            assert decision.hold_until_s is None or decision.hold_until_s < deadlines[decision.shed]

    @precondition(lambda self: self.running is not None)
    @rule()
    def finish(self):
        took_s, rows, head_deadline_s = self.running
        self.running = None
        self.now_s += took_s
        self.policy.executed(self.now_s, rows, took_s, self.now_s - head_deadline_s)

    @invariant()
    def every_piece_is_in_one_place(self):
        if hasattr(self, "policy"):
            assert sorted([*self.ran, *self.shed, *(piece[1] for piece in self.waiting)]) == self.arrived

    @invariant()
    def the_figures_are_sane(self):
        if hasattr(self, "policy"):
            facts = self.policy.snapshot()
            assert 0 <= facts.pressure <= 1
            assert facts.arrival_rate >= 0
            assert facts.one_row_s > 0


PolicyMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestEveryPolicyKeepsTheContract(PolicyMachine.TestCase):
    """X2: each piece runs or is shed once, in order, within the cap, and an idle executor is never forgotten."""


pieces = st.lists(st.tuples(st.floats(-0.5, 2.0), st.integers(1, ROWS_MAX)), min_size=1, max_size=60).map(sorted)


@given(
    waiting=pieces,
    name=st.sampled_from(list(CURVES)),
    multiple=st.sampled_from([1.5, 2.5, 4.0, 10.0]),
    load=st.integers(0, 200),
)
@settings(max_examples=300, deadline=None)
def test_hopeless_pieces_never_run_and_are_shed_first(waiting, name, multiple, load):
    """S2: what cannot meet its deadline alone is not run, and only such pieces count as hopeless."""
    policy, slo_s = priced(name, multiple)
    curve, now_s = CURVES[name], 50.0
    for index in range(load):
        policy.arrived(now_s - slo_s * (1 - index / 200), 1)
    deadlines, rows = [now_s + share * slo_s for share, _ in waiting], [count for _, count in waiting]

    decision = policy.decide(now_s, deadlines, rows)

    hopeless = [
        deadline_s < now_s + curve.duration_s(count) - 1e-6 for deadline_s, count in zip(deadlines, rows, strict=True)
    ]
    assert not any(hopeless[decision.shed : decision.shed + decision.run])
    saved = [
        deadline_s > now_s + curve.duration_s(count) + 1e-6 for deadline_s, count in zip(deadlines, rows, strict=True)
    ]
    assert not any(saved[: decision.hopeless])


def written_out(policy: PricedPolicy, now_s: float, deadlines: list[float]) -> tuple[int, int, int, bool]:
    """The rule for pieces of one row as the concept page states it, without bisection; (shed, hopeless, run, held)."""
    facts = policy.snapshot(now_s)
    curve, slo_s, rows_max, lam = facts.curve, facts.slo_s, facts.rows_max, facts.arrival_rate
    a, c, one_row_s = curve.base_s, curve.per_row_s, curve.duration_s(1)
    worth = max(facts.sustainable_rate, 1.001 / one_row_s, fluid_rate(curve, slo_s, rows_max, lam))
    chance = c * (worth + lam) / (1 + c * lam)
    margin = 1 + curve.sigma * NormalDist().inv_cdf(min(0.98, max(0.05, chance)))

    def took(rows: int) -> float:
        return margin * (a + c * rows)

    waiting = [deadline for deadline in deadlines if deadline >= now_s + one_row_s]
    hopeless = len(deadlines) - len(waiting)
    while len(waiting) > rows_max and waiting[0] < now_s + curve.duration_s(rows_max) * (1 + 2 * curve.sigma):
        waiting.pop(0)
    if not waiting:
        return len(deadlines), hopeless, 0, False
    allowed = max(1, *(rows for rows in range(rows_max + 1) if rows == 0 or now_s + took(rows) <= waiting[0]))
    run = min(len(waiting), allowed)
    shed = len(deadlines) - len(waiting)
    if run == len(waiting):
        pays = slo_s < took(1) + margin * a and run < rows_max
        hold = pays and now_s < waiting[0] - max(1.0, margin) * (a + c * (run + 1))
        return (shed, hopeless, 0, True) if hold else (shed, hopeless, run, False)
    if run == rows_max:
        return shed, hopeless, run, False
    in_time = [rows for rows in range(1, min(len(waiting), rows_max) + 1) if now_s + took(rows) <= waiting[-rows]]
    largest = max(in_time, default=0)
    phi = min(1.0, max(0.0, (lam - 1 / one_row_s) / (max(facts.sustainable_rate, 1.001 / one_row_s) - 1 / one_row_s)))
    size = min(rows_max, (slo_s - margin * a) / (margin * c + 1 / lam))
    price = phi * size / (margin * a + margin * c * size)

    def score(rows: int) -> float:
        first = 0 if rows == run else sum(deadline < now_s + took(rows) for deadline in waiting)
        rest = waiting[first + rows :]
        left = sum(deadline >= now_s + took(rows) + one_row_s for deadline in rest)
        return rows - price * took(rows) + (1 - phi) * left

    if largest > run:
        sizes = [*range(run, largest, math.ceil((largest - run) / 8)), largest]
        best = max(sizes, key=lambda rows: round(score(rows), 6))
        if best > run:
            shed += sum(deadline < now_s + took(best) for deadline in waiting)
            run = best
    return shed, hopeless, run, False


@given(
    count=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    oldest=st.sampled_from([-0.2, 0.05, 0.15, 0.3, 0.5]),
    name=st.sampled_from(list(CURVES)),
    multiple=st.sampled_from([1.5, 2.5, 4.0, 10.0, 25.0]),
    load=st.sampled_from([0.1, 0.4, 0.55, 0.7, 0.85, 0.95, 1.5, 6.0]),
    noise=st.sampled_from([0.0, 0.05, 0.2]),
)
@settings(max_examples=400, deadline=None)
def test_the_decision_is_the_published_rule(count, seed, oldest, name, multiple, load, noise):
    """X2, S2: for pieces of one row the fast decision equals the rule written out in plain steps."""
    policy, slo_s = priced(name, multiple)
    now_s, curve = 50.0, CURVES[name]
    gap_s = 1 / (load * max(sustainable_rate(curve, slo_s, ROWS_MAX), 1 / curve.duration_s(1)))
    for index in range(200):
        policy.arrived(now_s - (200 - index) * gap_s, 1)
    for index in range(12):
        rows = 1 + index % 6
        policy.executed(now_s, rows, curve.duration_s(rows) * (1 + noise * (-1) ** index), -1e-3)
    rng = random.Random(seed)
    deadlines = sorted(now_s + rng.uniform(oldest, 1.0) * slo_s for _ in range(count))

    for _ in range(20):  # enough for the derived constants to be fresh
        decision = policy.decide(now_s, deadlines, [1] * len(deadlines))

    found = decision.shed, decision.hopeless, decision.run, decision.hold_until_s is not None
    assert found == written_out(policy, now_s, deadlines)


@given(
    name=st.sampled_from(list(CURVES)),
    multiple=st.sampled_from([1.1, 1.5, 1.9, 2.5, 10.0]),
    rows=st.integers(1, ROWS_MAX),
    share=st.floats(0.0, 1.0),
)
@settings(max_examples=200, deadline=None)
def test_a_feasible_lone_request_on_an_idle_executor_always_runs(name, multiple, rows, share):
    """S2: it is let in, and after at most one hold it runs while it can still be in time."""
    policy, slo_s = priced(name, multiple)
    curve, now_s = CURVES[name], 50.0
    deadline_s = now_s + curve.duration_s(rows) * (1 + 1e-6) + share * slo_s
    policy.arrived(now_s, rows)

    is_admitted = policy.admits(now_s, deadline_s, rows, now_s - 1.0, 0)
    decision = policy.decide(now_s, [deadline_s], [rows])
    start_s = now_s
    if decision.hold_until_s is not None:
        start_s = decision.hold_until_s
        decision = policy.decide(start_s, [deadline_s], [rows])

    assert (is_admitted, decision.shed, decision.run) == (True, 0, 1)
    assert start_s + curve.duration_s(rows) <= deadline_s + 1e-6


@pytest.mark.parametrize("name", list(CURVES))
@pytest.mark.parametrize("multiple", [1.2, 1.5, 1.8, 2.2, 2.5, 4.0, 10.0])
def test_a_batch_is_held_only_where_waiting_pays(name, multiple):
    """X2: an idle executor holds a lone request if, and only if, D < 2a + c and a second still fits."""
    policy, slo_s = priced(name, multiple)
    curve = CURVES[name]
    policy.arrived(50.0, 1)

    decision = policy.decide(50.0, [50.0 + slo_s], [1])

    has_room_for_two = slo_s > 1.08 * curve.duration_s(2)
    pays = slo_s < 2 * curve.base_s + curve.per_row_s
    assert (decision.hold_until_s is not None) == (pays and has_room_for_two)


def test_a_held_batch_is_looked_at_early_enough_for_a_late_timer():
    """S2: a timer that fires a millisecond late does not make a held request hopeless."""
    curve = CURVES["gpu"]
    slo_s = 1.5 * curve.duration_s(1)
    policy = PricedPolicy(learner_of(curve), ROWS_MAX, slo_s)
    policy.arrived(50.0, 1)
    held = policy.decide(50.0, [50.0 + slo_s], [1])
    assert held.hold_until_s is not None

    decision = policy.decide(held.hold_until_s + 0.001, [50.0 + slo_s], [1])

    assert (decision.shed, decision.run) == (0, 1)


def test_the_youngest_are_served_when_the_oldest_would_drag_everyone_down():
    """S2: under pressure heads that force a tiny batch are shed for a large one: no metastable crawl."""
    policy, slo_s = priced("mid", 10.0, rows_max=64)
    for index in range(400):
        policy.arrived(50.0 + index * slo_s / 100, 1)  # far above U2
    now_s = 50.0 + 4 * slo_s
    deadlines = [now_s + 0.11 * slo_s] * 2 + [now_s + 0.9 * slo_s] * 20

    decision = policy.decide(now_s, deadlines, [1] * 22)

    assert (decision.shed, decision.hopeless, decision.run) == (2, 0, 20)


def test_a_quiet_server_serves_the_urgent_head_first():
    """S2: without pressure the same queue keeps its heads: nobody is priced out of an idle server."""
    policy, slo_s = priced("mid", 10.0, rows_max=64)
    policy.arrived(50.0, 1)
    now_s = 50.0 + 4 * slo_s
    deadlines = [now_s + 0.11 * slo_s] * 2 + [now_s + 0.9 * slo_s] * 20

    decision = policy.decide(now_s, deadlines, [1] * 22)

    assert (decision.shed, decision.run) == (0, 1)


def test_the_door_refuses_what_no_schedule_saves():
    """S2: a request that misses its deadline even if it runs next is refused at once."""
    policy, slo_s = priced()
    now_s, one_row_s = 50.0, CURVES["mid"].duration_s(1)
    policy.arrived(now_s, 1)

    answers = [policy.admits(now_s, now_s + slo_s, 1, now_s + slo_s - share * one_row_s, 3) for share in (0.9, 1.1)]

    assert answers == [False, True]


def test_the_door_adds_up_the_pieces_of_a_large_request():
    """S2: a request of 40 rows with a cap of 16 needs l(16) + l(16) + l(8)."""
    policy, _ = priced("mid", 40.0)
    curve, now_s = CURVES["mid"], 50.0
    alone_s = 2 * curve.duration_s(16) + curve.duration_s(8)
    policy.arrived(now_s, 40)

    answers = [policy.admits(now_s, now_s + alone_s * factor, 40, now_s, 0) for factor in (0.99, 1.01)]

    assert answers == [False, True]


def test_the_queue_is_bounded_by_what_can_still_be_served():
    """S2: little's bound U1 * D + B is published for trimming, and the door is a last line behind it."""
    policy, slo_s = priced()
    bound = rate_ceiling(CURVES["mid"], slo_s, ROWS_MAX) * slo_s + ROWS_MAX
    policy.arrived(50.0, 1)

    answers = [policy.admits(50.0, 50.0 + slo_s, 1, 50.0, waiting) for waiting in (int(bound), int(9 * bound))]

    assert (policy.waiting_rows_max, answers) == (pytest.approx(bound), [True, False])


def test_a_policy_that_believes_all_is_lost_probes_once_in_a_while():
    """S2: after four SLOs without a run one hopeless piece runs, so a bad estimate can be corrected."""
    slow = LatencyCurve(1.0, 0.001)
    policy = PricedPolicy(learner_of(slow), ROWS_MAX, 0.1)
    policy.arrived(50.0, 1)

    early = policy.decide(50.1, [50.2, 50.2], [1, 1])
    admitted = [policy.admits(at_s, at_s + 0.1, 1, 0.0, 0) for at_s in (50.1, 50.5)]
    late = policy.decide(50.5, [50.6, 50.6], [1, 1])
    again = policy.decide(50.6, [50.7, 50.7], [1, 1])

    assert [(found.shed, found.run) for found in (early, late, again)] == [(2, 0), (1, 1), (2, 0)]
    assert admitted == [False, True]


def test_padding_rides_to_the_end_of_its_bucket():
    """X2: with buckets 4 and 16 a head that allows 5 rows gets 4, and one that allows 16 gets all."""
    curve = LatencyCurve(0.002, 0.001, 0.0, (4, 16))
    policy = PricedPolicy(CurveLearner([(4, 0.006), (16, 0.018)] * 3, row_buckets=(4, 16)), 16, 1.0)
    policy.arrived(50.0, 1)

    runs = [policy.decide(50.0, [50.0 + room_s] * 12, [1] * 12).run for room_s in (0.0075, 0.025)]

    assert (runs, curve.padded_rows(5)) == ([4, 12], 16)


def test_fixed_delay_waits_for_the_oldest_or_for_a_full_batch():
    """X2: triton's rule: hold until the oldest has waited the delay, unless the batch is full."""
    policy = FixedDelayPolicy(learner_of(CURVES["mid"]), 4, slo_s=0.1, delay_s=0.005)

    held = policy.decide(50.002, [50.1, 50.101], [1, 1])
    expired = policy.decide(50.0051, [50.1, 50.101], [1, 1])
    full = policy.decide(50.002, [50.1] * 5, [1] * 5)

    assert (held.run, held.hold_until_s) == (0, pytest.approx(50.005))
    assert (expired.run, full.run) == (2, 4)


def test_the_adaptive_cap_grows_by_one_and_shrinks_by_a_tenth():
    """X2: clipper's rule: full batches in time add one row, a late one takes a tenth."""
    policy = AimdPolicy(learner_of(CURVES["mid"]), 64, slo_s=0.1)
    caps = []

    for lateness_s in [-0.01] * 19 + [0.01]:
        caps.append(policy.decide(50.0, [50.1] * 64, [1] * 64).run)
        policy.executed(50.0, caps[-1], 0.01, lateness_s)
    caps.append(policy.decide(50.0, [50.1] * 64, [1] * 64).run)

    assert (caps[:3], caps[19], caps[20]) == ([1, 2, 3], 20, 18)


def test_an_unknown_policy_is_refused_by_name():
    """X2: the error names the value and what is accepted."""
    with pytest.raises(ValueError, match="'fifo'; accepted: priced, greedy, fixed_delay, aimd, cork"):
        make_policy("fifo", learner_of(CURVES["mid"]), 8, 0.1)


@pytest.mark.parametrize(("rows_max", "slo_s"), [(0, 0.1), (8, 0.0), (8, math.nan)])
def test_an_impossible_cap_or_objective_is_refused(rows_max, slo_s):
    """X2: a batch has at least one row and an objective is above zero."""
    with pytest.raises(ValueError, match="must be"):
        PricedPolicy(learner_of(CURVES["mid"]), rows_max, slo_s)
