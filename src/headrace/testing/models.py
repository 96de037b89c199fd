"""Makes the ONNX models that tests and examples need; nothing is downloaded and nothing is committed.

Each function returns the bytes of a model, except `large`, which writes to a path. `save` puts bytes on the disk.
`onnx`, `scikit-learn` and `skl2onnx` are development dependencies, so they are imported inside the functions: a
server that has this module on its path loads none of them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from headrace.tensors import Array, Datatype

OPSET: Final = 17
IR_VERSION: Final = 8

# TensorProto.DataType by protocol type. Source: onnx/onnx.proto.
ONNX_TYPE: Final[dict[Datatype, int]] = {
    Datatype.FP32: 1,
    Datatype.UINT8: 2,
    Datatype.INT8: 3,
    Datatype.UINT16: 4,
    Datatype.INT16: 5,
    Datatype.INT32: 6,
    Datatype.INT64: 7,
    Datatype.BYTES: 8,
    Datatype.BOOL: 9,
    Datatype.FP16: 10,
    Datatype.FP64: 11,
    Datatype.UINT32: 12,
    Datatype.UINT64: 13,
}

Shape = Sequence[int | str] | None
Value = tuple[str, int | Datatype, Shape]


def save(path: Path, model: bytes) -> Path:
    """Write a model, making its folder.

    Returns:
        The path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model)
    return path


def build(
    nodes: Sequence[Any],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    weights: dict[str, Array] | None = None,
    *,
    metadata: dict[str, str] | None = None,
    opset: int = OPSET,
    ir_version: int = IR_VERSION,
) -> bytes:
    """Assemble a model.

    Args:
        nodes: From `onnx.helper.make_node`.
        inputs: (name, type, shape); a dimension that is a text is variable, a shape of None is undeclared.
        outputs: The same.
        weights: Initialisers by name.
        metadata: Custom metadata.
        opset: Version of the default operator set.
        ir_version: Version of the file format.
    """
    from onnx import helper, numpy_helper

    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, _number(kind), shape) for name, kind, shape in inputs],
        [helper.make_tensor_value_info(name, _number(kind), shape) for name, kind, shape in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version, producer_name="headrace-testing"
    )
    if metadata:
        helper.set_model_props(model, metadata)
    content: bytes = model.SerializeToString()
    return content


def node(operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    """`onnx.helper.make_node` without the import."""
    from onnx import helper

    return helper.make_node(operator, list(inputs), list(outputs), **attributes)


def _number(kind: int | Datatype) -> int:
    return ONNX_TYPE[kind] if isinstance(kind, Datatype) else kind


# ---------------------------------------------------------------------------------------------------- small tabular


def identity(
    datatype: Datatype = Datatype.FP32, shape: Shape = ("N", 3), *, metadata: dict[str, str] | None = None
) -> bytes:
    """`x` → `y`, unchanged."""
    return build(
        [node("Identity", ["x"], ["y"])], [("x", datatype, shape)], [("y", datatype, shape)], metadata=metadata
    )


def double(datatype: Datatype = Datatype.FP32, columns: int = 3) -> bytes:
    """`x` [N, columns] → `y` = 2·x, of the same type; numbers only.

    ONNX Runtime adds few types natively, so the others are added as INT64 or FP32 and cast back.
    """
    if datatype.kind not in "iuf":
        raise ValueError(f"{datatype.wire} cannot be doubled; accepted: a number type")
    through = Datatype.FP32 if datatype.kind == "f" and datatype is not Datatype.FP64 else Datatype.INT64
    if datatype is Datatype.FP64:
        through = Datatype.FP64
    nodes = [
        node("Cast", ["x"], ["a"], to=ONNX_TYPE[through]),
        node("Add", ["a", "a"], ["b"]),
        node("Cast", ["b"], ["y"], to=ONNX_TYPE[datatype]),
    ]
    return build(nodes, [("x", datatype, ("N", columns))], [("y", datatype, ("N", columns))])


def logistic(columns: int = 4, *, seed: int = 0) -> bytes:
    """`x` FP32 [N, columns] → `probability` FP32 [N, 1] and `label` INT64 [N, 1]."""
    generator = np.random.default_rng(seed)
    weights = {
        "w": generator.standard_normal((columns, 1)).astype(np.float32),
        "b": np.zeros(1, np.float32),
        "half": np.full(1, 0.5, np.float32),
    }
    nodes = [
        node("MatMul", ["x", "w"], ["s"]),
        node("Add", ["s", "b"], ["t"]),
        node("Sigmoid", ["t"], ["probability"]),
        node("Greater", ["probability", "half"], ["is_positive"]),
        node("Cast", ["is_positive"], ["label"], to=ONNX_TYPE[Datatype.INT64]),
    ]
    outputs: list[Value] = [("probability", Datatype.FP32, ("N", 1)), ("label", Datatype.INT64, ("N", 1))]
    return build(nodes, [("x", Datatype.FP32, ("N", columns))], outputs, weights)


def simple(datatype: Datatype = Datatype.INT32) -> bytes:
    """Triton's `simple`: INPUT0, INPUT1 [N, 16] → OUTPUT0 their sum, OUTPUT1 their difference."""
    shape = ("N", 16)
    nodes = [node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]), node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"])]
    inputs: list[Value] = [("INPUT0", datatype, shape), ("INPUT1", datatype, shape)]
    return build(nodes, inputs, [("OUTPUT0", datatype, shape), ("OUTPUT1", datatype, shape)])


