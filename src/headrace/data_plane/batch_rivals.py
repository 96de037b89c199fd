"""How other servers form batches, as plug-ins of the same server, so that a comparison compares only policies.

Each has the interface of ``BatchPolicy``; ``make_policy`` builds any of them, ours included, by name. They are
idealised in their favour: no polling, no locks, and a batch cap that fits the objective. The refusal at the
door is switched off, since none of them has it; a queue timeout takes its place where the original has one.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from headrace.data_plane.batch_curve import CurveLearner, rate_ceiling, sustainable_rate
from headrace.data_plane.batch_policy import (
    AimdCap,
    ArrivalMeter,
    BatchPolicy,
    Decision,
    PolicyFacts,
    PricedPolicy,
    pieces_within,
)

__all__ = ["POLICIES", "AimdPolicy", "CorkPolicy", "FixedDelayPolicy", "GreedyPolicy", "make_policy"]

_EPS_S = 1e-9


class _Rival:
    """What the rivals share: arrivals are counted, everything is admitted, the curve is learned but unused."""

    name = "rival"

    def __init__(
        self, learner: CurveLearner, rows_max: int, slo_s: float, queue_timeout_s: float | None = None
    ) -> None:
        self._learner = learner
        self._rows_max = rows_max
        self._slo_s = slo_s
        self._queue_timeout_s = math.inf if queue_timeout_s is None else queue_timeout_s
        self._meter = ArrivalMeter(window_s=3 * slo_s, floor_s=slo_s)
        self._now_s = -math.inf

    def arrived(self, now_s: float, rows: int) -> None:
        """Count a request as offered load."""
        self._now_s = now_s
        self._meter.arrived(now_s, rows)

    def admits(self, now_s: float, deadline_s: float, rows: int, free_at_s: float, waiting_rows: int) -> bool:
        """Everything may queue."""
        return True

    @property
    def waiting_rows_max(self) -> float:
        """No bound."""
        return math.inf

    def executed(self, now_s: float, rows: int, took_s: float, lateness_s: float) -> None:
        """Learn from a finished batch."""
        self._now_s = now_s
        self._learner.see(rows, took_s)

    def _timed_out(self, now_s: float, deadlines_s: Sequence[float]) -> int:
        """Pieces that have queued longer than the timeout; a piece arrived one SLO before its deadline."""
        if self._queue_timeout_s == math.inf:
            return 0
        return bisect_left(deadlines_s, now_s - self._queue_timeout_s + self._slo_s + _EPS_S)

    def _expired_or_hopeless(self, now_s: float, deadlines_s: Sequence[float], shed: int) -> int:
        curve = self._learner.curve
        return min(shed, bisect_left(deadlines_s, now_s + curve.duration_s(1) - _EPS_S))

    def _run(
        self, now_s: float, deadlines_s: Sequence[float], rows: Sequence[int], first: int, rows_limit: int
    ) -> Decision:
        hopeless = self._expired_or_hopeless(now_s, deadlines_s, first) if first else 0
        if first == len(deadlines_s):
            return Decision(first, hopeless, 0, None, math.inf)
        run, run_rows = pieces_within(rows, first, rows_limit)
        urgency_s = deadlines_s[first] - now_s - self._learner.curve.duration_s(run_rows)
        return Decision(first, hopeless, run, None, urgency_s)

    def snapshot(self, now_s: float | None = None) -> PolicyFacts:
        """The policy's figures."""
        curve = self._learner.curve
        one_row_s = curve.duration_s(1)
        one_row_rate = 1 / max(one_row_s, _EPS_S)
        sustainable = sustainable_rate(curve, self._slo_s, self._rows_max)
        lam = self._meter.rate(self._now_s if now_s is None else now_s)
        span = max(sustainable, one_row_rate * 1.001) - one_row_rate
        return PolicyFacts(
            name=self.name,
            curve=curve,
            rows_max=self._rows_max,
            slo_s=self._slo_s,
            one_row_s=one_row_s,
            rate_ceiling=rate_ceiling(curve, self._slo_s, self._rows_max),
            sustainable_rate=sustainable,
            arrival_rate=lam,
            pressure=min(1.0, max(0.0, (lam - one_row_rate) / span)),
        )


