"""How long a batch takes, learned while serving, and the rates that follow from it.

One model on one executor is described by two numbers and a spread: a batch of ``b`` rows takes
``l(b) = a + c * b`` seconds, give or take a relative ``sigma``. Everything the batch scheduler decides, and
every rate an operator is told, is computed from that curve, the latency objective ``D`` and the batch cap
``B``; there is no batch size and no batching delay to set by hand.

Source: the linear profile is Clockwork's (OSDI'20) and Nexus's (SOSP'19); the derivations are in
``docs/concepts/scheduling.md``.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "CurveLearner",
    "LatencyCurve",
    "fluid_rate",
    "lossy_rate_limit",
    "rate_ceiling",
    "sustainable_rate",
]

_PER_ROW_S_MIN = 1e-9  # a row that costs nothing would make every rate infinite
_ROUNDING = 1e-9  # keeps (a + 3c - a) / c from truncating to 2
_MEAN_ABS_TO_SIGMA = math.sqrt(math.pi / 2)  # E|x| of a centred normal is sigma / 1.2533
_SIGMA_AT_START = 0.05
_SIGMA_RATE = 0.02
_OUTLIER_RATIO = 3.0
_ALARM_RUNS = 8  # batches during which the memory stays short after an alarm
_SHIFT_RUNS = 4  # that many outliers in a row are not stalls but a new curve
_BIAS_RATE = 0.1
_BIAS_SIGMAS = 0.75  # 3.3 standard deviations of an EWMA(0.1) of residuals
_BIAS_MIN = 0.02  # below that a drift is not worth a shorter memory


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """The time of a batch as a function of its rows.

    Args:
        base_s: ``a``, seconds that any batch costs; at least 0.
        per_row_s: ``c``, seconds that each row adds; at least 0.
        sigma: Relative spread of a run around the curve; at least 0.
        row_buckets: Ascending batch sizes that the runtime pads to; empty when it does not pad.
    """

    base_s: float
    per_row_s: float
    sigma: float = 0.0
    row_buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("base_s", self.base_s), ("per_row_s", self.per_row_s), ("sigma", self.sigma)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of a latency curve is {value!r}; it must be finite and at least 0")
        _check_buckets(self.row_buckets)

    def padded_rows(self, rows: int) -> int:
        """Rows that the runtime computes when it is given ``rows`` of them."""
        return _pad(self.row_buckets, rows)

    def duration_s(self, rows: int) -> float:
        """Expected seconds that a batch of ``rows`` rows takes."""
        return self.base_s + self.per_row_s * _pad(self.row_buckets, rows)

    def rows_within(self, duration_s: float, rows_max: int) -> int:
        """Largest batch, at most ``rows_max`` rows, that is expected to end within ``duration_s`` (0 if none)."""
        room_s = duration_s - self.base_s
        if self.per_row_s * rows_max <= room_s:
            fitting = rows_max
        elif room_s <= 0:
            return 0
        else:
            fitting = min(rows_max, int(room_s / self.per_row_s + _ROUNDING))
        if not self.row_buckets or fitting >= self.row_buckets[-1]:
            return fitting
        whole_buckets = bisect_right(self.row_buckets, fitting)
        return min(rows_max, self.row_buckets[whole_buckets - 1]) if whole_buckets else 0


def _pad(row_buckets: tuple[int, ...], rows: int) -> int:
    if not row_buckets or rows > row_buckets[-1]:
        return rows
    return row_buckets[bisect_left(row_buckets, rows)]


def _check_buckets(row_buckets: tuple[int, ...]) -> None:
    if any(rows < 1 for rows in row_buckets) or list(row_buckets) != sorted(set(row_buckets)):
        raise ValueError(f"row_buckets is {row_buckets!r}; it must be ascending positive sizes, each once")


class CurveLearner:
    """Learns a ``LatencyCurve`` from timed batches, quickly when it drifts and calmly when one run stalls.

    Weighted least squares of ``took ~ a + c * rows`` with weights ``1 / took**2`` (relative errors count alike),
    older runs fading by ``forgetting`` per batch. The weights also make a stall harmless: a run that took a
    hundred times as long weighs a ten-thousandth. What the weights make slow is following a curve that really
    rose, so two alarms shorten the memory for the next eight batches: one run over three times its estimate
    halves it, a mean residual too far from zero for chance quarters it. Four such outliers in a row are no stall
    but a new level, and rescale the whole history.

    **Invariant**: ``curve`` is finite with ``base_s >= 0`` and ``per_row_s > 0`` after any sequence of calls.

    Args:
        warmup: Timed runs ``(rows, took_s)`` from load time; two distinct sizes make the fit well posed
            (usually 1, 1, 1, 8, 8, 8; the very first runs of a runtime are not counted).
        forgetting: Weight kept by older runs per batch, in (0, 1]; 0.98 remembers about 50 batches.
        row_buckets: Ascending batch sizes that the runtime pads to; a batch counts as its bucket.

    Concurrency: no locks; call from one thread.

    Example:
        >>> learner = CurveLearner([(1, 0.003), (8, 0.010)])
        >>> round(learner.curve.base_s, 6), round(learner.curve.per_row_s, 6)
        (0.002, 0.001)
    """

    __slots__ = (
        "_a",
        "_alarm_left",
        "_alarm_power",
        "_bias",
        "_c",
        "_forgetting",
        "_ignored_runs",
        "_outliers_in_row",
        "_row_buckets",
        "_runs",
        "_shift",
        "_sigma",
        "_sizes",
        "_sw",
        "_swx",
        "_swxx",
        "_swxy",
        "_swy",
    )

    def __init__(
        self,
        warmup: Iterable[tuple[int, float]] = (),
        forgetting: float = 0.98,
        row_buckets: tuple[int, ...] = (),
    ) -> None:
        if not 0 < forgetting <= 1:
            raise ValueError(f"forgetting is {forgetting!r}; it must be above 0 and at most 1")
        _check_buckets(row_buckets)
        self._forgetting = forgetting
        self._row_buckets = row_buckets
        self._sw = self._swx = self._swxx = self._swy = self._swxy = 0.0
        self._a, self._c, self._sigma = 0.0, _PER_ROW_S_MIN, _SIGMA_AT_START
        self._bias = 0.0
        self._alarm_left = self._outliers_in_row = self._runs = self._ignored_runs = 0
        self._alarm_power = 2
        self._shift = math.inf
        self._sizes: set[int] = set()
        for rows, took_s in warmup:
            if self._is_usable(rows, took_s):
                self._add(_pad(row_buckets, rows), took_s)
        self._solve()

    @property
    def curve(self) -> LatencyCurve:
        """The curve as learned so far."""
        return LatencyCurve(self._a, self._c, self._sigma, self._row_buckets)

    def duration_s(self, rows: int) -> float:
        """Expected seconds of a batch of this many rows, by the curve as learned so far."""
        return self._a + self._c * _pad(self._row_buckets, rows)

    @property
    def distinct_sizes(self) -> int:
        """How many different batch sizes were seen; below 2 base and per-row time cannot be told apart."""
        return len(self._sizes)

    @property
    def runs(self) -> int:
        """Batches learned from, warm-up included."""
        return self._runs

    @property
    def ignored_runs(self) -> int:
        """Reports that were no measurement: no rows, or a time that is not finite and positive."""
        return self._ignored_runs

    @property
    def is_alarmed(self) -> bool:
        """Whether the memory is short at present because the curve seems to be moving."""
        return self._alarm_left > 0

    def see(self, rows: int, took_s: float) -> None:
        """Learn from one executed batch.

        Args:
            rows: Rows in the batch before padding; at least 1.
            took_s: Seconds it took; a value that is not finite and positive is counted and ignored.
        """
        if not self._is_usable(rows, took_s):
            return
        size = _pad(self._row_buckets, rows)
        if self._runs:
            took_s = self._judge(took_s, self._a + self._c * size)
        keep = self._forgetting
        if self._alarm_left:
            self._alarm_left -= 1
            keep **= self._alarm_power  # 0.98 -> 0.96 or 0.92
        self._sw *= keep
        self._swx *= keep
        self._swxx *= keep
        self._swy *= keep
        self._swxy *= keep
        self._add(size, took_s)
        self._solve()

    def _judge(self, took_s: float, expected_s: float) -> float:
        """Update spread, bias and alarms; returns the time to learn from."""
        ratio = took_s / expected_s
        error = min(ratio, _OUTLIER_RATIO) - 1.0  # clipped, or one stall would pass for wild input-dependence
        self._sigma += _SIGMA_RATE * (abs(error) * _MEAN_ABS_TO_SIGMA - self._sigma)
        self._bias += _BIAS_RATE * (max(-0.5, min(0.5, error)) - self._bias)
        if ratio > _OUTLIER_RATIO:
            self._alarm_left, self._alarm_power = _ALARM_RUNS, 2
            self._outliers_in_row += 1
            self._shift = min(self._shift, ratio)
            if self._outliers_in_row == _SHIFT_RUNS:
                self._rescale(self._shift)
            return took_s
        self._outliers_in_row, self._shift = 0, math.inf
        if abs(self._bias) > _BIAS_SIGMAS * self._sigma and abs(self._bias) > _BIAS_MIN:
            self._alarm_left, self._alarm_power = _ALARM_RUNS, 4
        # The weight 1/took**2 of an absurdly short run (a batch that failed at once) would drown the rest.
        return max(took_s, expected_s / _OUTLIER_RATIO)

    def _rescale(self, factor: float) -> None:
        """Pretend that every earlier run had taken ``factor`` times as long: the shape stays, the level moves."""
        self._sw /= factor * factor
        self._swx /= factor * factor
        self._swxx /= factor * factor
        self._swy /= factor
        self._swxy /= factor
        self._outliers_in_row, self._shift, self._bias = 0, math.inf, 0.0

    def _is_usable(self, rows: int, took_s: float) -> bool:
        if rows >= 1 and 0.0 < took_s < math.inf:
            return True
        self._ignored_runs += 1
        return False

    def _add(self, size: int, took_s: float) -> None:
        weight = 1.0 / (took_s * took_s)
        self._sw += weight
        self._swx += weight * size
        self._swxx += weight * size * size
        self._swy += weight * took_s
        self._swxy += weight * size * took_s
        self._sizes.add(size)
        self._runs += 1

    def _solve(self) -> None:
        sw, swx, swxx, swy, swxy = self._sw, self._swx, self._swxx, self._swy, self._swxy
        if sw <= 0.0:
            return
        spread = sw * swxx - swx * swx
        if spread > 1e-9 * sw * swxx:
            c = (sw * swxy - swx * swy) / spread
            a = (swy - c * swx) / sw
            if c < _PER_ROW_S_MIN:
                c, a = _PER_ROW_S_MIN, max(0.0, swy / sw)
            elif a < 0.0:
                a, c = 0.0, max(_PER_ROW_S_MIN, swxy / swxx)
            self._a, self._c = a, c
            return
        # Only one size for a long time: the shape cannot be seen, so keep it and move the level.
        a, c = self._a, self._c
        level = (a * swy + c * swxy) / (a * a * sw + 2 * a * c * swx + c * c * swxx)
        self._a, self._c = a * level, max(_PER_ROW_S_MIN, c * level)


def rate_ceiling(curve: LatencyCurve, slo_s: float, rows_max: int) -> float:
    """The rate that no schedule can exceed: ``U1 = max b / l(b)`` over batches with ``l(b) <= D``.

    Args:
        curve: The latency curve of one executor.
        slo_s: ``D``, seconds from arrival to answer; positive.
        rows_max: ``B``, the largest batch; at least 1.

    Returns:
        Rows per second; 0 when not even one row meets the objective.
    """
    rows = curve.rows_within(slo_s, rows_max)
    return rows / max(curve.duration_s(rows), _PER_ROW_S_MIN) if rows else 0.0


def sustainable_rate(curve: LatencyCurve, slo_s: float, rows_max: int) -> float:
    """The rate that can be kept up without loss: ``U2 = b / l(b)`` where ``l(b) = D / 2``.

    Whoever arrives just after a start waits for that batch and for its own, so two consecutive batches must fit
    the objective. Padding is ignored: a lower rate than this is already lossless.

    Args:
        curve: The latency curve of one executor.
        slo_s: ``D``, seconds from arrival to answer; positive.
        rows_max: ``B``, the largest batch; at least 1.

    Returns:
        Rows per second; 0 when the base cost alone takes half of the objective.
    """
    a, c = curve.base_s, max(curve.per_row_s, _PER_ROW_S_MIN)
    rows = min(float(rows_max), (slo_s / 2 - a) / c)
    return rows / (a + c * rows) if rows > 0 else 0.0


def fluid_rate(curve: LatencyCurve, slo_s: float, rows_max: int, offered_rate: float) -> float:
    """The most that can be answered in time when shedding is allowed: ``G(lambda)``.

    A batch of ``b`` needs ``b`` arrivals that are young enough, ``b / lambda <= D - l(b)``, hence
    ``b = min(B, (D - a) / (c + 1 / lambda))`` and ``G = min(lambda, b / l(b))``. G equals the offered rate up to
    U2 and tends to U1.

    Args:
        curve: The latency curve of one executor.
        slo_s: ``D``, seconds from arrival to answer; positive.
        rows_max: ``B``, the largest batch; at least 1.
        offered_rate: ``lambda``, rows per second.

    Returns:
        Rows per second answered in time.
    """
    if offered_rate <= 0:
        return 0.0
    a, c = curve.base_s, max(curve.per_row_s, _PER_ROW_S_MIN)
    rows = min(float(rows_max), (slo_s - a) / (c + 1 / offered_rate))
    return min(offered_rate, rows / (a + c * rows)) if rows > 0 else 0.0


def lossy_rate_limit(curve: LatencyCurve, slo_s: float, loss: float = 0.01) -> float:
    """The rate up to which at most ``loss`` of the arrivals miss an objective below twice ``l(1)``.

    Each start of an executor then loses ``lambda * (2 l(1) - D)`` arrivals on average, those that can wait for
    neither this batch nor the next, and serves at most ``1 + lambda * (D - l(1))``.

    Args:
        curve: The latency curve of one executor.
        slo_s: ``D``, seconds from arrival to answer; positive.
        loss: Share of arrivals that may be lost, in (0, 1).

    Returns:
        Rows per second; 0 when ``D < l(1)``, infinite when the objective is no obstacle (``D >= 2 l(1)``).
    """
    one_row_s = curve.duration_s(1)
    if slo_s < one_row_s:
        return 0.0
    s_per_row = (2 * one_row_s - slo_s) / loss - (slo_s - one_row_s)
    return 1 / s_per_row if slo_s < 2 * one_row_s and s_per_row > 0 else math.inf
