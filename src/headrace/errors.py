"""Every error that a caller can be told, drawn once.

    HeadraceError                       code, HTTP status, gRPC status, retryable, blame
    ├── RequestError                    blame: caller → ending rejected
    │   ├── BadRequest 400              the message is not what the protocol says
    │   │   ├── MalformedJson
    │   │   └── InvalidInput            a tensor breaks the signature or the contract (carries field and reason)
    │   ├── NotFound 404                no such route
    │   │   ├── UnknownModel
    │   │   └── UnknownVersion
    │   ├── MethodNotAllowed 405
    │   ├── RequestTimeout 408          the caller was too slow to send
    │   ├── BodyTooLarge 413
    │   ├── UnsupportedEncoding 415
    │   ├── ExpectationFailed 417
    │   ├── HeaderTooLarge 431
    │   └── NotImplementedYet 501       a known route that this server does not offer
    ├── CapacityError 503               blame: capacity → ending rejected; carries Retry-After
    │   ├── QueueFull
    │   ├── DeadlineUnreachable         no schedule could make it
    │   ├── Shed                        priced out so that others make it
    │   ├── ModelLoading
    │   ├── ShuttingDown
    │   ├── RecordsUnavailable          strict durability, and the disk does not take the record
    │   └── TooManyConnections
    ├── DeadlineError 503               blame: deadline → ending expired, at a named stage
    └── ServerError 500                 blame: server → ending failed
        ├── ModelFailed                 the model raised
        ├── ModelUnavailable 503        its artefact could not be loaded; carries Retry-After
        ├── NonFiniteOutput             NaN or infinity where the reply cannot carry it
        └── WorkerLost                  the process that held the request died

    LoadError                           an artefact cannot be served (start-up and reload; never a reply by itself)
    ConfigError                         the configuration is wrong (start-up; reports every problem at once)

A message has three parts: what happened, the value seen, what would be accepted; and a `hint:` where one exists.
"""

from typing import ClassVar

from headrace.types import Blame, Ending

__all__ = [
    "BadRequest",
    "BodyTooLarge",
    "CapacityError",
    "ConfigError",
    "DeadlineError",
    "DeadlineUnreachable",
    "ExpectationFailed",
    "HeaderTooLarge",
    "HeadraceError",
    "InvalidInput",
    "LoadError",
    "MalformedJson",
    "MethodNotAllowed",
    "ModelFailed",
    "ModelLoading",
    "ModelUnavailable",
    "NonFiniteOutput",
    "NotFound",
    "NotImplementedYet",
    "QueueFull",
    "RecordsUnavailable",
    "RequestError",
    "RequestTimeout",
    "ServerError",
    "Shed",
    "ShuttingDown",
    "TooManyConnections",
    "UnknownModel",
    "UnknownVersion",
    "UnsupportedEncoding",
    "WorkerLost",
]


