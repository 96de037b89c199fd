"""Tensor data inside JSON, in both directions: leaves to arrays, arrays to leaves. And what errors call a JSON value.

Numbers are packed by `struct`, which is exact about ranges (300 is no UINT8; 1e39 is no FP32) and quicker than building
an array from a list.
"""

import json
import math
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np

from headrace.data_plane.gateway.oip_binary import byte_strings
from headrace.data_plane.gateway.oip_plans import InputPlan, OutputPlan, ReplyOutput
from headrace.data_plane.validate import quote
from headrace.errors import BadRequest, InvalidInput, NonFiniteOutput
from headrace.tensors import Array, Datatype, element_count

__all__ = ["OutOfRange", "describe", "encode_json", "pack", "read_data", "texts", "with_nonfinite"]

_PACKERS_MAX: Final = 256

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
# What a leaf may be after JSON parsing, and what errors call it, by kind of datatype.
_LEAVES: Final[dict[str, tuple[frozenset[type], str]]] = {
    "f": (frozenset({float, int}), "numbers"),
    "i": (frozenset({int}), "integers"),
    "u": (frozenset({int}), "integers"),
    "b": (frozenset({bool}), "true or false"),
    "s": (frozenset({str}), "strings"),
}

encode_json: Final = msgspec.json.Encoder().encode


class OutOfRange(float):
    """A JSON number that no double holds; a type of its own, so that nothing takes it for a number."""


_JSON_NAMES: Final[dict[type, str]] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    OutOfRange: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def describe(value: object) -> str:
    """A JSON value for an error message: its kind, and its text when that is short to make."""
    if value is None:
        return "null or missing"
    kind = _JSON_NAMES[type(value)]
    return kind if isinstance(value, list | dict) else f"{kind} ({quote(value)})"


# ---------------------------------------------------------------------------------------------- leaves to arrays


def read_data(plan: InputPlan, shape: Sequence[int], data: object) -> list[Any]:
    """Flatten data to leaves of the right kind; missing ones are replaced by the contract's defaults.

    Nesting may follow the shape or not, as long as it is even: only the row-major order of the leaves counts. Uneven
    nesting is refused although its leaves could be counted, since their order then is most likely not what was meant.
    """
    if type(data) is not list:
        raise plan.error("type", f": data is {describe(data)}; expected an array")
    leaves: list[Any] = data
    kinds = set(map(type, leaves))
    while list in kinds:
        lengths = set(map(len, leaves)) if len(kinds) == 1 else set()
        if len(lengths) != 1:
            raise plan.error(
                "shape",
                f": data nests unevenly; expected flat data, or arrays of equal length for shape {list(shape)}",
            )
        leaves = list(chain.from_iterable(leaves))
        kinds = set(map(type, leaves))
    count = element_count(shape)
    if len(leaves) != count:
        raise _count_error(plan, shape, count, leaves)
    if type(None) in kinds:
        if plan.rules is None:
            raise plan.error(
                "missing",
                f": element {leaves.index(None)} is null; expected {plan.spec.datatype.wire}, and the contract has no "
                "default",
            )
        leaves = plan.rules.fill(leaves, shape)
        kinds = set(map(type, leaves))
    accepted, plural = _LEAVES[plan.spec.datatype.kind]
    if not kinds <= accepted:
        at = next(at for at, leaf in enumerate(leaves) if type(leaf) not in accepted)
        if type(leaves[at]) is OutOfRange:
            raise plan.error("range", f": element {at}: expected {plural} in the range of FP64, got a larger one")
        raise plan.error("type", f": element {at}: expected {plural}, got {describe(leaves[at])}")
    return leaves


def pack(plan: InputPlan, shape: tuple[int, ...], count: int, data: list[Any] | None) -> Array:
    """An array of leaves of the right kind.

    Args:
        plan: Of the input.
        shape: Agrees with the signature.
        count: Elements of the shape.
        data: Flat leaves; None when the input has none.

    Raises:
        InvalidInput: reason `missing`: no data; `shape`: too few or too many; `range`: a number that the datatype does
            not hold.
    """
    if data is None:
        raise plan.error("missing", " has neither data nor binary_data_size; expected one of them")
    if len(data) != count:
        raise _count_error(plan, shape, count, data)
    if plan.is_bytes:
        return byte_strings(shape, [leaf.encode() for leaf in data])
    packer = plan.packers.get(count)
    if packer is None:
        if len(plan.packers) >= _PACKERS_MAX:
            plan.packers.clear()
        packer = plan.packers[count] = struct.Struct(f"<{count}{_CODES[plan.spec.datatype]}").pack
    try:
        return np.ndarray(shape, plan.dtype, packer(*data))
    except (struct.error, OverflowError):
        raise _range_error(plan, data) from None


def _count_error(plan: InputPlan, shape: Sequence[int], count: int, leaves: list[Any]) -> InvalidInput:
    return plan.error("shape", f": expected {quote(count)} elements for shape {quote(list(shape))}, got {len(leaves)}")


def _range_error(plan: InputPlan, data: list[Any]) -> InvalidInput:
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
            return plan.error("range", f": element {at}: expected {datatype.wire} ({expected}), got {quote(leaf)}")
    raise AssertionError("every leaf alone is in range")


# ---------------------------------------------------------------------------------------------- arrays to leaves


def texts(plan: OutputPlan, leaves: list[Any]) -> list[str]:
    """BYTES for JSON. Runtimes may give strings already.

    Raises:
        BadRequest: An element is not UTF-8.
    """
    try:
        return [leaf if isinstance(leaf, str) else leaf.decode() for leaf in leaves]
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"output {plan.spec.name!r}: element {leaves.index(error.object)} is not UTF-8, so JSON cannot carry it; "
            'hint: ask for it in binary form ("parameters": {"binary_data": true})'
        ) from None


def with_nonfinite(plan: OutputPlan, entry: ReplyOutput) -> list[Any] | msgspec.Raw | msgspec.UnsetType:
    """Data of an output that may hold NaN or infinity, by its policy: refused, left to become null, or as literals.

    Raises:
        NonFiniteOutput: It does, under the policy `error`.
    """
    leaves = entry.data
    if not plan.is_float or not isinstance(leaves, list) or plan.nonfinite == "null":
        return leaves
    at = next((at for at, leaf in enumerate(leaves) if not math.isfinite(leaf)), None)
    if at is None:
        return leaves
    if plan.nonfinite == "error":
        raise NonFiniteOutput(
            f"output {plan.name!r} holds {leaves[at]} at element "
            f"{[int(i) for i in np.unravel_index(at, entry.shape)]}, which JSON cannot carry; hint: ask for it in "
            'binary form ("parameters": {"binary_data": true}), or set nonfinite to null or literal'
        )
    literals = [json.dumps(leaf).encode() for leaf in leaves if not math.isfinite(leaf)]
    first, *others = encode_json(leaves).split(b"null")
    return msgspec.Raw(first + b"".join(chain.from_iterable(zip(literals, others, strict=True))))
