"""The path of a request. Read `accept` top to bottom, then `executed`, then `finish`: that is all of it.

    gateway ─► accept:    1 open      a ticket, an entry in the ledger, a deadline
                          2 admit     is the server taking requests, can the record be written?
                          3 route     endpoint and version → replica
                          4 decode    bytes → arrays under the version's signature
                          5 validate  the endpoint's contract: ranges, categories, missing values
                          6 batch     into the waiting list, or refused at the door
    executor ─► executed: 7 respond   encode once; under strict durability commit the record first; send
                finish:   8 end       exactly one ending per ticket: ledger, record, metrics

Routing comes before decoding because the version decides the signature (decision 0003). A stage that an endpoint does
not use is None in its replica and costs one comparison. No coroutine and no future is made per request: a stage either
passes the ticket on or raises a `HeadraceError`, which `finish` turns into the reply.

Concurrency: all of it runs on the event loop; only `batch.run_batch` runs elsewhere.
"""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from headrace.clock import Clock
from headrace.data_plane.admit import RECORDS_RETRY_AFTER_S, Admission, admit
from headrace.data_plane.batch import Batch
from headrace.data_plane.record import make_record
from headrace.data_plane.replicas import Endpoint
from headrace.data_plane.route import route
from headrace.data_plane.statistics import ModelStatistics
from headrace.data_plane.ticket import BatchOutputs, BrokenCall, OutputRows, Ticket
from headrace.errors import HeadraceError, ModelFailed, RecordsUnavailable, ServerError
from headrace.ports import RecordSink
from headrace.records import Amendment, Record
from headrace.telemetry.logs import log_unexpected
from headrace.telemetry.metrics import RecordFold, by_version
from headrace.telemetry.slots import Ledger
from headrace.types import Ending

FLUSH_S = 0.01
"""How long records and metrics of ended requests are gathered before they are handed on together."""


