"""Looks into ONNX files without loading them: digest, external weights, declared values.

Both planes need this before any runtime is imported, so it uses the standard library only and never executes or
unpickles anything. An ONNX file is a protobuf message; the walker below hops from field to field over a memory map,
skips the weights, and so reads a model of gigabytes in milliseconds.
"""

import hashlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "ArtefactError",
    "OnnxOutline",
    "ValueOutline",
    "external_file",
    "file_digest",
    "read_outline",
]


class ArtefactError(ValueError):
    """The file is not a well-formed ONNX file; the text completes the sentence "FILE …"."""


@dataclass(frozen=True, slots=True)
class ValueOutline:
    """A graph input or output as the file declares it.

    Attributes:
        name: Of the value.
        type_text: In ONNX Runtime's notation, for example `tensor(float)` or `sequence`; empty when not declared.
        has_shape: The file says how many dimensions there are.
    """

    name: str
    type_text: str
    has_shape: bool


@dataclass(frozen=True, slots=True)
class OnnxOutline:
    """What an ONNX file says about itself.

    Attributes:
        inputs: Graph inputs, in order.
        outputs: Graph outputs, in order.
        external: Locations of external tensor data as written in the file, each once, sorted.
    """

    inputs: tuple[ValueOutline, ...]
    outputs: tuple[ValueOutline, ...]
    external: tuple[str, ...]


# ---------------------------------------------------------------------------------------------------------- digest


def file_digest(path: Path) -> str:
    """The identity of an artefact's content.

    Without external data it is the plain SHA-256 of the file, the same as `sha256sum` prints. With external data it
    is the SHA-256 over the file's digest and, sorted by location, every location with its file's digest, so that
    changed weights are a changed version too. Locations that leave the model's folder are not opened: the loader
    refuses such a model.

    Args:
        path: A regular file.

    Returns:
        `sha256:` and 64 hexadecimal digits.

    Raises:
        OSError: The file, or an external data file that exists, cannot be read.

    Concurrency: releases the interpreter lock while it hashes.
    """
    digest = _sha256(path)
    try:
        locations = read_outline(path).external
    except ArtefactError:
        locations = ()  # Not ONNX: the bytes are all there is.
    if locations:
        whole = hashlib.sha256(digest.encode())
        for location in locations:
            target = external_file(path, location)
            part = _sha256(target) if target is not None and target.is_file() else "missing"
            whole.update(f"\n{location}\0{part}".encode())
        digest = whole.hexdigest()
    return f"sha256:{digest}"


def external_file(path: Path, location: str) -> Path | None:
    """The file that an external data location names; None when it is outside the model's folder.

    Symbolic links are followed before the comparison: a link out of the folder is outside.
    """
    folder = path.parent.resolve()
    if not location or os.path.isabs(location) or "\0" in location:
        return None
    target = (folder / location).resolve()
    return target if target.is_relative_to(folder) else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------------------------- ONNX

