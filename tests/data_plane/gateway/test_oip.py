"""The Open Inference Protocol codec: what it reads, what it refuses, what it writes."""

import itertools
import json
import math
import struct
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.data_plane.gateway import oip_json
from headrace.data_plane.gateway.oip import Codec
from headrace.data_plane.ticket import BatchOutputs, InferRequest, OutputRows, RequestedOutput
from headrace.errors import (
    BadRequest,
    HeadraceError,
    InvalidInput,
    MalformedJson,
    NonFiniteOutput,
    NotImplementedYet,
)
from headrace.snapshot import Contract, FieldContract, InputContract, NonFinitePolicy
from headrace.tensors import Array, Datatype, Signature, TensorSpec

TABULAR = TensorSpec("X", Datatype.FP32, (-1, 3))
TEXT = TensorSpec("s", Datatype.BYTES, (-1,))
MANY = 10_000


def make_codec(
    *inputs: TensorSpec,
    outputs: tuple[TensorSpec, ...] = (
        TensorSpec("y", Datatype.FP32, (-1, 2)),
        TensorSpec("label", Datatype.INT64, (-1,)),
    ),
    is_batched: bool = True,
    nonfinite: NonFinitePolicy = "error",
    contract: Contract | None = None,
    depth_max: int = 100,
) -> Codec:
    signature = Signature(inputs or (TABULAR,), outputs, is_batched, "test")
    return Codec("model", "3", signature, nonfinite, contract or Contract(), depth_max)


def body_of(*inputs: dict[str, Any], **others: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **others}).encode()


def tensor(data: Any, shape: Any = (1, 3), name: Any = "X", datatype: Any = "FP32", **others: Any) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data, **others}


def binary(size: Any, shape: Any = (1, 3), name: str = "X", datatype: str = "FP32") -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": size}}


def decode(codec: Codec, body: bytes, tail: bytes | None = None) -> InferRequest:
    return codec.decode(body, None) if tail is None else codec.decode(body + tail, len(body))


def refusal(codec: Codec, body: bytes, tail: bytes | None = None) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        decode(codec, body, tail)
    return caught.value


def reply(codec: Codec, *outputs: Array, wanted: list[RequestedOutput] | None = None, id: str | None = None) -> Any:
    chosen = wanted if wanted is not None else [RequestedOutput(index, False) for index in range(len(outputs))]
    return codec.encode(InferRequest(id, {}, {}, 1, chosen), OutputRows(BatchOutputs(outputs, 1)))


def exact(array: Array) -> tuple[Any, ...]:
    """Equal for equal arrays, NaN payloads and the sign of zero included."""
    content = array.tolist() if array.dtype == object else array.tobytes()
    return array.shape, array.dtype.str, content


# ---------------------------------------------------------------- reading JSON


def test_flat_and_nested_data_are_the_same_row_major_tensor() -> None:
    """Data may be flat or nested and are read row by row (P3; Open Inference Protocol, tensor data)."""
    codec = make_codec()

    flat = decode(codec, body_of(tensor([1, 2, 3, 4, 5, 6.5], (2, 3)))).inputs["X"]
    nested = decode(codec, body_of(tensor([[1, 2, 3], [4, 5, 6.5]], (2, 3)))).inputs["X"]

    assert exact(np.array([[1, 2, 3], [4, 5, 6.5]], np.float32)) == exact(flat) == exact(nested)


def test_everything_a_request_can_say_is_read() -> None:
    """Id, parameters, timeout, chosen outputs and unknown keys of a request are understood or ignored (P3)."""
    body = body_of(
        tensor([1, 2, 3], parameters={"content_type": "np"}, extra=[{}]),
        id="abc",
        model_name="from the kserve client",
        parameters={"timeout": 2_500_000, "priority": 1, "tag": "x", "weight": 0.5, "flag": True},
        outputs=[{"name": "label", "extra": 1}],
    )

    request = decode(make_codec(), body)

    assert ("abc", 1, 2.5) == (request.id, request.rows, request.timeout_s)
    expected = {"timeout": 2_500_000, "priority": 1, "tag": "x", "weight": 0.5, "flag": True}
    assert expected == request.parameters
    assert [RequestedOutput(1, False)] == request.outputs


def test_nulls_in_place_of_optional_members_count_as_absent() -> None:
    """Clients that print every member, absent ones as null, are served (P3)."""
    body = body_of(tensor([1, 2, 3], parameters=None), id=None, parameters=None, outputs=None)

    request = decode(make_codec(), body)

    assert (None, {}, 2) == (request.id, request.parameters, len(request.outputs))


def test_inputs_come_out_in_the_order_of_the_signature() -> None:
    """The order in which the caller lists inputs does not matter (P3)."""
    codec = make_codec(TABULAR, TEXT)

    request = decode(codec, body_of(tensor(["a"], [1], "s", "BYTES"), tensor([1, 2, 3])))

    assert ["X", "s"] == list(request.inputs)


