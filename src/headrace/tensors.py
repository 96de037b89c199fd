"""Tensors: their wire types, and what a model says about its inputs and outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Datatype(Enum):
    """An Open Inference Protocol tensor type.

    Attributes:
        wire: The name on the wire, for example `FP32`.
        dtype: The numpy type that holds it; `object` (of `bytes`) for BYTES.
        item_bytes: Bytes an element takes on the wire; 0 for BYTES, whose elements carry their length.
        kind: `b` boolean, `i` signed integer, `u` unsigned integer, `f` floating point, `s` byte strings.

    Source: Open Inference Protocol (KServe V2), "Tensor Data Types". BF16 has no numpy type and is refused at load.
    """

    BOOL = ("BOOL", "?", 1, "b")
    UINT8 = ("UINT8", "<u1", 1, "u")
    UINT16 = ("UINT16", "<u2", 2, "u")
    UINT32 = ("UINT32", "<u4", 4, "u")
    UINT64 = ("UINT64", "<u8", 8, "u")
    INT8 = ("INT8", "<i1", 1, "i")
    INT16 = ("INT16", "<i2", 2, "i")
    INT32 = ("INT32", "<i4", 4, "i")
    INT64 = ("INT64", "<i8", 8, "i")
    FP16 = ("FP16", "<f2", 2, "f")
    FP32 = ("FP32", "<f4", 4, "f")
    FP64 = ("FP64", "<f8", 8, "f")
    BYTES = ("BYTES", "O", 0, "s")

    def __init__(self, wire: str, dtype: str, item_bytes: int, kind: str) -> None:
        self.wire: Final = wire
        self.dtype: Final = np.dtype(dtype)
        self.item_bytes: Final = item_bytes
        self.kind: Final = kind


DATATYPES: Final[dict[str, Datatype]] = {member.wire: member for member in Datatype}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a model says about one of its inputs or outputs.

    Attributes:
        name: As in the artefact.
        datatype: Element type.
        shape: Dimensions; -1 is variable. The first is the batch dimension when the signature is batched.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs of one model version, as read from the artefact.

    Attributes:
        inputs: In the artefact's order.
        outputs: In the artefact's order.
        is_batched: The first dimension of every input and output is the batch and may vary. Proposed by the runtime
            from the shapes, confirmed or withdrawn by trial runs at load.
        platform: The name that metadata shows, for example `onnxruntime_onnx`.
        labels: Class labels by index; empty when the artefact has none.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    is_batched: bool
    platform: str
    labels: tuple[str, ...] = ()


def element_count(shape: Sequence[int]) -> int:
    """Number of elements of a concrete shape; 1 for a scalar."""
    count = 1
    for dimension in shape:
        count *= dimension
    return count
