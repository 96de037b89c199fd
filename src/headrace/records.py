"""The record: what is written down about every request, and all that any number is folded from.

The column list is an interface: `docs/reference/records.md` publishes it, `RECORD_SCHEMA` numbers it, and a reader
of any later release reads segments of every earlier schema. Columns are only ever added at the end, with a default.
"""

from typing import Final

import msgspec

RECORD_SCHEMA: Final = 1


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False, omit_defaults=False):
    """One request.

    Attributes:
        request_id: What `x-request-id` said, or one of ours.
        trace_id: 32 hexadecimal digits, W3C trace context.
        time_unix_s: Wall clock at arrival, for people; durations below come from the monotonic clock.
        snapshot_id: Snapshot in force at arrival.
        endpoint: Endpoint name; `unknown` when the request named none that exists.
        model: Model name.
        version: Version that answered, or would have.
        tenant: Empty until authentication is on.
        arm: Roll-out arm, `baseline` without a roll-out.
        arm_share: Probability with which the arm was chosen, 0 to 1.
        protocol: `http`.
        ending: One of `headrace.types.Ending`.
        code: Empty when answered, else the error's code.
        status: HTTP status that was or would have been sent; 0 when nothing was.
        stage: Stage in which a request that was not answered ended.
        degraded: Reason that the answer said it was degraded; empty when it was not.
        field: Input field a validation error names; empty otherwise.
        reason: Reason of a validation error; empty otherwise.
        rows: Rows asked for; 0 when unknown.
        batch_rows: Rows of the (last) batch it ran in; 0 when it did not run.
        batches: Number of batches it was spread over.
        bytes_in: Body bytes as received.
        bytes_out: Body bytes as sent.
        deadline_s: Time allowed, seconds from arrival.
        total_s: Arrival to end.
        decode_s: Admission, routing, decoding and validation.
        queue_s: Waiting for a batch to start.
        run_s: In the runtime.
        respond_s: Post-processing, encoding and writing.
        inputs: Sampled inputs as a MessagePack map of tensors; None when not sampled.
        outputs: Sampled outputs, same form.
        worker: Number of the worker process.
    """

    request_id: str
    trace_id: str
    time_unix_s: float
    snapshot_id: str
    endpoint: str
    model: str
    version: str
    tenant: str
    arm: str
    arm_share: float
    protocol: str
    ending: str
    code: str
    status: int
    stage: str
    degraded: str
    field: str
    reason: str
    rows: int
    batch_rows: int
    batches: int
    bytes_in: int
    bytes_out: int
    deadline_s: float
    total_s: float
    decode_s: float
    queue_s: float
    run_s: float
    respond_s: float
    inputs: bytes | None = None
    outputs: bytes | None = None
    worker: int = 0


class Amendment(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Corrects an earlier record: under strict durability the record is on disk before the answer is sent, so a send
    that fails afterwards is written as an amendment.

    Attributes:
        request_id: The record it corrects.
        time_unix_s: When.
        ending: The ending that holds now.
        code: The code that holds now.
    """

    request_id: str
    time_unix_s: float
    ending: str
    code: str


COLUMNS: Final[tuple[str, ...]] = Record.__struct_fields__
