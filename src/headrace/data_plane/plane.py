"""The data plane of one worker: holds the endpoints and brings them to what the snapshot says.

Level-triggered: `reconcile` compares what is desired with what is there and may be interrupted and repeated at any
instant. A version that cannot be loaded leaves what was serving; a version that is no longer wanted is closed when the
last request that holds it has ended.
"""

import asyncio
import fcntl
import gc
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from headrace.background import step_back
from headrace.clock import Clock
from headrace.data_plane.batch import InlineExecutor, Lane, ThreadExecutor
from headrace.data_plane.pipeline import Pipeline
from headrace.data_plane.replicas import Endpoint, Replica, is_cheap, load_model
from headrace.errors import LoadError
from headrace.ports import RuntimeLoader
from headrace.report import ReplicaReport
from headrace.snapshot import EndpointSpec, Snapshot, VersionSpec
from headrace.telemetry.logs import log, log_unexpected
from headrace.telemetry.slots import SlotWriter
from headrace.types import ReplicaState

DRAIN_POLL_S: Final = 0.02


class Plane:
    """Endpoints, replicas and the two lanes they run in.

    Args:
        loop: The worker's event loop.
        clock: Time.
        pipeline: Is handed the endpoints.
        slots: Ledgers and counters of this worker.
        loaders: Runtime adapter by name.
        threads: Threads per model run.
        json_depth_max: Deepest accepted JSON.
        load_lock: File that workers of one machine lock in turn while they load beside traffic.
        changed: Called whenever endpoints or replicas changed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        pipeline: Pipeline,
        slots: SlotWriter,
        loaders: Mapping[str, RuntimeLoader],
        threads: int,
        json_depth_max: int,
        load_lock: Path,
        changed: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._pipeline = pipeline
        self._slots = slots
        self._loaders = loaders
        self._threads = threads
        self._json_depth_max = json_depth_max
        self._load_lock = load_lock
        self._changed = changed
        self.executor = ThreadExecutor(loop, clock)
        self.inline_lane = Lane(loop, clock, InlineExecutor(clock), pipeline.executed, pipeline.refuse)
        self.thread_lane = Lane(loop, clock, self.executor, pipeline.executed, pipeline.refuse)
        self._draining: list[Replica] = []
        self.is_ready = False
        self.warm_snapshot_id = ""

    @property
    def endpoints(self) -> Mapping[str, Endpoint]:
        return self._pipeline.endpoints

    def not_ready(self) -> list[str]:
        """Names of the endpoints that have no warm default version."""
        return [name for name, endpoint in self.endpoints.items() if not endpoint.is_ready]

    def problems(self) -> dict[tuple[str, str], str]:
        """Endpoint and version → why it could not be loaded."""
        return {
            (name, version): problem
            for name, endpoint in self.endpoints.items()
            for version, problem in endpoint.problems.items()
        }

    def cannot_serve(self) -> bool:
        """Every endpoint has failed to load: there is nothing to wait for."""
        return bool(self.endpoints) and all(
            not endpoint.is_ready and endpoint.spec.default_version in endpoint.problems
            for endpoint in self.endpoints.values()
        )

    # ---------------------------------------------------------------- reconcile

    async def reconcile(self, snapshot: Snapshot) -> None:
        """Bring the endpoints to what a snapshot says: load, warm, switch, drain, unload."""
        before = self.endpoints
        self._pipeline.endpoints = {
            spec.name: self._carry_over(spec, before.get(spec.name)) for spec in snapshot.endpoints
        }
        self._pipeline.snapshot_id = snapshot.id
        self._drain_unreferenced(before)
        self._changed()
        for endpoint in list(self.endpoints.values()):
            for version in sorted(endpoint.spec.versions, key=lambda v: v.version != endpoint.spec.default_version):
                if not self._is_current(endpoint, version):
                    await self._load(endpoint, version)
        if self._is_warm():
            self.warm_snapshot_id = snapshot.id
        _tidy_memory()
        self._tell()

    def _carry_over(self, spec: EndpointSpec, old: Endpoint | None) -> Endpoint:
        """The endpoint of a new snapshot, with every replica of the old one that can still serve."""
        endpoint = Endpoint(spec, self._slots.ledger(spec.name))
        if old is not None:
            wanted = set(endpoint.versions())
            endpoint.replicas = {version: replica for version, replica in old.replicas.items() if version in wanted}
            endpoint.default = old.default
            self._choose_default(endpoint)
        return endpoint

    def _is_current(self, endpoint: Endpoint, version: VersionSpec) -> bool:
        replica = endpoint.replicas.get(version.version)
        return replica is not None and replica.spec == version and _same_rules(replica.endpoint, endpoint.spec)

    def _is_warm(self) -> bool:
        """Every endpoint serves its default version as the snapshot describes it; what served before does not count."""
        return all(
            self._is_current(endpoint, version)
            for endpoint in self.endpoints.values()
            for version in endpoint.spec.versions
            if version.version == endpoint.spec.default_version
        )

    def _choose_default(self, endpoint: Endpoint) -> None:
        """The desired default once it is there; until then whatever served before."""
        desired = endpoint.replicas.get(endpoint.spec.default_version)
        if desired is not None:
            endpoint.default = desired

    async def _load(self, endpoint: Endpoint, version: VersionSpec) -> None:
        try:
            replica = await self._load_in_background(endpoint.spec, version)
        except LoadError as error:
            endpoint.problems[version.version] = error.message
            log("error", "model not loaded", endpoint=endpoint.name, version=version.version, reason=error.message)
            self._tell()
            return
        old = endpoint.replicas.get(version.version)
        previous_default = endpoint.default
        endpoint.problems.pop(version.version, None)
        endpoint.replicas = {**endpoint.replicas, version.version: replica}
        self._choose_default(endpoint)
        for retired in {old, previous_default} - {None, endpoint.default}:
            assert retired is not None
            if retired not in endpoint.replicas.values():
                self._drain(retired)
        self._tell()

    def _tell(self) -> None:
        # Readiness latches: a later failure shows in that model's own readiness, not in the worker's.
        # With nothing to serve a worker is not ready.
        if not self.is_ready and self.endpoints and not self.not_ready():
            _tidy_memory()  # now, while nobody waits: afterwards it would hold up the first requests
            self.is_ready = True
        self._changed()

    async def _load_in_background(self, spec: EndpointSpec, version: VersionSpec) -> Replica:
        """Load on a thread of its own, which ends with the load: its priority cannot always be raised again."""
        done: asyncio.Future[Replica] = self._loop.create_future()
        thread = threading.Thread(
            target=self._load_on_thread, args=(spec, version, done), name="headrace-loader", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system grants no thread now; it may when the load is tried again
            raise LoadError(f"{version.path} could not be loaded: {error}") from error
        return await done

    def _load_on_thread(self, spec: EndpointSpec, version: VersionSpec, done: "asyncio.Future[Replica]") -> None:
        def settle(result: Replica | LoadError) -> None:
            if done.cancelled():
                if isinstance(result, Replica):
                    result.close()
            elif isinstance(result, LoadError):
                done.set_exception(result)
            else:
                done.set_result(result)

        result: Replica | LoadError
        try:
            loader = self._loaders.get(spec.runtime.name)
            if loader is None:
                known = ", ".join(sorted(self._loaders))
                raise LoadError(f"runtime {spec.runtime.name!r} is not installed; available: {known}")
            if self.is_ready:
                with open(self._load_lock, "ab") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    self._step_back()
                    result = self._make_replica(spec, version, loader)
            else:
                result = self._make_replica(spec, version, loader)
        except LoadError as error:
            result = error
        except BaseException as error:  # whatever a foreign loader raises, SystemExit too, is this model's problem
            log_unexpected("load", error)
            result = LoadError(f"{version.path} could not be loaded: {type(error).__name__}: {error}")
        try:
            self._loop.call_soon_threadsafe(settle, result)
        except RuntimeError:  # the loop has been closed: the worker is on its way out
            return

    def _make_replica(self, spec: EndpointSpec, version: VersionSpec, loader: RuntimeLoader) -> Replica:
        """All of it on the loader thread: compiling and timing the codec of a large input takes tens of milliseconds,
        and whatever is wrong with it is this version's problem alone."""
        model = load_model(spec, version, loader, self._threads, self._clock)
        try:
            lane = self.inline_lane if is_cheap(model.trial) else self.thread_lane
            return Replica(spec, version, model, lane, self._json_depth_max)
        except BaseException:
            model.runtime.close()
            raise

    def _step_back(self) -> None:
        # A runtime with several threads per run starts its pool here, and the pool would keep the low priority.
        if self._threads == 1:
            step_back()

    # ---------------------------------------------------------------- drain

    def _drain_unreferenced(self, before: Mapping[str, Endpoint]) -> None:
        kept = {id(replica) for endpoint in self.endpoints.values() for replica in _all_replicas(endpoint)}
        for endpoint in before.values():
            for replica in _all_replicas(endpoint):
                if id(replica) not in kept:
                    self._drain(replica)

    def _drain(self, replica: Replica) -> None:
        if replica.state is not ReplicaState.DRAINING:
            replica.state = ReplicaState.DRAINING
            self._draining.append(replica)
            self._close_drained()

    def _close_drained(self) -> None:
        for replica in list(self._draining):
            # A batch whose callers have all left still runs.
            if replica.tickets_open or self._is_running(replica):
                continue
            self._draining.remove(replica)
            _close(replica)
        if self._draining:
            self._loop.call_later(DRAIN_POLL_S, self._close_drained)

    def _is_running(self, replica: Replica) -> bool:
        return any(batch.waiting_list.runtime is replica.runtime for batch in self.executor.running())

    # ---------------------------------------------------------------- reports

    def replicas(self) -> list[Replica]:
        """Every loaded replica, those that drain included."""
        loaded = [replica for endpoint in self.endpoints.values() for replica in _all_replicas(endpoint)]
        return loaded + self._draining

    def reports(self) -> tuple[ReplicaReport, ...]:
        """Every version of every endpoint, loaded, loading or failed."""
        reports = []
        for endpoint in self.endpoints.values():
            for version in endpoint.versions():
                replica = endpoint.replicas.get(version)
                problem = endpoint.problems.get(version, "")
                if replica is not None:
                    report = replica.report(is_default=replica is endpoint.default)
                    reports.append(msgspec.structs.replace(report, problem=problem))
                    continue
                state = ReplicaState.FAILED if problem else ReplicaState.LOADING
                reports.append(ReplicaReport(endpoint.name, endpoint.spec.model, version, state, problem))
        return tuple(reports)

    def close(self) -> None:
        """Stop the lanes, then give every model back, except one that is still inside a run."""
        self.inline_lane.close()
        self.thread_lane.close()
        for replica in self.replicas():
            if not self._is_running(replica):
                _close(replica)


def _close(replica: Replica) -> None:
    try:
        replica.close()
    except Exception as error:  # a foreign runtime that cannot let go must not keep the others from it
        log_unexpected("close", error)


def _all_replicas(endpoint: Endpoint) -> list[Replica]:
    replicas = list(endpoint.replicas.values())
    if endpoint.default is not None and endpoint.default not in replicas:
        replicas.append(endpoint.default)
    return replicas


def _same_rules(left: EndpointSpec, right: EndpointSpec) -> bool:
    """Whether a replica built under one spec may serve under another."""
    return (left.model, left.slo, left.contract, left.batching, left.runtime, left.nonfinite) == (
        right.model, right.slo, right.contract, right.batching, right.runtime, right.nonfinite,
    )  # fmt: skip


def _tidy_memory() -> None:
    """Collect what loading left behind, then keep everything that stays out of later collections: a full collection
    over the modules of a worker takes tens of milliseconds, one over what came since almost nothing."""
    gc.collect()
    gc.freeze()
