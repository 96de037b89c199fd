"""What every runtime adapter keeps: the promises of `headrace.ports.Runtime`.

A new adapter joins by adding a line to `ADAPTERS`.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from headrace.artefact import file_digest
from headrace.errors import LoadError, ModelFailed
from headrace.ports import Runtime, RuntimeLoader
from headrace.runtimes import onnx
from headrace.snapshot import RuntimeOptions, VersionSpec
from headrace.testing import models, sleep_runtime
from headrace.testing.sleep_runtime import SleepArtefact


@dataclass(frozen=True)
class Adapter:
    """One adapter under the contract.

    Attributes:
        load: Its loader.
        healthy: Writes an artefact whose one input is FP32 [N, 1] and whose every output equals it.
        failing: Writes an artefact of the same signature that raises on every run of a negative value.
        suffix: What its artefacts' names end with.
    """

    load: RuntimeLoader
    healthy: Callable[[Path], object]
    failing: Callable[[Path], object]
    suffix: str


def onnx_failing(path: Path) -> None:
    # -1 is outside of a table of no rows but one: index = 2·x.
    nodes = [
        models.node("Cast", ["x"], ["index"], to=models.ONNX_TYPE[onnx.Datatype.INT64]),
        models.node("Add", ["index", "index"], ["twice"]),
        models.node("Gather", ["table", "twice"], ["y"]),
    ]
    value = ("x", onnx.Datatype.FP32, ("N", 1))
    output = ("y", onnx.Datatype.FP32, ("N", 1))
    models.save(path, models.build(nodes, [value], [output], {"table": np.zeros(1, np.float32)}))


ADAPTERS = {
    "onnx": Adapter(
        load=onnx.load,
        healthy=lambda path: models.save(path, models.identity(shape=("N", 1))),
        failing=onnx_failing,
        suffix=".onnx",
    ),
    "sleep": Adapter(
        load=sleep_runtime.load,
        healthy=lambda path: sleep_runtime.write_artefact(path, SleepArtefact(base_s=0.0005)),
        failing=lambda path: sleep_runtime.write_artefact(path, SleepArtefact(fail_every=1)),
        suffix=".sleep.json",
    ),
}


@pytest.fixture(params=sorted(ADAPTERS))
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return ADAPTERS[request.param]


def load(adapter: Adapter, path: Path, **options) -> Runtime:
    spec = VersionSpec("1", str(path), file_digest(path), labels=options.pop("labels", ()))
    return adapter.load(spec, RuntimeOptions(**options), 1)


@pytest.fixture
def healthy(adapter: Adapter, tmp_path: Path):
    path = tmp_path / f"model{adapter.suffix}"
    adapter.healthy(path)
    runtime = load(adapter, path)
    yield runtime
    runtime.close()


@pytest.fixture
def failing(adapter: Adapter, tmp_path: Path):
    path = tmp_path / f"failing{adapter.suffix}"
    adapter.failing(path)
    runtime = load(adapter, path)
    yield runtime
    runtime.close()


def column(*values: float) -> dict[str, np.ndarray]:
    return {"x": np.array(values, np.float32).reshape(-1, 1)}


def names(runtime: Runtime) -> list[str]:
    return [spec.name for spec in runtime.signature.outputs]


def test_the_signature_says_what_the_artefact_takes(healthy: Runtime):
    """X1: names, types, variable dimensions and the proposal to batch come from the artefact."""
    signature = healthy.signature

    assert [(spec.name, spec.datatype.wire, spec.shape) for spec in signature.inputs] == [("x", "FP32", (-1, 1))]
    assert signature.is_batched
    assert signature.platform


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64])
def test_every_row_comes_back_in_its_place_and_of_the_declared_type(healthy: Runtime, rows: int):
    """X1: outputs have one row per input row, the signature's dtype, and are C-contiguous."""
    inputs = column(*range(rows))

    for spec, array in zip(healthy.signature.outputs, healthy.run(inputs, names(healthy)), strict=True):
        assert array.dtype == spec.datatype.dtype
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(inputs["x"], array)


