"""The exact way to read a request: parsed without types, looked at piece by piece.

Takes whatever the typed parser refuses, right (nested data, nulls) or wrong, and finds the words for what is wrong.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from headrace.data_plane.gateway.oip_leaves import OutOfRange, describe, read_data
from headrace.data_plane.gateway.oip_parameters import read_parameters
from headrace.data_plane.gateway.oip_plans import INT64_MAX, Input, InputPlan, Message, Output
from headrace.data_plane.validate import name_list, nearest_hint, quote
from headrace.errors import InvalidInput, MalformedJson

__all__ = ["check_depth", "read_message", "unknown_name"]

_REREAD_BYTES_MAX: Final = 1 << 20  # the standard library's parser is slow, and only improves an error text
_DEPTH_CHUNK_BYTES: Final = 1 << 20
_RECURSION_TEXT: Final = "the JSON nests too deep"

_NESTING: Final = np.zeros(256, np.int8)
_NESTING[list(b"[{")] = 1
_NESTING[list(b"]}")] = -1
_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b'[]{}"'))
_BYTE_AT: Final = re.compile(r"\(byte (\d+)\)")
_NONFINITE_LITERAL: Final = re.compile(rb"-?(NaN|Infinity)")

_decode_any: Final = msgspec.json.Decoder().decode


def check_depth(text: bytes, depth_max: int) -> None:
    """Refuse JSON that nests deeper than the limit: without recursion, and in little memory.

    Whether a bracket is inside a string is the parity of the quotes before it, once escapes are gone.

    Raises:
        MalformedJson: It does.
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
        if depths.max() > depth_max:
            raise MalformedJson(f"the JSON nests too deep; expected at most {depth_max} levels")


# ---------------------------------------------------------------------------------------------- the message


def read_message(text: bytes, plans: Mapping[str, InputPlan], model_name: str) -> Message:
    """Read the JSON part of a request, or say precisely what is wrong.

    Args:
        text: The JSON part.
        plans: By name, in the signature's order.
        model_name: For error texts.

    Raises:
        MalformedJson: Not JSON, or not of the form that the protocol gives it.
        InvalidInput: A tensor does not agree with the signature or the contract.
        BadRequest: A parameter is wrong.
    """
    message = _parse(text)
    if type(message) is not dict:
        raise _form_error("the body", message, "a JSON object with inputs")
    identifier = message.get("id")
    if identifier is not None and type(identifier) is not str:
        raise _form_error("id", identifier, "a string")
    items = message.get("inputs")
    if items is None:
        items = []
    if type(items) is not list:
        raise _form_error("inputs", items, "an array of objects")
    outputs = message.get("outputs")
    if outputs is not None and type(outputs) is not list:
        raise _form_error("outputs", outputs, "an array of objects")
    return Message(
        [_read_input(position, item, plans, model_name) for position, item in enumerate(items)],
        identifier,
        read_parameters("the request", message.get("parameters")),
        None if outputs is None else [_read_output(position, item) for position, item in enumerate(outputs)],
    )


def _form_error(what: str, value: object, expected: str) -> MalformedJson:
    return MalformedJson(f"{what} is {describe(value)}; expected {expected}")


def _named_object(items: str, position: int, item: object) -> tuple[dict[str, Any], str]:
    """An entry of inputs or outputs, and its name."""
    if type(item) is not dict:
        raise _form_error(f"{items}[{position}]", item, "an object")
    name = item.get("name")
    if type(name) is not str:
        raise _form_error(f"{items}[{position}].name", name, "a string")
    return item, name


def _read_output(position: int, item: object) -> Output:
    fields, name = _named_object("outputs", position, item)
    return Output(name, read_parameters(f"outputs[{position}]", fields.get("parameters")))


def _read_input(position: int, item: object, plans: Mapping[str, InputPlan], model_name: str) -> Input:
    fields, name = _named_object("inputs", position, item)
    plan = plans.get(name)
    if plan is None:
        raise unknown_name("input", name, list(plans), model_name)
    datatype = fields.get("datatype")
    if datatype != plan.spec.datatype.wire:
        got = quote(datatype) if type(datatype) is str else describe(datatype)
        raise plan.error("datatype", f": expected datatype {plan.spec.datatype.wire}, got {got}")
    shape = _read_shape(plan, fields.get("shape"))
    parameters = read_parameters(f"input {name!r}", fields.get("parameters"))
    data = fields.get("data")
    if data is not None:
        data = read_data(plan, shape, data)
    return Input(plan, shape, data, parameters)


def unknown_name(kind: str, name: str, known: Sequence[str], model_name: str) -> InvalidInput:
    """The error for an input or output (`kind`) that the model does not have."""
    return InvalidInput(
        f"{kind} {quote(name)} does not exist; model {model_name!r} has {name_list(known)}{nearest_hint(name, known)}",
        field="",
        reason="unknown",
    )


def _read_shape(plan: InputPlan, shape: object) -> tuple[int, ...]:
    expected = plan.spec.shape
    if type(shape) is not list:
        raise _shape_error(plan, describe(shape))
    for dimension in shape:
        if type(dimension) is not int or not 0 <= dimension <= INT64_MAX:
            raise plan.error(
                "shape", f": a dimension is {describe(dimension)}; expected an integer from 0 to {INT64_MAX}"
            )
    if len(shape) != len(expected) or any(wanted not in (-1, got) for wanted, got in zip(expected, shape, strict=True)):
        raise _shape_error(plan, quote(shape[:64]))
    return tuple(shape)


def _shape_error(plan: InputPlan, got: str) -> InvalidInput:
    legend = " (-1 is any length)" if -1 in plan.spec.shape else ""
    return plan.error("shape", f": expected shape {list(plan.spec.shape)}{legend}, got {got}")


# ---------------------------------------------------------------------------------------------- text to values


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
                _refuse_literal(literal[0].decode())
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
    return value if math.isfinite(value) else OutOfRange(text)


def _refuse_literal(literal: str) -> None:
    raise MalformedJson(
        f"the body is not JSON: it holds the literal {literal}; expected finite numbers; hint: the binary form "
        "(binary_data_size) carries NaN and infinity"
    ) from None
