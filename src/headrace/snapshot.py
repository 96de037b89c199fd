"""The desired state of the data plane: one immutable, hashed value that workers reconcile to.

A snapshot says what shall be served. It is written by the control plane (or by `headrace serve` at the first start),
read by every worker, and never changed: a new state is a new snapshot. Two snapshots with the same content have the
same id whatever the time they were made.
"""

import hashlib
from typing import Literal

import msgspec

SNAPSHOT_SCHEMA = 1

NonFinitePolicy = Literal["error", "null", "literal"]
Durability = Literal["buffered", "strict"]


class FieldContract(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one column of a two-dimensional input may hold.

    Attributes:
        name: Used in errors and as the metric label `input.name`.
        index: Column; None means the position in the list.
        min: Smallest accepted value.
        max: Largest accepted value.
        categories: Accepted values; None accepts all.
        required: A missing value (JSON null) is an error unless there is a default.
        default: Stands in for a missing value.
    """

    name: str
    index: int | None = None
    min: float | None = None
    max: float | None = None
    categories: tuple[float | str, ...] | None = None
    required: bool = True
    default: float | str | bool | None = None


class InputContract(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one input tensor may hold; every rule is optional.

    Attributes:
        min, max: Bounds on every element.
        categories: Accepted elements.
        nonfinite: Whether NaN and infinity are taken (`accept`) or refused (`reject`).
        element_bytes_max: Longest BYTES element.
        required: An input that may be left out needs a default.
        default: Fills an input that is left out, and any missing (null) element.
        fields: Rules per column (last dimension).
    """

    min: float | None = None
    max: float | None = None
    categories: tuple[float | str, ...] | None = None
    nonfinite: Literal["accept", "reject"] = "accept"
    element_bytes_max: int | None = None
    required: bool = True
    default: float | str | bool | None = None
    fields: tuple[FieldContract, ...] = ()


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an endpoint takes, beyond what the artefact itself says.

    Attributes:
        rows_max: Most rows in one request; None leaves it to the body limit.
        inputs: By input name.
    """

    rows_max: int | None = None
    inputs: dict[str, InputContract] = {}


class RecordPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How requests of an endpoint are written down.

    Attributes:
        durability: `buffered` writes within 50 ms after the answer; `strict` lets no answer leave before its record is
            on disk.
        payload_rate: Share of requests whose inputs and outputs are kept with the record, 0 to 1.
    """

    durability: Durability = "buffered"
    payload_rate: float = 0.0


class BatchingPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How batches are formed; `priced` needs nothing but the SLO, the others are there to compare with.

    Attributes:
        policy: `priced`, `greedy`, `fixed_delay`, `aimd` or `cork`.
        rows_max: Largest batch; None lets the load-time measurement choose.
        delay_s: For `fixed_delay`: how long the oldest request waits for others, seconds; None takes the policy's own.
    """

    policy: Literal["priced", "greedy", "fixed_delay", "aimd", "cork"] = "priced"
    rows_max: int | None = None
    delay_s: float | None = None


class RuntimeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a model is executed.

    Attributes:
        name: Runtime adapter: `onnx`, or `sleep` for tests of the scheduler.
        threads: Threads one run may use; None takes the worker's share of the cores.
        graph_level: Graph optimisation level of ONNX Runtime.
        providers: Execution providers in order of preference; empty takes what the machine has.
    """

    name: str = "onnx"
    threads: int | None = None
    graph_level: Literal["disabled", "basic", "extended", "all"] = "all"
    providers: tuple[str, ...] = ()


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A latency objective: the share `quantile` of requests is answered within `threshold_s`.

    The threshold is also the deadline of every request that does not bring its own.
    """

    quantile: float
    threshold_s: float

    def __str__(self) -> str:
        threshold = f"{self.threshold_s:g}s" if self.threshold_s >= 1 else f"{self.threshold_s * 1e3:g}ms"
        return f"p{self.quantile * 100:g}={threshold}"


class VersionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One version of a model that shall be loaded.

    Attributes:
        version: As callers name it.
        path: Absolute path of the artefact.
        digest: `sha256:` and 64 hexadecimal digits of the artefact's bytes; a changed file is a changed version spec.
        labels: Class labels from a `labels.txt` beside the artefact; empty leaves the artefact's own.
    """

    version: str
    path: str
    digest: str
    labels: tuple[str, ...] = ()


class EndpointSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One endpoint: a name in the URL, the versions behind it and the rules it lives by.

    Attributes:
        name: In the URL; no `/`.
        model: Name of the model, for labels and records.
        versions: Loaded versions; at least one.
        default_version: Serves requests that name no version.
        slo: None means none was declared: the data plane then takes max(1 s, 5 × one row's time) as deadline.
        nonfinite: What a JSON reply does with NaN and infinity in an output.
    """

    name: str
    model: str
    versions: tuple[VersionSpec, ...]
    default_version: str
    slo: Slo | None = None
    contract: Contract = Contract()
    records: RecordPolicy = RecordPolicy()
    batching: BatchingPolicy = BatchingPolicy()
    runtime: RuntimeOptions = RuntimeOptions()
    nonfinite: NonFinitePolicy = "error"


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything the data plane needs to know.

    Attributes:
        id: First 16 hexadecimal digits of the SHA-256 of the content.
        schema: Version of this layout.
        endpoints: Sorted by name.
    """

    id: str
    schema: int
    endpoints: tuple[EndpointSpec, ...]


def make_snapshot(endpoints: list[EndpointSpec]) -> Snapshot:
    """Build a snapshot; the id follows from the content alone."""
    ordered = tuple(sorted(endpoints, key=lambda endpoint: endpoint.name))
    content = msgspec.json.encode((SNAPSHOT_SCHEMA, ordered), order="deterministic")
    return Snapshot(id=hashlib.sha256(content).hexdigest()[:16], schema=SNAPSHOT_SCHEMA, endpoints=ordered)


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Serialise for the disk, readable."""
    return msgspec.json.format(msgspec.json.encode(snapshot, order="deterministic"), indent=1)


def decode_snapshot(content: bytes) -> Snapshot:
    """Read a snapshot back and check that it is the one its id names.

    Raises:
        ValueError: The bytes are not a snapshot of this schema, or were changed.
    """
    snapshot = msgspec.json.decode(content, type=Snapshot)
    if snapshot.schema != SNAPSHOT_SCHEMA:
        raise ValueError(f"snapshot schema is {snapshot.schema}, this program reads {SNAPSHOT_SCHEMA}")
    if make_snapshot(list(snapshot.endpoints)).id != snapshot.id:
        raise ValueError(f"snapshot {snapshot.id} does not have the content that its id names")
    return snapshot


def version_key(version: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which `v10` is above `v9` and `10` above `9`."""
    parts: list[tuple[int, int, str]] = []
    digits = text = ""
    for character in version + "\0":
        if character.isdigit() and character.isascii():
            if text:
                parts.append((0, 0, text))
                text = ""
            digits += character
            continue
        if digits:
            parts.append((1, int(digits), ""))
            digits = ""
        if character != "\0":
            text += character
    if text:
        parts.append((0, 0, text))
    return tuple(parts)