class GreedyPolicy(_Rival):
    """Run whatever waits as soon as an executor is free, in arrival order.

    Source: the work-conserving default of TensorFlow Serving and of Triton without a queue delay.

    Args:
        learner: Learns the curve for the figures only.
        rows_max: Rows of the largest batch.
        slo_s: The latency objective in seconds.
        queue_timeout_s: Refuse what has queued that long; None never does, which is what is shipped.
    """

    name = "greedy"

    def decide(self, now_s: float, deadlines_s: Sequence[float], rows: Sequence[int]) -> Decision:
        """Everything that waits, up to the cap."""
        return self._run(now_s, deadlines_s, rows, self._timed_out(now_s, deadlines_s), self._rows_max)


class FixedDelayPolicy(_Rival):
    """A full batch at once, else whatever waits when the oldest has waited ``delay_s``.

    Source: Triton's dynamic batcher (``max_queue_delay_microseconds``); TorchServe and KServe are alike.

    Args:
        learner: Learns the curve for the figures only.
        rows_max: Rows of the largest batch.
        slo_s: The latency objective in seconds; a head arrived one SLO before its deadline.
        delay_s: How long the oldest may wait for a fuller batch.
        queue_timeout_s: Refuse what has queued that long; None never does, which is what is shipped.
    """

    name = "fixed_delay"

    def __init__(
        self,
        learner: CurveLearner,
        rows_max: int,
        slo_s: float,
        delay_s: float = 0.001,
        queue_timeout_s: float | None = None,
    ) -> None:
        super().__init__(learner, rows_max, slo_s, queue_timeout_s)
        self._delay_s = delay_s

    def decide(self, now_s: float, deadlines_s: Sequence[float], rows: Sequence[int]) -> Decision:
        """A full batch, or an old one, or wait."""
        first = self._timed_out(now_s, deadlines_s)
        if first < len(deadlines_s):
            go_at_s = deadlines_s[first] - self._slo_s + self._delay_s
            if now_s < go_at_s - _EPS_S and sum(rows[first : first + self._rows_max]) < self._rows_max:
                hopeless = self._expired_or_hopeless(now_s, deadlines_s, first) if first else 0
                return Decision(first, hopeless, 0, go_at_s, math.inf)
        return self._run(now_s, deadlines_s, rows, first, self._rows_max)


class AimdPolicy(_Rival):
    """A batch cap that grows by one after a full batch in time and shrinks by a tenth after a late one.

    Source: Clipper, NSDI'17, section 4.3; dropping what has outlived its deadline is in its released code.

    Args:
        learner: Learns the curve for the figures only.
        rows_max: Rows of the largest batch.
        slo_s: The latency objective in seconds.
        is_end_to_end: Feed back the head's lateness; False feeds back the batch's own duration, as published.
        queue_timeout_s: Refuse what has queued that long; None stands for the SLO.
    """

    name = "aimd"

    def __init__(
        self,
        learner: CurveLearner,
        rows_max: int,
        slo_s: float,
        is_end_to_end: bool = True,
        queue_timeout_s: float | None = None,
    ) -> None:
        super().__init__(learner, rows_max, slo_s, slo_s if queue_timeout_s is None else queue_timeout_s)
        self._is_end_to_end = is_end_to_end
        self._cap = AimdCap(rows_max)

    def decide(self, now_s: float, deadlines_s: Sequence[float], rows: Sequence[int]) -> Decision:
        """Everything that waits, up to the adaptive cap."""
        return self._run(now_s, deadlines_s, rows, self._timed_out(now_s, deadlines_s), self._cap.rows)

    def executed(self, now_s: float, rows: int, took_s: float, lateness_s: float) -> None:
        """Adapt the cap."""
        super().executed(now_s, rows, took_s, lateness_s)
        self._cap.executed(rows, lateness_s > 0 if self._is_end_to_end else took_s > self._slo_s)


