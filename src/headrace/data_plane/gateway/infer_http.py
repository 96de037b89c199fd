"""One inference call over HTTP: the protocol's half of a ticket."""

import re
import secrets
from collections.abc import Sequence

from headrace.data_plane.gateway.http import Exchange, error_reply
from headrace.data_plane.gateway.oip_parameters import TIMEOUT_S_MAX
from headrace.data_plane.replicas import Replica
from headrace.data_plane.ticket import InferRequest, Ticket
from headrace.errors import BadRequest, HeadraceError

_ID_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/+=@")
# The right half of the trace id becomes our span's id, which must not be zero either.
_TRACEPARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?![0-9a-f]{16}0{16})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[^,]*)?"
)


class Ids:
    """Makes request and trace ids that no other worker makes: a random prefix and a counter.

    Source: W3C Trace Context, `traceparent`.
    """

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(8)
        self._count = secrets.randbits(32)

    def next_trace(self) -> str:
        """32 hexadecimal digits."""
        self._count += 1
        return f"{self._prefix}{self._count:016x}"


def read_ids(exchange: Exchange, ids: Ids) -> tuple[str, str]:
    """Request and trace id of a call: the caller's where they are well formed, otherwise ours."""
    headers = exchange.headers
    if b"traceparent" not in headers and b"x-request-id" not in headers:
        ours = ids.next_trace()
        return ours, ours
    trace_id = _trace_id(headers.get(b"traceparent", b"")) or ids.next_trace()
    given = headers.get(b"x-request-id")
    if given is not None and 0 < len(given) <= 128 and _ID_CHARACTERS.issuperset(given):
        return given.decode("ascii"), trace_id
    return trace_id, trace_id


def _trace_id(parent: bytes) -> str | None:
    match = _TRACEPARENT.fullmatch(parent)
    if match is None or (match[1] == b"00" and match[3]):  # only later versions may have more to say
        return None
    return match[2].decode("ascii")


class HttpInferCall:
    """See `headrace.data_plane.ticket.Call`."""

    __slots__ = ("_body", "_exchange", "_head", "_status", "bytes_in")
    protocol = "http"

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.bytes_in = len(exchange.body)
        self._status = 0
        self._head = b""
        self._body: Sequence[bytes | memoryview] = ()

    def decode(self, replica: Replica) -> InferRequest:
        headers = self._exchange.headers
        json_length = headers.get(b"inference-header-content-length")
        json_bytes = None
        if json_length is not None:
            if not json_length.isdigit() or len(json_length) > 12:
                raise BadRequest(
                    "the header Inference-Header-Content-Length must be the number of bytes of the JSON part; "
                    f"got {json_length[:20].decode('latin-1')!r}"
                )
            json_bytes = int(json_length)
        request = replica.codec.decode(self._exchange.body, json_bytes)
        timeout_ms = headers.get(b"x-request-timeout-ms")
        if timeout_ms is not None:
            request.timeout_s = _timeout_s(timeout_ms)
        return request

    def encode(self, ticket: Ticket) -> None:
        trace_id = ticket.trace_id
        ids = f"x-request-id: {ticket.request_id}\r\ntraceparent: 00-{trace_id}-{trace_id[16:]}-00\r\n"
        replica, request, outputs = ticket.replica, ticket.request, ticket.outputs
        if ticket.error is not None:
            self._status, head, self._body = error_reply(ticket.error)
            self._head = head + ids.encode("ascii")
            ticket.bytes_out = len(self._body[0])
        else:
            assert replica is not None
            assert request is not None
            assert outputs is not None
            encoded = replica.codec.encode(request, outputs)
            if encoded.is_binary:
                kind = (
                    "content-type: application/octet-stream\r\n"
                    f"inference-header-content-length: {encoded.json_bytes}\r\n"
                )
                self._body = [encoded.json, *encoded.tensors]
                ticket.bytes_out = sum(map(len, self._body))
            else:
                kind = "content-type: application/json\r\n"
                self._body = (encoded.json,)
                ticket.bytes_out = len(encoded.json)
            self._status = 200
            self._head = f"{replica.answer_head}{kind}{ids}".encode("ascii")
        ticket.status = self._status

    def send(self) -> bool:
        return self._exchange.send(self._status, self._head, self._body)


def _timeout_s(value: bytes) -> float:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds <= TIMEOUT_S_MAX * 1e3:
        raise BadRequest(
            "the header x-request-timeout-ms must be a number of milliseconds above 0 and at most "
            f"{TIMEOUT_S_MAX * 1e3:g}; got {value[:20].decode('latin-1')!r}"
        )
    return milliseconds / 1e3


def refuse(exchange: Exchange, error: HeadraceError) -> None:
    """Answer an exchange that is no inference with an error."""
    exchange.send(*error_reply(error))
