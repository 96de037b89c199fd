"""Which handler answers which request: the routes of the data plane's HTTP port.

Known inference URLs are looked up as bytes in a table built at each snapshot; everything else is parsed. A URL that
names nothing known never becomes a label or a table entry.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec

from headrace.clock import Clock
from headrace.data_plane import statistics
from headrace.data_plane.gateway import resources
from headrace.data_plane.gateway.http import Exchange, error_reply
from headrace.data_plane.gateway.infer_http import HttpInferCall, Ids, read_ids, refuse
from headrace.data_plane.pipeline import Pipeline
from headrace.data_plane.replicas import Endpoint
from headrace.data_plane.route import route
from headrace.data_plane.ticket import Ticket
from headrace.errors import (
    HeadraceError,
    MalformedJson,
    MethodNotAllowed,
    NotFound,
    NotImplementedYet,
    ServerError,
    UnknownModel,
    UnknownVersion,
)
from headrace.telemetry.logs import log_unexpected
from headrace.telemetry.slots import SlotValues

JSON_HEAD: Final = b"content-type: application/json\r\n"
JSON_HEAD_NO_STORE: Final = JSON_HEAD + b"cache-control: no-store\r\n"

READ: Final = ("GET", "HEAD")

NOT_OFFERED: Final = {
    ("repository", "load"): "loading a model by request",
    ("repository", "unload"): "unloading a model by request",
    ("trace",): "trace settings",
    ("logging",): "log settings",
    ("systemsharedmemory",): "system shared memory",
    ("cudasharedmemory",): "CUDA shared memory",
    ("generate",): "generation",
    ("generate_stream",): "streamed generation",
}


class Router:
    """Handles every complete request of the HTTP front.

    Args:
        loop: The worker's event loop.
        clock: Time.
        pipeline: Takes inference requests; its `endpoints` are what the routes name.
        is_ready: Whether this worker is ready, and which models keep it from it.
        read_all_slots: Slots of every worker, for statistics; blocking, runs in the default executor.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        pipeline: Pipeline,
        is_ready: Callable[[], tuple[bool, list[str]]],
        read_all_slots: Callable[[], list[SlotValues]],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._pipeline = pipeline
        self._is_ready = is_ready
        self._read_all_slots = read_all_slots
        self._ids = Ids()
        self._infer: Mapping[bytes, tuple[Endpoint, str]] = {}
        self._tasks: set[asyncio.Future[Any]] = set()

    def endpoints_changed(self) -> None:
        """Rebuild the table of known inference URLs."""
        table: dict[bytes, tuple[Endpoint, str]] = {}
        for name, endpoint in self._pipeline.endpoints.items():
            prefix = f"/v2/models/{name}"
            table[f"{prefix}/infer".encode()] = (endpoint, "")
            for version in endpoint.versions():
                table[f"{prefix}/versions/{version}/infer".encode()] = (endpoint, version)
        self._infer = table

    # ---------------------------------------------------------------- HttpHandler

    def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        known = self._infer.get(exchange.target)
        if known is not None and exchange.method == "POST":
            self._start_inference(exchange, known[0], known[1])
            return
        try:
            self._dispatch(exchange)
        except MethodNotAllowed as error:
            status, head, body = error_reply(error)
            allow = b"allow: %b\r\n" % ", ".join(error.verbs).encode("ascii")  # RFC 9110 §15.5.6
            exchange.send(status, head + allow, body)
        except HeadraceError as error:
            refuse(exchange, error)
        except Exception as error:
            log_unexpected("route", error)
            refuse(exchange, ServerError("internal error"))

    def refused(self, error: HeadraceError) -> None:
        """Count a request that broke off before it was complete; its reply has been sent by the front."""
        self._pipeline.refused_at_front(error)

    # ---------------------------------------------------------------- inference

    def _start_inference(self, exchange: Exchange, endpoint: Endpoint | None, version: str) -> None:
        request_id, trace_id = read_ids(exchange, self._ids)
        ticket = Ticket(HttpInferCall(exchange), request_id, trace_id, exchange.received_at_s)
        exchange.on_abandoned = partial(self._pipeline.abandon, ticket)
        self._pipeline.accept(ticket, endpoint, version)

    # ---------------------------------------------------------------- everything else

    def _dispatch(self, exchange: Exchange) -> None:
        path = _segments(exchange.target)
        match path:
            case ["v2", "models", name, *rest] if name != "stats" or rest:
                self._model(exchange, name, rest)
            case ["v2"]:
                self._answer(exchange, READ, resources.server_metadata)
            case ["v2", "health", "live"] | ["livez"] | ["healthz"]:
                _allow(exchange, READ)
                _send_json(exchange, 200, {"live": True}, JSON_HEAD_NO_STORE)
            case ["v2", "health", "ready"] | ["readyz"]:
                _allow(exchange, READ)
                self._ready(exchange)
            case ["v2", "models"]:
                self._answer(exchange, READ, lambda: {"models": list(self._pipeline.endpoints)})
            case ["v2", "models", "stats"]:
                _allow(exchange, READ)
                self._statistics(exchange, {name: e.versions() for name, e in self._pipeline.endpoints.items()})
            case ["v2", "repository", "index"]:
                _allow(exchange, ("POST",))
                only_ready = _only_ready(exchange.body)
                _send_json(exchange, 200, resources.repository_index(self._pipeline.endpoints, only_ready=only_ready))
            case ["v2", "repository", "models", _, ("load" | "unload") as verb]:
                raise NotImplementedYet(f"this server does not offer {NOT_OFFERED['repository', verb]}")
            case ["v2", ("trace" | "logging" | "systemsharedmemory" | "cudasharedmemory") as what, *_]:
                raise NotImplementedYet(f"this server does not offer {NOT_OFFERED[(what,)]}")
            case _:
                raise NotFound("no such route; GET /v2 describes the server, GET /v2/models lists the models")

    def _model(self, exchange: Exchange, name: str, rest: list[str]) -> None:
        endpoint = self._pipeline.endpoints.get(name)
        version = ""
        if rest[:1] == ["versions"] and len(rest) >= 2 and rest[1]:  # an empty version is not the default one
            version, rest = rest[1], rest[2:]
        match rest:
            case ["infer"]:
                _allow(exchange, ("POST",))
                self._start_inference(exchange, endpoint, version)
            case []:
                _allow(exchange, READ)
                _send_json(exchange, 200, resources.model_metadata(*self._find(endpoint, version)))
            case ["config"]:
                _allow(exchange, READ)
                _send_json(exchange, 200, resources.model_configuration(*self._find(endpoint, version)))
            case ["ready"]:
                _allow(exchange, READ)
                self._find(endpoint, version)
                _send_json(exchange, 200, {"name": name, "ready": True}, JSON_HEAD_NO_STORE)
            case ["stats"]:
                _allow(exchange, READ)
                known = _known(endpoint, version)
                self._statistics(exchange, {known.name: [version] if version else known.versions()})
            case [("generate" | "generate_stream") as what]:
                raise NotImplementedYet(f"this server does not offer {NOT_OFFERED[(what,)]}")
            case ["trace", *_]:
                raise NotImplementedYet(f"this server does not offer {NOT_OFFERED[('trace',)]}")
            case _:
                raise NotFound("no such route below a model; known: infer, ready, config, stats")

    def _find(self, endpoint: Endpoint | None, version: str) -> tuple[Endpoint, Any]:
        replica = route(endpoint, version)
        assert endpoint is not None
        return endpoint, replica

    def _ready(self, exchange: Exchange) -> None:
        is_ready, missing = self._is_ready()
        if is_ready:
            _send_json(exchange, 200, {"ready": True}, JSON_HEAD_NO_STORE)
            return
        text = f"not ready: {', '.join(missing) or 'no model is served yet'}"
        if self._pipeline.admission.is_draining:
            text = "not ready: the server is shutting down"
        body = {"ready": False, "models": missing, "error": text, "code": "not_ready"}
        _send_json(exchange, 503, body, JSON_HEAD_NO_STORE + b"retry-after: 1\r\n")

    def _answer(self, exchange: Exchange, verbs: tuple[str, ...], make: Callable[[], Any]) -> None:
        _allow(exchange, verbs)
        _send_json(exchange, 200, make())

    def _statistics(self, exchange: Exchange, wanted: Mapping[str, list[str]]) -> None:
        future = self._loop.run_in_executor(None, lambda: statistics.add_up(self._read_all_slots(), wanted))
        self._tasks.add(future)
        future.add_done_callback(partial(self._send_statistics, exchange))

    def _send_statistics(self, exchange: Exchange, future: "asyncio.Future[list[dict[str, Any]]]") -> None:
        self._tasks.discard(future)
        try:
            _send_json(exchange, 200, {"model_stats": future.result()})
        except Exception as error:
            log_unexpected("statistics", error)
            refuse(exchange, ServerError("the statistics could not be read"))