def test_zero_rows_are_a_legal_request() -> None:
    """A shape with a zero and no data is decoded to an empty tensor (P3)."""
    for data in ([], [[]]):
        request = decode(make_codec(), body_of(tensor(data, (0, 3))))

        assert (0, (0, 3)) == (request.rows, request.inputs["X"].shape)


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        (Datatype.UINT8, [0, 255]),
        (Datatype.INT8, [-128, 127]),
        (Datatype.UINT64, [0, 2**64 - 1]),
        (Datatype.INT64, [-(2**63), 2**63 - 1]),
        (Datatype.INT64, [2**53 + 1, 0]),
        (Datatype.FP16, [65504, -65504.0]),
        (Datatype.FP32, [3.4028234663852886e38, 1e-45]),
        (Datatype.FP64, [1.7976931348623157e308, 5e-324]),
        (Datatype.BOOL, [True, False]),
        (Datatype.BYTES, ["", 'é"\\a\u0000b']),
    ],
)
def test_extreme_values_arrive_exactly(datatype: Datatype, values: list[Any]) -> None:
    """The limits of every type survive, 2^63-1 and 2^64-1 included (P3)."""
    codec = make_codec(TensorSpec("a", datatype, (-1,)))

    array = decode(codec, body_of(tensor(values, [2], "a", datatype.wire))).inputs["a"]

    expected = [value.encode() if isinstance(value, str) else value for value in values]
    if datatype is Datatype.FP32:
        expected = [float(np.float32(value)) for value in values]
    assert expected == array.tolist()


@pytest.mark.parametrize(
    ("datatype", "value", "reason"),
    [
        (Datatype.UINT8, 300, "range"),
        (Datatype.UINT8, -1, "range"),
        (Datatype.INT64, 2**63, "range"),
        (Datatype.UINT64, 2**64, "range"),
        (Datatype.INT64, 10**60, "range"),
        (Datatype.INT32, 1.0, "type"),
        (Datatype.INT32, True, "type"),
        (Datatype.INT32, "1", "type"),
        (Datatype.FP16, 1e5, "range"),
        (Datatype.FP32, 1e39, "range"),
        (Datatype.FP32, 10**400, "range"),
        (Datatype.FP32, True, "type"),
        (Datatype.FP32, "1.5", "type"),
        (Datatype.FP32, None, "missing"),
        (Datatype.FP32, {}, "type"),
        (Datatype.BOOL, 0, "type"),
        (Datatype.BYTES, 5, "type"),
        (Datatype.BYTES, None, "missing"),
    ],
)
def test_a_value_that_the_datatype_does_not_hold_is_refused(datatype: Datatype, value: Any, reason: str) -> None:
    """Nothing wraps, rounds to infinity or changes its kind silently; the error names input and element (P3)."""
    codec = make_codec(TensorSpec("a", datatype, (-1,)))
    good: Any = {"b": True, "s": "x"}.get(datatype.kind, 1)

    error = refusal(codec, body_of(tensor([good, value], [2], "a", datatype.wire)))

    assert isinstance(error, InvalidInput)
    assert ("a", reason, 400) == (error.field, error.reason, error.http_status)
    assert "'a'" in error.message
    assert "element 1" in error.message


def test_a_number_that_no_double_holds_is_refused_by_name() -> None:
    """1e400 is not read as infinity (P3)."""
    text = body_of(tensor([1, 2, 777])).replace(b"777", b"1e400")

    error = refusal(make_codec(), text)

    assert isinstance(error, InvalidInput)
    assert ("X", "range") == (error.field, error.reason)
    huge = body_of(tensor([777.5] + [0.5] * 400_000, (1, 400_001))).replace(b"777.5", b"1e400")
    assert isinstance(refusal(make_codec(), huge), MalformedJson)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "-NaN"])
def test_nonfinite_literals_are_refused_with_a_way_out(literal: str) -> None:
    """NaN is no JSON; the error points to the binary form (P3)."""
    error = refusal(make_codec(), body_of(tensor([1, 2, 777])).replace(b"777", literal.encode()))

    assert isinstance(error, MalformedJson)
    assert literal in error.message
    assert "hint: the binary form" in error.message


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"inputs":[}',
        b"[]",
        b"null",
        b'"text"',
        b"{} x",
        b"\xef\xbb\xbf{}",
        b'{"id":"\xff"}',
        b'{"id":"\\ud800"}',
        b'{"inputs":{}}',
        b'{"inputs":[1]}',
        b'{"inputs":[{}]}',
        b'{"inputs":[{"name":1}]}',
        b'{"inputs":[],"outputs":{}}',
        b'{"inputs":[],"id":5}',
        b'{"inputs":[],"parameters":[]}',
        b'{"inputs":[],"outputs":[1]}',
        b'{"inputs":[],"outputs":[{"name":null}]}',
    ],
)
def test_what_is_no_request_is_malformed(text: bytes) -> None:
    """Malformed JSON and JSON of another form are 400 `malformed_json` (P3)."""
    assert isinstance(refusal(make_codec(), text), MalformedJson)


