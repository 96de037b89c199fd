"""Loading and closing versions, whatever the system or a foreign runtime does meanwhile."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.clock import SystemClock
from headrace.data_plane.trial import try_out
from headrace.errors import HeadraceError, LoadError
from headrace.tensors import Array, Datatype, Signature, TensorSpec
from headrace.testing.rig import FunctionRuntime, Rig
from headrace.types import ReplicaState


async def test_a_load_for_which_no_thread_is_granted_is_a_problem_that_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X3, F7: the version that serves goes on, the reason is reported, and the next attempt loads."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with Rig(tmp_path, {"m": lambda rows: rows}) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            await rig.deploy("2")
        failed = rig.plane.reports()[0]
        during = await rig.infer("m", [1])
        await rig.deploy("2")
        loaded = rig.plane.reports()[0]

    assert (ReplicaState.FAILED, True) == (failed.state, "can't start new thread" in failed.problem)
    assert not isinstance(during, HeadraceError)
    assert (ReplicaState.READY, "") == (loaded.state, loaded.problem)


async def test_a_loader_that_leaves_by_system_exit_fails_its_version_and_holds_up_nobody(tmp_path: Path) -> None:
    """X3: foreign code may call `sys.exit`; on the loader thread that would end the thread and leave the plane waiting
    for it for ever."""

    def leaves(_rows: Array) -> Array:
        raise SystemExit(1)

    class Leaving(FunctionRuntime):
        def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
            return [leaves(inputs["x"])]

    async with asyncio.timeout(20), Rig(tmp_path, {"a": Leaving(leaves), "b": lambda rows: rows}) as rig:
        states = {report.endpoint: (report.state, report.problem) for report in rig.plane.reports()}
        answer = await rig.infer("b", [1])

    assert ReplicaState.FAILED is states["a"][0]
    assert "SystemExit" in states["a"][1]
    assert not isinstance(answer, HeadraceError)


async def test_a_runtime_that_cannot_be_closed_does_not_keep_the_others_open(tmp_path: Path) -> None:
    """X3: unloading goes on behind a library that raises, also at the end of the worker."""

    class Stubborn(FunctionRuntime):
        def close(self) -> None:
            raise OSError("busy")

    others = [FunctionRuntime(lambda rows: rows) for _ in range(2)]
    async with Rig(tmp_path, {"a": Stubborn(lambda rows: rows), "b": others[0], "c": others[1]}) as rig:
        del rig.models["a"], rig.models["b"]
        await rig.deploy()

    assert [True, True] == [other.is_closed for other in others]


class Liar(FunctionRuntime):
    """Says FP32 and INT64, returns what it is given."""

    def __init__(self, *outputs: object) -> None:
        super().__init__(lambda rows: rows)
        self._outputs = outputs

    @property
    def signature(self) -> Signature:
        declared = (TensorSpec("y", Datatype.FP32, (-1, 1)), TensorSpec("n", Datatype.INT64, (-1, 1)))
        return Signature((TensorSpec("x", Datatype.FP32, (-1, 1)),), declared, True, "function")

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        rows = len(inputs["x"])
        return [
            np.repeat(output, rows, axis=0) if isinstance(output, np.ndarray) else output  # type: ignore[misc]
            for output in self._outputs
        ]


Y, N = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int64)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ((Y.astype(np.float64), N), "output 'y' came back as float64; accepted is float32"),
        ((Y, N.astype(np.float32)), "output 'n' came back as float32; accepted is int64"),
        ((Y.astype(object), N), "output 'y' came back as object"),
        ((Y, [[0]]), "output 'n' came back as list"),
        ((Y,), "returned 1 outputs"),
    ],
    ids=["wider", "another kind", "objects", "no array", "too few"],
)
def test_a_model_whose_outputs_are_not_what_it_says_is_refused_at_load(outputs: tuple[object, ...], words: str) -> None:
    """X1, P3: an INT64 output that comes back as floats would answer 1.0 where the metadata promises an integer."""
    with pytest.raises(LoadError) as caught:
        try_out(Liar(*outputs), SystemClock(), rows_max=None)

    assert words in caught.value.message


def test_a_model_whose_outputs_are_what_it_says_is_taken() -> None:
    """X1."""
    assert try_out(Liar(Y, N), SystemClock(), rows_max=None).signature.is_batched
