"""Every request ends once, whatever a stage raises, and a model is closed only when nobody is inside."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.data_plane.ticket import Ticket
from headrace.errors import HeadraceError, ModelFailed, ServerError
from headrace.records import Amendment, Record
from headrace.snapshot import BatchingPolicy, RecordPolicy, VersionSpec
from headrace.storage.memory import MemorySink
from headrace.tensors import Array
from headrace.testing.rig import FunctionRuntime, Gate, Rig, RigCall
from headrace.types import Ending, ReplicaState


class Forgetful(FunctionRuntime):
    """Returns no outputs while told so."""

    is_forgetful = False

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        return [] if self.is_forgetful else super().run(inputs, outputs)


@pytest.mark.parametrize("is_threaded", [True, False])
async def test_a_model_that_returns_too_few_outputs_fails_its_request_and_serves_the_next(
    tmp_path: Path, is_threaded: bool
) -> None:
    """P3: a broken runtime contract ends the batch, never the executor behind it."""
    model = Forgetful(lambda rows: rows * 2)
    async with Rig(tmp_path, {"m": model}) as rig:
        if is_threaded:
            rig.use_thread_lane("m")
        model.is_forgetful = True
        broken = await rig.infer("m", [1])
        model.is_forgetful = False
        sound = await rig.infer("m", [2])

    assert isinstance(broken, ModelFailed)
    assert not isinstance(sound, HeadraceError)


@pytest.mark.parametrize("is_threaded", [True, False])
async def test_running_out_of_memory_while_a_batch_is_put_together_ends_the_batch_only(
    tmp_path: Path, is_threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3, F6: requests that cannot be merged run one by one, and the executor lives."""

    def no_memory(*_: object) -> Array:
        raise MemoryError("Unable to allocate 64 MiB")

    async with Rig(tmp_path, {"m": lambda rows: rows * 2}) as rig:
        if is_threaded:
            rig.use_thread_lane("m")
        calls = [rig.start("m", [value])[1] for value in (1, 2, 3)]
        monkeypatch.setattr(np, "concatenate", no_memory)
        replies = [await asyncio.wait_for(call.answer, 5) for call in calls]
        monkeypatch.undo()

    assert [2, 4, 6] == [None if isinstance(reply, HeadraceError) else float(reply[0, 0]) for reply in replies]


@pytest.mark.parametrize("is_threaded", [True, False])
async def test_parts_of_an_answer_that_do_not_fit_together_fail_that_request_and_not_its_neighbour(
    tmp_path: Path, is_threaded: bool
) -> None:
    """P3: a model that pads to the longest row of a batch gives the parts of a split request different widths."""

    def as_wide_as_the_largest(rows: Array) -> Array:
        return np.zeros((len(rows), 1 + int(rows.max())), np.float32)

    small_batches = {"m": {"batching": BatchingPolicy(rows_max=2)}}
    async with Rig(tmp_path, {"m": as_wide_as_the_largest}, changes=small_batches) as rig:
        if is_threaded:
            rig.use_thread_lane("m")
        split, neighbour = await asyncio.gather(rig.infer("m", [1, 1, 2, 2, 3]), rig.infer("m", [1]))
        await rig.idle()
        row = rig.ledger("m")

    assert isinstance(split, ModelFailed)
    assert "do not fit together" in split.message
    assert not isinstance(neighbour, HeadraceError)
    assert (0, 0) == (row.in_flight, row.difference)


def break_encode(call: RigCall) -> None:
    sound = call.encode

    def encode(ticket: Ticket) -> None:
        if ticket.error is None:
            raise ValueError("a defect of the codec")
        sound(ticket)

    call.encode = encode  # type: ignore[method-assign]  # the fault


def break_send(call: RigCall) -> None:
    def send() -> bool:
        raise RuntimeError("the handle is closed")

    call.send = send  # type: ignore[method-assign]  # the fault


@pytest.mark.parametrize(("fault", "ending"), [(break_encode, Ending.FAILED), (break_send, Ending.ABANDONED)])
@pytest.mark.parametrize("durability", ["buffered", "strict"])
async def test_an_unexpected_exception_in_one_reply_leaves_the_neighbours_of_its_batch_answered(
    tmp_path: Path, fault: Callable[[RigCall], None], ending: Ending, durability: str
) -> None:
    """P3, X2: a fault of ours ends the request at fault and is logged; the others of the batch get their answers."""
    changes = {"m": {"records": RecordPolicy(durability)}}  # type: ignore[arg-type]  # one of the two literals
    async with Rig(tmp_path, {"m": lambda rows: rows * 2}, changes=changes) as rig:
        calls = [rig.start("m", [value]) for value in (1, 2, 3)]
        fault(calls[1][1])
        await asyncio.wait_for(rig.idle(), 5)
        row = rig.ledger("m")

    assert [Ending.ANSWERED, ending, Ending.ANSWERED] == [ticket.ending for ticket, _ in calls]
    assert (0, 0) == (row.in_flight, row.difference)