def test_outputs_come_in_the_order_they_are_asked_for(healthy: Runtime):
    """X1: the caller chooses which outputs and in which order; none is an answer without any."""
    asked = [*reversed(names(healthy)), names(healthy)[0]]

    results = healthy.run(column(1, 2), asked)

    assert len(asked) == len(results)
    assert healthy.run(column(1, 2), []) == []


def test_an_answer_does_not_change_when_its_input_does(healthy: Runtime):
    """X1: outputs are not views of the inputs, whose buffer serves the next batch."""
    inputs = column(1, 2, 3)
    (result,) = healthy.run(inputs, names(healthy))

    inputs["x"][:] = 99

    np.testing.assert_array_equal([[1], [2], [3]], result)


def test_a_model_that_raises_is_a_failed_model_told_in_one_line(failing: Runtime):
    """X1, C5: foreign exceptions stop at the adapter's edge; the text has no stack trace, no position, no path."""
    with pytest.raises(ModelFailed) as caught:
        failing.run(column(-1), names(failing))

    text = caught.value.message
    assert "\n" not in text
    assert len(text) < 400
    for leak in ("Traceback", ".cc:", "onnxruntime_src", "/tmp", "ONNXRuntimeError"):
        assert leak not in text


def test_a_model_goes_on_after_it_has_raised(adapter: Adapter, healthy: Runtime):
    """X1: one bad batch is not the end of the replica."""
    with pytest.raises(ModelFailed):
        healthy.run({"no such input": np.zeros((1, 1), np.float32)}, names(healthy))

    (result,) = healthy.run(column(5), names(healthy))
    np.testing.assert_array_equal([[5]], result)


def test_asking_for_an_unknown_output_is_a_failed_model(healthy: Runtime):
    """X1: no foreign exception passes, whatever is asked."""
    with pytest.raises(ModelFailed):
        healthy.run(column(1), ["no such output"])


def test_closing_twice_is_closing_once_and_a_closed_model_fails(healthy: Runtime):
    """X1: close is idempotent, and a late run is told so instead of crashing."""
    healthy.close()
    healthy.close()

    with pytest.raises(ModelFailed, match="closed"):
        healthy.run(column(1), names(healthy))


def test_facts_are_short_texts(healthy: Runtime):
    """X1: what the start screen shows; at least the runtime's name."""
    facts = healthy.facts

    assert facts["runtime"]
    assert all(isinstance(value, str) and "\n" not in value for value in facts.values())


def test_labels_beside_the_artefact_are_the_signatures(adapter: Adapter, tmp_path: Path):
    """X1: `labels.txt` wins over what the artefact says."""
    path = tmp_path / f"model{adapter.suffix}"
    adapter.healthy(path)
    runtime = load(adapter, path, labels=("no", "yes"))

    assert runtime.signature.labels == ("no", "yes")


@pytest.mark.parametrize("content", [b"", b"\x00\xffjunk" * 50], ids=["empty", "junk"])
def test_a_bad_artefact_is_a_load_error_that_names_the_file(adapter: Adapter, tmp_path: Path, content: bytes):
    """X1, C5: what is wrong with which file, and what would be accepted."""
    path = tmp_path / f"bad{adapter.suffix}"
    path.write_bytes(content)

    with pytest.raises(LoadError) as caught:
        load(adapter, path)
    assert str(path) in caught.value.message
    assert "accepted:" in caught.value.message


def test_a_missing_artefact_is_a_load_error(adapter: Adapter, tmp_path: Path):
    """X1: a file that went away between discovery and load is told by name."""
    spec = VersionSpec("1", str(tmp_path / f"gone{adapter.suffix}"), "sha256:0")

    with pytest.raises(LoadError, match="gone"):
        adapter.load(spec, RuntimeOptions(), 1)


def test_the_adapter_says_how_many_threads_may_run_it_and_keeps_it(healthy: Runtime):
    """X1: the class states its concurrency; "several threads at once" is tried with four."""
    statement = type(healthy).__doc__ or ""
    assert "Concurrency:" in statement
    threads = 4 if "several threads at once" in statement else 1
    start = threading.Barrier(threads)

    def work(worker: int) -> bool:
        start.wait()
        answers = [healthy.run(column(worker, n), names(healthy))[0] for n in range(50)]
        return all((answer == [[worker], [n]]).all() for n, answer in enumerate(answers))

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(work, range(threads)))
