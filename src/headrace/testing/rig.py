"""The data plane without sockets: the real pipeline, plane and lanes on the running loop, with models that are plain
functions. For tests that must reach one caller in any state and see what its neighbours get.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from headrace.clock import SystemClock
from headrace.data_plane.admit import Admission
from headrace.data_plane.pipeline import Pipeline
from headrace.data_plane.plane import Plane
from headrace.data_plane.replicas import Replica
from headrace.data_plane.statistics import ModelStatistics
from headrace.data_plane.ticket import InferRequest, RequestedOutput, Ticket
from headrace.errors import HeadraceError, LoadError, ModelFailed
from headrace.ports import RecordSink
from headrace.snapshot import BatchingPolicy, EndpointSpec, RuntimeOptions, VersionSpec, make_snapshot
from headrace.storage.memory import MemorySink
from headrace.telemetry.metrics import RecordFold
from headrace.telemetry.slots import LedgerRow, SlotWriter, read_slots
from headrace.tensors import Array, Datatype, Signature, TensorSpec

Function = Callable[[Array], Array]


class FunctionRuntime:
    """A model that is a function from FP32 [N, 1] to FP32 [N, 1].

    Attributes:
        is_closed: `close` was called.
    """

    def __init__(self, function: Function, *, is_batched: bool = True) -> None:
        self._function = function
        self.is_closed = False
        self._signature = Signature(
            (TensorSpec("x", Datatype.FP32, (-1, 1)),),
            (TensorSpec("y", Datatype.FP32, (-1, 1)),),
            is_batched,
            "function",
        )

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def facts(self) -> Mapping[str, str]:
        return {}

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        try:
            return [self._function(inputs["x"])]
        except HeadraceError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        self.is_closed = True


class RigCall:
    """The caller's half: what it sent and what it was told.

    Attributes:
        answer: Set when a reply was sent: the output rows, or the error.
        is_connected: False makes `send` fail, as if the caller had gone.
    """

    protocol = "http"

    def __init__(self, rows: Array, timeout_s: float | None = None, broken: HeadraceError | None = None) -> None:
        self.rows = rows
        self.timeout_s = timeout_s
        self.broken = broken
        self.bytes_in = rows.nbytes
        self.is_connected = True
        self.answer: asyncio.Future[Array | HeadraceError] = asyncio.get_running_loop().create_future()
        self.answers_sent = 0
        self._encoded: Array | HeadraceError | None = None

    def decode(self, replica: Replica) -> InferRequest:
        if self.broken is not None:
            raise self.broken
        rows = len(self.rows) if replica.signature.is_batched else 1
        return InferRequest(None, {}, {"x": self.rows}, rows, (RequestedOutput(0, False),), self.timeout_s)

    def encode(self, ticket: Ticket) -> None:
        self._encoded = ticket.error if ticket.error is not None else ticket.outputs.array(0)  # type: ignore[union-attr]  # answered tickets have outputs
        ticket.status = ticket.error.http_status if ticket.error is not None else 200

    def send(self) -> bool:
        if not self.is_connected:
            return False
        self.answers_sent += 1
        assert self._encoded is not None
        self.answer.set_result(self._encoded)
        return True


class Rig:
    """An async context manager around one data plane.

    Args:
        folder: For the counters.
        models: Name → function, or → a prepared `FunctionRuntime`.
        sink: Takes the records; in memory unless told otherwise.
        changes: Endpoint settings by name: keyword arguments of `EndpointSpec`.
    """

    def __init__(
        self,
        folder: Path,
        models: Mapping[str, Function | FunctionRuntime],
        *,
        sink: RecordSink | None = None,
        changes: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._slots_file = folder / "worker-1.slots"
        self._load_lock = folder / "load.lock"
        self.models = dict(models)
        self._given_sink = sink
        self.changes = dict(changes or {})
        self._count = 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        clock = SystemClock()
        self.sink = self._given_sink if self._given_sink is not None else MemorySink(loop.call_soon)
        self.slots = SlotWriter.open(self._slots_file)
        self.admission = Admission()
        self.pipeline = Pipeline(
            loop, clock, 1, self.admission, self.slots.ledger("unknown"), self.sink, RecordFold(self.slots),
            ModelStatistics(self.slots, clock),
        )  # fmt: skip
        self.plane = Plane(
            loop, clock, self.pipeline, self.slots, {"function": self._load}, 1, 100, self._load_lock, lambda: None
        )
        await self.deploy()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.plane.close()
        self.pipeline.close()
        await self.sink.close()
        self.slots.close()

    async def deploy(self, version: str = "1") -> None:
        """Publish the models as a snapshot and wait until it is reconciled."""
        endpoints = [
            EndpointSpec(
                **{
                    "name": name,
                    "model": name,
                    "versions": (VersionSpec(version, name, f"sha256:{version}"),),
                    "default_version": version,
                    "runtime": RuntimeOptions(name="function"),
                    "batching": BatchingPolicy(),
                    **self.changes.get(name, {}),
                }
            )
            for name in self.models
        ]
        await self.plane.reconcile(make_snapshot(endpoints))

    def _load(self, version: VersionSpec, options: RuntimeOptions, threads: int) -> FunctionRuntime:
        model = self.models.get(version.path)
        if model is None:
            raise LoadError(f"no function is called {version.path!r}")
        return model if isinstance(model, FunctionRuntime) else FunctionRuntime(model)

    def start(self, model: str, rows: Any, **call: Any) -> tuple[Ticket, RigCall]:
        """Send one request; does not wait."""
        array = np.asarray(rows, dtype=np.float32).reshape(-1, 1)
        rig_call = RigCall(array, **call)
        self._count += 1
        ticket = Ticket(rig_call, f"request-{self._count}", "0" * 32, SystemClock.now_s())
        self.pipeline.accept(ticket, self.pipeline.endpoints.get(model), "")
        return ticket, rig_call

    async def infer(self, model: str, rows: Any, **call: Any) -> Array | HeadraceError:
        """Send one request and wait for its reply."""
        _, rig_call = self.start(model, rows, **call)
        return await asyncio.wait_for(rig_call.answer, 10)

    def use_thread_lane(self, model: str) -> None:
        """Run a model on the executor thread however cheap it measured."""
        for replica in self.plane.replicas():
            if replica.endpoint.name == model:
                replica.lane = self.plane.thread_lane

    async def idle(self) -> None:
        """Return when no request is open and what ended has been folded."""
        while self.admission.tickets_open:  # noqa: ASYNC110  # the admission's own event belongs to the worker
            await asyncio.sleep(0.001)
        self.pipeline.flush()

    def ledger(self, endpoint: str) -> LedgerRow:
        """The conservation row of an endpoint."""
        return read_slots(self._slots_file).ledgers[endpoint]


class Gate:
    """A model that waits until it is let go: holds batches inside the executor for as long as a test needs.

    Attributes:
        is_open: Set it to let everything pass.
        entered: Set while a batch is inside.
        is_closed_to_trials: Set it after deployment; until then the gate lets the trial runs pass.
    """

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.entered = threading.Event()
        self.is_closed_to_trials = False
        self._passes = threading.Semaphore(0)

    def __call__(self, rows: Array) -> Array:
        if self.is_closed_to_trials:
            self.entered.set()
            end_s = SystemClock.now_s() + 10
            while not self.is_open.is_set() and not self._passes.acquire(timeout=0.001):
                if SystemClock.now_s() > end_s:
                    raise TimeoutError("the gate was never opened")
        return rows * 2

    async def let_one_batch_pass(self) -> None:
        """Let the batch inside go, and return when the next one is inside."""
        self.entered.clear()
        self._passes.release()
        await asyncio.to_thread(self.entered.wait, 10)
