"""The cells that the policies are tested in. The simulated world itself is `headrace.testing.batch_world`."""

from headrace.data_plane.batch_curve import LatencyCurve
from headrace.testing.batch_world import (
    ROWS_MAX,
    SIGMA,
    WARMUP_SIZES,
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

__all__ = [
    "CELLS",
    "CURVES",
    "ROWS_MAX",
    "SIGMA",
    "SLO_MULTIPLES",
    "WARMUP_SIZES",
    "Build",
    "FrozenLearner",
    "Outcome",
    "Traffic",
    "play",
    "play_curve",
    "play_shared",
    "rate_at_99",
    "slo_of",
    "warmed_learner",
]

CURVES = {
    "gpu": LatencyCurve(0.004, 0.00015, SIGMA),
    "mid": LatencyCurve(0.002, 0.001, SIGMA),
    "cpu": LatencyCurve(0.0005, 0.002, SIGMA),
}
SLO_MULTIPLES = (2.5, 4.0, 10.0)  # of l(1)
CELLS = [(name, multiple) for name in CURVES for multiple in SLO_MULTIPLES]


def slo_of(curve: LatencyCurve, multiple: float) -> float:
    return multiple * curve.duration_s(1)