class Pipeline:
    """The request path of one worker.

    Args:
        loop: The worker's event loop.
        clock: Time.
        worker: Number of this worker, written into records.
        admission: Whether requests are taken at all.
        unknown: Ledger of requests that name no endpoint.
        sink: Takes the records.
        fold: Turns records into metrics.
        statistics: Per-version counters in the form the protocol's statistics route wants.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        worker: int,
        admission: Admission,
        unknown: Ledger,
        sink: RecordSink,
        fold: RecordFold,
        statistics: ModelStatistics,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._worker = worker
        self.admission = admission
        self._unknown = unknown
        self._sink = sink
        self._fold = fold
        self._statistics = statistics
        self.endpoints: Mapping[str, Endpoint] = {}
        self.snapshot_id = ""
        self._ended: list[Record] = []
        self._unwritten: list[Record | Amendment] = []
        self._is_flush_due = False

    # ---------------------------------------------------------------- the way in

    def accept(self, ticket: Ticket, endpoint: Endpoint | None, version: str) -> None:
        """Take one request, fully received; it ends exactly once, now or later.

        Args:
            ticket: Fresh; its call holds the body.
            endpoint: Named by the URL; None when no endpoint has that name.
            version: Named by the URL; empty for the default.
        """
        ticket.endpoint = endpoint
        (endpoint.ledger if endpoint is not None else self._unknown).received()
        self.admission.tickets_open += 1
        stage = "admit"
        try:
            admit(self.admission, endpoint, self._sink)

            stage = "route"
            replica = ticket.replica = route(endpoint, version)
            replica.tickets_open += 1

            stage = "decode"
            request = ticket.request = ticket.call.decode(replica)
            allowed_s = replica.deadline_s if request.timeout_s is None else request.timeout_s
            ticket.deadline_at_s = ticket.received_at_s + allowed_s

            stage = "validate"
            if replica.check_contract is not None:
                replica.check_contract(request)
            ticket.decoded_at_s = self._clock.now_s()

            ticket.stage = stage = "queue"
            replica.lane.submit(replica.waiting_list(request), ticket)
        except Exception as error:
            ticket.stage = stage
            self._fail(ticket, error)

    # ---------------------------------------------------------------- the way out

    def executed(self, batch: Batch) -> None:
        """A batch has come back: answer every ticket whose last piece it held."""
        now_s = self._clock.now_s()
        started_at_s, took_s, rows = batch.started_at_s, batch.took_s, batch.rows
        self._statistics.batch_executed(batch)
        complete: list[Ticket] = []
        for piece in batch.pieces:
            ticket = piece.ticket
            if ticket.ending is not None:
                continue  # the caller left, or another piece of it failed
            ticket.stage = "run"
            ticket.batches += 1
            ticket.batch_rows = rows
            ticket.run_s += took_s
            ticket.started_at_s = ticket.started_at_s or started_at_s
            ticket.executed_at_s = now_s
            if piece.error is not None:
                self.refuse(ticket, piece.error)
                continue
            assert piece.outputs is not None
            ticket.pieces -= 1
            if ticket.pieces == 0 and ticket.parts is None:
                ticket.outputs = piece.outputs
                complete.append(ticket)
                continue
            if ticket.parts is None:
                ticket.parts = []
            ticket.parts.append((piece.first_row, piece.outputs))
            if ticket.pieces == 0:
                try:
                    ticket.outputs = _assemble(ticket.parts)
                except Exception as error:
                    self._fail(ticket, error)
                    continue
                complete.append(ticket)
        self._respond(complete)

    def _respond(self, complete: list[Ticket]) -> None:
        """Encode every answer, then send them back to back: the first wakes the callers' side, the others find it
        awake, and what they ask next arrives together."""
        encoded: list[Ticket] = []
        is_strict = False
        for ticket in complete:
            ticket.stage = "respond"
            try:
                ticket.call.encode(ticket)
            except Exception as error:
                self._fail(ticket, error)
                continue
            encoded.append(ticket)
            # Asked of each: a reload changes the durability between two requests, and both may be in this batch.
            is_strict = is_strict or (ticket.endpoint is not None and ticket.endpoint.is_strict)
        if is_strict:
            self._commit_then_send(encoded)
            return
        sent: list[Ticket] = []
        for ticket in encoded:
            if self._send(ticket):
                sent.append(ticket)
            else:
                self.abandon(ticket)
        self.finish(sent, Ending.ANSWERED)

    def _commit_then_send(self, tickets: list[Ticket]) -> None:
        """Strict durability: one write and one sync for all of them, then the answers; a send that fails after the
        commit is written down as an amendment."""
        records = self._records(tickets, Ending.ANSWERED)
        for ticket in tickets:
            ticket.is_committing = True

        def committed(is_on_disk: bool) -> None:
            for ticket, record in zip(tickets, records, strict=True):
                ticket.is_committing = False
                if ticket.ending is not None:  # the caller left meanwhile
                    if is_on_disk:
                        self._amend(record, ticket.ending)
                    else:
                        self._write(self._records((ticket,), ticket.ending)[0])
                elif not is_on_disk:
                    text = "the record of this request could not be written to disk"
                    self.refuse(ticket, RecordsUnavailable(text, retry_after_s=RECORDS_RETRY_AFTER_S))
                elif self._send(ticket):
                    self.finish((ticket,), Ending.ANSWERED, written=record)
                else:
                    self.finish((ticket,), Ending.ABANDONED, written=record)
                    self._amend(record, Ending.ABANDONED)

        self._sink.commit(records, committed)

    def _amend(self, record: Record, ending: Ending) -> None:
        self._write(Amendment(record.request_id, self._clock.unix_s(), ending, "caller_gone"))

    # ---------------------------------------------------------------- the end

    def refuse(self, ticket: Ticket, error: HeadraceError) -> None:
        """End a ticket with an error: tell its caller and write it down."""
        ticket.error = error
        ticket.outputs = None
        ticket.call.encode(ticket)
        self.finish((ticket,), error.ending if self._send(ticket) else Ending.ABANDONED)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        """End a ticket in whose stage something was raised: even a fault of ours leaves nobody waiting."""
        if not isinstance(error, HeadraceError):
            log_unexpected(ticket.stage, error)
            error = ServerError(f"internal error in stage {ticket.stage}")
        if ticket.ending is None:
            self.refuse(ticket, error)

    def _send(self, ticket: Ticket) -> bool:
        """Hand a reply to the transport; one that raises has lost its caller and takes no neighbour along."""
        try:
            return ticket.call.send()
        except Exception as error:
            log_unexpected("send", error)
            return False

    def refused_at_front(self, error: HeadraceError) -> None:
        """Count a request that the protocol front refused before it was complete; the front has told the caller."""
        ticket = Ticket(BrokenCall(error), "", "", self._clock.now_s())
        ticket.error = error
        ticket.status = error.http_status
        self._unknown.received()
        self.admission.tickets_open += 1
        self.finish((ticket,), error.ending)

    def abandon(self, ticket: Ticket) -> None:
        """The caller has gone: forget what waits; what already runs comes back and is ignored."""
        if ticket.ending is None:
            self.finish((ticket,), Ending.ABANDONED)

    def finish(self, tickets: Sequence[Ticket], ending: Ending, *, written: Record | None = None) -> None:
        """Close tickets.

        **Invariant**: at most once per ticket, and the only way that one closes (tests/promises/test_one_ending.py).

        Args:
            tickets: Those that end alike at this moment, as the answered ones of a batch do.
            ending: Of them all.
            written: The record of the only ticket, if it is on disk already; one with another ending is amended.
        """
        if not tickets:
            return
        is_true = written is not None and written.ending == ending
        records = [written] if written is not None and is_true else self._records(tickets, ending)
        by_ledger: dict[Ledger, int] = {}
        try:
            for ticket, record in zip(tickets, records, strict=True):
                assert ticket.ending is None, f"request {ticket.request_id} ended twice"
                ticket.ending = ending
                ledger = ticket.endpoint.ledger if ticket.endpoint is not None else self._unknown
                by_ledger[ledger] = by_ledger.get(ledger, 0) + 1
                replica = ticket.replica
                if replica is not None:
                    replica.tickets_open -= 1
                    if ticket.pieces:
                        replica.forget(ticket)
                self._ended.append(record)
                if written is None and not ticket.is_committing:
                    self._unwritten.append(record)
        finally:  # a defect met at one of them leaves the books of the others right
            for ledger, count in by_ledger.items():
                ledger.ended(ending, count)
                self.admission.tickets_open -= count
        if not self._is_flush_due:
            self._flush_soon()
        self.admission.note_idle()

    def _write(self, entry: Record | Amendment) -> None:
        self._unwritten.append(entry)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write and fold what has ended since the last time."""
        self._is_flush_due = False
        ended, self._ended = self._ended, []
        unwritten, self._unwritten = self._unwritten, []
        if not ended and not unwritten:
            return
        if unwritten:
            self._sink.write(unwritten)
        groups = by_version(ended)
        self._fold.fold(groups)
        self._statistics.fold(groups)

    def close(self) -> None:
        """Hand over what is still held; before the sink closes."""
        self.flush()

    def _records(self, tickets: Sequence[Ticket], ending: Ending) -> list[Record]:
        now_s, now_unix_s = self._clock.now_s(), self._clock.unix_s()
        snapshot_id, worker = self.snapshot_id, self._worker
        return [make_record(ticket, ending, now_s, now_unix_s, snapshot_id, worker) for ticket in tickets]


def _assemble(parts: list[tuple[int, OutputRows]]) -> OutputRows:
    """Put the pieces of a many-row answer together, in row order."""
    parts.sort(key=lambda part: part[0])
    try:
        columns = zip(*(outputs.arrays() for _, outputs in parts), strict=True)
        return OutputRows(BatchOutputs([np.concatenate(column) for column in columns], 1))
    except ValueError as error:  # a dimension behind the first depends on what else is in the batch
        raise ModelFailed(f"the outputs of the request's {len(parts)} batches do not fit together: {error}") from error