@pytest.mark.parametrize(
    ("changes", "field", "reason", "words"),
    [
        ({"datatype": "FP64"}, "X", "datatype", ["expected datatype FP32", "'FP64'"]),
        ({"datatype": None}, "X", "datatype", ["FP32", "null or missing"]),
        ({"data": [1, 2]}, "X", "shape", ["'X'", "expected 3 elements", "got 2"]),
        ({"data": [[1], [2, 3]]}, "X", "shape", ["unevenly"]),
        ({"data": [1, [2, 3]]}, "X", "shape", ["unevenly"]),
        ({"data": 5}, "X", "type", ["expected an array"]),
        ({"data": None}, "X", "missing", ["neither data nor binary_data_size"]),
        ({"shape": [3]}, "X", "shape", ["[-1, 3]", "[3]"]),
        ({"shape": [1, 4]}, "X", "shape", ["[-1, 3]", "[1, 4]"]),
        ({"shape": [-1, 3]}, "X", "shape", ["from 0 to", "-1"]),
        ({"shape": [1.0, 3]}, "X", "shape", ["1.0"]),
        ({"shape": [True, 3]}, "X", "shape", ["boolean"]),
        ({"shape": [2**62, 3]}, "X", "shape", ["got 3"]),
        ({"shape": [2**63, 3]}, "X", "shape", ["a dimension"]),
        ({"shape": [10**50, 3]}, "X", "shape", ["a dimension"]),
        ({"shape": "1,3"}, "X", "shape", ["[-1, 3]"]),
        ({"shape": None}, "X", "shape", ["null or missing"]),
        ({"name": "x"}, "", "unknown", ["'x'", "has 'X'"]),
        ({"name": "y" * 500}, "", "unknown", ["y" * 70]),
    ],
)
def test_a_tensor_that_breaks_the_signature_is_refused(
    changes: dict[str, Any], field: str, reason: str, words: list[str]
) -> None:
    """The error says field, expected and got; the field is never the caller's text (P3)."""
    item = {**tensor([1, 2, 3]), **changes}

    error = refusal(make_codec(), body_of(item))

    assert isinstance(error, InvalidInput)
    assert (field, reason, 400) == (error.field, error.reason, error.http_status)
    assert reason in InvalidInput.REASONS
    for word in words:
        assert word in error.message
    assert len(error.message) < 400


def test_an_absurd_shape_costs_nothing() -> None:
    """A shape is compared with the data before anything is allocated, and zero elements excuse no dimension (P3)."""
    codec = make_codec(TensorSpec("X", Datatype.FP32, (-1, -1, -1)))
    start = time.perf_counter()

    for shape in ([2**40, 2**40, 2**40], [0, 2**62, 2**62], [10**9, 0, 1], [0, 0, 2**63 - 1]):
        assert refusal(codec, body_of(tensor([], shape))).http_status == 400
        assert refusal(codec, body_of(binary(0, shape)), b"").http_status == 400

    assert time.perf_counter() - start < 1


def test_inputs_that_are_missing_unknown_or_repeated_are_refused() -> None:
    """A request holds every input of the signature once (P3)."""
    codec = make_codec(TABULAR, TEXT)
    numbers, text = tensor([1, 2, 3]), tensor(["a"], [1], "s", "BYTES")

    errors = [
        refusal(codec, body_of(numbers)),
        refusal(codec, body_of(numbers, text, numbers)),
        refusal(codec, body_of(numbers, text, tensor([1], [1], "t"))),
        refusal(codec, body_of()),
        refusal(codec, b"{}"),
    ]

    expected = [("s", "missing"), ("X", "repeated"), ("", "unknown"), ("", "missing"), ("", "missing")]
    assert expected == [(error.field, error.reason) for error in errors if isinstance(error, InvalidInput)]
    assert "expected 2 inputs, got 1; missing 's'" in errors[0].message


def test_an_input_without_a_name_is_refused_even_when_there_is_only_one() -> None:
    """A lone input is not taken for the one input of the model (P3)."""
    item = tensor([1, 2, 3])
    del item["name"]

    for codec in (make_codec(), make_codec(TABULAR, TEXT)):
        assert isinstance(refusal(codec, body_of(item)), MalformedJson)


def test_inputs_agree_on_the_number_of_rows() -> None:
    """Inputs of a batched model have the same first dimension (P3)."""
    codec = make_codec(TABULAR, TEXT)
    numbers, text = tensor([1, 2, 3]), tensor(["a", "b"], [2], "s", "BYTES")

    error = refusal(codec, body_of(numbers, text))

    assert isinstance(error, InvalidInput)
    assert ("s", "rows") == (error.field, error.reason)
    assert 1 == decode(make_codec(TABULAR, TEXT, is_batched=False), body_of(numbers, text)).rows


def test_a_scalar_input_takes_one_element() -> None:
    """Shape [] is one element (P3)."""
    codec = make_codec(TensorSpec("t", Datatype.FP64, ()), is_batched=False)

    assert 2.5 == decode(codec, body_of(tensor([2.5], [], "t", "FP64"))).inputs["t"].item()


