"""Offers load over HTTP/1.1 and says truthfully what came back.

An **open loop** sends by a schedule that was drawn up before the run and counts every latency from the scheduled time,
so that a server which stalls cannot slow its own questioner down ("coordinated omission"). A **closed loop** keeps N
connections busy back to back; it finds what a server can carry, and its latencies must not be read as a user's.

The generator checks itself: the send lag (actual minus scheduled send) is part of the result, and a run whose 99th
percentile is above its limit is void. It sends to loopback addresses only, and it always ends: at the latest at
duration + grace.

This file is one thing although it is long: plan, run and result are read together, and a generator that is split over
several files invites measuring with half of it.

Source: G. Tene, "How NOT to Measure Latency" (coordinated omission); Schroeder, Wierman, Harchol-Balter, "Open Versus
Closed: A Cautionary Tale", NSDI 2006 (the two loops differ by orders of magnitude near the limit).
"""

import asyncio
import bisect
import gc
import ipaddress
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any, Final, Literal, cast

import httptools
import msgspec
import numpy as np
import uvloop

from headrace.tensors import Array, Datatype

__all__ = [
    "LoadPlan",
    "LoadResult",
    "NotLoopback",
    "Outcome",
    "binary_infer_body",
    "closed_loop",
    "constant_offsets",
    "infer_request_bytes",
    "json_infer_body",
    "open_loop",
    "poisson_offsets",
    "run",
    "run_in_process",
]

Progress = Callable[[int, float], None]

SEND_LAG_SHARE_MAX: Final = 0.02
"""A run is void when the p99 send lag is above this share of the deadline."""

_PROGRESS_S: Final = 0.1
_CONNECT_S_MAX: Final = 2.0
_SENDS_PER_TURN_MAX: Final = 64
_REOPEN_S: Final = 0.02
# libuv timers tick in milliseconds, so the last stretch before a send is spent turning the loop instead of sleeping.
_SPIN_S: Final = 0.002
_REFUSALS: Final = frozenset({429, 503})
_CODE_MARK: Final = b'"code"'


class NotLoopback(ValueError):
    """A host that is not this machine: load is never sent there."""


class Outcome(IntEnum):
    """What became of a request; each has exactly one."""

    UNSENT = 0
    UNANSWERED = 1
    ANSWERED = 2
    REFUSED = 3
    FAILED = 4
    CONNECTION_ERROR = 5


def loopback_address(host: str) -> str:
    """The literal loopback address that a host stands for.

    Args:
        host: `localhost`, an address in 127.0.0.0/8, or `::1`. Names are not resolved: a hosts file could send the load
            elsewhere.

    Raises:
        NotLoopback: It is anything else.
    """
    if host == "localhost":
        return "127.0.0.1"
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise NotLoopback(f"load is sent to this machine only: got host {host!r}, accepted localhost, 127.x.x.x or ::1")
    return host


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadPlan:
    """One run, fully determined before it starts.

    Attributes:
        host: A loopback address.
        port: TCP port.
        requests: Complete HTTP/1.1 requests as bytes, taken in rotation.
        duration_s: Time in which requests start, seconds.
        offsets_s: Scheduled send times, ascending seconds from the start; None is the closed loop.
        connections: Connections opened before the clock starts; the closed loop keeps exactly these busy.
        connections_max: The open loop opens up to this many when all are busy, and then waits for a free one.
        deadline_s: An answer is in time when it arrives at most this long after its scheduled send, seconds.
        grace_s: How long to wait for answers after `duration_s`, seconds.
        send_lag_s_max: Void limit on the p99 send lag, seconds; None takes 2 % of the deadline.
    """

    host: str
    port: int
    requests: tuple[bytes, ...]
    duration_s: float
    offsets_s: Array | None = None
    connections: int = 16
    connections_max: int = 512
    deadline_s: float = math.inf
    grace_s: float = 2.0
    send_lag_s_max: float | None = None

    def __post_init__(self) -> None:
        loopback_address(self.host)
        if not self.requests:
            raise ValueError("a plan needs at least one request to send, got none")
        if not 0 < self.duration_s < math.inf:
            raise ValueError(f"duration_s is {self.duration_s}, accepted is a positive finite number of seconds")
        if not 1 <= self.connections <= self.connections_max:
            raise ValueError(f"connections is {self.connections}, accepted is 1 to {self.connections_max}")
        if self.offsets_s is not None and self.offsets_s.size and np.any(np.diff(self.offsets_s) < 0):
            raise ValueError("offsets_s must ascend")

    @property
    def lag_limit_s(self) -> float:
        """Void limit in force, seconds; infinite without a deadline and without a limit of its own."""
        return SEND_LAG_SHARE_MAX * self.deadline_s if self.send_lag_s_max is None else self.send_lag_s_max


