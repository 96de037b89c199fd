"""One server with one worker, the load that is sent to it, and what is read off every run.

The server has one core and the generator another, so that neither makes the other late; the executor sleeps and needs
none. The generator is this process: it draws nothing and waits for nothing but its schedule while a run is on.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from headrace.drills.bench_machine import available_cores, pinned_to
from headrace.drills.load import (
    LoadResult,
    Outcome,
    binary_infer_body,
    infer_request_bytes,
    open_loop,
    run,
)
from headrace.tensors import Array
from headrace.testing.server import ServerProcess
from headrace.testing.sleep_runtime import SleepArtefact, write_artefact

__all__ = ["PATIENCE_S", "RETRIES_MAX", "Endpoint", "Measured", "Sample", "Shot", "Stage"]

CONNECTIONS: Final = 64
CONNECTIONS_MAX: Final = 8192
GRACE_S: Final = 3.0
RETRIES_MAX: Final = 20
"""After so many void runs the machine is not quiet, and repeating them only takes time."""

PATIENCE_S: Final = 60.0
"""Time that a caller allows who does not tell the server what it needs."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model of the server.

    Attributes:
        name: In the URL.
        artefact: The sleeping model.
        slo_s: The objective that the policy is told.
        batching: The configuration's `batching`; empty is what Headrace does by itself.
    """

    name: str
    artefact: SleepArtefact
    slo_s: float
    batching: Mapping[str, Any]

    def entry(self, folder: Path) -> dict[str, Any]:
        """Its part of the configuration."""
        path = write_artefact(folder / f"{self.name}.sleep.json", self.artefact)
        batching = {"batching": dict(self.batching)} if self.batching else {}
        return {
            "name": self.name, "path": str(path), "slo": f"p99={self.slo_s * 1e3:.3f}ms", "runtime": {"name": "sleep"},
            **batching,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shot:
    """A kind of request.

    Attributes:
        endpoint: Whom it goes to.
        deadline_s: In time means within this of the scheduled send.
        budget_s: Time that the server is told it has.
        rows: Of the input.
        value: Of the input; above 1 the run takes that many times as long.
    """

    endpoint: str
    deadline_s: float
    budget_s: float
    rows: int = 1
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one run; rates and shares count rows.

    Attributes:
        what: Policy, or whatever was compared.
        load: Offered, in the part's own unit (usually multiples of U2).
        repetition: From 1; runs of one repetition had the same arrivals.
        requests: How many were sent, or should have been.
        offered_per_s, in_time_per_s: Rows, per second of the schedule.
        in_time_share: Of what was offered.
        late_share: Of what was answered.
        refusal_p99_s: Time to a 503; None without one.
        mean_s: Mean latency of the answers; None without one.
        errors: Ended neither with an answer nor with a refusal.
        lag_p99_s: How late the generator was.
        void_reason: Why the run proves nothing; empty when it is sound.
    """

    what: str
    load: float
    repetition: int
    requests: int
    offered_per_s: float
    in_time_per_s: float
    in_time_share: float
    late_share: float
    refusal_p99_s: float | None
    mean_s: float | None
    errors: int
    lag_p99_s: float
    void_reason: str

    def as_dict(self) -> dict[str, Any]:
        """For the raw results."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A run: its figures, and per request what part-specific figures need.

    Attributes:
        sample: The figures.
        scheduled_s: Scheduled sends, ascending seconds from the start.
        answered_s: When the answers came.
        is_in_time: Whether each was answered within its deadline.
        rows: Of each.
    """

    sample: Sample
    scheduled_s: Array
    answered_s: Array
    is_in_time: Array
    rows: Array

    def in_time_per_s(self, from_s: float, until_s: float) -> float:
        """Rows answered in time of the requests scheduled in an interval, per second of it."""
        mask = (self.scheduled_s >= from_s) & (self.scheduled_s < until_s) & self.is_in_time
        return float(self.rows[mask].sum()) / (until_s - from_s)

    def batch_p99_s(self, gap_s: float) -> float | None:
        """99th percentile of the batches' durations while the executor never rested; None with fewer than two batches.

        Answers of one batch come together and those of the next a whole run later: what lies further apart than `gap_s`
        belongs to different batches.
        """
        answered_s = np.sort(self.answered_s)
        first_s = answered_s[np.concatenate([[True], np.diff(answered_s) > gap_s])] if answered_s.size else answered_s
        return float(np.quantile(np.diff(first_s), 0.99)) if first_s.size > 1 else None


