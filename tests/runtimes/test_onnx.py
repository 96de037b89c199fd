"""The ONNX adapter: types, text, shapes, bad artefacts, messages, silence, idle cost."""

import contextlib
import io
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from headrace.artefact import file_digest
from headrace.errors import InvalidInput, LoadError, ModelFailed
from headrace.runtimes import onnx
from headrace.runtimes.onnx import OnnxRuntime
from headrace.snapshot import RuntimeOptions, VersionSpec
from headrace.tensors import Datatype
from headrace.testing import models

NUMBERS = [datatype for datatype in Datatype if datatype.kind in "iuf"]


def load(path: Path, *, labels: tuple[str, ...] = (), threads: int = 1, **options) -> OnnxRuntime:
    return onnx.load(VersionSpec("1", str(path), "sha256:0", labels), RuntimeOptions(**options), threads)


@pytest.fixture
def make(tmp_path: Path):
    """Write a model and load it."""

    def load_model(content: bytes, **options) -> OnnxRuntime:
        return load(models.save(tmp_path / "m.onnx", content), **options)

    return load_model


@pytest.fixture
def refuse(tmp_path: Path):
    """Write a file and return the message with which it is refused."""

    def message_of(content: bytes, name: str = "m.onnx") -> str:
        path = models.save(tmp_path / name, content)
        with pytest.raises(LoadError) as caught:
            load(path)
        message = caught.value.message
        assert message.startswith(f"{path}: ")
        assert "accepted:" in message
        assert "\n" not in message
        assert "onnxruntime_src" not in message
        return message

    return message_of


def example(datatype: Datatype, shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape))
    if datatype is Datatype.BYTES:
        return np.array([f"é{n}".encode() for n in range(count)], object).reshape(shape)
    return (
        (np.arange(count) % 2 == 1 if datatype is Datatype.BOOL else np.arange(count))
        .astype(datatype.dtype)
        .reshape(shape)
    )


# ----------------------------------------------------------------------------------------------------- types, shapes


@pytest.mark.parametrize("datatype", Datatype, ids=lambda datatype: datatype.wire)
def test_every_type_of_the_protocol_passes_unchanged(make, datatype: Datatype):
    """X1, P7: all 13 tensor types, in and out, value for value."""
    runtime = make(models.identity(datatype))
    array = example(datatype, (4, 3))

    (result,) = runtime.run({"x": array}, ["y"])

    assert datatype is runtime.signature.inputs[0].datatype
    assert array.dtype == result.dtype
    assert array.tolist() == result.tolist()


@pytest.mark.parametrize("datatype", NUMBERS, ids=lambda datatype: datatype.wire)
def test_every_number_type_is_computed_with(make, datatype: Datatype):
    """X1: the values arrive as numbers, not only as bytes."""
    array = example(datatype, (2, 3))

    (result,) = make(models.double(datatype)).run({"x": array}, ["y"])

    assert (array * 2).tolist() == result.tolist()
    assert datatype.dtype == result.dtype


@pytest.mark.parametrize("element", [b"", b"a\0b", b"trailing\0", "é漢🙂".encode(), b"x" * 100_000])
def test_text_comes_back_byte_for_byte(make, element: bytes):
    """X1, P7: BYTES elements of any length, zero bytes included."""
    (result,) = make(models.text_identity()).run({"INPUT0": np.array([[element] * 16], object)}, ["OUTPUT0"])

    assert [element] * 16 == result[0].tolist()


def test_text_that_is_not_utf8_is_the_callers_error(make):
    """X1: ONNX strings are UTF-8; the message names the element, the field is the input's name."""
    array = np.full((1, 16), b"ok", object)
    array[0, 3] = b"a\xff"

    with pytest.raises(InvalidInput, match=r"element 3 .*0xff at position 1") as caught:
        make(models.text_identity()).run({"INPUT0": array}, ["OUTPUT0"])
    assert (caught.value.field, caught.value.reason) == ("INPUT0", "type")