@pytest.mark.parametrize(
    ("others", "status", "words"),
    [
        ({"outputs": [{"name": "nope"}]}, 400, ["'nope'", "'y', 'label'"]),
        ({"outputs": [{"name": "labl"}]}, 400, ["did you mean 'label'"]),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, 400, ["more than once"]),
        ({"outputs": [{"name": "y", "parameters": {"classification": 3}}]}, 501, ["classification"]),
        ({"outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]}, 501, ["shared memory"]),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, 400, ["true or false"]),
        ({"outputs": [{"name": "y", "parameters": {"triton_x": 1}}]}, 400, ["reserved"]),
        ({"parameters": {"binary_data_output": "yes"}}, 400, ["true or false"]),
        ({"parameters": {"triton_x": 1}}, 400, ["reserved"]),
        ({"parameters": {"a": [1]}}, 400, ["'a'", "an array"]),
        ({"parameters": {"a": {}}}, 400, ["an object"]),
        ({"parameters": {"a": None}}, 400, ["null"]),
        ({"parameters": {"a": 2**64}}, 400, ["64 bits"]),
        ({"parameters": {"timeout": -1}}, 400, ["microseconds"]),
        ({"parameters": {"timeout": 1.5}}, 400, ["microseconds"]),
        ({"parameters": {"timeout": True}}, 400, ["microseconds"]),
        ({"parameters": {"timeout": "1"}}, 400, ["microseconds"]),
    ],
)
def test_outputs_and_parameters_are_checked(others: dict[str, Any], status: int, words: list[str]) -> None:
    """Unknown outputs, reserved and ill-typed parameters are refused; what is not offered is 501 (P3)."""
    error = refusal(make_codec(), body_of(tensor([1, 2, 3]), **others))

    assert status == error.http_status
    for word in words:
        assert word in error.message


def test_a_timeout_of_zero_means_none() -> None:
    """As in Triton, 0 is the default and not an instant deadline (P3)."""
    body = body_of(tensor([1, 2, 3]), parameters={"timeout": 0})

    assert decode(make_codec(), body).timeout_s is None


@pytest.mark.parametrize("timeout", [3_600_000_001, 2**63 - 1, 2**64 - 1])
def test_a_timeout_of_more_than_an_hour_is_an_hour(timeout: int) -> None:
    """P3, S2: the largest integer means "for ever" to those who send it, and nobody may fill the queue for ever."""
    body = body_of(tensor([1, 2, 3]), parameters={"timeout": timeout})

    assert 3600.0 == decode(make_codec(), body).timeout_s


def test_shared_memory_is_not_offered() -> None:
    """A shared-memory input is 501 with a way out (P3)."""
    item = {"name": "X", "shape": [1, 3], "datatype": "FP32", "parameters": {"shared_memory_region": "r"}}

    error = refusal(make_codec(), body_of(item))

    assert isinstance(error, NotImplementedYet)
    assert "binary_data_size" in error.message


# ---------------------------------------------------------------- nesting


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[{"name":"X","shape":[1,3],"datatype":"FP32","data":' + b"[" * MANY + b"1" + b"]" * MANY + b"}]}",
        b'{"x":' + b"[" * MANY + b"]" * MANY + b"}",
        b'{"x":' + b'{"a":' * MANY + b"1" + b"}" * MANY + b"}",
        b"[" * MANY,
        b'{"\\"":' + b"[" * MANY,
    ],
)
def test_deep_nesting_is_refused_quickly(text: bytes) -> None:
    """10,000 levels are a 400 within milliseconds, wherever they are (P3; conformance case 22)."""
    start = time.perf_counter()

    error = refusal(make_codec(), text)

    assert isinstance(error, MalformedJson)
    assert "deep" in error.message
    assert time.perf_counter() - start < 0.5


def test_nesting_up_to_the_limit_is_taken_and_brackets_in_strings_do_not_nest() -> None:
    """The limit counts levels, not brackets (P3)."""
    item = tensor(["[" * 50 + '"' + "\\" + "{" * 50, "]"], [2], "s", "BYTES")
    deep: Any = [1, 2, 3]
    for _ in range(6):
        deep = [deep]

    text = decode(make_codec(TEXT, depth_max=4), body_of(item)).inputs["s"]
    at_limit = decode(make_codec(depth_max=10), body_of(tensor(deep))).inputs["X"]

    assert [item["data"][0].encode(), b"]"] == text.tolist()
    assert [[1, 2, 3]] == at_limit.tolist()
    assert isinstance(refusal(make_codec(depth_max=9), body_of(tensor(deep))), MalformedJson)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.sampled_from(["[", "]", "{", "}", '"', "\\\\", '\\"', "\\n", "x"]), max_size=30))
def test_the_depth_is_that_of_a_plain_scan(pieces: list[str]) -> None:
    """The vectorised scan agrees with a character-by-character one, across its chunks too (P3)."""
    depth = deepest = 0
    is_outside = True
    for piece in pieces:
        is_outside ^= piece == '"'
        depth += is_outside * ((piece in ("[", "{")) - (piece in ("]", "}")))
        deepest = max(deepest, depth)
    text = "".join(pieces).encode()
    limit = 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oip_json, "_DEPTH_CHUNK_BYTES", 3)
        try:
            oip_json.check_depth(text, limit)
            is_accepted = True
        except MalformedJson:
            is_accepted = False

    assert (deepest <= limit) == is_accepted


def test_a_limit_above_what_the_parser_can_do_still_ends_in_400() -> None:
    """The parser's own recursion limit is no 500 (P3)."""
    text = b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}"

    assert isinstance(refusal(make_codec(depth_max=MANY), text), MalformedJson)


# ---------------------------------------------------------------- reading binary


def test_the_worked_example_is_read_byte_for_byte() -> None:
    """A request as a Triton client sends it (X6; Triton binary tensor data extension)."""
    head = (
        b'{"inputs":[{"name":"a","shape":[2],"datatype":"FP32","parameters":{"binary_data_size":8}},'
        b'{"name":"s","shape":[2],"datatype":"BYTES","parameters":{"binary_data_size":13}}],'
        b'"outputs":[{"name":"y","parameters":{"binary_data":true}}]}'
    )
    tail = bytes.fromhex("0000803f 000020c0 03000000 616263 02000000 c3a9")
    codec = make_codec(TensorSpec("a", Datatype.FP32, (-1,)), TEXT)

    request = decode(codec, head, tail)

    assert (231, 252) == (len(head), len(head + tail))
    assert [1.0, -2.5] == request.inputs["a"].tolist()
    assert [b"abc", "é".encode()] == request.inputs["s"].tolist()
    assert [RequestedOutput(0, True)] == request.outputs