class Stage:
    """A running server; a context manager.

    Args:
        folder: For its files; must be its own.
        endpoints: What it serves.
        say: Told about void runs.

    Attributes:
        voids: What was void, and why.
        server: The process.
    """

    def __init__(self, folder: Path, endpoints: Sequence[Endpoint], say: Callable[[str], None]) -> None:
        folder.mkdir(parents=True)
        config = folder / "headrace.yaml"
        entries = [endpoint.entry(folder) for endpoint in endpoints]
        server = {"workers": 1, "connections_max": 2 * CONNECTIONS_MAX}
        config.write_text(json.dumps({"server": server, "models": entries}))  # JSON is YAML
        self.server = ServerProcess(config, folder / "home")
        self.voids: list[dict[str, Any]] = []
        self._say = say
        cores = available_cores()
        self._server_cores, self._load_cores = (cores[:1], cores[-1:]) if len(cores) > 1 else (cores, cores)
        self._request_bytes = cache(self._make_request)

    def __enter__(self) -> Self:
        with pinned_to(self._server_cores):
            self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.stop()

    def _make_request(self, shot: Shot) -> bytes:
        body, headers = binary_infer_body("x", np.full((shot.rows, 1), shot.value, np.float32))
        headers["x-request-timeout-ms"] = f"{shot.budget_s * 1e3:.3f}"
        return infer_request_bytes("127.0.0.1", self.server.http_port, shot.endpoint, body, headers)

    def measure(
        self, what: str, load: float, repetition: int, shots: Sequence[Shot], offsets_s: Sequence[float] | Array,
        duration_s: float, *, has_batches: bool = False, tries: int = 2,
    ) -> Measured:  # fmt: skip
        """Send a schedule. A run whose generator was late is repeated once, on the same arrivals, and noted.

        Args:
            what, load, repetition: For the sample.
            shots: One per offset, or a few that are taken in rotation.
            offsets_s: The schedule, seconds.
            duration_s: Its length, seconds.
            tries: How often a void run may be tried altogether, while there are few void runs.
        """
        while True:
            tries -= 1
            measured = self._measure_once(what, load, repetition, shots, offsets_s, duration_s)
            reason = measured.sample.void_reason
            if not reason:
                return measured
            self.voids.append({"what": what, "load": load, "repetition": repetition, "reason": reason})
            self._say(f"void: {what} at {load:.3g}: {reason}")
            if tries <= 0 or len(self.voids) > RETRIES_MAX:
                return measured

    def _measure_once(
        self, what: str, load: float, repetition: int, shots: Sequence[Shot], offsets_s: Sequence[float] | Array,
        duration_s: float,
    ) -> Measured:  # fmt: skip
        plan = open_loop(
            "127.0.0.1", self.server.http_port, [self._request_bytes(shot) for shot in shots], np.asarray(offsets_s),
            duration_s=duration_s, connections=CONNECTIONS, connections_max=CONNECTIONS_MAX,
            deadline_s=min(shot.deadline_s for shot in shots), grace_s=GRACE_S,
        )  # fmt: skip
        with pinned_to(self._load_cores):
            result = run(plan)
        count = len(result.outcomes)
        kinds = [shots[index % len(shots)] for index in range(count)]
        return _read(what, load, repetition, result, kinds)


def _read(what: str, load: float, repetition: int, result: LoadResult, kinds: Sequence[Shot]) -> Measured:
    rows = np.array([kind.rows for kind in kinds], dtype=np.int64)
    deadlines_s = np.array([kind.deadline_s for kind in kinds])
    is_answered = result.outcomes == Outcome.ANSWERED
    took_s = result.done_s - result.scheduled_s
    is_in_time = is_answered & (np.nan_to_num(took_s, nan=math.inf) <= deadlines_s)
    offered, answered, in_time = (int(rows[mask].sum()) for mask in (slice(None), is_answered, is_in_time))
    refusal_p99_s, mean_s = result.refusal_s(0.99), float(took_s[is_answered].mean()) if answered else math.nan
    ended = is_answered | (result.outcomes == Outcome.REFUSED)
    sample = Sample(
        what=what, load=load, repetition=repetition, requests=len(rows),
        offered_per_s=offered / result.duration_s, in_time_per_s=in_time / result.duration_s,
        in_time_share=in_time / max(1, offered), late_share=1 - in_time / answered if answered else 0.0,
        refusal_p99_s=None if math.isnan(refusal_p99_s) else refusal_p99_s,
        mean_s=None if math.isnan(mean_s) else mean_s,
        errors=int(np.count_nonzero(~ended)),
        lag_p99_s=float(np.quantile(result.send_lag_s, 0.99)) if len(rows) else 0.0, void_reason=result.void_reason,
    )  # fmt: skip
    return Measured(sample, result.scheduled_s, result.done_s[is_answered], is_in_time, rows)