def test_a_text_scalar_keeps_its_rank(make):
    """X1: a BYTES tensor of rank 0 goes in and comes out as one."""
    (result,) = make(models.identity(Datatype.BYTES, ())).run({"x": np.array(b"one", object)}, ["y"])

    assert (result.shape, result.item()) == ((), b"one")


@pytest.mark.parametrize(
    ("content", "shapes", "is_batched"),
    [
        (models.identity, {"x": (-1, 3), "y": (-1, 3)}, True),
        (models.tokens, {"tokens": (-1, -1), "mean": (-1, 1)}, True),
        (models.simple, {"INPUT0": (-1, 16), "INPUT1": (-1, 16), "OUTPUT0": (-1, 16), "OUTPUT1": (-1, 16)}, True),
        (models.fixed_batch, {"x": (2, 3), "y": (2, 3)}, False),
        (models.scalar, {"x": (-1, 3), "factor": (), "y": (-1, 3)}, False),
        (models.output_transposed, {"x": (-1, 3), "y": (3, -1)}, False),
        (models.output_not_batch, {"x": (-1, -1), "y": (-1,)}, True),  # withdrawn by the trial runs
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_batching_is_proposed_when_every_tensor_begins_with_a_variable_dimension(make, content, shapes, is_batched):
    """X1, P7: shapes as the artefact has them, -1 for variable ones."""
    signature = make(content()).signature

    assert shapes == {spec.name: spec.shape for spec in (*signature.inputs, *signature.outputs)}
    assert is_batched is signature.is_batched


def test_outputs_are_selected_and_ordered_by_name(make):
    """X1: any outputs in any order."""
    runtime = make(models.many_outputs(20))

    results = runtime.run({"x": np.zeros((1, 2), np.float32)}, ["y19", "y0", "y7"])

    assert [array[0, 0] for array in results] == [19, 0, 7]


def test_a_variable_dimension_takes_any_length(make):
    """P7: sequences of text differ in length from call to call."""
    runtime = make(models.tokens())

    means = [runtime.run({"tokens": np.arange(n)[None, :]}, ["mean"])[0].item() for n in (1, 5, 17)]

    assert means == [0, 2, 8]


def test_two_inputs_give_sum_and_difference(make):
    """X1: Triton's example model answers as Triton does."""
    inputs = {"INPUT0": np.arange(16, dtype=np.int32)[None], "INPUT1": np.ones((1, 16), np.int32)}

    total, difference = make(models.simple()).run(inputs, ["OUTPUT0", "OUTPUT1"])

    assert list(range(1, 17)) == total[0].tolist()
    assert list(range(-1, 15)) == difference[0].tolist()


def test_nan_is_a_value(make):
    """X1: what to do with NaN is the reply's policy, not the runtime's."""
    (result,) = make(models.nan()).run({"x": np.array([[-1], [4]], np.float32)}, ["y"])

    assert np.isnan(result[0, 0])
    assert result[1, 0] == 2


def test_boosted_trees_classify_as_they_do_in_scikit_learn(make):
    """P7: a gradient-boosted classifier on breast-cancer data, through skl2onnx without zipmap."""
    runtime = make(models.breast_cancer(20))
    rows, classes = models.breast_cancer_rows()

    label, probabilities = runtime.run({"X": rows}, ["label", "probabilities"])

    assert runtime.signature.labels == ("malignant", "benign")
    assert probabilities.shape == (569, 2)
    assert (label == classes).mean() > 0.97
    np.testing.assert_allclose(1, probabilities.sum(axis=1), rtol=1e-5)


# ------------------------------------------------------------------------------------------------- labels, providers


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ('["cat", "dog"]', ("cat", "dog")),
        ("cat, dog", ("cat", "dog")),
        ("cat\ndog\n", ("cat", "dog")),
        ("red, green\nblue", ("red, green", "blue")),
        ("[0, 1]", ("0", "1")),
        ("[unk], a", ("[unk]", "a")),
        ("", ()),
    ],
)
def test_labels_are_read_from_the_metadata(make, text: str, labels: tuple[str, ...]):
    """X1: a JSON list, lines, or commas."""
    assert labels == make(models.labelled(text)).signature.labels