def text_identity() -> bytes:
    """Triton's `simple_identity`: INPUT0 BYTES [N, 16] → OUTPUT0, unchanged."""
    value: Value = ("INPUT0", Datatype.BYTES, ("N", 16))
    return build([node("Identity", ["INPUT0"], ["OUTPUT0"])], [value], [("OUTPUT0", Datatype.BYTES, ("N", 16))])


def many_outputs(count: int = 20) -> bytes:
    """`x` FP32 [N, 2] → `y0` … `y<count-1>` FP32 [N, 2]: x + index."""
    weights = {f"c{index}": np.array([index], np.float32) for index in range(count)}
    nodes = [node("Add", ["x", f"c{index}"], [f"y{index}"]) for index in range(count)]
    outputs: list[Value] = [(f"y{index}", Datatype.FP32, ("N", 2)) for index in range(count)]
    return build(nodes, [("x", Datatype.FP32, ("N", 2))], outputs, weights)


def labelled(labels: str = '["cat", "dog"]') -> bytes:
    """`identity` whose custom metadata carry `labels`."""
    return identity(shape=("N", 2), metadata={"labels": labels})


# ----------------------------------------------------------------------------------------------- shapes and batches


def fixed_batch(rows: int = 2) -> bytes:
    """`x` FP32 [rows, 3] → `y`, unchanged; takes no other number of rows."""
    return identity(shape=(rows, 3))


def scalar() -> bytes:
    """`x` FP32 [N, 3], `factor` FP32 [] → `y` = factor·x; a scalar input cannot be batched."""
    inputs: list[Value] = [("x", Datatype.FP32, ("N", 3)), ("factor", Datatype.FP32, ())]
    return build([node("Mul", ["x", "factor"], ["y"])], inputs, [("y", Datatype.FP32, ("N", 3))])


def output_not_batch() -> bytes:
    """`x` FP32 [N, C] → `y` FP32 [M]: the columns' sums, C elements whatever N is, under a variable dimension.

    By its shapes it looks batched; only a run shows that it is not.
    """
    nodes = [node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)]
    weights = {"axes": np.array([0], np.int64)}
    return build(nodes, [("x", Datatype.FP32, ("N", "C"))], [("y", Datatype.FP32, ("M",))], weights)


def output_transposed() -> bytes:
    """`x` FP32 [N, 3] → `y` FP32 [3, N]: the batch is not the output's first dimension."""
    nodes = [node("Transpose", ["x"], ["y"], perm=[1, 0])]
    return build(nodes, [("x", Datatype.FP32, ("N", 3))], [("y", Datatype.FP32, (3, "N"))])


def batch_mixing() -> bytes:
    """`x` FP32 [N, 3] → `y` FP32 [N, 3]: softmax over the batch, so a row's answer depends on its neighbours."""
    return build(
        [node("Softmax", ["x"], ["y"], axis=0)], [("x", Datatype.FP32, ("N", 3))], [("y", Datatype.FP32, ("N", 3))]
    )


def tokens() -> bytes:
    """`tokens` INT64 [N, S] → `mean` FP32 [N, 1]; S is variable."""
    nodes = [node("Cast", ["tokens"], ["f"], to=1), node("ReduceMean", ["f"], ["mean"], axes=[1], keepdims=1)]
    return build(nodes, [("tokens", Datatype.INT64, ("N", "S"))], [("mean", Datatype.FP32, ("N", 1))])


# ---------------------------------------------------------------------------------------------------------- trouble


def nan() -> bytes:
    """`x` FP32 [N, 1] → `y` = sqrt(x): NaN where x < 0."""
    return build([node("Sqrt", ["x"], ["y"])], [("x", Datatype.FP32, ("N", 1))], [("y", Datatype.FP32, ("N", 1))])


def failing() -> bytes:
    """`index` INT64 [N, 1] → `y` FP32 [N, 1]: raises when an index is above 0 or below -1 (Gather out of range)."""
    weights = {"table": np.array([7.0], np.float32)}
    nodes = [node("Gather", ["table", "index"], ["y"], axis=0)]
    return build(nodes, [("index", Datatype.INT64, ("N", 1))], [("y", Datatype.FP32, ("N", 1))], weights)


def failing_reshape() -> bytes:
    """`x` FP32 [N, 3] → `y` FP32 [N, 3], reshaped to two rows: raises unless N is 2."""
    weights = {"shape": np.array([2, 3], np.int64)}
    nodes = [node("Reshape", ["x", "shape"], ["y"])]
    return build(nodes, [("x", Datatype.FP32, ("N", 3))], [("y", Datatype.FP32, ("M", 3))], weights)