def poisson_offsets(rate_per_s: float, duration_s: float, *, seed: int) -> Array:
    """Arrivals of many independent callers.

    Args:
        rate_per_s: Mean arrivals per second.
        duration_s: All offsets lie in [0, duration_s).
        seed: Same seed, same schedule.

    Returns:
        Ascending seconds.

    Source: given their number, Poisson arrivals are ordered uniforms.
    """
    dice = np.random.default_rng(seed)
    return np.sort(dice.uniform(0.0, duration_s, int(dice.poisson(rate_per_s * duration_s))))


def constant_offsets(rate_per_s: float, duration_s: float) -> Array:
    """Evenly spaced arrivals, the first at 0; ascending seconds."""
    return np.arange(round(rate_per_s * duration_s)) / rate_per_s


def open_loop(host: str, port: int, requests: Iterable[bytes], offsets_s: Array, **options: Any) -> LoadPlan:
    """A plan that sends by the clock, whatever the server does.

    Args:
        host: A loopback address.
        port: TCP port.
        requests: Prebuilt requests, taken in rotation.
        offsets_s: Scheduled send times, seconds from the start; sorted here.
        options: Further attributes of `LoadPlan`; `duration_s` defaults to the last offset.
    """
    offsets = np.sort(np.asarray(offsets_s, dtype=np.float64))
    options.setdefault("duration_s", float(offsets[-1]) if offsets.size and offsets[-1] > 0 else 1e-3)
    return LoadPlan(host=host, port=port, requests=tuple(requests), offsets_s=offsets, **options)


def closed_loop(
    host: str, port: int, requests: Iterable[bytes], *, connections: int, duration_s: float, **options: Any
) -> LoadPlan:
    """A plan that keeps `connections` busy back to back for `duration_s` seconds."""
    options.setdefault("connections_max", max(connections, 512))
    return LoadPlan(
        host=host, port=port, requests=tuple(requests), connections=connections, duration_s=duration_s, **options
    )