def test_labels_of_the_version_win(make):
    """X1: `labels.txt` is nearer to the operator than the artefact."""
    assert make(models.labelled(), labels=("a", "b")).signature.labels == ("a", "b")


def test_the_machines_providers_are_taken_and_azure_never(make, monkeypatch: pytest.MonkeyPatch):
    """X1, C5: a provider that sends inputs elsewhere is not taken even when it is the first one offered."""
    assert "CPUExecutionProvider" in make(models.identity()).facts["provider"]

    machine = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "AzureExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: machine)
    assert onnx._providers(RuntimeOptions()) == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    asked = ("TensorrtExecutionProvider", "CPUExecutionProvider")
    assert list(asked) == onnx._providers(RuntimeOptions(providers=asked))
    with pytest.raises(LoadError, match="AzureExecutionProvider"):
        onnx._providers(RuntimeOptions(providers=("AzureExecutionProvider",)))


def test_a_provider_that_is_not_there_is_told_with_those_that_are(make):
    """X1: an accelerator that was asked for is never silently replaced by the CPU."""
    with pytest.raises(LoadError, match=r"'NoSuchProvider'.*accepted: .*CPUExecutionProvider"):
        make(models.identity(), providers=("NoSuchProvider",))


def test_a_provider_that_does_not_start_is_an_error_when_asked_for_and_a_note_when_not(
    make, monkeypatch: pytest.MonkeyPatch
):
    """X1: ONNX Runtime drops a provider whose driver is missing and only logs it; we look which ones are there."""
    machine = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: machine)
    session = onnx._session
    monkeypatch.setattr(
        onnx, "_session", lambda path, options, _, threads: session(path, options, machine[1:], threads)
    )

    facts = make(models.identity()).facts
    assert (facts["provider"], facts["note"]) == ("CPUExecutionProvider", "CUDAExecutionProvider did not start")
    with pytest.raises(LoadError, match="CUDAExecutionProvider is installed but did not start"):
        make(models.identity(), providers=("CUDAExecutionProvider",))


@pytest.mark.parametrize("level", ["disabled", "basic", "extended", "all"])
def test_every_graph_level_gives_the_same_answer(make, level: str):
    """X1: optimisation changes time, not results."""
    runtime = make(models.logistic(), graph_level=level)

    probability, label = runtime.run({"x": np.ones((1, 4), np.float32)}, ["probability", "label"])

    assert level == runtime.facts["graph_level"]
    assert label.item() == (probability.item() > 0.5)


# --------------------------------------------------------------------------------------------------- bad artefacts