async def test_a_request_without_rows_is_answered_alone_and_among_others(tmp_path: Path) -> None:
    """X2: nothing in, nothing out, at once."""
    async with Rig(tmp_path, {"m": lambda rows: rows * 2}) as rig:
        replies = await asyncio.gather(*(rig.infer("m", np.ones(rows)) for rows in (0, 2, 0, 1)))

    assert [0, 2, 0, 1] == [None if isinstance(reply, HeadraceError) else len(reply) for reply in replies]


async def test_an_answered_request_is_forgotten_even_if_no_other_follows(tmp_path: Path) -> None:
    """F1: an executor that waits for work holds nothing of the work it did."""
    async with Rig(tmp_path, {"m": lambda rows: rows * 2}) as rig:
        rig.use_thread_lane("m")
        ticket, call = rig.start("m", [1])
        await call.answer
        await rig.idle()
        await asyncio.sleep(0.05)
        held: weakref.ref[RigCall] = weakref.ref(call)
        del ticket, call
        gc.collect()

        assert held() is None


class CountingSink(MemorySink):
    """Knows which requests were committed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop.call_soon)
        self.committed: set[str] = set()

    def commit(self, records: Sequence[Record | Amendment], done: Callable[[bool], None]) -> None:
        self.committed |= {record.request_id for record in records}
        super().commit(records, done)


async def test_a_request_that_came_after_the_switch_to_strict_is_committed_though_its_batch_began_before(
    tmp_path: Path,
) -> None:
    """O1: no answer of a strict endpoint leaves before its record is on disk, whoever shares its batch."""
    gate = Gate()
    sink = CountingSink(asyncio.get_running_loop())
    async with Rig(tmp_path, {"m": gate}, sink=sink) as rig:
        rig.use_thread_lane("m")
        gate.is_closed_to_trials = True
        rig.start("m", [0], timeout_s=30)
        await asyncio.to_thread(gate.entered.wait)
        rig.start("m", [1], timeout_s=20)
        rig.changes = {"m": {"records": RecordPolicy("strict")}}
        await rig.deploy("1")
        strict, call = rig.start("m", [2], timeout_s=30)
        gate.is_open.set()
        await asyncio.wait_for(call.answer, 5)
        await rig.idle()

    assert strict.request_id in sink.committed


class Watched(FunctionRuntime):
    """Notes whether it was inside a run when it was closed."""

    is_running = False
    was_running_at_close: bool | None = None

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        self.is_running = True
        try:
            return super().run(inputs, outputs)
        finally:
            self.is_running = False

    def close(self) -> None:
        self.was_running_at_close = self.is_running
        super().close()


async def test_a_replaced_model_is_closed_only_after_the_batch_whose_callers_have_all_left(tmp_path: Path) -> None:
    """X3: a native library that is closed inside a run takes the worker with it."""
    gate = Gate()
    model = Watched(gate)
    async with Rig(tmp_path, {"m": model}) as rig:
        rig.use_thread_lane("m")
        gate.is_closed_to_trials = True
        ticket, _ = rig.start("m", [0], timeout_s=30)
        await asyncio.to_thread(gate.entered.wait)
        rig.pipeline.abandon(ticket)
        rig.models["m"] = lambda rows: rows
        await rig.deploy("2")
        await asyncio.sleep(0.1)
        before = model.was_running_at_close
        gate.is_open.set()
        for _ in range(200):
            if model.is_closed:
                break
            await asyncio.sleep(0.01)

    assert before is None
    assert model.was_running_at_close is False


async def test_a_version_that_cannot_be_made_into_a_replica_is_that_versions_problem_alone(tmp_path: Path) -> None:
    """X3, F7: reconciling goes on with the endpoints behind it, and the report says what is wrong."""
    async with Rig(tmp_path, {"a": lambda rows: rows, "b": lambda rows: rows}) as rig:
        not_a_header = VersionSpec("ü", "a", "sha256:2")
        rig.changes = {"a": {"versions": (not_a_header,), "default_version": "ü"}}
        await rig.deploy("2")
        reports = {(report.endpoint, report.version): report for report in rig.plane.reports()}
        old = await rig.infer("a", [1])
        new = await rig.infer("b", [1])

    assert ReplicaState.FAILED is reports["a", "ü"].state
    assert "UnicodeEncodeError" in reports["a", "ü"].problem
    assert ReplicaState.READY is reports["b", "2"].state
    assert not isinstance(old, ServerError)
    assert not isinstance(new, HeadraceError)
