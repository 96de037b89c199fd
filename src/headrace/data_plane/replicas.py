"""Replicas: loaded, warm model versions, and the endpoints that name them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from headrace.clock import Clock
from headrace.data_plane.batch import Lane, WaitingList
from headrace.data_plane.batch_curve import CurveLearner, LatencyCurve, lossy_rate_limit, rate_ceiling, sustainable_rate
from headrace.data_plane.batch_rivals import make_policy
from headrace.data_plane.gateway.oip import Codec
from headrace.data_plane.ticket import BASELINE_ARM, InferRequest, Ticket
from headrace.data_plane.trial import TrialResult, try_out
from headrace.data_plane.validate import ContractChecker, compile_contract, contract_problems
from headrace.errors import HeadraceError, LoadError
from headrace.ports import Runtime, RuntimeLoader
from headrace.report import ReplicaReport
from headrace.snapshot import EndpointSpec, VersionSpec
from headrace.telemetry.slots import Ledger
from headrace.tensors import Signature
from headrace.types import ReplicaState

DEADLINE_WITHOUT_SLO_S = 1.0
"""Deadline where no SLO was declared, unless the model itself takes longer than a fifth of it."""

SINGLE_RUNS_PER_DEADLINE = 5.0

BATCH_ROWS_MAX = 128
"""Largest batch unless the configuration says otherwise: beyond it throughput gains little and memory grows."""

BATCH_BYTES_MAX = 64 * 1024 * 1024

INLINE_RUN_S_MAX = 0.000_15
"""A model whose batch of eight takes less runs on the event loop: handing it to a thread would cost about 60 µs and a
context switch, more than it keeps the loop waiting."""

REQUEST_S = 40e-6
"""Processor time of one small request apart from decoding, running and encoding: sockets, parsing, books, record
(benchmarks/notes.md). Only the rate that the start screen announces depends on it."""

SHAPES_MAX = 64
"""Most waiting lists of one replica, one per shape of the dimensions behind the batch."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What loading on a background thread brings back to the event loop."""

    runtime: Runtime
    trial: TrialResult
    load_s: float
    warm_s: float


def load_model(
    endpoint: EndpointSpec, version: VersionSpec, loader: RuntimeLoader, threads: int, clock: Clock
) -> LoadedModel:
    """Load and try out one version; blocking, runs on a background thread.

    Raises:
        LoadError: It cannot be served.
    """
    started_s = clock.now_s()
    runtime = loader(version, endpoint.runtime, threads)
    loaded_s = clock.now_s()
    try:
        problems = contract_problems(runtime.signature, endpoint.contract)
        if problems:
            raise LoadError(f"the contract of {endpoint.name!r} does not fit {version.path}: " + "; ".join(problems))
        trial = try_out(runtime, clock, rows_max=endpoint.batching.rows_max)
    except BaseException:
        runtime.close()
        raise
    return LoadedModel(runtime, trial, loaded_s - started_s, clock.now_s() - loaded_s)