def torchscript() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("model/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr("model/version", "3")
    return content.getvalue()


# Content, what it is called, and a word of the way out.
FOREIGN: dict[str, tuple[bytes, str, str]] = {
    "pickle": (pickle.dumps({"a": 1}), "Python pickle", "skl2onnx"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(64), "HDF5", 'format="onnx"'),
    "torch": (torchscript(), "TorchScript", "torch.onnx.export"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(64), "GGUF", "export the model it came from"),
    "safetensors": (b'\x40\0\0\0\0\0\0\0{"a":{}}' + bytes(64), "safetensors", "export the model it came from"),
    "lightgbm": (b"tree\nversion=v4\nnum_class=1\n", "LightGBM", "convert_lightgbm"),
    "xgboost-json": (b'{"learner":{"attributes":{}},"version":[2,1,0]}', "XGBoost JSON", "convert_xgboost"),
    "xgboost-ubj": (b"{L\0\0\0\0\0\0\0\x07learner{", "XGBoost UBJSON", "convert_xgboost"),
    "tflite": (b"\x1c\0\0\0TFL3" + bytes(64), "TensorFlow Lite", "tf2onnx"),
    "gzip": (b"\x1f\x8b\x08\0" + bytes(64), "gzip", "unpack"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer", "git lfs pull"),
    "html": (b"<!DOCTYPE html><html>404", "HTML", "download"),
    "catboost": (b"CBM1" + bytes(64), "CatBoost", 'format="onnx"'),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_another_format_is_recognised_and_the_way_to_onnx_told(refuse, kind: str):
    """C5, X1: no guesswork with another library's model; the message says what it is and how to convert."""
    content, what, how = FOREIGN[kind]

    message = refuse(content)

    assert what in message
    assert how in message


def test_a_pickle_is_not_executed(refuse, tmp_path: Path):
    """C5: looking at a hostile pickle runs nothing."""
    mark = tmp_path / "executed"

    class Hostile:
        def __reduce__(self):
            return (os.mkdir, (str(mark),))

    refuse(pickle.dumps(Hostile()))

    assert not mark.exists()


def test_a_saved_model_folder_is_recognised(tmp_path: Path):
    """X1: TensorFlow's format is a folder."""
    (tmp_path / "m.onnx").mkdir()
    (tmp_path / "m.onnx" / "saved_model.pb").write_bytes(b"\x08\x01")

    with pytest.raises(LoadError, match=r"SavedModel.*tf2onnx"):
        load(tmp_path / "m.onnx")


def test_an_empty_file_says_so(refuse):
    """X1."""
    assert "empty" in refuse(b"")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_says_so(refuse, share: float):
    """X1: an interrupted copy is told apart from a wrong file."""
    content = models.logistic(64)

    assert "cut short" in refuse(content[: int(len(content) * share)])


def test_any_damage_is_a_load_error_and_never_a_crash(tmp_path: Path):
    """X1, C5: 200 seeded corruptions either load or raise LoadError."""
    generator = np.random.default_rng(0)
    content = np.frombuffer(models.logistic(), np.uint8)
    refused = 0
    for _ in range(200):
        damaged = content.copy()
        damaged[generator.integers(0, len(damaged), 4)] = generator.integers(0, 256, 4)
        path = models.save(tmp_path / "m.onnx", damaged.tobytes())
        with contextlib.suppress(LoadError):
            load(path).close()
            refused -= 1
        refused += 1

    assert refused > 100


@pytest.mark.parametrize("content", [bytes(100), b"\xff" * 100, b"hello, world\n" * 10], ids=["zeros", "ones", "text"])
def test_noise_says_that_it_is_no_onnx_file(refuse, content: bytes):
    """X1."""
    message = refuse(content)

    assert "not an ONNX file" in message or "corrupt" in message


def test_a_folder_and_a_device_are_refused(tmp_path: Path):
    """X1: only a regular file is opened; a pipe would be waited for without end."""
    (tmp_path / "folder.onnx").mkdir()
    os.mkfifo(tmp_path / "pipe.onnx")

    with pytest.raises(LoadError, match="is a folder"):
        load(tmp_path / "folder.onnx")
    with pytest.raises(LoadError, match="not a regular file"):
        load(tmp_path / "pipe.onnx")


def test_a_file_that_may_not_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """X1: the user id is in the message, since containers often run as another user than expected."""
    path = models.save(tmp_path / "m.onnx", models.identity())
    path.chmod(0)
    if os.geteuid() == 0:  # root may read everything

        def deny(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", deny)

    with pytest.raises(LoadError, match=rf"permission denied for user id {os.geteuid()}"):
        load(path)


@pytest.mark.parametrize(
    ("onnx_type", "name"), [(16, "bfloat16"), (17, "float8e4m3fn"), (22, "int4"), (14, "complex64")]
)
def test_a_type_that_cannot_be_carried_names_the_tensor(refuse, onnx_type: int, name: str):
    """X1: BF16, FP8, INT4 and complex numbers have no numpy type or no wire type."""
    content = models.build(
        [models.node("Identity", ["odd"], ["y"])],
        [("odd", onnx_type, ("N", 3))],
        [("y", onnx_type, ("N", 3))],
        opset=21,
        ir_version=10,
    )

    message = refuse(content)

    assert "'odd'" in message
    assert name in message


def test_a_list_of_maps_names_the_output_and_the_zipmap_option(refuse):
    """X1, P7: scikit-learn's default export cannot be served as tensors; the message has the one-line cure."""
    assert "zipmap" in refuse(models.breast_cancer(2, zipmap=True))
    assert "'y' is a list or map" in refuse(models.sequence_output())


def test_an_input_of_unknown_rank_is_refused(refuse):
    """X1: ONNX Runtime would report it as a scalar, and every real request would then be refused."""
    assert "how many dimensions" in refuse(models.identity(shape=None))


def one_node(operator: str = "Identity", output: int = 1, **versions: int) -> bytes:
    """`x` FP32 [N] → `y` through one operator."""
    return models.build([models.node(operator, ["x"], ["y"])], [("x", 1, ("N",))], [("y", output, ("N",))], **versions)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"opset": 99}, ["opset 99", "accepted: up to", "opset_version="]),
        ({"ir_version": 99}, ["format version 99", "accepted: up to"]),
        ({"operator": "Nope"}, ["operator Nope"]),
        ({"output": 11}, ["Type Error", "tensor(double)"]),
    ],
)
def test_what_onnx_runtime_refuses_is_told_in_one_line(refuse, options, words: list[str]):
    """X1: the runtime's message without its source positions, with what it accepts."""
    message = refuse(one_node(**options))

    for word in words:
        assert word in message