def _percentile_s(sample_s: Array, share: float) -> float:
    """Nearest-rank percentile: a value that occurred; NaN of nothing."""
    return float(np.quantile(sample_s, share, method="inverted_cdf")) if sample_s.size else math.nan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadResult:
    """What was offered and what came back. One row per request in every array.

    **Invariant**: requests = answered + refused + failed + connection_errors + unanswered + unsent.

    Attributes:
        kind: `open` or `closed`.
        duration_s: Planned duration, seconds; rates are per second of it.
        elapsed_s: Start to end with the grace, seconds.
        deadline_s: In time means within this of the scheduled send; infinite without a deadline.
        lag_limit_s: Void limit on the p99 send lag, seconds.
        scheduled_s: Scheduled sends, seconds from the start.
        sent_s: Actual sends; NaN when unsent.
        done_s: When the answer was complete or the connection broke; NaN when neither happened.
        outcomes: `Outcome` values, uint8.
        statuses: HTTP statuses, int16; 0 without an answer.
        codes: Answers other than 200 by status and the error code in the body, for example `503 shed`.
        connections_peak: Most connections open at once.
        waited: Requests that were due while every connection up to the maximum was busy.
    """

    kind: Literal["open", "closed"]
    duration_s: float
    elapsed_s: float
    deadline_s: float
    lag_limit_s: float
    scheduled_s: Array
    sent_s: Array
    done_s: Array
    outcomes: Array
    statuses: Array
    codes: dict[str, int]
    connections_peak: int
    waited: int

    def count(self, outcome: Outcome) -> int:
        """Requests with this outcome."""
        return int(np.count_nonzero(self.outcomes == outcome))

    def times_s(self, outcome: Outcome) -> Array:
        """Scheduled send to completion of the requests with this outcome, seconds."""
        mask = self.outcomes == outcome
        return np.asarray(self.done_s[mask] - self.scheduled_s[mask])

    @property
    def latencies_s(self) -> Array:
        """Of the answered requests, from the scheduled send, seconds."""
        return self.times_s(Outcome.ANSWERED)

    def latency_s(self, share: float) -> float:
        """Percentile of the answered requests' latency, seconds; `share` in 0..1."""
        return _percentile_s(self.latencies_s, share)

    def refusal_s(self, share: float) -> float:
        """Percentile of the time to a refusal, from the scheduled send, seconds."""
        return _percentile_s(self.times_s(Outcome.REFUSED), share)

    @property
    def in_time(self) -> int:
        """Answers that kept the deadline."""
        return int(np.count_nonzero(self.latencies_s <= self.deadline_s))

    @property
    def throughput_per_s(self) -> float:
        """Answers that arrived within the planned duration, per second of it."""
        arrived = (self.outcomes == Outcome.ANSWERED) & (self.done_s <= self.duration_s)
        return int(np.count_nonzero(arrived)) / self.duration_s

    @property
    def goodput_per_s(self) -> float:
        """Answers in time, per second of the planned duration."""
        return self.in_time / self.duration_s

    @property
    def send_lag_s(self) -> Array:
        """Actual minus scheduled send, seconds; what was never sent lags until the end."""
        return np.where(np.isnan(self.sent_s), self.elapsed_s, self.sent_s) - self.scheduled_s

    @property
    def void_reason(self) -> str:
        """Why the run proves nothing; empty when it is sound."""
        lag_s = _percentile_s(self.send_lag_s, 0.99)
        if not lag_s > self.lag_limit_s:
            return ""
        cause = (
            f"{self.waited} of {len(self.outcomes)} requests found all connections busy: allow more, or offer less"
            if self.waited * 100 > len(self.outcomes)
            else "the generator could not keep its own schedule: give it a core, or offer less"
        )
        return f"p99 send lag is {lag_s * 1e3:.2f} ms, accepted is {self.lag_limit_s * 1e3:.2f} ms; {cause}"

    def summary(self) -> dict[str, Any]:
        """Everything but the arrays, ready for JSON: seconds, rates per second, None where there is nothing."""

        def known(value: float) -> float | None:
            return value if math.isfinite(value) else None

        shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}
        return {
            "kind": self.kind,
            "duration_s": self.duration_s,
            "elapsed_s": self.elapsed_s,
            "deadline_s": known(self.deadline_s),
            "requests": len(self.outcomes),
            "offered_per_s": len(self.outcomes) / self.duration_s,
            "throughput_per_s": self.throughput_per_s,
            "goodput_per_s": self.goodput_per_s,
            "answered": self.count(Outcome.ANSWERED),
            "in_time": self.in_time,
            "late": self.count(Outcome.ANSWERED) - self.in_time,
            "refused": self.count(Outcome.REFUSED),
            "failed": self.count(Outcome.FAILED),
            "connection_errors": self.count(Outcome.CONNECTION_ERROR),
            "unanswered": self.count(Outcome.UNANSWERED),
            "unsent": self.count(Outcome.UNSENT),
            "codes": dict(self.codes),
            "latency_s": {name: known(self.latency_s(share)) for name, share in shares.items()},
            "refusal_s": {name: known(self.refusal_s(share)) for name, share in shares.items()},
            "send_lag_s": {name: known(_percentile_s(self.send_lag_s, share)) for name, share in shares.items()},
            "send_lag_limit_s": known(self.lag_limit_s),
            "connections_peak": self.connections_peak,
            "waited_for_connection": self.waited,
            "is_void": bool(self.void_reason),
            "void_reason": self.void_reason,
        }


