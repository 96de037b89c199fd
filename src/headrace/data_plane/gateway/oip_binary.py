"""Tensors as bytes: the binary part of a request and of a reply, the raw form, BYTES framing.

Source: Triton binary tensor data extension.
"""

import struct
from collections.abc import Sequence
from itertools import chain

import numpy as np

from headrace.data_plane.gateway.oip_plans import InputPlan, OutputPlan
from headrace.data_plane.validate import quote
from headrace.tensors import Array, Datatype, element_count

__all__ = ["byte_strings", "raw_tensor", "tensor_bytes", "view"]


def view(plan: InputPlan, shape: Sequence[int], count: int, tail: memoryview | None, offset: int, size: int) -> Array:
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
    if not plan.is_bytes and size != count * plan.dtype.itemsize:
        raise plan.error(
            "shape",
            f": expected {quote(count * plan.dtype.itemsize)} bytes for {plan.spec.datatype.wire} of shape "
            f"{quote(list(shape))}, got binary_data_size {size}",
        )
    available = 0 if tail is None else len(tail)
    if tail is None or offset + size > available:
        hint = "; hint: is Inference-Header-Content-Length set?" if tail is None else ""
        raise plan.error(
            "size",
            f": {offset + size - available} bytes missing; expected {offset + size} bytes after the JSON part, got "
            f"{available}{hint}",
        )
    if plan.is_bytes:
        return byte_strings(shape, _split_elements(plan, count, tail[offset : offset + size]))
    array: Array = np.ndarray(tuple(shape), plan.dtype, tail, offset)
    if plan.spec.datatype is Datatype.BOOL and array.size:
        octets = array.view(np.uint8).reshape(-1)
        if octets.max() > 1:
            at = int(np.argmax(octets > 1))
            raise plan.error("range", f": element {at}: expected a byte of 0 or 1, got {octets[at]}")
    # Runtimes read by whole words; where the JSON part ends decides the alignment, so three of four FP32 are copied.
    return array if array.flags.aligned else array.copy()


def byte_strings(shape: Sequence[int], elements: list[bytes]) -> Array:
    """A BYTES array."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)


def _split_elements(plan: InputPlan, count: int, part: memoryview) -> list[bytes]:
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
            raise plan.error(
                "size",
                f": element {len(elements)} of BYTES is cut off: {max(at, start) - end} bytes missing of "
                f"binary_data_size {end}",
            )
        elements.append(content[start:at])
    if len(elements) != count or at != end:
        got = f"{len(elements)}" if at == end else f"{end - at} bytes more"
        raise plan.error("shape", f": expected {quote(count)} BYTES elements in binary_data_size {end}, got {got}")
    return elements


def raw_tensor(plan: InputPlan, is_batched: bool, body: memoryview) -> Array:
    """A whole body as the one row of the only input.

    Raises:
        InvalidInput: The length does not go with the shape, or leaves open which one it is.

    Source: Triton binary tensor data extension, "Raw Binary Request".
    """
    shape = list(plan.spec.shape)
    if is_batched:
        shape[0] = 1
    if plan.is_bytes:
        shape = [1 if dimension < 0 else dimension for dimension in shape]
        if element_count(shape) != 1:
            raise plan.error(
                "shape",
                f" takes {element_count(shape)} strings, a raw body is one; use the binary form with a JSON part",
            )
        return byte_strings(shape, [bytes(body)])
    shape = _raw_shape(plan, shape, len(body))
    return view(plan, shape, element_count(shape), body, 0, len(body))


def _raw_shape(plan: InputPlan, shape: list[int], size: int) -> list[int]:
    """Work out the variable dimension of a raw body from its length."""
    variable = [axis for axis, dimension in enumerate(shape) if dimension < 0]
    if len(variable) > 1:
        raise plan.error(
            "shape",
            f" has {len(variable)} variable dimensions, a raw body can tell one; use the binary form with a JSON part",
        )
    if variable:
        row_bytes = plan.dtype.itemsize * element_count([dimension for dimension in shape if dimension >= 0])
        if row_bytes == 0 or size % row_bytes:
            raise plan.error(
                "size",
                f": a raw body of {size} bytes is no whole number of {row_bytes} bytes, as shape "
                f"{list(plan.spec.shape)} of {plan.spec.datatype.wire} asks",
            )
        shape[variable[0]] = size // row_bytes
    return shape


def tensor_bytes(plan: OutputPlan, array: Array) -> memoryview | bytes:
    """An output in binary form, without a copy where it has its wire form already."""
    if plan.is_bytes:
        elements = [leaf.encode() if isinstance(leaf, str) else leaf for leaf in array.ravel().tolist()]
        return b"".join(chain.from_iterable((struct.pack("<I", len(leaf)), leaf) for leaf in elements))
    if not array.size:
        return b""
    return np.ascontiguousarray(array, plan.spec.datatype.dtype).reshape(-1).view(np.uint8).data