# --------------------------------------------------------------------------------------------------- external weights


def external(folder: Path, location: str) -> Path:
    """A model in `folder/store` whose weights are at `location`; a secret lies outside."""
    store = folder / "store"
    (store / "sub").mkdir(parents=True, exist_ok=True)
    for path in (store / "w.bin", store / "sub" / "w.bin", folder / "secret.bin"):
        path.write_bytes(models.external_weights())
    if not (store / "link.bin").is_symlink():
        (store / "link.bin").symlink_to(folder / "secret.bin")
    return models.save(store / "m.onnx", models.with_external_weights(location))


@pytest.mark.parametrize("location", ["w.bin", "sub/w.bin", "./w.bin"])
def test_weights_beside_the_model_are_loaded(tmp_path: Path, location: str):
    """X1: models above 2 GB keep their weights in files of their own."""
    (result,) = load(external(tmp_path, location)).run({"x": np.eye(3, dtype=np.float32)}, ["y"])

    assert np.arange(300).tolist() == result.reshape(-1).tolist()


@pytest.mark.parametrize(
    "location", ["../secret.bin", "sub/../../secret.bin", "link.bin", "{}/secret.bin", "/dev/zero"]
)
def test_weights_outside_the_models_folder_are_refused(tmp_path: Path, location: str):
    """C5: a model file cannot read other files of the server, neither through us nor through ONNX Runtime itself."""
    path = external(tmp_path, location.format(tmp_path))

    with pytest.raises(LoadError, match="outside the model's folder"):
        load(path)
    with pytest.raises(Exception, match=r"escapes model directory|Absolute path not allowed"):
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def test_weights_named_inside_a_subgraph_are_looked_at_too(tmp_path: Path):
    """C5: a constant in the branch of an If is found, however deep."""
    import onnx as onnx_package
    from onnx import helper

    inner = onnx_package.ModelProto.FromString(models.with_external_weights("../secret.bin")).graph.initializer[0]
    branch = helper.make_graph(
        [models.node("Constant", [], ["w"], value=inner)],
        "branch",
        [],
        [helper.make_tensor_value_info("w", 1, [3, 100])],
    )
    nodes = [models.node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)]
    content = models.build(nodes, [("c", Datatype.BOOL, ())], [("y", Datatype.FP32, (3, 100))])

    with pytest.raises(LoadError, match="outside the model's folder"):
        load(models.save(tmp_path / "store" / "m.onnx", content))


