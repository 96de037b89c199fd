"""What the policy itself costs, without a server: one decision, and one request, in pure Python."""

import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from headrace.data_plane.batch import Piece, WaitingList
from headrace.data_plane.batch_curve import CurveLearner
from headrace.data_plane.batch_policy import PricedPolicy
from headrace.drills.goodput_cells import MODELS_CURVE
from headrace.testing.sleep_runtime import SleepArtefact, SleepRuntime

__all__ = ["decision_cost"]


def decision_cost(waiting: int = 256, rounds: int = 4000) -> dict[str, float]:
    """What a decision costs, and what a request costs, with so many waiting; seconds.

    Returns:
        `decision_s`: Median of one decision in overload, where sizes have to be priced.
        `request_s`: Median of counting, admitting and queueing one request.
    """
    # The batch may hold all of them, or places would be scarce, which is decided without a price.
    curve, rate = MODELS_CURVE, 4000.0
    slo_s = waiting / rate
    warmup = [(rows, curve.duration_s(rows)) for rows in (1, 1, 1, 8, 8, 8)]
    policy = PricedPolicy(CurveLearner(warmup), 2 * waiting, slo_s)
    dice = np.random.default_rng(1)
    now_s, decisions_s, requests_s = 0.0, [], []
    for _ in range(rounds):
        now_s += 1.0 / rate
        policy.arrived(now_s, 1)
    for _ in range(rounds):
        deadlines_s = np.sort(dice.uniform(now_s + 0.2 * slo_s, now_s + slo_s, waiting)).tolist()
        rows = [1] * waiting
        began_s = time.perf_counter()
        policy.decide(now_s, deadlines_s, rows)
        decisions_s.append(time.perf_counter() - began_s)
    queue = _waiting_list(policy, slo_s)
    tickets = [_Ticket(now_s + slo_s * index / waiting) for index in range(waiting)]
    for ticket in tickets:
        queue.insert(Piece(ticket, 0, 1))  # type: ignore[arg-type]  # a deadline is all that queueing asks of it
    for _ in range(rounds):
        ticket = _Ticket(now_s + slo_s)
        began_s = time.perf_counter()
        policy.arrived(now_s, 1)
        policy.admits(now_s, ticket.deadline_at_s, 1, now_s, queue.rows_due_by(now_s + slo_s))
        queue.insert(Piece(ticket, 0, 1))  # type: ignore[arg-type]  # as above
        requests_s.append(time.perf_counter() - began_s)
        queue.take(1)
    return {"waiting": waiting, "decision_s": median(decisions_s), "request_s": median(requests_s)}


@dataclass(slots=True)
class _Ticket:
    deadline_at_s: float


def _waiting_list(policy: PricedPolicy, slo_s: float) -> WaitingList:
    return WaitingList(SleepRuntime(SleepArtefact()), policy, CurveLearner([(1, 0.004)]), 64, True, slo_s)
