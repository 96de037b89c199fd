"""A runtime that sleeps instead of computing, for tests of the scheduler: its cost is what the test says it is.

The artefact is a small JSON file whose name ends with `.sleep.json`, for example

    {"base_s": 0.002, "per_row_s": 0.0001}
"""

import itertools
import random
import select
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from headrace.errors import LoadError, ModelFailed
from headrace.snapshot import RuntimeOptions, VersionSpec
from headrace.tensors import Array, Datatype, Signature, TensorSpec

__all__ = ["SleepArtefact", "SleepRuntime", "load", "write_artefact"]

PLATFORM: Final = "headrace_sleep"


class SleepArtefact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says.

    Attributes:
        base_s: Time of a run whatever its size, seconds.
        per_row_s: Time that every row adds, seconds.
        columns: Columns of the input.
        fail_every: Every so-manieth run raises; 0 is never.
        jitter: Share by which a run's time varies, uniformly in 1 ± jitter; 0 to 1. The sequence is the same each time.
        stall_every: Every so-manieth run takes `stall_s` more; 0 is never.
        stall_s: Length of a stall, seconds.
        load_s: Time that loading takes, seconds.
        leak_bytes: Memory that every run takes and never gives back.
        is_slowed_by_input: A run takes as many seconds more as its most negative input says: a row of -2.5 makes it
            2.5 s longer. So one model serves callers who want to hold it up and callers who do not, and loads fast.
        is_stretched_by_input: A run takes as many times as long as its largest input says, if that is above 1: a row of
            1.4 makes it 1.4 times as long. So callers can let the curve drift while it serves.
    """

    base_s: float = 0.0
    per_row_s: float = 0.0
    columns: int = 1
    fail_every: int = 0
    jitter: float = 0.0
    stall_every: int = 0
    stall_s: float = 0.0
    load_s: float = 0.0
    leak_bytes: int = 0
    is_slowed_by_input: bool = False
    is_stretched_by_input: bool = False

    def __post_init__(self) -> None:
        times = (self.base_s, self.per_row_s, self.stall_s, self.load_s)
        if min(*times, self.fail_every, self.stall_every, self.leak_bytes) < 0:
            raise ValueError("times, intervals and sizes are 0 or more")
        if self.columns < 1 or not 0 <= self.jitter <= 1:
            raise ValueError("columns is 1 or more and jitter is 0 to 1")


class SleepRuntime:
    """Input `x` FP32 [N, columns], output `y` FP32 [N, 1]: the first column of `x`.

    Concurrency: `run` may be called from several threads at once; it sleeps without the interpreter lock.
    """

    def __init__(self, artefact: SleepArtefact, labels: tuple[str, ...] = ()) -> None:
        self._artefact = artefact
        self._is_closed = False
        self._runs = itertools.count(1)
        self._random = random.Random(0)
        self._leaked: list[bytes] = []
        self._signature = Signature(
            inputs=(TensorSpec("x", Datatype.FP32, (-1, artefact.columns)),),
            outputs=(TensorSpec("y", Datatype.FP32, (-1, 1)),),
            is_batched=True,
            platform=PLATFORM,
            labels=labels,
        )

    @property
    def signature(self) -> Signature:
        """One input, one output, batched."""
        return self._signature

    @property
    def facts(self) -> Mapping[str, str]:
        """`runtime`, `base_s` and `per_row_s`."""
        artefact = self._artefact
        return {"runtime": "sleep", "base_s": f"{artefact.base_s:g}", "per_row_s": f"{artefact.per_row_s:g}"}

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Sleep, then return the first column for every wanted output.

        Args:
            inputs: `x`, FP32 [N, columns].
            outputs: Any number of times `y`.

        Returns:
            A copy of the first column, FP32 [N, 1], each.

        Raises:
            headrace.errors.ModelFailed: The artefact says so, or the runtime is closed, or the names are wrong.
        """
        if self._is_closed:
            raise ModelFailed("the model failed: it is closed")
        if "x" not in inputs or any(name != "y" for name in outputs):
            raise ModelFailed("the model failed: its input is x and its output is y")
        array = inputs["x"]
        run = next(self._runs)
        seconds = self.duration_s(rows=array.shape[0], run=run)
        if self._artefact.is_slowed_by_input:
            seconds += max(0.0, -float(array.min(initial=0.0)))
        if self._artefact.is_stretched_by_input:
            seconds *= max(1.0, float(array.max(initial=1.0)))
        if self._artefact.leak_bytes:
            self._leaked.append(b"x" * self._artefact.leak_bytes)  # written, so that it is resident
        _sleep(seconds)
        if self._artefact.fail_every and run % self._artefact.fail_every == 0:
            raise ModelFailed(f"the model failed: run {run} fails, as its artefact says")
        return [array[:, :1].copy() for _ in outputs]

    def duration_s(self, *, rows: int, run: int) -> float:
        """How long a run sleeps, seconds.

        Args:
            rows: In the batch.
            run: Number of the run, from 1.
        """
        artefact = self._artefact
        seconds = artefact.base_s + artefact.per_row_s * rows
        if artefact.jitter:
            seconds *= 1 + artefact.jitter * self._random.uniform(-1, 1)
        if artefact.stall_every and run % artefact.stall_every == 0:
            seconds += artefact.stall_s
        return seconds

    def close(self) -> None:
        """Refuse later runs. Idempotent."""
        self._is_closed = True


def _sleep(seconds: float) -> None:
    """`time.sleep`, which fails under libfaketime (it sleeps until an absolute time); `select` waits for a duration."""
    select.select((), (), (), seconds)


def load(version: VersionSpec, options: RuntimeOptions, threads: int) -> SleepRuntime:
    """Load a sleep artefact.

    Args:
        version: Which artefact.
        options: Not used.
        threads: Not used.

    Raises:
        headrace.errors.LoadError: The file cannot be read or is not a sleep artefact.
    """
    accepted = f"accepted: a JSON object with {', '.join(SleepArtefact.__struct_fields__)}"
    try:
        artefact = msgspec.json.decode(Path(version.path).read_bytes(), type=SleepArtefact)
    except OSError as error:
        raise LoadError(f"{version.path}: cannot be read ({error.strerror}); {accepted}") from error
    except msgspec.DecodeError as error:
        raise LoadError(f"{version.path}: {error}; {accepted}") from error
    _sleep(artefact.load_s)
    return SleepRuntime(artefact, version.labels)


def write_artefact(path: Path, artefact: SleepArtefact) -> Path:
    """Write an artefact file.

    Args:
        path: Ends with `.sleep.json` if it shall be found by name.
    """
    path.write_bytes(msgspec.json.encode(artefact))
    return path