class _Connection(asyncio.Protocol):
    """One kept-alive connection with at most one request in flight."""

    __slots__ = ("_chunk", "_is_complete", "_is_kept", "_parser", "_run", "_status", "_transport", "index", "is_open")

    def __init__(self, run: "_Run") -> None:
        self._run = run
        self._parser = httptools.HttpResponseParser(self)
        self._chunk = b""
        self._status = 0
        self._is_complete = self._is_kept = self.is_open = False
        self._transport: asyncio.Transport | None = None
        self.index = -1

    def send(self, index: int, request: bytes) -> None:
        self.index = index
        if self._transport is not None:
            self._transport.write(request)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class does not inherit it
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        # The clock is read before parsing: what the answer cost us to read is not the server's latency.
        now_s = self._run.now_s()
        self._chunk = data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()
            return
        if not self._is_complete:
            return
        self._is_complete = False
        index, self.index = self.index, -1
        if index < 0:
            self.abort()
            return
        self._run.answered(index, self._status, data, now_s)
        if self._is_kept:
            self._run.freed(self, now_s)
        else:
            self.abort()

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._status = status
            self._is_kept = self._parser.should_keep_alive()
            self._is_complete = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._transport = None
        self._run.lost(self)


class _Run:
    """State common to both loops: arrays, connections, the end.

    Concurrency: everything happens on one event loop; the only tasks are connection attempts, owned by the TaskGroup.
    """

    def __init__(self, plan: LoadPlan, progress: Progress | None, capacity: int) -> None:
        self._plan = plan
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._address = loopback_address(plan.host)
        self._requests = plan.requests
        self._start_s = math.inf
        self._open: set[_Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._peak = 0
        self._waited = 0
        self._settled = 0
        self._next = 0
        self._is_over = False
        self._codes: dict[str, int] = {}
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._scheduled_s: Array = np.full(capacity, np.nan)
        self._sent_s: Array = np.full(capacity, np.nan)
        self._done_s: Array = np.full(capacity, np.nan)
        self._outcomes: Array = np.zeros(capacity, dtype=np.uint8)
        self._statuses: Array = np.zeros(capacity, dtype=np.int16)

    # What the two loops do differently.

    def begin(self) -> None:
        raise NotImplementedError

    def freed(self, connection: _Connection, now_s: float) -> None:
        raise NotImplementedError

    def connect_failed(self, now_s: float) -> None:
        raise NotImplementedError

    def after_loss(self, now_s: float) -> None:
        raise NotImplementedError

    # What they share.

    def now_s(self) -> float:
        """Seconds since the start; negative infinity before it."""
        return time.perf_counter() - self._start_s

    async def execute(self) -> LoadResult:
        plan = self._plan
        async with asyncio.TaskGroup() as self._tasks:
            for _ in range(plan.connections):
                self._connect()
            await asyncio.wait(self._connecting, timeout=_CONNECT_S_MAX)
            self._start_s = time.perf_counter()
            end = self._loop.call_later(plan.duration_s + plan.grace_s, self._finish)
            ticker = self._loop.call_later(_PROGRESS_S, self._tick) if self._progress else None
            self.begin()
            await self._finished
            elapsed_s = self.now_s()
            self._is_over = True
            end.cancel()
            if ticker:
                ticker.cancel()
            for task in self._connecting:
                task.cancel()
            for connection in tuple(self._open):
                connection.abort()
        if self._open:
            await self._closed
        if self._progress:
            self._progress(self._settled, elapsed_s)
        return self._result(elapsed_s)

    def _finish(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)

    def _tick(self) -> None:
        if self._progress and not self._is_over:
            self._progress(self._settled, self.now_s())
            self._loop.call_later(_PROGRESS_S, self._tick)

    def _connect(self, delay_s: float = 0.0) -> None:
        task = self._tasks.create_task(self._connect_once(delay_s))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect_once(self, delay_s: float) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        try:
            async with asyncio.timeout(_CONNECT_S_MAX):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self), self._address, self._plan.port
                )
        except OSError:  # TimeoutError is one
            if not self._is_over:
                self.connect_failed(self.now_s())
            return
        self._open.add(connection)
        self._peak = max(self._peak, len(self._open))
        if self._is_over or not connection.is_open:
            connection.abort()
            self._open.discard(connection)
            return
        self.freed(connection, self.now_s())

    def _send(self, connection: _Connection, index: int, scheduled_s: float) -> None:
        self._scheduled_s[index] = scheduled_s
        self._sent_s[index] = time.perf_counter() - self._start_s
        self._outcomes[index] = Outcome.UNANSWERED
        connection.send(index, self._requests[index % len(self._requests)])

    def _settle(self, index: int, outcome: Outcome, now_s: float) -> None:
        self._outcomes[index] = outcome
        self._done_s[index] = now_s
        self._settled += 1

    def answered(self, index: int, status: int, chunk: bytes, now_s: float) -> None:
        """A complete answer is here; `chunk` holds at least the end of its body."""
        self._statuses[index] = status
        if status == 200:
            self._settle(index, Outcome.ANSWERED, now_s)
            return
        code = f"{status} {_error_code(chunk)}".rstrip()
        self._codes[code] = self._codes.get(code, 0) + 1
        self._settle(index, Outcome.REFUSED if status in _REFUSALS else Outcome.FAILED, now_s)

    def lost(self, connection: _Connection) -> None:
        """A connection ended; the request on it, if any, ended with it."""
        self._open.discard(connection)
        if self._is_over:
            if not self._open and not self._closed.done():
                self._closed.set_result(None)
            return
        now_s = self.now_s()
        if connection.index >= 0:
            self._settle(connection.index, Outcome.CONNECTION_ERROR, now_s)
            connection.index = -1
        self.after_loss(now_s)

    def _result(self, elapsed_s: float) -> LoadResult:
        plan = self._plan
        count = self._next if plan.offsets_s is None else plan.offsets_s.size
        scheduled_s = self._scheduled_s[:count] if plan.offsets_s is None else plan.offsets_s
        return LoadResult(
            kind="closed" if plan.offsets_s is None else "open",
            duration_s=plan.duration_s,
            elapsed_s=elapsed_s,
            deadline_s=plan.deadline_s,
            lag_limit_s=plan.lag_limit_s,
            scheduled_s=scheduled_s.copy(),
            sent_s=self._sent_s[:count].copy(),
            done_s=self._done_s[:count].copy(),
            outcomes=self._outcomes[:count].copy(),
            statuses=self._statuses[:count].copy(),
            codes=self._codes,
            connections_peak=self._peak,
            waited=self._waited,
        )