def test_aligned_binary_inputs_are_views_of_the_body() -> None:
    """Nothing is copied unless the address is misaligned, and then the array is aligned (X6)."""
    head, tail = body_of(binary(12)), np.arange(3, dtype="<f4").tobytes()

    for padding in range(8):
        padded = head + b" " * padding
        body = padded + tail
        array = make_codec().decode(body, len(padded)).inputs["X"]
        is_view = np.shares_memory(array, np.frombuffer(body, np.uint8))

        assert [[0, 1, 2]] == array.tolist()
        assert array.flags.aligned
        assert (len(padded) % 4 == 0) == is_view


def test_binary_and_json_inputs_mix() -> None:
    """The kind is chosen tensor by tensor (X6; conformance case 9)."""
    codec = make_codec(TABULAR, TEXT, TensorSpec("n", Datatype.INT16, (-1,)))
    body = body_of(tensor(["q"], [1], "s", "BYTES"), binary(2, [1], "n", "INT16"), binary(12))

    request = decode(codec, body, struct.pack("<h3f", -7, 1, 2, math.nan))

    assert [b"q"] == request.inputs["s"].tolist()
    assert [-7] == request.inputs["n"].tolist()
    assert "[[1.0, 2.0, nan]]" == str(request.inputs["X"].tolist())


def test_a_memoryview_body_is_as_good_as_bytes() -> None:
    """The front may hand over a view (X6)."""
    head, tail = body_of(binary(12)), bytes(12)

    assert [[0, 0, 0]] == make_codec().decode(memoryview(head + tail), len(head)).inputs["X"].tolist()
    assert 1 == make_codec().decode(memoryview(body_of(tensor([1, 2, 3]))), None).rows


@pytest.mark.parametrize(
    ("item", "tail", "words"),
    [
        (binary(12), bytes(11), ["1 bytes missing"]),
        (binary(12), b"", ["12 bytes missing"]),
        (binary(12), bytes(15), ["3 bytes are left"]),
        (binary(8), bytes(8), ["expected 12 bytes", "binary_data_size 8"]),
        (binary(-1), bytes(12), ["at least 0"]),
        (binary("12"), bytes(12), ["'12'"]),
        (binary(True), bytes(12), ["True"]),
        (binary(1.5), bytes(12), ["1.5"]),
        (binary(2**70), bytes(12), ["64 bits"]),
        ({**binary(12), "data": [1, 2, 3]}, bytes(12), ["both data and binary_data_size"]),
        (tensor([1, 2, 3]), bytes(1), ["1 bytes are left"]),
    ],
)
def test_binary_lengths_must_add_up(item: dict[str, Any], tail: bytes, words: list[str]) -> None:
    """Too few bytes, too many, and sizes that do not fit the shape are 400 (X6; conformance cases 7 and 8)."""
    error = refusal(make_codec(), body_of(item), tail)

    assert 400 == error.http_status
    for word in words:
        assert word in error.message


def test_a_header_length_outside_the_body_is_refused() -> None:
    """The JSON part cannot be longer than the body; one byte off is no JSON (X6; conformance case 7)."""
    head, tail = body_of(binary(12)), bytes(12)
    codec = make_codec()

    for json_bytes in (len(head) + len(tail) + 1, -1, 2**40, len(head) + 1, len(head) - 1, 1):
        with pytest.raises(BadRequest):
            codec.decode(head + tail, json_bytes)


def test_a_binary_input_without_the_header_is_refused_with_a_hint() -> None:
    """The usual cause of missing bytes is named (X6)."""
    assert "hint: is Inference-Header-Content-Length set?" in refusal(make_codec(), body_of(binary(12))).message


@pytest.mark.parametrize(
    "content",
    [b"\x05\0\0\0abc", b"\xff\xff\xff\xffabc", b"\x01\0", b"", b"\1\0\0\0a", b"\0\0\0\0" * 3, b"\0\0\0\0\0\0\0\0\0"],
)
def test_length_prefixes_are_bounds_checked(content: bytes) -> None:
    """BYTES elements never reach outside their tensor, and are as many as the shape says (X6)."""
    error = refusal(make_codec(TEXT), body_of(binary(len(content), [2], "s", "BYTES")), content + b"")

    assert isinstance(error, InvalidInput)
    assert "s" == error.field


def test_a_binary_bool_is_zero_or_one() -> None:
    """Other bytes would be neither true nor false to the model (X6)."""
    codec = make_codec(TensorSpec("b", Datatype.BOOL, (-1,)))
    head = body_of(binary(2, [2], "b", "BOOL"))

    assert [False, True] == decode(codec, head, b"\0\1").inputs["b"].tolist()
    assert "element 1" in refusal(codec, head, b"\0\2").message


