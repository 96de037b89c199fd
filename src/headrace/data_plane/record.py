"""The record stage: what is written down about a request that has ended."""

import zlib

import msgspec

from headrace.clock import Clock
from headrace.data_plane.ticket import BASELINE_ARM, Ticket
from headrace.errors import DeadlineError, InvalidInput
from headrace.records import Record
from headrace.tensors import Array
from headrace.types import Ending


def make_record(ticket: Ticket, ending: Ending, clock: Clock, snapshot_id: str, worker: int) -> Record:
    """Build the record of a ticket.

    Durations are differences of monotonic times and 0.0 where a stage was not reached.
    """
    now_s = clock.now_s()
    received_s = ticket.received_at_s
    total_s = now_s - received_s
    endpoint, replica, request, error = ticket.endpoint, ticket.replica, ticket.request, ticket.error
    decoded_s, started_s, executed_s = ticket.decoded_at_s, ticket.started_at_s, ticket.executed_at_s
    inputs = outputs = None
    stage = ""
    if ending is not Ending.ANSWERED:
        stage = error.stage if isinstance(error, DeadlineError) else ticket.stage
    rate = endpoint.spec.records.payload_rate if endpoint is not None else 0.0
    if rate and request is not None and is_sampled(ticket.request_id, rate):
        inputs = pack_tensors(request.inputs)
        if ticket.outputs is not None and replica is not None:
            names = (spec.name for spec in replica.signature.outputs)
            outputs = pack_tensors(dict(zip(names, ticket.outputs, strict=True)))
    return Record(
        ticket.request_id,
        ticket.trace_id,
        clock.unix_s() - total_s,
        snapshot_id,
        endpoint.name if endpoint is not None else "unknown",
        endpoint.spec.model if endpoint is not None else "",
        replica.version if replica is not None else "",
        "",
        BASELINE_ARM,
        1.0,
        ticket.call.protocol,
        ending,
        "caller_gone" if ending is Ending.ABANDONED else error.code if error is not None else "",
        ticket.status if ending is not Ending.ABANDONED else 0,
        stage,
        ticket.degraded,
        error.field if isinstance(error, InvalidInput) else "",
        error.reason if isinstance(error, InvalidInput) else "",
        request.rows if request is not None else 0,
        ticket.batch_rows,
        ticket.batches,
        ticket.call.bytes_in,
        ticket.bytes_out,
        max(0.0, ticket.deadline_at_s - received_s),
        total_s,
        decoded_s - received_s if decoded_s else total_s,
        (started_s or now_s) - decoded_s if decoded_s else 0.0,
        ticket.run_s,
        now_s - executed_s if executed_s else 0.0,
        inputs,
        outputs,
        worker,
    )


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
