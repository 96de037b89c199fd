"""The record stage: what is written down about a request that has ended."""

import zlib

import msgspec

from headrace.data_plane.ticket import BASELINE_ARM, Ticket
from headrace.errors import DeadlineError, InvalidInput
from headrace.records import Record
from headrace.telemetry.logs import log_unexpected
from headrace.tensors import Array
from headrace.types import Ending


def make_record(
    ticket: Ticket, ending: Ending, now_s: float, now_unix_s: float, snapshot_id: str, worker: int
) -> Record:
    """Build the record of a ticket that ends now.

    Durations are differences of monotonic times and 0.0 where a stage was not reached.
    """
    endpoint, replica, request, call = ticket.endpoint, ticket.replica, ticket.request, ticket.call
    received_s, decoded_s, executed_s = ticket.received_at_s, ticket.decoded_at_s, ticket.executed_at_s
    total_s = now_s - received_s
    code = stage = field = reason = ""
    status = ticket.status
    if ending is not Ending.ANSWERED:
        error = ticket.error
        stage = ticket.stage
        if isinstance(error, DeadlineError):
            stage = error.stage
        elif isinstance(error, InvalidInput):
            field, reason = error.field, error.reason
        if ending is Ending.ABANDONED:
            code, status = "caller_gone", 0
        elif error is not None:
            code = error.code
    inputs = outputs = None
    if endpoint is not None and endpoint.payload_rate:
        inputs, outputs = _payload(ticket, endpoint.payload_rate)
    return Record(
        ticket.request_id,
        ticket.trace_id,
        now_unix_s - total_s,
        snapshot_id,
        endpoint.name if endpoint is not None else "unknown",
        endpoint.model if endpoint is not None else "",
        replica.version if replica is not None else "",
        "",
        BASELINE_ARM,
        1.0,
        call.protocol,
        ending,
        code,
        status,
        stage,
        ticket.degraded,
        field,
        reason,
        request.rows if request is not None else 0,
        ticket.batch_rows,
        ticket.batches,
        call.bytes_in,
        ticket.bytes_out,
        max(0.0, ticket.deadline_at_s - received_s),
        total_s,
        decoded_s - received_s if decoded_s else total_s,
        (ticket.started_at_s or now_s) - decoded_s if decoded_s else 0.0,
        ticket.run_s,
        now_s - executed_s if executed_s else 0.0,
        inputs,
        outputs,
        worker,
    )


def _payload(ticket: Ticket, rate: float) -> tuple[bytes | None, bytes | None]:
    """Inputs and outputs, of a request that is sampled."""
    request, replica = ticket.request, ticket.replica
    if request is None or not is_sampled(ticket.request_id, rate):
        return None, None
    inputs = outputs = None
    try:
        inputs = pack_tensors(request.inputs)
        if ticket.outputs is not None and replica is not None:
            names = (spec.name for spec in replica.signature.outputs)
            outputs = pack_tensors(dict(zip(names, ticket.outputs.arrays(), strict=True)))
    except Exception as error:  # what cannot be written down costs the payload, never the ending
        log_unexpected("record", error)
    return inputs, outputs


def is_sampled(request_id: str, rate: float) -> bool:
    """Whether a request's payload is kept: the same request id always gets the same verdict."""
    return zlib.crc32(request_id.encode()) < rate * 4294967296.0


def pack_tensors(tensors: dict[str, Array]) -> bytes:
    """Serialise tensors as a MessagePack map: name → [dtype, shape, little-endian bytes, or a list for BYTES]."""
    return msgspec.msgpack.encode(
        {
            name: (array.dtype.str, array.shape, array.ravel().tolist() if array.dtype.hasobject else array.tobytes())
            for name, array in tensors.items()
        }
    )