# Field numbers that lead to tensors, per message. Source: onnx/onnx.proto (IR version 14), messages ModelProto,
# GraphProto, FunctionProto, NodeProto, AttributeProto, SparseTensorProto.
_CHILDREN: Final[dict[str, dict[int, str]]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
_MODEL_GRAPH, _GRAPH_INPUT, _GRAPH_OUTPUT = 7, 11, 12
_TENSOR_EXTERNAL_DATA, _TENSOR_DATA_LOCATION = 13, 14
_TYPE_KINDS: Final = {1: "tensor", 4: "sequence", 5: "map", 7: "opaque", 8: "sparse_tensor", 9: "optional"}
# TensorProto.DataType, in ONNX Runtime's spelling.
# fmt: off
_ELEMENTS: Final = (
    "undefined", "float", "uint8", "int8", "uint16", "int16", "int32", "int64",
    "string", "bool", "float16", "double", "uint32", "uint64", "complex64", "complex128",
    "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz", "uint4", "int4", "float4e2m1",
    "float8e8m0", "uint2", "int2", "float6e2m3", "float6e3m2",
)
# fmt: on

_Buffer = mmap.mmap
_Field = tuple[int, int, int, int]


def read_outline(path: Path) -> OnnxOutline:
    """Read what an ONNX file declares, without its weights.

    Args:
        path: A regular file.

    Raises:
        ArtefactError: The file is empty, cut short, corrupt, or has no graph.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ArtefactError("is empty (0 bytes)")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _outline(data)


def _outline(data: _Buffer) -> OnnxOutline:
    graph: tuple[int, int] | None = None
    for number, wire, start, end in _fields(data, 0, len(data)):
        if number == _MODEL_GRAPH and wire == 2:
            graph = (start, end)
    if graph is None:
        raise ArtefactError("holds no ONNX graph")
    inputs: list[ValueOutline] = []
    outputs: list[ValueOutline] = []
    for number, wire, start, end in _fields(data, *graph):
        if wire == 2 and number == _GRAPH_INPUT:
            inputs.append(_value(data, start, end))
        elif wire == 2 and number == _GRAPH_OUTPUT:
            outputs.append(_value(data, start, end))
    return OnnxOutline(tuple(inputs), tuple(outputs), tuple(sorted(_external_locations(data))))


def _external_locations(data: _Buffer) -> set[str]:
    # An explicit stack: a hostile file nests graphs deeper than the interpreter's recursion limit. Every field is
    # visited once, so the work is linear in the number of fields.
    locations: set[str] = set()
    stack = [("model", 0, len(data))]
    while stack:
        kind, start, end = stack.pop()
        if kind == "tensor":
            locations.update(_tensor_locations(data, start, end))
            continue
        children = _CHILDREN[kind]
        for number, wire, child_start, child_end in _fields(data, start, end):
            if wire == 2 and number in children:
                stack.append((children[number], child_start, child_end))
    return locations


def _tensor_locations(data: _Buffer, start: int, end: int) -> list[str]:
    is_external = False
    locations: list[str] = []
    for number, wire, field_start, field_end in _fields(data, start, end):
        if number == _TENSOR_DATA_LOCATION and wire == 0:
            is_external = field_start == 1
        elif number == _TENSOR_EXTERNAL_DATA and wire == 2:
            pair = {n: (s, e) for n, w, s, e in _fields(data, field_start, field_end) if w == 2}
            if 1 in pair and 2 in pair and _text(data, *pair[1]) == "location":
                locations.append(_text(data, *pair[2]))
    return locations if is_external else []


def _value(data: _Buffer, start: int, end: int) -> ValueOutline:
    name, type_text, has_shape = "", "", False
    for number, wire, field_start, field_end in _fields(data, start, end):
        if number == 1 and wire == 2:
            name = _text(data, field_start, field_end)
        elif number == 2 and wire == 2:
            for kind, kind_wire, kind_start, kind_end in _fields(data, field_start, field_end):
                if kind_wire != 2 or kind not in _TYPE_KINDS:
                    continue
                type_text = _TYPE_KINDS[kind]
                if type_text != "tensor":
                    continue
                element = 0
                for n, w, s, _ in _fields(data, kind_start, kind_end):
                    if n == 1 and w == 0:
                        element = s
                    elif n == 2 and w == 2:
                        has_shape = True
                type_text = f"tensor({_ELEMENTS[element] if element < len(_ELEMENTS) else f'type {element}'})"
    return ValueOutline(name, type_text, has_shape)


def _text(data: _Buffer, start: int, end: int) -> str:
    return data[start:end].decode("utf-8", "replace")


def _fields(data: _Buffer, position: int, end: int) -> Iterator[_Field]:
    """Yield (number, wire type, start, end) of each field of the message in `data[position:end]`.

    For a varint the third item is its value. Source: protobuf encoding specification, "Message Structure".

    Raises:
        ArtefactError: A field does not end within the message, or has a type that protobuf does not know.
    """
    while position < end:
        key, position = _varint(data, position, end)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise ArtefactError(f"is corrupt or not an ONNX file (field number 0 at byte {position})")
        if wire == 2:
            size, position = _varint(data, position, end)
            start, position = position, position + size
            if position > end:
                raise ArtefactError(f"is cut short or corrupt (a part should end at byte {position}, not {end})")
            yield number, wire, start, position
        elif wire == 0:
            value, position = _varint(data, position, end)
            yield number, wire, value, position
        elif wire in (1, 5):
            position += 8 if wire == 1 else 4
            if position > end:
                raise ArtefactError(f"is cut short or corrupt (a part should end at byte {position}, not {end})")
            yield number, wire, position, position
        else:
            raise ArtefactError(f"is corrupt or not an ONNX file (wire type {wire} at byte {position})")


def _varint(data: _Buffer, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ArtefactError(f"is cut short or corrupt (an unfinished number at byte {position})")