@pytest.mark.parametrize(
    ("spec", "body", "expected"),
    [
        (TABULAR, np.arange(3, dtype="<f4").tobytes(), [[0, 1, 2]]),
        (TensorSpec("v", Datatype.INT16, (-1, -1)), b"\1\0\2\0", [[1, 2]]),
        (TEXT, b"\xff whole body\0\0", [b"\xff whole body\0\0"]),
        (TensorSpec("t", Datatype.BYTES, (-1, 1)), b"", [[b""]]),
    ],
)
def test_a_raw_request_is_one_row_of_the_only_input(spec: TensorSpec, body: bytes, expected: Any) -> None:
    """Header length 0: the body is the tensor, outputs are binary (X6; Triton raw binary request)."""
    request = make_codec(spec).decode(body, 0)

    assert (expected, 1) == (request.inputs[spec.name].tolist(), request.rows)
    assert all(output.is_binary for output in request.outputs)


def test_a_raw_request_that_does_not_fit_is_refused() -> None:
    """More inputs, an odd length or two open dimensions are 400 (X6)."""
    open_twice = TensorSpec("v", Datatype.FP32, (-1, -1, -1))

    for codec, body in (
        (make_codec(TABULAR, TEXT), b""),
        (make_codec(), bytes(11)),
        (make_codec(open_twice), bytes(12)),
        (make_codec(TensorSpec("v", Datatype.FP32, (-1, -1))), bytes(11)),
        (make_codec(TensorSpec("t", Datatype.BYTES, (-1, 2))), b"x"),
    ):
        with pytest.raises(BadRequest):
            codec.decode(body, 0)


@pytest.mark.parametrize(
    ("flag", "request_flag", "is_binary"),
    [(None, None, False), (None, True, True), (True, None, True), (False, True, False), (True, False, True)],
)
def test_an_outputs_own_flag_beats_the_requests(flag: bool | None, request_flag: bool | None, is_binary: bool) -> None:
    """Output flag, else request flag, else JSON (X6; conformance case 11)."""
    output = {"name": "y"} if flag is None else {"name": "y", "parameters": {"binary_data": flag}}
    parameters = {} if request_flag is None else {"binary_data_output": request_flag}

    listed = decode(make_codec(), body_of(tensor([1, 2, 3]), outputs=[output], parameters=parameters))
    unlisted = decode(make_codec(), body_of(tensor([1, 2, 3]), parameters=parameters))

    assert [RequestedOutput(0, is_binary)] == listed.outputs
    assert [bool(request_flag)] * 2 == [output.is_binary for output in unlisted.outputs]


# ---------------------------------------------------------------- writing


def test_a_json_reply_is_flat_and_exact_to_the_byte() -> None:
    """Name, version, datatype, shape and flat data; the id only when one was given (P3)."""
    outputs = np.array([[0.5, 0.25], [1, -0.0]], np.float32), np.array([7, -1])

    encoded = reply(make_codec(), *outputs)
    with_id = reply(make_codec(), *outputs, id='a"b')

    expected = (
        b'{"model_name":"model","model_version":"3","outputs":['
        b'{"name":"y","datatype":"FP32","shape":[2,2],"data":[0.5,0.25,1.0,-0.0]},'
        b'{"name":"label","datatype":"INT64","shape":[2],"data":[7,-1]}]}'
    )
    assert (expected, [], False, len(expected)) == (
        encoded.json,
        encoded.tensors,
        encoded.is_binary,
        encoded.json_bytes,
    )
    assert expected.replace(b'"outputs"', b'"id":"a\\"b","outputs"') == with_id.json


def test_a_mixed_reply_carries_its_tensors_behind_the_json() -> None:
    """Each output in the form asked for, in the order asked for (X6; conformance case 9)."""
    label, y = np.array([258]), np.array([[1, -2.5]], np.float32)

    encoded = reply(make_codec(), y, label, wanted=[RequestedOutput(1, True), RequestedOutput(0, False)])

    expected = (
        b'{"model_name":"model","model_version":"3","outputs":['
        b'{"name":"label","datatype":"INT64","shape":[1],"parameters":{"binary_data_size":8}},'
        b'{"name":"y","datatype":"FP32","shape":[1,2],"data":[1.0,-2.5]}]}'
    )
    assert (expected, True) == (encoded.json, encoded.is_binary)
    assert b"\2\1\0\0\0\0\0\0" == b"".join(encoded.tensors)


def test_a_binary_reply_without_bytes_is_still_binary() -> None:
    """Zero rows in binary form keep the content type that was asked for (X6)."""
    encoded = reply(make_codec(), np.empty((0, 2), np.float32), wanted=[RequestedOutput(0, True)])

    assert (True, []) == (encoded.is_binary, encoded.tensors)
    assert {"binary_data_size": 0} == json.loads(encoded.json)["outputs"][0]["parameters"]


def test_zero_rows_are_answered_with_zero_rows() -> None:
    """An empty tensor has its shape and empty data (P3)."""
    encoded = reply(make_codec(), np.empty((0, 2), np.float32))

    assert ([0, 2], []) == tuple(json.loads(encoded.json)["outputs"][0][key] for key in ("shape", "data"))


def test_a_binary_output_is_not_copied() -> None:
    """The reply holds a view of the model's array; one that is not contiguous is laid out first (X6)."""
    array = np.arange(4, dtype=np.float32).reshape(2, 2)
    wanted = [RequestedOutput(0, True)]

    (view,) = reply(make_codec(), array, wanted=wanted).tensors
    (transposed,) = reply(make_codec(), array.T, wanted=wanted).tensors

    assert np.shares_memory(array, np.frombuffer(view, np.uint8))
    assert array.T.tobytes() == bytes(transposed)


