"""The life of one request inside the data plane.

A ticket is opened when a request has been received and closed by exactly one ending (house rule: `pipeline.finish` is
the only place that closes one). It carries what the stages pass on, and the times they leave behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import HeadraceError
from headrace.tensors import Array
from headrace.types import Ending

if TYPE_CHECKING:
    from headrace.data_plane.replicas import Endpoint, Replica

Scalar = str | int | float | bool

BASELINE_ARM = "baseline"
"""The arm of a request while its endpoint has no roll-out."""


class BatchOutputs:
    """What one run of the model gave back, for all who were in it.

    Attributes:
        arrays: One per output of the signature, in its order; the first dimension is the batch, if there is one.
        rows: Length of the batch dimension; 1 when the model is not batched.
    """

    __slots__ = ("_leaves", "arrays", "rows")

    def __init__(self, arrays: Sequence[Array], rows: int) -> None:
        self.arrays = arrays
        self.rows = rows
        self._leaves: dict[int, list[Any]] = {}

    def leaves(self, index: int) -> list[Any]:
        """All elements of one output as Python values, in row-major order; made once for the batch."""
        found = self._leaves.get(index)
        if found is None:
            found = self._leaves[index] = self.arrays[index].ravel().tolist()
        return found


class OutputRows:
    """The rows of a batch's outputs that are one request's: a view, cut only when somebody looks.

    Args:
        batch: All outputs of the run.
        first_row, rows: Which; all of them when `rows` is None, whatever the first dimension means.
    """

    __slots__ = ("_batch", "_first_row", "_rows")

    def __init__(self, batch: BatchOutputs, first_row: int = 0, rows: int | None = None) -> None:
        self._batch = batch
        self._first_row = first_row
        self._rows = rows

    def array(self, index: int) -> Array:
        """One output, by its position in the signature."""
        whole = self._batch.arrays[index]
        return whole if self._rows is None else whole[self._first_row : self._first_row + self._rows]

    def arrays(self) -> list[Array]:
        """All outputs."""
        return [self.array(index) for index in range(len(self._batch.arrays))]

    def leaves(self, index: int) -> tuple[tuple[int, ...], list[Any]]:
        """Shape and elements of one output, the elements as Python values in row-major order."""
        batch, rows = self._batch, self._rows
        shape = batch.arrays[index].shape
        every = batch.leaves(index)
        if rows is None:
            return shape, every
        width = len(every) // (batch.rows or 1)
        start = self._first_row * width
        return (rows, *shape[1:]), every[start : start + rows * width]


@dataclass(slots=True)
class RequestedOutput:
    """One output that the caller wants.

    Attributes:
        index: Position in the signature's outputs.
        is_binary: Travels as bytes behind the JSON instead of inside it.
    """

    index: int
    is_binary: bool


@dataclass(slots=True)
class InferRequest:
    """A decoded request, the same whatever protocol brought it.

    Attributes:
        id: The caller's id, echoed; None when none was given.
        parameters: The caller's parameters.
        inputs: One C-contiguous array per input of the signature, in its order, of exactly its dtype.
        rows: Length of the batch dimension; 1 when the model is not batched.
        outputs: What to answer with, in this order.
        timeout_s: Time the caller allows, seconds from arrival; None when not said.
    """

    id: str | None
    parameters: dict[str, Scalar]
    inputs: dict[str, Array]
    rows: int
    outputs: Sequence[RequestedOutput]
    timeout_s: float | None = None


class Call(Protocol):
    """The protocol's half of a request: knows the wire, not the model's life.

    `decode` runs once; then `encode` once, when the ticket has an outcome; then `send` once. Under strict durability a
    commit lies between `encode` and `send`.
    """

    protocol: str
    bytes_in: int

    def decode(self, replica: "Replica") -> InferRequest:
        """Read the body under the version's signature and contract.

        Raises:
            headrace.errors.RequestError: The body is not acceptable.
        """
        ...

    def encode(self, ticket: "Ticket") -> None:
        """Build the reply for `ticket.outputs`, or for `ticket.error` when that is set; sets `ticket.bytes_out`,
        `ticket.status`.

        Raises:
            headrace.errors.NonFiniteOutput: The reply cannot carry an output.
        """
        ...

    def send(self) -> bool:
        """Hand the reply to the transport; False when the caller has gone."""
        ...


@dataclass(slots=True, eq=False)
class Ticket:
    """One request between its receipt and its ending.

    Times are monotonic seconds; 0.0 means "not reached". `pieces` counts the parts of a many-row request that have not
    come back from a batch yet. While `is_committing`, a record that says "answered" is on its way to the disk (strict
    durability): whatever happens to the ticket meanwhile is written as an amendment.
    """

    call: Call
    request_id: str
    trace_id: str
    received_at_s: float
    deadline_at_s: float = 0.0
    endpoint: "Endpoint | None" = None
    replica: "Replica | None" = None
    request: InferRequest | None = None
    outputs: OutputRows | None = None
    error: HeadraceError | None = None
    ending: Ending | None = None
    degraded: str = ""
    stage: str = "receive"
    status: int = 0
    bytes_out: int = 0
    pieces: int = 0
    is_committing: bool = False
    parts: list[tuple[int, OutputRows]] | None = None
    batch_rows: int = 0
    batches: int = 0
    decoded_at_s: float = 0.0
    started_at_s: float = 0.0
    executed_at_s: float = 0.0
    run_s: float = 0.0


class BrokenCall:
    """A call that broke off before it was complete: the front has answered it, and it only has to be counted."""

    protocol = "http"
    bytes_in = 0

    def __init__(self, error: HeadraceError) -> None:
        self.error = error

    def decode(self, replica: "Replica") -> InferRequest:
        raise self.error

    def encode(self, ticket: Ticket) -> None:
        return

    def send(self) -> bool:
        return False