class _OpenLoop(_Run):
    """Sends by the schedule.

    Requests go out in order, so the queue of due requests is the range from `_next` to the last offset that has passed.
    """

    def __init__(self, plan: LoadPlan, progress: Progress | None) -> None:
        assert plan.offsets_s is not None
        super().__init__(plan, progress, plan.offsets_s.size)
        self._offsets_s: list[float] = plan.offsets_s.tolist()
        self._count = len(self._offsets_s)
        self._free: deque[_Connection] = deque()
        self._is_armed = False

    def begin(self) -> None:
        self._pump()

    def _pump(self) -> None:
        """Send what is due while there are free connections, then come back when the next is due."""
        self._is_armed = False
        if self._is_over:
            return
        if self._settled >= self._count:
            self._finish()
            return
        offsets_s, free = self._offsets_s, self._free
        now_s = self.now_s()
        for _ in range(_SENDS_PER_TURN_MAX):
            if self._next >= self._count or offsets_s[self._next] > now_s:
                break
            if not free:
                self._open_more(now_s)
                break
            connection = free.popleft()
            if connection.is_open:
                self._send(connection, self._next, offsets_s[self._next])
                self._next += 1
        self._arm(now_s)

    def _arm(self, now_s: float) -> None:
        if self._next >= self._count or self._is_armed:
            return
        wait_s = self._offsets_s[self._next] - now_s
        if wait_s <= 0.0 and not self._free:
            # A connection that becomes free takes the next due request itself. The look once a millisecond is there to
            # open more connections while the backlog grows.
            self._is_armed = True
            self._loop.call_later(0.001, self._pump)
            return
        self._is_armed = True
        if wait_s < _SPIN_S:
            self._loop.call_soon(self._pump)
        else:
            self._loop.call_later(wait_s - 0.75 * _SPIN_S, self._pump)

    def _open_more(self, now_s: float) -> None:
        backlog = bisect.bisect_right(self._offsets_s, now_s, lo=self._next) - self._next
        room = self._plan.connections_max - len(self._open) - len(self._connecting)
        for _ in range(min(room, backlog - len(self._connecting), _SENDS_PER_TURN_MAX)):
            self._connect()

    def freed(self, connection: _Connection, now_s: float) -> None:
        if self._next < self._count and self._offsets_s[self._next] <= now_s:
            if not self._free and len(self._open) >= self._plan.connections_max:
                self._waited += 1
            self._send(connection, self._next, self._offsets_s[self._next])
            self._next += 1
            return
        self._free.append(connection)
        if self._settled >= self._count:
            self._finish()

    def connect_failed(self, now_s: float) -> None:
        # The attempt was made for the oldest due request; that one is told.
        if self._next < self._count and self._offsets_s[self._next] <= now_s:
            self._settle(self._next, Outcome.CONNECTION_ERROR, now_s)
            self._next += 1
        self.after_loss(now_s)

    def after_loss(self, now_s: float) -> None:
        if self._settled >= self._count:
            self._finish()
        elif now_s >= 0.0:
            self._arm(now_s)