class CorkPolicy(_Rival):
    """Cancel heads that the whole queue as one batch would make late; wait while waiting is cheap.

    With ``n`` rows waiting and the youngest ``w`` seconds old, it waits a tick while
    ``n * (w + tick + c) <= 0.95 * wait``, ``wait`` being the recent mean delay of batch heads.

    Source: BentoML's ``CorkDispatcher`` (``_internal/marshal/dispatcher.py``), with an exact learned curve.

    Args:
        learner: Holds the curve.
        rows_max: Rows of the largest batch.
        slo_s: The latency objective in seconds.
        tick_s: How long one wait lasts.
        queue_timeout_s: Refuse what has queued that long; None never does.
    """

    name = "cork"

    def __init__(
        self,
        learner: CurveLearner,
        rows_max: int,
        slo_s: float,
        tick_s: float = 0.001,
        queue_timeout_s: float | None = None,
    ) -> None:
        super().__init__(learner, rows_max, slo_s, queue_timeout_s)
        self._tick_s = tick_s
        self._wait_s = 0.0
        self._head_waits_s: deque[float] = deque(maxlen=50)
        self._renew_at_s: float | None = None

    def decide(self, now_s: float, deadlines_s: Sequence[float], rows: Sequence[int]) -> Decision:
        """Cancel, wait or run."""
        if self._renew_at_s is None:
            self._renew_at_s = now_s + 20 * self._slo_s
        curve = self._learner.curve
        first, end = self._timed_out(now_s, deadlines_s), len(deadlines_s)
        waiting_rows = sum(rows[first:])
        while first + 1 < end and deadlines_s[first] <= now_s + curve.duration_s(waiting_rows):
            waiting_rows -= rows[first]
            first += 1
        if first < end:
            youngest_s = now_s - deadlines_s[-1] + self._slo_s
            cost_s = waiting_rows * (youngest_s + self._tick_s + curve.per_row_s)
            if waiting_rows < self._rows_max and cost_s <= 0.95 * self._wait_s:
                hopeless = self._expired_or_hopeless(now_s, deadlines_s, first)
                return Decision(first, hopeless, 0, now_s + self._tick_s, math.inf)
            self._head_waits_s.append(now_s - deadlines_s[first] + self._slo_s)
            if now_s > self._renew_at_s:
                self._wait_s = sum(self._head_waits_s) / len(self._head_waits_s)
                self._renew_at_s = now_s + 20 * self._slo_s
        return self._run(now_s, deadlines_s, rows, first, self._rows_max)


def _fitting(learner: CurveLearner, rows_max: int, slo_s: float) -> int:
    """The batch cap a careful operator would set for a rival: the largest batch that ends within the SLO."""
    return max(1, learner.curve.rows_within(slo_s, rows_max))


POLICIES: Mapping[str, Callable[[CurveLearner, int, float], BatchPolicy]] = MappingProxyType(
    {
        "priced": PricedPolicy,
        "greedy": lambda learner, rows_max, slo_s: GreedyPolicy(
            learner, _fitting(learner, rows_max, slo_s), slo_s, queue_timeout_s=slo_s
        ),
        "fixed_delay": lambda learner, rows_max, slo_s: FixedDelayPolicy(
            learner, _fitting(learner, rows_max, slo_s), slo_s, queue_timeout_s=slo_s
        ),
        "aimd": AimdPolicy,
        "cork": CorkPolicy,
    }
)
"""Name -> factory ``(learner, rows_max, slo_s)``; the first is the default."""


def make_policy(
    name: str, learner: CurveLearner, rows_max: int, slo_s: float, *, delay_s: float | None = None
) -> BatchPolicy:
    """Build a policy by name.

    Args:
        name: One of ``POLICIES``.
        learner: Holds the latency curve of the model.
        rows_max: Rows of the largest batch; at least 1.
        slo_s: The latency objective in seconds; positive.
        delay_s: For `fixed_delay` only: how long the oldest request waits for others, seconds; None takes its default.

    Raises:
        ValueError: No policy has that name.
    """
    if name == "fixed_delay" and delay_s is not None:
        fitting = _fitting(learner, rows_max, slo_s)
        return FixedDelayPolicy(learner, fitting, slo_s, delay_s=delay_s, queue_timeout_s=slo_s)
    factory = POLICIES.get(name)
    if factory is None:
        raise ValueError(f"batch policy is {name!r}; accepted: {', '.join(POLICIES)}")
    return factory(learner, rows_max, slo_s)
