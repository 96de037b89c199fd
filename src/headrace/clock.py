"""Time as a value that is passed in, so that tests can move it.

`Clock.now_s` is monotonic and is what every deadline, duration and timer uses; `Clock.unix_s` is the wall clock and
is only ever written down (in records and logs), never subtracted. A stepped wall clock therefore changes no decision.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Where the time comes from."""

    def now_s(self) -> float:
        """Monotonic seconds since an arbitrary origin."""
        ...

    def unix_s(self) -> float:
        """Wall clock, seconds since 1970-01-01T00:00:00Z."""
        ...


class SystemClock:
    """The machine's clocks."""

    now_s = staticmethod(time.monotonic)
    unix_s = staticmethod(time.time)


class ManualClock:
    """A clock that moves only when it is told to; starts at zero."""

    def __init__(self, now_s: float = 0.0, unix_s: float = 1_000_000_000.0) -> None:
        self._now_s = now_s
        self._unix_s = unix_s

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._unix_s

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._now_s += seconds
        self._unix_s += seconds

    def step_wall_clock(self, seconds: float) -> None:
        """Move the wall clock only, as an operator or NTP would."""
        self._unix_s += seconds