class _ClosedLoop(_Run):
    """Keeps its connections busy until the duration is over."""

    def __init__(self, plan: LoadPlan, progress: Progress | None) -> None:
        super().__init__(plan, progress, 1 << 16)
        self._waiting: list[_Connection] = []

    def begin(self) -> None:
        self._loop.call_later(self._plan.duration_s, self._finish_when_settled)
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            self.freed(connection, self.now_s())

    def _finish_when_settled(self) -> None:
        if self._settled >= self._next:
            self._finish()

    def _claim(self) -> int:
        index = self._next
        self._next += 1
        if index == len(self._outcomes):
            self._scheduled_s = np.concatenate([self._scheduled_s, np.full(index, np.nan)])
            self._sent_s = np.concatenate([self._sent_s, np.full(index, np.nan)])
            self._done_s = np.concatenate([self._done_s, np.full(index, np.nan)])
            self._outcomes = np.concatenate([self._outcomes, np.zeros_like(self._outcomes)])
            self._statuses = np.concatenate([self._statuses, np.zeros_like(self._statuses)])
        return index

    def freed(self, connection: _Connection, now_s: float) -> None:
        if now_s < 0.0:
            self._waiting.append(connection)
        elif now_s < self._plan.duration_s:
            if connection.is_open:
                self._send(connection, self._claim(), now_s)
        else:
            self._finish_when_settled()

    def connect_failed(self, now_s: float) -> None:
        if now_s >= 0.0:
            index = self._claim()
            self._scheduled_s[index] = self._sent_s[index] = now_s
            self._settle(index, Outcome.CONNECTION_ERROR, now_s)
        self.after_loss(now_s)

    def after_loss(self, now_s: float) -> None:
        if now_s < self._plan.duration_s:
            self._connect(_REOPEN_S)
        else:
            self._finish_when_settled()


def _error_code(chunk: bytes) -> str:
    """The value of `"code"` in a JSON error body; empty when there is none.

    Found by searching instead of parsing: an overloaded server sends thousands of these a second, and reading them must
    not make the generator late.
    """
    at = chunk.rfind(_CODE_MARK)
    if at < 0:
        return ""
    begin = chunk.find(b'"', at + len(_CODE_MARK)) + 1
    return chunk[begin : chunk.find(b'"', begin)].decode("ascii", "replace") if begin else ""


def run(plan: LoadPlan, progress: Progress | None = None) -> LoadResult:
    """Carry a plan out in this thread, on a uvloop of its own.

    Args:
        plan: What to send.
        progress: Called about ten times a second with (completed requests, elapsed seconds).

    Concurrency: garbage collection is off meanwhile, since a pause would be booked as the server's. The loop turns
    without sleeping while sends are less than 2 ms apart, so give it a core.
    """

    async def execute() -> LoadResult:
        flow = _ClosedLoop(plan, progress) if plan.offsets_s is None else _OpenLoop(plan, progress)
        return await flow.execute()

    is_collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(execute())
    finally:
        if is_collecting:
            gc.enable()


