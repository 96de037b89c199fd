"""What the goodput drill measures: cells of a latency curve and a deadline, and the policies that meet in them.

The cells are those of the batch scheduler's tests, three curves and objectives of 2.5, 4 and 10 times the duration of
one row, and here each curve and each multiple once; the gains over the rivals that the simulator predicts for this
choice are near those for all nine. Times are scaled up, since an operating system's scheduler is coarse beside an
objective of a few milliseconds; a scale changes no ratio.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from headrace.data_plane.batch_curve import LatencyCurve, fluid_rate, sustainable_rate
from headrace.data_plane.batch_policy import PricedPolicy
from headrace.data_plane.batch_rivals import AimdPolicy, CorkPolicy, FixedDelayPolicy, GreedyPolicy
from headrace.testing.batch_world import Build
from headrace.testing.sleep_runtime import SleepArtefact

__all__ = [
    "CELLS", "DRIFT_CELLS", "DRIFT_FACTOR", "JITTER", "MODELS_CURVE", "MODELS_SLO_S", "OURS", "RIVALS", "SIGMA", "Cell",
    "Overhead", "delays_s", "idle_delay_s", "policies",
]  # fmt: skip

JITTER: Final = 0.03
SIGMA: Final = JITTER / math.sqrt(3)
"""Standard deviation of the sleep kernel's jitter, which is uniform in 1 ± JITTER."""

ROWS_MAX: Final = 128
"""The largest batch that the server chooses by itself."""

OURS: Final = "priced"
RIVALS: Final = ("greedy", "fixed delay", "aimd", "cork")


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a real server adds to the curve.

    Attributes:
        fixed_s: Both ways between caller and executor, at one request at a time.
        per_request_s: Processor time of the worker per request.
    """

    fixed_s: float = 0.0
    per_request_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """A latency curve and a deadline.

    Attributes:
        name: For people.
        base_s, per_row_s: A batch of b rows takes base_s + per_row_s · b seconds.
        deadline_s: Time allowed from the scheduled send, as the caller sees it.
        scale: How many times longer everything is than in the cell of the tests.
        overhead: Taken into account by every bound and prediction.
    """

    name: str
    base_s: float
    per_row_s: float
    deadline_s: float
    scale: float = 1.0
    overhead: Overhead = Overhead()

    def with_overhead(self, overhead: Overhead) -> "Cell":
        """The same cell on a real server."""
        return replace(self, overhead=overhead)

    def slowed(self, factor: float) -> "Cell":
        """The same deadline with a model that takes `factor` times as long."""
        return replace(self, base_s=self.base_s * factor, per_row_s=self.per_row_s * factor)

    @property
    def curve(self) -> LatencyCurve:
        """As the executor would need if it also did the server's work: `l'(b) = a + (c + s) b`."""
        return LatencyCurve(self.base_s, self.per_row_s + self.overhead.per_request_s, SIGMA)

    @property
    def slo_s(self) -> float:
        """`D - o`: what the fixed overhead leaves of the deadline."""
        return self.deadline_s - self.overhead.fixed_s

    @property
    def rows_max(self) -> int:
        """The largest batch that ends within the deadline, as the server finds it when it loads the model."""
        return max(1, LatencyCurve(self.base_s, self.per_row_s).rows_within(self.budget_s, ROWS_MAX))

    @property
    def budget_s(self) -> float:
        """Time that a caller gives the server: the deadline without the ways, and without answering a usual batch.

        The batch is that of U2; `curve` counts the same time as part of the run.
        """
        rows = max(1.0, (self.slo_s / 2 - self.base_s) / self.curve.per_row_s)
        return self.slo_s - self.overhead.per_request_s * rows

    @property
    def sustainable(self) -> float:
        """U2, rows per second."""
        return sustainable_rate(self.curve, self.slo_s, self.rows_max)

    def fluid(self, rate: float) -> float:
        """G at an offered rate, rows per second."""
        return fluid_rate(self.curve, self.slo_s, self.rows_max, rate)

    def fluid_batch_s(self, rate: float) -> float:
        """Duration of the batch that G calls for."""
        rows = min(float(self.rows_max), (self.slo_s - self.base_s) / (self.curve.per_row_s + 1 / rate))
        return self.base_s + self.curve.per_row_s * max(1.0, rows)

    def artefact(self) -> SleepArtefact:
        """The model; input above 1 makes it that many times slower."""
        return SleepArtefact(
            base_s=self.base_s, per_row_s=self.per_row_s, jitter=JITTER, is_stretched_by_input=True
        )  # fmt: skip


def _cell(name: str, base_ms: float, per_row_ms: float, multiple: float, scale: float) -> Cell:
    base_s, per_row_s = base_ms * 1e-3 * scale, per_row_ms * 1e-3 * scale
    return Cell(name, base_s, per_row_s, multiple * (base_s + per_row_s), scale)


CELLS: Final = (
    _cell("large base", 4.0, 0.15, 2.5, 5.0),
    _cell("mixed", 2.0, 1.0, 10.0, 2.0),
    _cell("compute-bound", 0.5, 2.0, 4.0, 2.5),
)

DRIFT_CELLS: Final = (_cell("mixed", 2.0, 1.0, 4.0, 4.0), _cell("compute-bound", 0.5, 2.0, 4.0, 4.0))
DRIFT_FACTOR: Final = 1.4

MODELS_CURVE: Final = LatencyCurve(0.004, 0.00015, SIGMA)
MODELS_SLO_S: Final = (0.020, 0.040, 0.080, 0.160)


def delays_s(cell: Cell) -> tuple[float, ...]:
    """Fixed delays that an operator might set; the drill takes the best of them."""
    return (0.001 * cell.scale, 0.005 * cell.scale, cell.deadline_s / 4)


def idle_delay_s(cell: Cell) -> float:
    """The usual 5 ms, at the cell's scale."""
    return 0.005 * cell.scale


def policies(cell: Cell, delay_s: float) -> Mapping[str, tuple[dict[str, Any], Build]]:
    """Name → what the configuration says, and the same policy for the simulator.

    Args:
        cell: For the batch cap, which the server finds for itself.
        delay_s: Of the fixed delay.
    """
    rows_max = cell.rows_max

    def delayed(delay_s: float) -> Build:
        return lambda learner, slo_s: FixedDelayPolicy(learner, rows_max, slo_s, delay_s, queue_timeout_s=slo_s)

    entries: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
        OURS: ({}, lambda learner, slo_s: PricedPolicy(learner, rows_max, slo_s)),
        "greedy": (
            {"policy": "greedy"},
            lambda learner, slo_s: GreedyPolicy(learner, rows_max, slo_s, queue_timeout_s=slo_s),
        ),
        "fixed delay": ({"policy": "fixed_delay", "delay_s": delay_s}, delayed(delay_s)),
        "aimd": ({"policy": "aimd"}, lambda learner, slo_s: AimdPolicy(learner, rows_max, slo_s)),
        "cork": ({"policy": "cork"}, lambda learner, slo_s: CorkPolicy(learner, rows_max, slo_s)),
        "5 ms delay": (
            {"policy": "fixed_delay", "delay_s": idle_delay_s(cell)}, delayed(idle_delay_s(cell))
        ),
    }  # fmt: skip
    return MappingProxyType(entries)
