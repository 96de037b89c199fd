"""The promises between parts: what the data plane needs from runtimes and storage.

Each port is small and has one contract-test file in `tests/contracts` that every adapter passes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from headrace.records import Amendment, Record
from headrace.snapshot import RuntimeOptions, VersionSpec
from headrace.tensors import Array, Signature


class Runtime(Protocol):
    """A loaded model.

    Concurrency: `run` may be called from any one thread at a time per executor; adapters state if more is safe.
    """

    @property
    def signature(self) -> Signature:
        """Inputs, outputs, labels, and whether the shapes allow batching."""
        ...

    @property
    def facts(self) -> Mapping[str, str]:
        """What the start screen and metadata show: provider, threads, versions."""
        ...

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Execute.

        Args:
            inputs: One array per input of the signature, C-contiguous, of the signature's dtype.
            outputs: Names of the wanted outputs, in the wanted order.

        Returns:
            One array per wanted output, of the signature's dtype.

        Raises:
            headrace.errors.ModelFailed: The model raised; the text is one line without a stack trace.
        """
        ...

    def close(self) -> None:
        """Give memory and threads back. Idempotent."""
        ...


class RuntimeLoader(Protocol):
    """Turns an artefact into a runtime; blocking, called on a background thread."""

    def __call__(self, version: VersionSpec, options: RuntimeOptions, threads: int) -> Runtime:
        """Load.

        Args:
            version: Which artefact.
            options: How.
            threads: Threads per run when the options do not say.

        Raises:
            headrace.errors.LoadError: With what is wrong and what would be accepted.
        """
        ...


class RecordSink(Protocol):
    """Takes records, durably.

    Concurrency: called from the event loop only; the adapter does its I/O elsewhere.
    """

    def write(self, records: Sequence[Record | Amendment]) -> None:
        """Take records to be on disk within the flush interval; never blocks, never raises. What finds no room is
        dropped and counted."""
        ...

    def commit(self, records: Sequence[Record | Amendment], done: Callable[[bool], None]) -> None:
        """Take records that must be on disk before `done(True)` is called on the event loop; `done(False)` when they
        could not be written. Calls that come while a commit is in progress share the next one (group commit)."""
        ...

    @property
    def is_writable(self) -> bool:
        """False while the last write failed; a retry in the background turns it true again."""
        ...

    async def close(self) -> None:
        """Flush everything and stop. Idempotent."""
        ...