def test_missing_and_short_weights_name_the_file(tmp_path: Path):
    """X1: half of an upload is the most common accident with external weights."""
    path = external(tmp_path, "no.bin")
    with pytest.raises(LoadError, match=r"weights file 'no\.bin' is missing"):
        load(path)

    path = external(tmp_path, "w.bin")
    (path.parent / "w.bin").write_bytes(b"short")
    with pytest.raises(LoadError, match="out of bounds"):
        load(path)


def test_changed_weights_are_a_changed_digest(tmp_path: Path):
    """X1: the weights are the model; a digest of the graph alone would keep the old version in service."""
    path = external(tmp_path, "w.bin")
    before = file_digest(path)
    assert before == file_digest(path)

    (path.parent / "w.bin").write_bytes(models.external_weights(2))

    assert before != file_digest(path)


def test_the_digest_never_opens_files_outside_the_folder(tmp_path: Path):
    """C5: reading /dev/zero would not end."""
    assert file_digest(external(tmp_path, "/dev/zero")).startswith("sha256:")


def test_the_digest_of_one_file_is_what_sha256sum_prints(tmp_path: Path):
    """X1: operators compare digests with ordinary tools."""
    path = models.save(tmp_path / "m.onnx", models.identity())

    printed = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]

    assert f"sha256:{printed}" == file_digest(path)


# ---------------------------------------------------------------------------------------------------------- messages


def test_a_failing_operator_is_told_with_its_reason(make, tmp_path: Path):
    """X1: the operator and the reason, nothing of C++."""
    with pytest.raises(ModelFailed) as gather:
        make(models.failing()).run({"index": np.array([[0], [7]])}, ["y"])
    with pytest.raises(ModelFailed) as reshape:
        make(models.failing_reshape()).run({"x": np.zeros((3, 3), np.float32)}, ["y"])

    assert "Gather" in gather.value.message
    assert "idx=7 must be within the inclusive range [-1,0]" in gather.value.message
    assert "cannot be reshaped" in reshape.value.message
    assert "::" not in reshape.value.message
    assert ".h" not in reshape.value.message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[ONNXRuntimeError] : 1 : FAIL : Load model from a b.onnx failed:Parsing failed.", "Parsing failed."),
        ("[ONNXRuntimeError] : 1 : FAIL : Error: x.cc:592 ValidateDir Absolute path", "Error: Absolute path"),
        ("/src/a/model.cc:256 onnx::Model::Model(onnx::Proto&&, const std::function<void(int)>&) Bad\n", "Bad"),
        ("/src/x.h:4 void a::b(int) const [with T = float] Bad\nin two lines\n\nStacktrace:\n0x1", "Bad in two lines"),
        ("x" * 1000, "x" * 299 + "…"),
    ],
)
def test_messages_are_cut_down_to_what_helps(text: str, line: str):
    """X1: positions, signatures, stacks and line breaks go; the reason stays."""
    assert line == onnx.summarise(text)


# ------------------------------------------------------------------------------------------------- silence, idle cost


def in_fresh_process(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )


PRELUDE = """
    import sys, time, numpy as np
    from headrace.runtimes.onnx import load
    from headrace.snapshot import RuntimeOptions, VersionSpec
    from headrace.errors import LoadError, ModelFailed
    def take(path, threads=1):
        return load(VersionSpec("1", str(path), "sha256:0"), RuntimeOptions(), threads)
"""