def _segments(target: bytes) -> list[str]:
    """Percent-decoded path segments; a name with an encoded slash stays one segment and so matches nothing."""
    path = target.split(b"?", 1)[0]
    parts = path.split(b"/")
    if parts[0] or len(parts) < 2:
        raise NotFound("the path must begin with /")
    if parts[-1] == b"":
        parts.pop()
    return [unquote_to_bytes(part).decode("utf-8", "replace") for part in parts[1:]]


def _allow(exchange: Exchange, verbs: tuple[str, ...]) -> None:
    if exchange.method not in verbs:
        raise MethodNotAllowed(f"this route takes {' or '.join(verbs)}", verbs=verbs)


def _known(endpoint: Endpoint | None, version: str) -> Endpoint:
    if endpoint is None:
        raise UnknownModel("no model of that name is served; GET /v2/models lists what is")
    if version and version not in endpoint.versions():
        raise UnknownVersion(f"model {endpoint.name!r} has: {', '.join(endpoint.versions())}")
    return endpoint


class _IndexRequest(msgspec.Struct):
    ready: bool = False


def _only_ready(body: bytes) -> bool:
    if not body:
        return False
    try:
        return msgspec.json.decode(body, type=_IndexRequest).ready
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedJson(f'the body must be empty or {{"ready": true|false}}: {error}') from error


def _send_json(exchange: Exchange, status: int, value: Any, head: bytes = JSON_HEAD) -> None:
    # tritonclient's aio variant asks for compression on every request but undoes it only for inference results.
    exchange.may_compress = False
    exchange.send(status, head, (msgspec.json.encode(value),))