class HeadraceError(Exception):
    """An error with a stable code.

    Attributes:
        code: Stable, documented in `docs/reference/errors.md`; the `code` of the reply and of the metric.
        http_status: Status of an HTTP reply.
        grpc_status: Name of the gRPC status.
        is_retryable: The same request may succeed later.
        blame: Whose trouble it is.
        retry_after_s: When to come back, seconds; None when unknown.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    is_retryable: ClassVar[bool] = False
    blame: ClassVar[Blame] = Blame.SERVER

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def ending(self) -> Ending:
        """The ending of a request that is told this error."""
        if self.blame is Blame.SERVER:
            return Ending.FAILED
        if self.blame is Blame.DEADLINE:
            return Ending.EXPIRED
        return Ending.REJECTED


class RequestError(HeadraceError):
    """The caller must change the request."""

    code = "bad_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    blame = Blame.CALLER


class BadRequest(RequestError):
    """The message is not what the protocol says."""


class MalformedJson(BadRequest):
    """The body is not JSON, or not JSON of the right form."""

    code = "malformed_json"


class InvalidInput(BadRequest):
    """A tensor breaks the signature or the contract.

    Attributes:
        field: `input` or `input.column`: a name from the signature or the contract, never the caller's text, since it
            becomes a metric label; empty when no known field is concerned.
        reason: One of `REASONS`.
    """

    code = "invalid_input"
    REASONS: ClassVar[tuple[str, ...]] = (
        "missing",
        "unknown",
        "repeated",
        "datatype",
        "shape",
        "type",
        "range",
        "category",
        "nonfinite",
        "rows",
        "size",
    )

    def __init__(self, message: str, *, field: str, reason: str) -> None:
        super().__init__(message)
        self.field = field
        self.reason = reason


class NotFound(RequestError):
    """No such route."""

    code = "not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class UnknownModel(NotFound):
    """No endpoint has this name."""

    code = "unknown_model"


class UnknownVersion(NotFound):
    """The endpoint has no such version."""

    code = "unknown_version"


class MethodNotAllowed(RequestError):
    """The route exists under another verb.

    Attributes:
        verbs: Those that it takes.
    """

    code = "method_not_allowed"
    http_status = 405
    grpc_status = "UNIMPLEMENTED"

    def __init__(self, message: str, *, verbs: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.verbs = verbs


class RequestTimeout(RequestError):
    """The request did not arrive in full within its time limit."""

    code = "request_timeout"
    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"
    is_retryable = True


class BodyTooLarge(RequestError):
    """The body, or what it decompresses to, is above the limit."""

    code = "body_too_large"
    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"


class UnsupportedEncoding(RequestError):
    """A content or transfer encoding that is not offered."""

    code = "unsupported_encoding"
    http_status = 415
    grpc_status = "UNIMPLEMENTED"


class ExpectationFailed(RequestError):
    """An Expect header other than 100-continue."""

    code = "expectation_failed"
    http_status = 417


class HeaderTooLarge(RequestError):
    """Request line and headers are above the limit."""

    code = "header_too_large"
    http_status = 431
    grpc_status = "RESOURCE_EXHAUSTED"


class NotImplementedYet(RequestError):
    """A route of the protocol that this server does not offer."""

    code = "not_implemented"
    http_status = 501
    grpc_status = "UNIMPLEMENTED"


class CapacityError(HeadraceError):
    """The server is sound but cannot take this request now."""

    code = "overloaded"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    is_retryable = True
    blame = Blame.CAPACITY


class QueueFull(CapacityError):
    """The waiting list is at its bound."""

    code = "queue_full"


class DeadlineUnreachable(CapacityError):
    """No schedule could answer this request in time, so it was not queued."""

    code = "deadline_unreachable"


class Shed(CapacityError):
    """Dropped from the queue so that more of the others are answered in time."""

    code = "shed"


class ModelLoading(CapacityError):
    """The model is known but not warm yet."""

    code = "model_loading"


class ShuttingDown(CapacityError):
    """The server finishes what it holds and takes nothing new."""

    code = "shutting_down"


class RecordsUnavailable(CapacityError):
    """Strict durability is asked for and the record cannot be written."""

    code = "records_unavailable"


class TooManyConnections(CapacityError):
    """The worker holds its most connections."""

    code = "too_many_connections"


class BodiesFull(CapacityError):
    """The bodies that the worker is receiving take all the memory they may."""

    code = "bodies_full"


class DeadlineError(HeadraceError):
    """The deadline passed while the request was here.

    Attributes:
        stage: The stage in which it passed, for example `queue`.
    """

    code = "deadline_expired"
    http_status = 503
    grpc_status = "DEADLINE_EXCEEDED"
    is_retryable = True
    blame = Blame.DEADLINE

    def __init__(self, message: str, *, stage: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.stage = stage


class ServerError(HeadraceError):
    """Something of ours failed."""


class ModelFailed(ServerError):
    """The model raised while it ran."""

    code = "model_failed"


class ModelUnavailable(ServerError):
    """The model's artefact could not be loaded."""

    code = "model_unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    is_retryable = True


class NonFiniteOutput(ServerError):
    """An output holds NaN or infinity, which JSON cannot carry."""

    code = "nonfinite_output"


class WorkerLost(ServerError):
    """The worker process that held the request died; only ever counted, its callers saw their connection close."""

    code = "worker_lost"


class LoadError(Exception):
    """An artefact cannot be served.

    Attributes:
        message: What is wrong with which file, and what would be accepted.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(Exception):
    """The configuration is wrong.

    Attributes:
        problems: One line each, all that were found.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