def test_nonfinite_outputs_follow_the_policy() -> None:
    """JSON replies refuse, null or print NaN and infinity as configured; binary carries them (P3; case 19)."""
    array = np.array([[math.nan, 1], [-math.inf, math.inf]], np.float32)

    with pytest.raises(NonFiniteOutput, match=r"'y' holds nan at element \[0, 0\].*binary form"):
        reply(make_codec(nonfinite="error"), array)
    null = reply(make_codec(nonfinite="null"), array).json
    literal = reply(make_codec(nonfinite="literal"), array).json
    carried = reply(make_codec(), array, wanted=[RequestedOutput(0, True)]).tensors

    assert [None, 1.0, None, None] == msgspec.json.decode(null)["outputs"][0]["data"]
    assert b'"data":[NaN,1.0,-Infinity,Infinity]' in literal
    assert array.tobytes() == b"".join(carried)


def test_bytes_that_are_no_text_need_the_binary_form() -> None:
    """JSON cannot carry them, and the error says what can (P3)."""
    codec = make_codec(outputs=(TensorSpec("t", Datatype.BYTES, (-1,)),))
    array = np.array([b"ok", b"\xff"], object)

    with pytest.raises(BadRequest, match=r"'t': element 1 is not UTF-8.*binary form"):
        reply(codec, array)

    assert b"\2\0\0\0ok\1\0\0\0\xff" == b"".join(reply(codec, array, wanted=[RequestedOutput(0, True)]).tensors)


def test_names_that_need_escapes_are_served() -> None:
    """Names come from artefacts, which do not care about JSON (P3)."""
    spec = TensorSpec('a"\\/é:0', Datatype.INT8, (-1,))
    codec = make_codec(spec, outputs=(spec,))

    request = decode(codec, body_of(tensor([5], [1], spec.name, "INT8"), outputs=[{"name": spec.name}]))
    encoded = codec.encode(request, OutputRows(BatchOutputs([request.inputs[spec.name]], 1)))

    assert spec.name == json.loads(encoded.json)["outputs"][0]["name"]


# ---------------------------------------------------------------- missing values


def test_missing_values_are_filled_from_the_contract() -> None:
    """A null takes the default of its column, else of its input; an omitted input takes its default (P3)."""
    contract = Contract(
        inputs={
            "X": InputContract(default=-1, fields=(FieldContract("age", index=1, default=30.0),)),
            "s": InputContract(default="none"),
        }
    )
    codec = make_codec(TABULAR, TEXT, contract=contract)

    request = decode(codec, body_of(tensor([[None, None, 3], [4, 5, None]], (2, 3))))

    assert [[-1, 30, 3], [4, 5, -1]] == request.inputs["X"].tolist()
    assert [b"none", b"none"] == request.inputs["s"].tolist()


def test_a_missing_value_without_a_default_names_its_field() -> None:
    """The error and its metric label name the column of the contract (P3)."""
    contract = Contract(inputs={"X": InputContract(fields=(FieldContract("age", index=1),))})

    error = refusal(make_codec(contract=contract), body_of(tensor([1, 2, 3, 4, None, 6], (2, 3))))

    assert isinstance(error, InvalidInput)
    assert ("X.age", "missing") == (error.field, error.reason)
    assert "field 'age' (column 1), row 1: expected FP32 (no default), got null" in error.message


# ---------------------------------------------------------------- properties


def arrays_of(datatype: Datatype, *, finite: bool, text: bool) -> st.SearchStrategy[Array]:
    shapes = hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=4)
    if datatype is Datatype.BYTES:
        leaf: st.SearchStrategy[bytes] = st.text(max_size=6).map(str.encode) if text else st.binary(max_size=6)
        return hnp.arrays(object, shapes, elements=leaf)
    if datatype.kind == "f":
        floats = {"allow_nan": not finite, "allow_infinity": not finite}
        return hnp.arrays(datatype.dtype, shapes, elements=floats)
    return hnp.arrays(datatype.dtype, shapes)


@pytest.mark.parametrize("datatype", list(Datatype), ids=lambda datatype: datatype.wire)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), is_nested=st.booleans())
def test_every_datatype_survives_json_both_ways(datatype: Datatype, data: st.DataObject, is_nested: bool) -> None:
    """What is decoded from JSON and encoded to JSON is the same tensor, to the bit (P3)."""
    array = data.draw(arrays_of(datatype, finite=True, text=True))
    spec = TensorSpec("a", datatype, (-1,) * array.ndim)
    codec = make_codec(spec, outputs=(spec,))
    leaves = array.tolist() if is_nested else array.ravel().tolist()
    sent = json.loads(json.dumps({"data": leaves}, default=bytes.decode))["data"]

    request = decode(codec, body_of(tensor(sent, array.shape, "a", datatype.wire)))
    answer = json.loads(codec.encode(request, OutputRows(BatchOutputs([array], 1))).json)["outputs"][0]
    again = decode(codec, body_of(answer))

    assert exact(array) == exact(request.inputs["a"]) == exact(again.inputs["a"])
    assert list(array.shape) == answer["shape"]


