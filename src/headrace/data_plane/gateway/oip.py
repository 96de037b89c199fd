"""The Open Inference Protocol over HTTP: request bodies to arrays, arrays to reply bodies.

A `Codec` is compiled once per loaded version. A request takes one of two ways to the same code:

    bytes ─┬─ typed: msgspec structs made from the signature; checks names, datatypes, fixed dimensions and the kind of
           │         every element while it parses. Flat data without nulls, which is nearly all traffic.
           └─ exact: anything the typed way refuses is parsed again without types and looked at piece by piece. Accepts
                     nested data and nulls, and finds the words for what is wrong. It alone decides what is an error.

Both end in `_Input`s, which `Codec._build` turns into arrays. Numbers are packed by `struct`, which is exact about
ranges (300 is no UINT8; 1e39 is no FP32) and quicker than building an array from a list.

This file is one thing, the wire form in both directions, and its error texts make up half of it.

Source: Open Inference Protocol (KServe V2), "Inference"; Triton binary tensor data extension. Where the
implementations disagree, `docs/reference/open-inference-protocol.md` says what Headrace does.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Annotated, Any, Final, Literal, Union

import msgspec
import numpy as np

from headrace.data_plane.ticket import InferRequest, RequestedOutput, Scalar
from headrace.data_plane.validate import InputRules, compile_contract, name_list, nearest_hint, quote
from headrace.errors import BadRequest, InvalidInput, MalformedJson, NonFiniteOutput, NotImplementedYet
from headrace.snapshot import Contract, NonFinitePolicy
from headrace.tensors import Array, Datatype, Signature, TensorSpec, element_count

__all__ = ["Codec", "Encoded"]

_EMPTY_DIMENSION_MAX: Final = 65_536  # no element backs the dimensions of an empty tensor, so something must bound them
_PACKERS_MAX: Final = 256
_INT64_MAX: Final = 2**63 - 1
_REREAD_BYTES_MAX: Final = 1 << 20  # the standard library's parser is slow, and only improves an error text
_DEPTH_CHUNK_BYTES: Final = 1 << 20
_RECURSION_TEXT: Final = "the JSON nests too deep"

# `struct` codes; little-endian and exact about ranges.
_CODES: Final = {
    Datatype.BOOL: "?",
    Datatype.UINT8: "B",
    Datatype.UINT16: "H",
    Datatype.UINT32: "I",
    Datatype.UINT64: "Q",
    Datatype.INT8: "b",
    Datatype.INT16: "h",
    Datatype.INT32: "i",
    Datatype.INT64: "q",
    Datatype.FP16: "e",
    Datatype.FP32: "f",
    Datatype.FP64: "d",
}
# What a leaf may be after JSON parsing, what a typed parser is told, and what errors call it.
_LEAVES: Final[dict[str, tuple[frozenset[type], type, str]]] = {
    "f": (frozenset({float, int}), float, "numbers"),
    "i": (frozenset({int}), int, "integers"),
    "u": (frozenset({int}), int, "integers"),
    "b": (frozenset({bool}), bool, "true or false"),
    "s": (frozenset({str}), str, "strings"),
}


class _OutOfRange(float):
    """A JSON number that no double holds; a type of its own, so that nothing takes it for a number."""


_JSON_NAMES: Final[dict[type, str]] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    _OutOfRange: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_NESTING: Final = np.zeros(256, np.int8)
_NESTING[list(b"[{")] = 1
_NESTING[list(b"]}")] = -1
_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b'[]{}"'))
_BYTE_AT: Final = re.compile(r"\(byte (\d+)\)")
_NONFINITE_LITERAL: Final = re.compile(rb"-?(NaN|Infinity)")

_encode_json: Final = msgspec.json.Encoder().encode
_decode_any: Final = msgspec.json.Decoder().decode

# Longer integers go the exact way and are refused there.
_ShortInteger = Annotated[int, msgspec.Meta(ge=-(2**63), le=_INT64_MAX)]
_Parameters = dict[str, str | _ShortInteger | float | bool] | None


class _Plan:
    """One input, compiled.

    Attributes:
        spec: From the signature.
        position: In the signature.
        rules: From the contract; None when it declares nothing for this input.
        row_elements: Elements per step of the first dimension; None unless the other dimensions are all fixed.
        packers: `struct` packers by element count.
    """

    __slots__ = ("dtype", "is_bytes", "name", "packers", "position", "row_elements", "rules", "spec")

    def __init__(self, spec: TensorSpec, position: int, rules: InputRules | None) -> None:
        self.spec = spec
        self.name = spec.name
        self.dtype = spec.datatype.dtype
        self.is_bytes = spec.datatype is Datatype.BYTES
        self.position = position
        self.rules = rules
        is_plain = bool(spec.shape) and min(spec.shape[1:], default=0) >= 0
        self.row_elements = element_count(spec.shape[1:]) if is_plain else None
        self.packers: dict[int, Callable[..., bytes]] = {}


class _OutputPlan:
    """One output, compiled: its reply entry up to the shape, and what decides the form of its data."""

    __slots__ = ("head", "is_bytes", "is_float", "spec")

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self.head = _encode_json({"name": spec.name, "datatype": spec.datatype.wire})[:-1] + b',"shape":'
        self.is_bytes = spec.datatype is Datatype.BYTES
        self.is_float = spec.datatype.kind == "f"


class _Input(msgspec.Struct, gc=False):
    """One input of a request. The typed parser makes structs of its own with these attributes (`_input_structs`).

    Attributes:
        plan: Of the input with this name.
        shape: Agrees with the signature.
        data: Flat leaves of the right kind; None when the tensor is in the binary part.
        parameters: As sent.
    """

    plan: _Plan
    shape: tuple[int, ...]
    data: list[Any] | None
    parameters: _Parameters


class _Output(msgspec.Struct, gc=False):
    """One requested output."""

    name: str
    parameters: _Parameters = None


class _Message(msgspec.Struct, gc=False):
    """The JSON part of a request. Unknown keys are ignored: the kserve client sends some."""

    inputs: list[_Input]
    id: str | None = None
    parameters: _Parameters = None
    outputs: list[_Output] | None = None


class Encoded(msgspec.Struct, gc=False):
    """A reply body in parts, to be written one after the other.

    Attributes:
        json: The JSON part.
        tensors: The binary part; empty buffers are left out.
        is_binary: Some output is in binary form, even if it has no bytes: the reply is `application/octet-stream` and
            carries `Inference-Header-Content-Length: <json_bytes>`.
    """

    json: bytes
    tensors: list[memoryview | bytes]
    is_binary: bool

    @property
    def json_bytes(self) -> int:
        """Length of the JSON part, bytes."""
        return len(self.json)


class Codec:
    """Reads requests for, and writes replies of, one loaded version.

    Concurrency: stateless apart from a cache of packers; call from one thread at a time.

    **Invariant** (tests/data_plane/gateway/test_oip.py): the typed and the exact way agree on every body that the typed
    one takes.

    Source: Open Inference Protocol (KServe V2); Triton binary tensor data extension.
    """

    def __init__(
        self,
        model_name: str,
        version: str,
        signature: Signature,
        nonfinite: NonFinitePolicy,
        contract: Contract,
        depth_max: int,
    ) -> None:
        """Compile.

        Args:
            model_name: Name that replies carry.
            version: Version that replies carry.
            signature: Inputs and outputs of the version.
            nonfinite: What a JSON reply does with NaN and infinity.
            contract: Rules beyond the signature.
            depth_max: Deepest nesting of a JSON body, levels of arrays and objects; flat data takes 4.

        Raises:
            headrace.errors.ConfigError: The contract is wrong.
        """
        self._model_name = model_name
        self._signature = signature
        self._nonfinite: NonFinitePolicy = nonfinite
        self._depth_max = depth_max
        checker = compile_contract(signature, contract)
        rules = {} if checker is None else checker.rules
        self._plans = {
            spec.name: _Plan(spec, position, rules.get(spec.name)) for position, spec in enumerate(signature.inputs)
        }
        inputs = _input_structs(list(self._plans.values()))
        items: Any = list[Union[inputs]] if inputs else tuple[()]  # type: ignore[valid-type] # noqa: UP007
        message = msgspec.defstruct("Message", [("inputs", items)], bases=(_Message,), gc=False)
        self._decode_typed: Callable[[bytes], Any] = msgspec.json.Decoder(message).decode
        self._output_index = {spec.name: index for index, spec in enumerate(signature.outputs)}
        self._all_json = tuple(RequestedOutput(index, False) for index in range(len(signature.outputs)))
        self._all_binary = tuple(RequestedOutput(index, True) for index in range(len(signature.outputs)))
        self._head = _encode_json({"model_name": model_name, "model_version": version})[:-1]
        self._output_plans = tuple(map(_OutputPlan, signature.outputs))

    # ---------------------------------------------------------------------------------------------- requests

    def decode(self, body: bytes | memoryview, json_bytes: int | None) -> InferRequest:
        """Read a request.

        Args:
            body: The whole body, decompressed. Binary inputs become views of it, so it must not change while the
                arrays live.
            json_bytes: Length of the JSON part (`Inference-Header-Content-Length`); None when the whole body is
                JSON; 0 for the raw form, in which it is the bytes of the only input.

        Returns:
            One array per input of the signature, C-contiguous, of the signature's dtype, possibly read-only.

        Raises:
            MalformedJson: Not JSON, too deep, or not of the form that the protocol gives it.
            InvalidInput: A tensor does not agree with the signature, the contract or the bytes.
            BadRequest: A parameter or a length is wrong.
            NotImplementedYet: Shared memory or classification is asked for.

        Source: Open Inference Protocol (KServe V2), "Inference Request JSON Object"; Triton binary tensor data
        extension.
        """
        tail: memoryview | None = None
        if json_bytes is None:
            head = body if isinstance(body, bytes) else bytes(body)
        else:
            if json_bytes == 0:
                return self._decode_raw(memoryview(body))
            if not 0 < json_bytes <= len(body):
                raise BadRequest(
                    f"Inference-Header-Content-Length is {json_bytes}; the body has {len(body)} bytes, so it must be "
                    f"0 to {len(body)}"
                )
            tail = memoryview(body)
            head, tail = bytes(tail[:json_bytes]), tail[json_bytes:]
        # So few brackets cannot nest too deep; counting them costs a hundredth of parsing.
        if head.count(b"[") + head.count(b"{") > self._depth_max:
            self._check_depth(head)
        try:
            message: _Message = self._decode_typed(head)
        except (ValueError, RecursionError):
            message = self._read_exactly(head)
        return self._build(message, tail)

    def _build(self, message: _Message, tail: memoryview | None) -> InferRequest:
        arrays: dict[str, Array] = {}
        is_batched = self._signature.is_batched
        is_ordered = True
        rows = -1
        offset = 0
        for item in message.inputs:
            plan = item.plan
            name = plan.name
            shape = item.shape
            if name in arrays:
                raise InvalidInput(
                    f"input {name!r} is given more than once; expected it once", field=name, reason="repeated"
                )
            if plan.position != len(arrays):
                is_ordered = False
            if plan.row_elements is not None:
                count = shape[0] * plan.row_elements
            else:
                count = element_count(shape)
            if count == 0:
                _check_empty_shape(plan, shape)
            size = self._binary_bytes(item) if item.parameters else None
            if size is None:
                data = item.data
                if data is None:
                    raise InvalidInput(
                        f"input {name!r} has neither data nor binary_data_size; expected one of them",
                        field=name,
                        reason="missing",
                    )
                if len(data) != count:
                    raise InvalidInput(
                        f"input {name!r}: expected {count} elements for shape {list(shape)}, got {len(data)}",
                        field=name,
                        reason="shape",
                    )
                arrays[name] = _pack(plan, shape, count, data)
            else:
                arrays[name] = _view(plan, shape, count, tail, offset, size)
                offset += size
            if is_batched:
                if rows < 0:
                    rows = shape[0]
                elif shape[0] != rows:
                    raise InvalidInput(
                        f"input {name!r} has {shape[0]} rows; expected {rows}, as in the input before it",
                        field=name,
                        reason="rows",
                    )
        if rows < 0:
            rows = 1
        if tail is not None and offset != len(tail):
            raise InvalidInput(
                f"{len(tail) - offset} bytes are left after the last input; expected {offset} bytes after the JSON "
                f"part, got {len(tail)}",
                field="",
                reason="size",
            )
        if len(arrays) != len(self._plans) or not is_ordered:
            arrays = self._complete(arrays, rows)
        parameters: dict[str, Scalar] = {}
        timeout_s = None
        is_binary_default = False
        if message.parameters:
            parameters = message.parameters
            timeout_s, is_binary_default = _request_parameters(parameters)
        outputs: Sequence[RequestedOutput]
        if message.outputs:
            outputs = self._requested(message.outputs, is_binary_default)
        else:
            outputs = self._all_binary if is_binary_default else self._all_json
        return InferRequest(message.id, parameters, arrays, rows, outputs, timeout_s)

    def _complete(self, arrays: dict[str, Array], rows: int) -> dict[str, Array]:
        """Put inputs in the signature's order; the contract's defaults stand in for those left out."""
        if not arrays:
            raise InvalidInput(
                f"the request has no inputs; expected {name_list(list(self._plans))}", field="", reason="missing"
            )
        complete: dict[str, Array] = {}
        for name, plan in self._plans.items():
            array = arrays.get(name)
            if array is None and plan.rules is not None:
                array = plan.rules.absent(rows)
            if array is None:
                missing = [name for name in self._plans if name not in arrays]
                raise InvalidInput(
                    f"model {self._model_name!r} expected {len(self._plans)} inputs, got {len(arrays)}; "
                    f"missing {name_list(missing)}",
                    field=name,
                    reason="missing",
                )
            complete[name] = array
        return complete

    def _binary_bytes(self, item: _Input) -> int | None:
        """The `binary_data_size` of an input that has parameters; None when its data are in the JSON."""
        name = item.plan.name
        parameters = item.parameters or {}
        _refuse_reserved(parameters)
        if "shared_memory_region" in parameters:
            raise NotImplementedYet(
                f"input {name!r} asks for shared memory, which this server does not offer; send data or "
                "binary_data_size instead"
            )
        size = parameters.get("binary_data_size")
        if size is None:
            return None
        if item.data is not None:
            raise InvalidInput(
                f"input {name!r} has both data and binary_data_size; expected one of them", field=name, reason="size"
            )
        if type(size) is not int or size < 0:
            raise InvalidInput(
                f"input {name!r}: binary_data_size is {quote(size)}; expected an integer of at least 0",
                field=name,
                reason="size",
            )
        return size

    def _requested(self, outputs: Sequence[_Output], is_binary_default: bool) -> list[RequestedOutput]:
        """Which outputs, in which form: the output's own flag, else the request's, else JSON."""
        requested: list[RequestedOutput] = []
        seen: set[int] = set()
        for output in outputs:
            index = self._output_index.get(output.name)
            if index is None:
                known = list(self._output_index)
                raise InvalidInput(
                    f"output {quote(output.name)} does not exist; model {self._model_name!r} has {name_list(known)}"
                    + nearest_hint(output.name, known),
                    field="",
                    reason="unknown",
                )
            if index in seen:
                raise InvalidInput(
                    f"output {output.name!r} is asked for more than once; expected it once",
                    field=output.name,
                    reason="repeated",
                )
            seen.add(index)
            is_binary = is_binary_default
            if output.parameters:
                is_binary = _output_parameters(output.name, output.parameters, is_binary_default)
            requested.append(RequestedOutput(index, is_binary))
        return requested

    def _decode_raw(self, body: memoryview) -> InferRequest:
        """Raw form: no JSON, the body is one row of the only input; every output comes back in binary form.

        Source: Triton binary tensor data extension, "Raw Binary Request".
        """
        if len(self._plans) != 1:
            raise BadRequest(
                "Inference-Header-Content-Length is 0, which makes the whole body the only input; model "
                f"{self._model_name!r} has {len(self._plans)} inputs, so it must be the length of the JSON part"
            )
        (plan,) = self._plans.values()
        shape = list(plan.spec.shape)
        if self._signature.is_batched:
            shape[0] = 1
        if plan.is_bytes:
            shape = [1 if dimension < 0 else dimension for dimension in shape]
            if element_count(shape) != 1:
                raise InvalidInput(
                    f"input {plan.name!r} takes {element_count(shape)} strings, a raw body is one; use the binary form "
                    "with a JSON part",
                    field=plan.name,
                    reason="shape",
                )
            array = np.empty(shape, object)
            array[...] = bytes(body)
        else:
            shape = _raw_shape(plan, shape, len(body))
            array = _view(plan, shape, element_count(shape), body, 0, len(body))
        return InferRequest(None, {}, {plan.name: array}, 1, self._all_binary)

    # ------------------------------------------------------------------------------------- the exact way

    def _check_depth(self, text: bytes) -> None:
        """Refuse JSON that nests deeper than the limit: without recursion, and in little memory.

        Whether a bracket is inside a string is the parity of the quotes before it, once escapes are gone.
        """
        if b"\\" in text:
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        structure = np.frombuffer(text.translate(None, _NOT_STRUCTURE), np.uint8)
        depth = quotes = 0
        for start in range(0, len(structure), _DEPTH_CHUNK_BYTES):
            part = structure[start : start + _DEPTH_CHUNK_BYTES]
            parity = (np.cumsum(part == ord('"'), dtype=np.int32) + quotes) % 2
            depths = np.cumsum(_NESTING[part] * (1 - parity), dtype=np.int32) + depth
            depth, quotes = int(depths[-1]), int(parity[-1])
            if depths.max() > self._depth_max:
                raise MalformedJson(f"the JSON nests too deep; expected at most {self._depth_max} levels")

    def _read_exactly(self, text: bytes) -> _Message:
        """Parse without types, and say precisely what is wrong."""
        message = _parse(text)
        if type(message) is not dict:
            raise MalformedJson(f"the body is {_describe(message)}; expected a JSON object with inputs")
        identifier = message.get("id")
        if identifier is not None and type(identifier) is not str:
            raise MalformedJson(f"id is {_describe(identifier)}; expected a string")
        items = message.get("inputs")
        if items is None:
            items = []
        if type(items) is not list:
            raise MalformedJson(f"inputs is {_describe(items)}; expected an array of objects")
        outputs = message.get("outputs")
        if outputs is not None and type(outputs) is not list:
            raise MalformedJson(f"outputs is {_describe(outputs)}; expected an array of objects")
        return _Message(
            [self._read_input(position, item) for position, item in enumerate(items)],
            identifier,
            _read_parameters("the request", message.get("parameters")),
            None if outputs is None else [_read_output(position, item) for position, item in enumerate(outputs)],
        )

    def _read_input(self, position: int, item: object) -> _Input:
        if type(item) is not dict:
            raise MalformedJson(f"inputs[{position}] is {_describe(item)}; expected an object")
        name = item.get("name")
        if type(name) is not str:
            raise MalformedJson(f"inputs[{position}].name is {_describe(name)}; expected a string")
        plan = self._plans.get(name)
        if plan is None:
            known = list(self._plans)
            raise InvalidInput(
                f"input {quote(name)} does not exist; model {self._model_name!r} has {name_list(known)}"
                + nearest_hint(name, known),
                field="",
                reason="unknown",
            )
        datatype = item.get("datatype")
        if datatype != plan.spec.datatype.wire:
            raise InvalidInput(
                f"input {name!r}: expected datatype {plan.spec.datatype.wire}, got "
                f"{quote(datatype) if type(datatype) is str else _describe(datatype)}",
                field=name,
                reason="datatype",
            )
        shape = _read_shape(plan, item.get("shape"))
        parameters = _read_parameters(f"input {name!r}", item.get("parameters"))
        data = item.get("data")
        if data is not None:
            data = _read_data(plan, shape, data)
        return _Input(plan, shape, data, parameters)

    # ---------------------------------------------------------------------------------------------- replies

    def encode(self, request: InferRequest, outputs: Sequence[Array]) -> Encoded:
        """Write a reply.

        JSON data are flat. An FP32 or FP16 is written as the shortest decimal that a parser reads back as a double of
        exactly its value, so that it survives any client whatever it parses into.

        Args:
            request: What was asked; its id and outputs are used.
            outputs: One array per entry of `request.outputs`, in that order, of the signature's dtype.

        Raises:
            NonFiniteOutput: NaN or infinity in a JSON output, under the policy `error`.
            BadRequest: A BYTES output that JSON was asked for is not UTF-8.

        Source: Open Inference Protocol (KServe V2), "Inference Response JSON Object"; Triton binary tensor data
        extension.
        """
        parts = [self._head]
        if request.id is not None:
            parts += (b',"id":', _encode_json(request.id))
        separator = b',"outputs":['
        tensors: list[memoryview | bytes] = []
        is_binary = False
        for requested, array in zip(request.outputs, outputs, strict=True):
            plan = self._output_plans[requested.index]
            if requested.is_binary:
                is_binary = True
                tensor = _tensor_bytes(plan.spec, array)
                if len(tensor):
                    tensors.append(tensor)
                content = b',"parameters":{"binary_data_size":%d}}' % len(tensor)
                parts += (separator, plan.head, _encode_json(array.shape), content)
            else:
                leaves = (array if array.ndim == 1 else array.ravel()).tolist()
                if plan.is_bytes:
                    leaves = _texts(plan.spec, leaves)
                data = _encode_json(leaves)
                # msgspec writes null for NaN and infinity, and no number has an n in it: cheaper than isfinite.
                if plan.is_float and b"n" in data:
                    data = self._nonfinite_data(plan.spec, array.shape, leaves, data)
                parts += (separator, plan.head, _encode_json(array.shape), b',"data":', data, b"}")
            separator = b","
        parts.append(b"]}" if request.outputs else b',"outputs":[]}')
        return Encoded(b"".join(parts), tensors, is_binary)

    def _nonfinite_data(self, spec: TensorSpec, shape: Sequence[int], leaves: list[float], data: bytes) -> bytes:
        """Apply the policy to data that hold NaN or infinity, which are null in `data`."""
        if self._nonfinite == "null":
            return data
        if self._nonfinite == "error":
            at = next(at for at, leaf in enumerate(leaves) if not math.isfinite(leaf))
            raise NonFiniteOutput(
                f"output {spec.name!r} holds {leaves[at]} at element "
                f"{[int(i) for i in np.unravel_index(at, tuple(shape))]}, which JSON cannot carry; hint: ask for it in "
                'binary form ("parameters": {"binary_data": true}), or set nonfinite to null or literal'
            )
        literals = [_literal(leaf) for leaf in leaves if not math.isfinite(leaf)]
        first, *others = data.split(b"null")
        return first + b"".join(chain.from_iterable(zip(literals, others, strict=True)))


# -------------------------------------------------------------------------------------------------- typed parser


def _input_structs(plans: Sequence[_Plan]) -> tuple[type[msgspec.Struct], ...]:
    """A struct per input, so that the parser itself checks name, datatype, rank, fixed dimensions and leaves.

    Several inputs are told apart by a tag; a lone one has its name as a field, since its tag would be optional.
    """
    structs: list[type[msgspec.Struct]] = []
    for plan in plans:
        is_alone = len(plans) == 1
        dimensions = tuple(_dimension_type(dimension) for dimension in plan.spec.shape)
        leaf = _LEAVES[plan.spec.datatype.kind][1]
        fields: list[tuple[str, Any] | tuple[str, Any, Any]] = [("name", Literal[plan.name])] if is_alone else []
        fields += [
            ("shape", tuple.__class_getitem__(dimensions)),
            ("datatype", Literal[plan.spec.datatype.wire]),
            ("data", list[leaf] | None, None),  # type: ignore[valid-type]
            ("parameters", _Parameters, None),
        ]
        structs.append(
            msgspec.defstruct(
                f"Input{plan.position}",
                fields,
                namespace={"plan": plan},
                tag_field=None if is_alone else "name",
                tag=None if is_alone else plan.name,
                gc=False,
            )
        )
    return tuple(structs)


def _dimension_type(dimension: int) -> Any:
    return Literal[dimension] if dimension >= 0 else Annotated[int, msgspec.Meta(ge=0, le=_INT64_MAX)]


# -------------------------------------------------------------------------------------------------- exact parser


def _parse(text: bytes) -> Any:
    """Parse JSON without types.

    Raises:
        MalformedJson: Not JSON; NaN and Infinity are named, since some encoders write them.
    """
    try:
        return _decode_any(text)
    except RecursionError:
        raise MalformedJson(_RECURSION_TEXT) from None
    except msgspec.ValidationError:  # a number that no double holds
        return _parse_slowly(text)
    except ValueError as error:
        found = _BYTE_AT.search(str(error))
        at = int(found[1]) if found else len(text)
        for start in (at - 1, at):  # msgspec points at the letter, also after a minus sign
            literal = _NONFINITE_LITERAL.match(text, max(start, 0))
            if literal:
                raise _nonfinite_literal(literal[0].decode()) from None
        raise MalformedJson(f"the body is not JSON: {error}") from None


def _parse_slowly(text: bytes) -> Any:
    """Parse JSON some of whose numbers no double holds; they are refused where they are used."""
    if len(text) > _REREAD_BYTES_MAX:
        raise MalformedJson("the body holds a number out of the range of FP64")
    try:
        return json.loads(text, parse_constant=_refuse_literal, parse_float=_parse_float)
    except RecursionError:
        raise MalformedJson(_RECURSION_TEXT) from None
    except ValueError as error:
        raise MalformedJson(f"the body is not JSON: {error}") from None


def _parse_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _OutOfRange(text)


def _refuse_literal(literal: str) -> None:
    raise _nonfinite_literal(literal)


def _nonfinite_literal(literal: str) -> MalformedJson:
    return MalformedJson(
        f"the body is not JSON: it holds the literal {literal}; expected finite numbers; hint: the binary form "
        "(binary_data_size) carries NaN and infinity"
    )


def _describe(value: object) -> str:
    """A JSON value for an error message: its kind, and its text when that is short to make."""
    if value is None:
        return "null or missing"
    kind = _JSON_NAMES[type(value)]
    article = "an" if kind[0] in "aioe" else "a"
    if isinstance(value, list | dict):
        return f"{article} {kind}"
    return f"{article} {kind} ({quote(value)})"


def _read_output(position: int, item: object) -> _Output:
    if type(item) is not dict:
        raise MalformedJson(f"outputs[{position}] is {_describe(item)}; expected an object")
    name = item.get("name")
    if type(name) is not str:
        raise MalformedJson(f"outputs[{position}].name is {_describe(name)}; expected a string")
    return _Output(name, _read_parameters(f"outputs[{position}]", item.get("parameters")))


def _read_parameters(whose: str, parameters: object) -> _Parameters:
    if parameters is None:
        return None
    if type(parameters) is not dict:
        raise MalformedJson(f"the parameters of {whose} are {_describe(parameters)}; expected an object")
    for key, value in parameters.items():
        if type(value) not in (str, int, float, bool):
            raise BadRequest(
                f"parameter {quote(key)} of {whose} is {_describe(value)}; expected a string, a number or a boolean"
            )
        if type(value) is int and not -(2**63) <= value < 2**64:
            raise BadRequest(f"parameter {quote(key)} of {whose} is {_describe(value)}; expected an integer of 64 bits")
    return parameters


def _read_shape(plan: _Plan, shape: object) -> tuple[int, ...]:
    expected = plan.spec.shape
    if type(shape) is not list:
        raise _shape_error(plan, _describe(shape))
    for dimension in shape:
        if type(dimension) is not int or not 0 <= dimension <= _INT64_MAX:
            raise InvalidInput(
                f"input {plan.name!r}: a dimension is {_describe(dimension)}; expected an integer from 0 to "
                f"{_INT64_MAX}",
                field=plan.name,
                reason="shape",
            )
    if len(shape) != len(expected) or any(wanted not in (-1, got) for wanted, got in zip(expected, shape, strict=True)):
        raise _shape_error(plan, quote(shape[:64]))
    return tuple(shape)


def _shape_error(plan: _Plan, got: str) -> InvalidInput:
    return InvalidInput(
        f"input {plan.name!r}: expected shape {list(plan.spec.shape)}{' (-1 is any length)' * (-1 in plan.spec.shape)}"
        f", got {got}",
        field=plan.name,
        reason="shape",
    )


def _check_empty_shape(plan: _Plan, shape: Sequence[int]) -> None:
    if max(shape, default=0) > _EMPTY_DIMENSION_MAX:
        raise InvalidInput(
            f"input {plan.name!r} has no elements and a dimension of {quote(max(shape))}; expected at most "
            f"{_EMPTY_DIMENSION_MAX} then",
            field=plan.name,
            reason="shape",
        )


def _read_data(plan: _Plan, shape: Sequence[int], data: object) -> list[Any]:
    """Flatten data to leaves of the right kind; missing ones are replaced by the contract's defaults.

    Nesting may follow the shape or not, as long as it is even: only the row-major order of the leaves counts. Uneven
    nesting is refused although its leaves could be counted, since their order then is most likely not what was meant.
    """
    name = plan.name
    if type(data) is not list:
        raise InvalidInput(f"input {name!r}: data is {_describe(data)}; expected an array", field=name, reason="type")
    leaves: list[Any] = data
    kinds = set(map(type, leaves))
    while list in kinds:
        lengths = set(map(len, leaves)) if len(kinds) == 1 else set()
        if len(lengths) != 1:
            raise InvalidInput(
                f"input {name!r}: data nests unevenly; expected flat data, or arrays of equal length for shape "
                f"{list(shape)}",
                field=name,
                reason="shape",
            )
        leaves = list(chain.from_iterable(leaves))
        kinds = set(map(type, leaves))
    count = element_count(shape)
    if len(leaves) != count:
        raise InvalidInput(
            f"input {name!r}: expected {quote(count)} elements for shape {quote(list(shape))}, got {len(leaves)}",
            field=name,
            reason="shape",
        )
    if type(None) in kinds:
        if plan.rules is None:
            at = leaves.index(None)
            raise InvalidInput(
                f"input {name!r}: element {at} is null; expected {plan.spec.datatype.wire}, and the contract has no "
                "default",
                field=name,
                reason="missing",
            )
        leaves = plan.rules.fill(leaves, shape)
        kinds = set(map(type, leaves))
    accepted, _, plural = _LEAVES[plan.spec.datatype.kind]
    if not kinds <= accepted:
        at = next(at for at, leaf in enumerate(leaves) if type(leaf) not in accepted)
        if type(leaves[at]) is _OutOfRange:
            raise _element_error(plan, at, f"expected {plural} in the range of FP64, got a larger one", "range")
        raise _element_error(plan, at, f"expected {plural}, got {_describe(leaves[at])}", "type")
    return leaves


def _element_error(plan: _Plan, at: int, verdict: str, reason: str) -> InvalidInput:
    return InvalidInput(f"input {plan.name!r}: element {at}: {verdict}", field=plan.name, reason=reason)


# -------------------------------------------------------------------------------------------------- tensors


def _pack(plan: _Plan, shape: tuple[int, ...], count: int, data: list[Any]) -> Array:
    """Leaves of the right kind and number to an array.

    Raises:
        InvalidInput: reason `range`: a number that the datatype does not hold.
    """
    if plan.is_bytes:
        return _objects(shape, [leaf.encode() for leaf in data])
    packer = plan.packers.get(count)
    if packer is None:
        if len(plan.packers) >= _PACKERS_MAX:
            plan.packers.clear()
        packer = plan.packers[count] = struct.Struct(f"<{count}{_CODES[plan.spec.datatype]}").pack
    try:
        return np.ndarray(shape, plan.dtype, packer(*data))
    except (struct.error, OverflowError):
        raise _range_error(plan, data) from None


def _range_error(plan: _Plan, data: list[Any]) -> InvalidInput:
    datatype = plan.spec.datatype
    if datatype.kind == "f":
        limit = float(np.finfo(datatype.dtype).max)
        expected = f"{-limit:g} to {limit:g}"
    else:
        limits = np.iinfo(datatype.dtype)
        expected = f"{limits.min} to {limits.max}"
    pack_one = struct.Struct("<" + _CODES[datatype]).pack
    for at, leaf in enumerate(data):
        try:
            pack_one(leaf)
        except (struct.error, OverflowError):
            return _element_error(plan, at, f"expected {datatype.wire} ({expected}), got {quote(leaf)}", "range")
    raise AssertionError("every leaf alone is in range")


def _objects(shape: Sequence[int], elements: list[bytes]) -> Array:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)


def _view(plan: _Plan, shape: Sequence[int], count: int, tail: memoryview | None, offset: int, size: int) -> Array:
    """A tensor in the binary part, without a copy where its address is aligned.

    Args:
        plan: Of the input.
        shape: Agrees with the signature.
        count: Elements of the shape.
        tail: The binary part; None when the request has none.
        offset: Of the tensor in it, bytes.
        size: As announced, bytes.

    Raises:
        InvalidInput: The size does not go with the shape, bytes are missing, or they are no such tensor.
    """
    name = plan.name
    if not plan.is_bytes and size != count * plan.dtype.itemsize:
        raise InvalidInput(
            f"input {name!r}: expected {quote(count * plan.dtype.itemsize)} bytes for {plan.spec.datatype.wire} of "
            f"shape {quote(list(shape))}, got binary_data_size {size}",
            field=name,
            reason="shape",
        )
    available = 0 if tail is None else len(tail)
    if tail is None or offset + size > available:
        hint = "; hint: is Inference-Header-Content-Length set?" if tail is None else ""
        raise InvalidInput(
            f"input {name!r}: {offset + size - available} bytes missing; expected {offset + size} bytes after the JSON "
            f"part, got {available}{hint}",
            field=name,
            reason="size",
        )
    if plan.is_bytes:
        return _objects(shape, _split_elements(plan, count, tail[offset : offset + size]))
    array: Array = np.ndarray(tuple(shape), plan.dtype, tail, offset)
    if plan.spec.datatype is Datatype.BOOL and array.size and array.view(np.uint8).max() > 1:
        at = int(np.argmax(array.view(np.uint8).reshape(-1) > 1))
        raise _element_error(
            plan, at, f"expected a byte of 0 or 1, got {array.view(np.uint8).reshape(-1)[at]}", "range"
        )
    # Runtimes read by whole words; where the JSON part ends decides the alignment, so three of four FP32 are copied.
    return array if array.flags.aligned else array.copy()


def _split_elements(plan: _Plan, count: int, part: memoryview) -> list[bytes]:
    """BYTES elements: each a little-endian 4-byte length and that many bytes.

    Source: Triton binary tensor data extension, BYTES.
    """
    content = bytes(part)
    elements: list[bytes] = []
    at = 0
    end = len(content)
    while at < end and len(elements) < count:
        start = at + 4
        at = start + int.from_bytes(content[at:start], "little")
        if at > end or start > end:
            raise InvalidInput(
                f"input {plan.name!r}: element {len(elements)} of BYTES is cut off: "
                f"{max(at, start) - end} bytes missing of binary_data_size {end}",
                field=plan.name,
                reason="size",
            )
        elements.append(content[start:at])
    if len(elements) != count or at != end:
        got = f"{len(elements)}" if at == end else f"{end - at} bytes more"
        raise InvalidInput(
            f"input {plan.name!r}: expected {quote(count)} BYTES elements in binary_data_size {end}, got {got}",
            field=plan.name,
            reason="shape",
        )
    return elements


def _raw_shape(plan: _Plan, shape: list[int], size: int) -> list[int]:
    """Work out the variable dimension of a raw body from its length."""
    variable = [axis for axis, dimension in enumerate(shape) if dimension < 0]
    if len(variable) > 1:
        raise InvalidInput(
            f"input {plan.name!r} has {len(variable)} variable dimensions, a raw body can tell one; use the binary "
            "form with a JSON part",
            field=plan.name,
            reason="shape",
        )
    if variable:
        row_bytes = plan.dtype.itemsize
        for dimension in shape:
            row_bytes *= dimension if dimension >= 0 else 1
        if row_bytes == 0 or size % row_bytes:
            raise InvalidInput(
                f"input {plan.name!r}: a raw body of {size} bytes is no whole number of {row_bytes} bytes, as shape "
                f"{list(plan.spec.shape)} of {plan.spec.datatype.wire} asks",
                field=plan.name,
                reason="size",
            )
        shape[variable[0]] = size // row_bytes
    return shape


def _tensor_bytes(spec: TensorSpec, array: Array) -> memoryview | bytes:
    if spec.datatype is Datatype.BYTES:
        elements = [leaf.encode() if isinstance(leaf, str) else leaf for leaf in array.ravel().tolist()]
        return b"".join(chain.from_iterable((struct.pack("<I", len(leaf)), leaf) for leaf in elements))
    if not array.size:
        return b""
    return np.ascontiguousarray(array, spec.datatype.dtype).reshape(-1).view(np.uint8).data


def _texts(spec: TensorSpec, leaves: list[Any]) -> list[str]:
    """BYTES for JSON. Runtimes may give strings already."""
    try:
        return [leaf if isinstance(leaf, str) else leaf.decode() for leaf in leaves]
    except UnicodeDecodeError:
        at = next(at for at, leaf in enumerate(leaves) if not _is_text(leaf))
        raise BadRequest(
            f"output {spec.name!r}: element {at} is not UTF-8, so JSON cannot carry it; hint: ask for it in binary "
            'form ("parameters": {"binary_data": true})'
        ) from None


def _is_text(leaf: str | bytes) -> bool:
    try:
        return isinstance(leaf, str) or leaf.decode() is not None
    except UnicodeDecodeError:
        return False


def _literal(value: float) -> bytes:
    if value != value:
        return b"NaN"
    return b"Infinity" if value > 0 else b"-Infinity"


# -------------------------------------------------------------------------------------------------- parameters


def _refuse_reserved(parameters: dict[str, Scalar]) -> None:
    for key in parameters:
        if key.startswith("triton_"):
            raise BadRequest(f"parameter {quote(key)} is reserved; expected a name that does not start with triton_")


def _request_parameters(parameters: dict[str, Scalar]) -> tuple[float | None, bool]:
    """Parameters of the request that mean something here.

    Returns:
        The timeout in seconds (None when not said, or 0), and whether outputs are binary unless they say otherwise.
    """
    _refuse_reserved(parameters)
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or timeout < 0:
        raise BadRequest(
            f"parameter 'timeout' is {_describe(timeout)}; expected microseconds, an integer of at least 0"
        )
    is_binary = parameters.get("binary_data_output", False)
    if type(is_binary) is not bool:
        raise BadRequest(f"parameter 'binary_data_output' is {_describe(is_binary)}; expected true or false")
    return (timeout / 1e6 if timeout else None), is_binary


def _output_parameters(name: str, parameters: dict[str, Scalar], is_binary_default: bool) -> bool:
    """Whether an output with parameters is binary."""
    _refuse_reserved(parameters)
    if "classification" in parameters:
        raise NotImplementedYet(
            f"output {name!r} asks for classification, which this server does not offer yet; leave the parameter out "
            "and take the largest values of the plain tensor"
        )
    if "shared_memory_region" in parameters:
        raise NotImplementedYet(
            f"output {name!r} asks for shared memory, which this server does not offer; ask for binary_data instead"
        )
    is_binary = parameters.get("binary_data", is_binary_default)
    if type(is_binary) is not bool:
        raise BadRequest(
            f"parameter 'binary_data' of output {name!r} is {_describe(is_binary)}; expected true or false"
        )
    return is_binary