def test_loading_running_failing_and_refusing_print_nothing(tmp_path: Path):
    """X1: stdout is for data and stderr for our log; ONNX Runtime writes to neither."""
    models.save(tmp_path / "failing.onnx", models.failing())
    models.save(tmp_path / "bad.onnx", one_node("Nope"))
    unused = {"unused": np.zeros(3, np.float32)}  # ONNX Runtime would warn that it removes it
    value, result = ("x", 1, ("N", 3)), ("y", 1, ("N", 3))
    warns = models.build([models.node("Identity", ["x"], ["y"])], [value], [result], unused)
    models.save(tmp_path / "warns.onnx", warns)

    done = in_fresh_process(
        PRELUDE
        + f"""
    folder = {str(tmp_path)!r}
    take(folder + "/warns.onnx").run({{"x": np.ones((1, 3), np.float32)}}, ["y"])
    for action in (lambda: take(folder + "/bad.onnx"),
                   lambda: take(folder + "/failing.onnx").run({{"index": np.array([[9]])}}, ["y"])):
        try:
            action()
        except (LoadError, ModelFailed):
            continue
        raise SystemExit("did not raise")
    """
    )

    assert (done.stdout, done.stderr) == ("", "")


def test_an_idle_model_burns_no_cpu(tmp_path: Path):
    """X1: after a run its threads sleep; with ONNX Runtime's default they spin."""
    path = models.save(tmp_path / "m.onnx", models.cnn(side=64))

    done = in_fresh_process(
        PRELUDE
        + f"""
    model = take({str(path)!r}, threads=4)
    for _ in range(20):
        model.run({{"image": np.zeros((4, 3, 64, 64), np.float32)}}, ["scores"])
    before = time.process_time()
    for _ in range(10):
        time.sleep(0.05)
    print(time.process_time() - before)
    """
    )

    assert float(done.stdout) < 0.02


def test_an_idle_worker_stays_under_100_mb(tmp_path: Path):
    """X1: interpreter, numpy, ONNX Runtime and a tree model that has answered batches of every size."""
    path = models.save(tmp_path / "m.onnx", models.breast_cancer(50))

    done = in_fresh_process(
        PRELUDE
        + f"""
    model = take({str(path)!r})
    for rows in range(1, 65):
        model.run({{"X": np.zeros((rows, 30), np.float32)}}, ["label", "probabilities"])
    print(open("/proc/self/status").read().split("VmRSS:")[1].split()[0])
    print(sorted(name for name in ("onnx", "sklearn", "skl2onnx", "scipy", "pandas") if name in sys.modules))
    """
    )

    kilobytes, heavy = done.stdout.splitlines()
    assert int(kilobytes) < 100_000
    assert heavy == "[]"


def test_traffic_goes_on_while_a_large_model_loads(tmp_path: Path):
    """X1: the session is built from the path, during which the interpreter lock is free."""
    small = load(models.save(tmp_path / "small.onnx", models.identity()))
    large = models.large(tmp_path / "large.onnx")
    inputs = {"x": np.ones((1, 3), np.float32)}
    loader = threading.Thread(target=lambda: load(large).close())
    pauses = []

    loader.start()
    last = time.perf_counter()
    while loader.is_alive():
        small.run(inputs, ["y"])
        time.sleep(0.0005)
        now = time.perf_counter()
        pauses.append(now - last)
        last = now
    loader.join()

    assert len(pauses) > 10
    assert np.quantile(pauses, 0.9) < 0.02


def test_the_adapter_adds_little_to_a_run(make):
    """X1: at most 3 µs above ONNX Runtime's own call (measured 0.1); the best of several rounds, on a busy machine."""
    runtime = make(models.identity())
    session_run = runtime._run
    inputs, outputs = {"x": np.ones((1, 3), np.float32)}, ["y"]

    def best_s(call) -> float:
        rounds = []
        for _ in range(15):
            start = time.perf_counter()
            for _ in range(500):
                call()
            rounds.append((time.perf_counter() - start) / 500)
        return min(rounds)

    assert best_s(lambda: runtime.run(inputs, outputs)) - best_s(lambda: session_run(outputs, inputs)) < 3e-6