def run_in_process(
    plan: LoadPlan, progress: Progress | None = None, *, core: int | None = None, start_s_max: float = 30.0
) -> LoadResult:
    """Carry a plan out in a fresh Python process, which shares no interpreter lock with whatever is measured.

    Args:
        plan: What to send.
        progress: As in `run`; called in this process.
        core: Pin the generator to this core; None leaves it to the system.
        start_s_max: Time that the process may take to start and to hand the result over, seconds; it is killed at
            `start_s_max` + duration + grace.

    Raises:
        RuntimeError: The process ended without a result; its error output was passed through.
    """
    limit_s = start_s_max + plan.duration_s + plan.grace_s
    end_s = time.monotonic() + limit_s
    # A socket pair of its own: what a library prints in the child cannot be taken for a result.
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        source = f"from headrace.drills.load import _serve_plan; _serve_plan({theirs.fileno()})"
        with subprocess.Popen([sys.executable, "-c", source], pass_fds=[theirs.fileno()]) as process:
            theirs.close()
            try:
                ours.send((plan, core, progress is not None))
                while ours.poll(max(0.0, end_s - time.monotonic())):
                    message = ours.recv()
                    if isinstance(message, LoadResult):
                        return message
                    if progress:
                        progress(*message)
            except (EOFError, ConnectionError) as error:
                raise RuntimeError("the load process ended without a result") from error
            finally:
                process.kill()
    raise RuntimeError(f"the load process gave no result within {limit_s:.0f} s and was killed")


def _serve_plan(fd: int) -> None:
    """Body of the process that `run_in_process` starts: takes the plan, tells about progress, hands the result over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(fd) as parent:
        plan, core, wants_progress = parent.recv()
        if core is not None:
            os.sched_setaffinity(0, {core})
        gc.freeze()
        result = run(plan, (lambda *seen: parent.send(seen)) if wants_progress else None)
        parent.send(result)


def infer_request_bytes(
    host: str, port: int, model: str, body: bytes, headers: Mapping[str, str] | None = None
) -> bytes:
    """A complete HTTP/1.1 inference request.

    Args:
        host: For the Host header.
        port: For the Host header.
        model: Endpoint name; must need no percent-encoding.
        body: From `json_infer_body` or `binary_infer_body`.
        headers: Further headers; `Content-Type` defaults to `application/json`.

    Source: Open Inference Protocol, POST /v2/models/{model}/infer.
    """
    lines = {"Host": f"{host}:{port}", "Content-Type": "application/json", **(headers or {})}
    lines["Content-Length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST /v2/models/{model}/infer HTTP/1.1\r\n{head}\r\n".encode("ascii") + body


def _wire_datatype(array: Array) -> str:
    for datatype in Datatype:
        if datatype.kind != "s" and datatype.dtype == array.dtype:
            return datatype.wire
    raise ValueError(f"no Open Inference Protocol datatype for dtype {array.dtype}")


def json_infer_body(name: str, array: Array, *, datatype: str | None = None, outputs: Sequence[str] = ()) -> bytes:
    """An inference request body in JSON.

    Args:
        name: Input tensor.
        array: Values of any shape; written flat.
        datatype: On the wire; None follows the array. Float64 values under `FP32` keep their short decimal form.
        outputs: Wanted outputs; empty asks for all.
    """
    tensor = {
        "name": name,
        "shape": list(array.shape),
        "datatype": datatype or _wire_datatype(array),
        "data": array.ravel().tolist(),
    }
    body: dict[str, Any] = {"inputs": [tensor]}
    if outputs:
        body["outputs"] = [{"name": output} for output in outputs]
    return msgspec.json.encode(body)


def binary_infer_body(
    name: str, array: Array, *, outputs: Sequence[str] = (), is_output_binary: bool = True
) -> tuple[bytes, dict[str, str]]:
    """An inference request body with the binary tensor data extension.

    Args:
        name: Input tensor.
        array: Values; sent as little-endian bytes, row-major.
        outputs: Wanted outputs; empty asks for all.
        is_output_binary: Ask for binary outputs too.

    Returns:
        The body, and the headers that say where its JSON part ends.

    Source: Open Inference Protocol, binary tensor data extension.
    """
    datatype = _wire_datatype(array)
    raw = np.ascontiguousarray(array).tobytes()
    tensor = {
        "name": name,
        "shape": list(array.shape),
        "datatype": datatype,
        "parameters": {"binary_data_size": len(raw)},
    }
    body: dict[str, Any] = {"inputs": [tensor], "parameters": {"binary_data_output": is_output_binary}}
    if outputs:
        body["outputs"] = [{"name": output} for output in outputs]
    head = msgspec.json.encode(body)
    return head + raw, {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
