"""Records in memory: the `RecordSink` for trials, notebooks and tests, with the same promises short of a disk."""

from collections import deque
from collections.abc import Callable, Sequence

from headrace.records import Amendment, Record


class MemorySink:
    """Keeps the latest records.

    Args:
        call_soon: `loop.call_soon_threadsafe`.
        on_outcome: Told how many records were written or dropped.
        records_max: Most records kept; the oldest go first.

    Attributes:
        records: What was taken and not yet pushed out, oldest first.
    """

    def __init__(
        self,
        call_soon: Callable[..., object],
        on_outcome: Callable[[str, int], None] = lambda outcome, count: None,
        *,
        records_max: int = 100_000,
    ) -> None:
        self.records: deque[Record | Amendment] = deque(maxlen=records_max)
        self._call_soon = call_soon
        self._on_outcome = on_outcome
        self._is_sound = True
        self._is_closed = False

    def write(self, records: Sequence[Record | Amendment]) -> None:
        """See `RecordSink.write`."""
        self._take(records)

    def commit(self, records: Sequence[Record | Amendment], done: Callable[[bool], None]) -> None:
        """See `RecordSink.commit`."""
        self._call_soon(done, self._take(records))

    @property
    def is_writable(self) -> bool:
        """False between `fail` and `heal`, and once closed."""
        return self._is_sound and not self._is_closed

    def fail(self) -> None:
        """Behave as a disk that is full."""
        self._is_sound = False

    def heal(self) -> None:
        """Behave as a disk that has room again."""
        self._is_sound = True

    async def close(self) -> None:
        """Take nothing more; what was taken stays readable. Idempotent."""
        self._is_closed = True

    def _take(self, records: Sequence[Record | Amendment]) -> bool:
        if not self.is_writable:
            self._on_outcome("dropped", len(records))
            return False
        self.records.extend(records)
        self._on_outcome("written", len(records))
        return True