@pytest.mark.parametrize("datatype", list(Datatype), ids=lambda datatype: datatype.wire)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), padding=st.integers(0, 8))
def test_every_datatype_survives_the_binary_form_both_ways(
    datatype: Datatype, data: st.DataObject, padding: int
) -> None:
    """Bytes out are bytes in, NaN and bytes that are no text included (X6)."""
    array = data.draw(arrays_of(datatype, finite=False, text=False))
    spec = TensorSpec("a", datatype, (-1,) * array.ndim)
    codec = make_codec(spec, outputs=(spec,))

    encoded = reply(codec, array, wanted=[RequestedOutput(0, True)])
    output = json.loads(encoded.json)["outputs"][0]
    request = decode(codec, body_of(output) + b" " * padding, b"".join(encoded.tensors))

    assert exact(array) == exact(request.inputs["a"])


JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["X", "s", "y", "label", "x"])
LEAVES = st.none() | st.booleans() | st.integers(-3, 300) | st.floats(-1e39, 1e39) | st.text(max_size=2)
TENSORS = st.fixed_dictionaries(
    {
        "name": NAMES | JSON_VALUES,
        "shape": st.sampled_from([[1, 3], [2, 3], [0, 3], [1], [2]]) | JSON_VALUES,
        "datatype": st.sampled_from(["FP32", "BYTES", "INT8"]) | JSON_VALUES,
    },
    optional={
        "data": st.lists(st.floats(-9, 9) | st.integers(0, 9), min_size=3, max_size=3)
        | st.lists(st.text(max_size=2), min_size=1, max_size=2)
        | st.lists(LEAVES, max_size=6)
        | JSON_VALUES,
        "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "a"]), JSON_VALUES, max_size=2)
        | JSON_VALUES,
    },
)
MESSAGES = st.fixed_dictionaries(
    {"inputs": st.lists(TENSORS | JSON_VALUES, max_size=3) | JSON_VALUES},
    optional={
        "id": st.text() | JSON_VALUES,
        "parameters": st.dictionaries(st.sampled_from(["timeout", "binary_data_output", "b"]), JSON_VALUES, max_size=2)
        | JSON_VALUES,
        "outputs": st.lists(st.fixed_dictionaries({"name": NAMES}, optional={"parameters": JSON_VALUES}), max_size=2)
        | JSON_VALUES,
        "extra": JSON_VALUES,
    },
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(message=MESSAGES, tail=st.none() | st.binary(max_size=12))
def test_any_json_is_either_a_request_or_the_callers_error(message: Any, tail: bytes | None) -> None:
    """No body raises anything but a request error, and every label is a known name (P3)."""
    for codec in (make_codec(), make_codec(TABULAR, TEXT)):
        try:
            request = decode(codec, json.dumps(message).encode(), tail)
        except HeadraceError as caught:
            outcome = (caught.http_status, getattr(caught, "field", ""), getattr(caught, "reason", "type"))
        else:
            outcome = (200, "", "type")
            assert np.float32 == request.inputs["X"].dtype

        status, field, reason = outcome
        assert status in (200, 400, 501)
        assert field in {"", "X", "s", "y", "label"}
        assert reason in InvalidInput.REASONS


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.integers(0, 2),
    leaves=st.lists(st.integers(-9, 2**66) | st.floats(-1e39, 1e39), min_size=6, max_size=6),
    id=st.none() | st.text(max_size=3),
    parameters=st.none() | st.dictionaries(st.text(max_size=3), st.integers(0, 2**63 - 1) | st.booleans(), max_size=2),
    is_lone=st.booleans(),
)
def test_the_typed_and_the_exact_way_agree(
    rows: int, leaves: list[Any], id: str | None, parameters: Any, is_lone: bool
) -> None:
    """The fast way is an optimisation only: whatever it takes, the slow way takes with the same result (P3)."""
    inputs = [tensor(leaves[: rows * 3], (rows, 3))]
    if not is_lone:
        inputs.append(tensor(["t"] * rows, (rows,), "s", "BYTES"))
    text = body_of(*inputs, id=id, parameters=parameters)
    codec = make_codec() if is_lone else make_codec(TABULAR, TEXT)

    def outcome(is_exact: bool) -> Any:
        try:
            message = oip_json.read_message(text, codec._plans, "model") if is_exact else codec._decode_typed(text)
            request = codec._build(message, None)
        except HeadraceError as error:
            return type(error), error.message
        arrays = [(name, exact(array)) for name, array in request.inputs.items()]
        return request.id, request.parameters, request.rows, arrays

    assert outcome(is_exact=False) == outcome(is_exact=True)


@settings(max_examples=200, deadline=None)
@given(garbage=st.binary(max_size=40), json_bytes=st.none() | st.integers(0, 50))
def test_garbage_is_the_callers_error(garbage: bytes, json_bytes: int | None) -> None:
    """Arbitrary bytes never end in anything but 400, or in a raw request when they are one (P3, X6)."""
    try:
        make_codec().decode(garbage, json_bytes)
    except BadRequest:
        return

    assert 0 == json_bytes
    assert 12 == len(garbage)


def test_a_truncated_request_is_refused_at_every_length() -> None:
    """No prefix of a request is a request (X6)."""
    head, tail = body_of(binary(12), outputs=[{"name": "y"}]), bytes(12)
    codec = make_codec()

    for length in itertools.chain(range(1, len(head) + len(tail))):
        with pytest.raises(BadRequest):
            codec.decode((head + tail)[:length], min(length, len(head)))