class Replica:
    """One version, warm, with its codec, its contract and its waiting lists.

    Attributes:
        state: READY until the plane drains it.
        deadline_s: Time allowed to a request that brings no deadline of its own.
        lane: Shares an executor with other replicas.
        tickets_open: Requests that hold this replica; it is closed only at zero.
        answer_head: Header lines that every answer of this version carries.
    """

    def __init__(
        self,
        endpoint: EndpointSpec,
        version: VersionSpec,
        model: LoadedModel,
        lane: Lane,
        json_depth_max: int,
    ) -> None:
        self.endpoint = endpoint
        self.version = version.version
        self.spec = version
        self.model = endpoint.model
        self.runtime = model.runtime
        self.signature: Signature = model.trial.signature
        self.trial = model.trial
        self.load_s, self.warm_s = model.load_s, model.warm_s
        self.lane = lane
        self.state = ReplicaState.READY
        self.tickets_open = 0
        self.codec = Codec(
            endpoint.name, version.version, self.signature, endpoint.nonfinite, endpoint.contract, json_depth_max
        )
        self.answer_head = f"x-headrace-version: {version.version}\r\nx-headrace-arm: {BASELINE_ARM}\r\n"
        self.answer_head.encode("ascii")  # what a header cannot carry fails here, at load, and not at every request
        self.check_contract: ContractChecker | None = compile_contract(self.signature, endpoint.contract)
        curve = CurveLearner(model.trial.warmup).curve
        self.deadline_s = _deadline_s(endpoint, curve)
        self.rows_max = self._largest_batch(curve)
        self.request_s = REQUEST_S + self._measure_codec_s()
        self._lists: dict[tuple[tuple[int, ...], ...], WaitingList] = {}
        self._has_variable_shape = any(-1 in spec.shape[1:] for spec in self.signature.inputs)
        self._fixed = self._make_list()

    def _largest_batch(self, curve: LatencyCurve) -> int:
        if not self.signature.is_batched:
            return 1
        if self.endpoint.batching.rows_max is not None:
            return self.endpoint.batching.rows_max
        by_memory = BATCH_BYTES_MAX // max(1, self.trial.input_bytes_per_row)
        return max(1, min(BATCH_ROWS_MAX, by_memory, curve.rows_within(self.deadline_s, BATCH_ROWS_MAX)))

    def _measure_codec_s(self) -> float:
        """Seconds to decode a JSON request of one row; zero where the example cannot be written as JSON."""
        inputs = [
            {"name": spec.name, "shape": array.shape, "datatype": spec.datatype.wire, "data": array.ravel().tolist()}
            for spec, array in zip(self.signature.inputs, self.trial.example.values(), strict=False)
            if not array.dtype.hasobject
        ]
        body = msgspec.json.encode({"inputs": inputs})
        durations_s = []
        for _ in range(5):
            started_s = time.perf_counter()
            try:
                self.codec.decode(body, None)
            except HeadraceError:
                return 0.0
            durations_s.append(time.perf_counter() - started_s)
        return min(durations_s)

    def _make_list(self) -> WaitingList:
        learner = CurveLearner(self.trial.warmup)
        batching = self.endpoint.batching
        policy = make_policy(batching.policy, learner, self.rows_max, self.deadline_s, delay_s=batching.delay_s)
        is_batched = self.signature.is_batched
        return WaitingList(self.runtime, policy, learner, self.rows_max, is_batched, self.deadline_s)

    def waiting_list(self, request: InferRequest) -> WaitingList:
        """The list whose batches this request may join: all its members agree in every dimension but the first."""
        if not self._has_variable_shape:
            return self._fixed
        shape = _shape_behind_rows(request)
        waiting_list = self._lists.pop(shape, None)
        if waiting_list is None:
            self._forget_idle_shapes()
            waiting_list = self._make_list()
        self._lists[shape] = waiting_list  # the last used is the last
        return waiting_list

    def _forget_idle_shapes(self) -> None:
        """Make room for one more list. Where somebody waits in every one of them there are more for a while."""
        for shape in [shape for shape, waiting_list in self._lists.items() if not waiting_list.pieces]:
            if len(self._lists) < SHAPES_MAX:
                return
            del self._lists[shape]

    def forget(self, ticket: Ticket) -> None:
        """Take what still waits of an ended ticket out of the waiting lists."""
        if ticket.request is None or not ticket.pieces:
            return
        waiting_list = self._lists.get(_shape_behind_rows(ticket.request)) if self._has_variable_shape else self._fixed
        if waiting_list is not None:  # None: nothing of that shape waits any more, only runs
            self.lane.forget(waiting_list, ticket)

    @property
    def pieces_waiting(self) -> int:
        return len(self._fixed.pieces) + sum(len(waiting_list.pieces) for waiting_list in self._lists.values())

    def report(self, is_default: bool) -> ReplicaReport:
        """What the start screen and the control process show; the curve is the one in force now."""
        curve = self._fixed.learner.curve
        runs_unbatched = not self.signature.is_batched
        served = replace(curve, per_row_s=curve.per_row_s + self.request_s)
        lossy = lossy_rate_limit(curve, self.deadline_s) if self.deadline_s < 2 * curve.duration_s(1) else None
        return ReplicaReport(
            endpoint=self.endpoint.name,
            model=self.model,
            version=self.version,
            state=self.state,
            facts=dict(self.runtime.facts),
            is_default=is_default,
            is_inline=self.lane.executor.is_inline,
            batching=self.trial.batching,
            # One request is one run, whatever its rows; and measured at one size, the fit has no base of its own.
            base_s=curve.duration_s(1) if runs_unbatched else curve.base_s,
            per_row_s=0.0 if runs_unbatched else curve.per_row_s,
            sigma=curve.sigma,
            rows_max=self.rows_max,
            deadline_s=self.deadline_s,
            slo=str(self.endpoint.slo) if self.endpoint.slo else "",
            sustainable_rate=sustainable_rate(served, self.deadline_s, self.rows_max),
            ceiling_rate=rate_ceiling(served, self.deadline_s, self.rows_max),
            lossy_rate=lossy,
            request_s=self.request_s,
            load_s=self.load_s,
            warm_s=self.warm_s,
        )

    def close(self) -> None:
        self.runtime.close()


def _shape_behind_rows(request: InferRequest) -> tuple[tuple[int, ...], ...]:
    return tuple(array.shape[1:] for array in request.inputs.values())


def is_cheap(trial: TrialResult) -> bool:
    """Whether the model may run on the event loop.

    Never one whose run has no bound that was measured: where a dimension is the caller's choice and not cut into
    batches, one large request would hold up everybody.
    """
    signature = trial.signature
    cut = 1 if signature.is_batched else 0
    if any(-1 in spec.shape[cut:] for spec in signature.inputs):
        return False
    longest_s = max((took_s for _, took_s in trial.warmup), default=float("inf"))
    return longest_s <= INLINE_RUN_S_MAX


def _deadline_s(endpoint: EndpointSpec, curve: LatencyCurve) -> float:
    if endpoint.slo is not None:
        return endpoint.slo.threshold_s
    return max(DEADLINE_WITHOUT_SLO_S, SINGLE_RUNS_PER_DEADLINE * curve.duration_s(1))


class Endpoint:
    """What a name in the URL leads to: ready replicas by version, and the ledger that counts its requests.

    Attributes:
        spec: From the snapshot in force.
        is_strict: No answer leaves before its record is on disk.
        payload_rate: Share of requests whose inputs and outputs are recorded.
        replicas: By version; only such as can take requests.
        problems: Version → why it could not be loaded.
        default: Serves requests that name no version; None while nothing is warm.
    """

    def __init__(self, spec: EndpointSpec, ledger: Ledger) -> None:
        self.spec = spec
        self.name = spec.name
        self.model = spec.model
        self.is_strict = spec.records.durability == "strict"
        self.payload_rate = spec.records.payload_rate
        self.ledger = ledger
        self.replicas: Mapping[str, Replica] = {}
        self.problems: dict[str, str] = {}
        self.default: Replica | None = None

    @property
    def is_ready(self) -> bool:
        """A request that names no version can be answered."""
        return self.default is not None

    def versions(self) -> list[str]:
        """Every version of the snapshot, loaded or not."""
        return [version.version for version in self.spec.versions]