def sequence_output() -> bytes:
    """`x` FP32 [N, 3] → `y`, a sequence of tensors: cannot be served."""
    from onnx import helper

    graph = helper.make_graph(
        [node("SequenceConstruct", ["x", "x"], ["y"])],
        "test",
        [helper.make_tensor_value_info("x", 1, ["N", 3])],
        [helper.make_tensor_sequence_value_info("y", 1, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    content: bytes = model.SerializeToString()
    return content


def with_external_weights(location: str) -> bytes:
    """`x` FP32 [N, 3] → `y` FP32 [N, 100] = x·w, where w lies in the file `location`: see `external_weights`."""
    from onnx import ModelProto, TensorProto

    content = build(
        [node("MatMul", ["x", "w"], ["y"])],
        [("x", Datatype.FP32, ("N", 3))],
        [("y", Datatype.FP32, ("N", 100))],
        {"w": np.frombuffer(external_weights(), np.float32).reshape(3, 100)},
    )
    model = ModelProto.FromString(content)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    external: bytes = model.SerializeToString()
    return external


def external_weights(scale: float = 1.0) -> bytes:
    """The content of the weights file of `with_external_weights`."""
    return (np.arange(300, dtype=np.float32) * np.float32(scale)).tobytes()


# ------------------------------------------------------------------------------------------------------------ heavy


def large(path: Path, *, bytes_min: int = 100_000_000, width: int = 1024, seed: int = 0) -> Path:
    """Write a model of many MatMuls: `x` FP32 [N, width] → `y` FP32 [N, width].

    Args:
        path: Where.
        bytes_min: Smallest file size.
        width: Rows and columns of each weight; one takes 4·width² bytes.
        seed: Of the weights.
    """
    count = -(-bytes_min // (4 * width * width))
    generator = np.random.default_rng(seed)
    weights = {
        f"w{index}": generator.standard_normal((width, width), dtype=np.float32) / np.float32(width**0.5)
        for index in range(count)
    }
    names = ["x", *(f"h{index}" for index in range(1, count)), "y"]
    nodes = [node("MatMul", [names[index], f"w{index}"], [names[index + 1]]) for index in range(count)]
    shape = ("N", width)
    return save(path, build(nodes, [("x", Datatype.FP32, shape)], [("y", Datatype.FP32, shape)], weights))


def cnn(*, side: int = 224, channels: Sequence[int] = (64, 128, 256, 256), classes: int = 10, seed: int = 0) -> bytes:
    """`image` FP32 [N, 3, side, side] → `scores` FP32 [N, classes]; with the defaults about 10 ms a row on one core."""
    generator = np.random.default_rng(seed)
    weights: dict[str, Array] = {}
    nodes: list[Any] = []
    previous, depth = "image", 3
    for index, width in enumerate(channels):
        weights[f"w{index}"] = (generator.standard_normal((width, depth, 3, 3)) * (2 / (9 * depth)) ** 0.5).astype("f4")
        nodes.append(node("Conv", [previous, f"w{index}"], [f"c{index}"], strides=[2, 2], pads=[1, 1, 1, 1]))
        nodes.append(node("Relu", [f"c{index}"], [f"r{index}"]))
        previous, depth = f"r{index}", width
    weights["head"] = (generator.standard_normal((depth, classes)) / depth**0.5).astype("f4")
    nodes.append(node("GlobalAveragePool", [previous], ["pooled"]))
    nodes.append(node("Flatten", ["pooled"], ["flat"]))
    nodes.append(node("MatMul", ["flat", "head"], ["scores"]))
    image: Value = ("image", Datatype.FP32, ("N", 3, side, side))
    return build(nodes, [image], [("scores", Datatype.FP32, ("N", classes))], weights)


# ---------------------------------------------------------------------------------------------------------- trained


def breast_cancer(trees: int = 100, *, zipmap: bool = False) -> bytes:
    """Gradient-boosted trees on scikit-learn's breast-cancer data, seeded, through skl2onnx.

    Args:
        trees: Boosting stages, depth 3 each.
        zipmap: Export the probabilities as a list of maps, which cannot be served; False exports a tensor.

    Returns:
        A model `X` FP32 [N, 30] → `label` INT64 [N] and `probabilities` FP32 [N, 2] (malignant, benign), whose labels
        are in the metadata.
    """
    from onnx import helper
    from skl2onnx import to_onnx
    from sklearn.datasets import load_breast_cancer
    from sklearn.ensemble import GradientBoostingClassifier

    data = load_breast_cancer()
    rows = data.data.astype(np.float32)
    classifier = GradientBoostingClassifier(n_estimators=trees, random_state=0).fit(rows, data.target)
    model = to_onnx(classifier, rows[:1], options={"zipmap": zipmap}, target_opset=OPSET)
    helper.set_model_props(model, {"labels": ",".join(data.target_names)})
    content: bytes = model.SerializeToString()
    return content


def breast_cancer_rows() -> tuple[Array, Array]:
    """The data that `breast_cancer` was trained on.

    Returns:
        Features FP32 [569, 30] and classes INT64 [569] (0 malignant, 1 benign).
    """
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    return data.data.astype(np.float32), data.target.astype(np.int64)
