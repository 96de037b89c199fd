"""What the codec compiles from a signature: a plan per tensor, and a parser that knows them.

The typed parser makes structs of its own per input. They carry the plan and have the attributes of `Input`, so that
whoever reads a `Message` need not know which way it came.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Final, Literal, Union

import msgspec

from headrace.data_plane.validate import InputRules
from headrace.errors import InvalidInput
from headrace.snapshot import NonFinitePolicy
from headrace.tensors import Datatype, TensorSpec, element_count

__all__ = [
    "INT64_MAX",
    "Input",
    "InputPlan",
    "Message",
    "Output",
    "OutputPlan",
    "Parameters",
    "Reply",
    "ReplyOutput",
    "typed_decoder",
]

INT64_MAX: Final = 2**63 - 1

# What the typed parser is told a leaf is, by kind of datatype.
_LEAF_TYPES: Final[dict[str, type]] = {"f": float, "i": int, "u": int, "b": bool, "s": str}

# Longer integers go the exact way and are refused there.
_ShortInteger = Annotated[int, msgspec.Meta(ge=-(2**63), le=INT64_MAX)]
Parameters = dict[str, str | _ShortInteger | float | bool] | None


class InputPlan:
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

    def error(self, reason: str, verdict: str) -> InvalidInput:
        """What is wrong with this input: `verdict` goes on where "input 'name'" ends."""
        return InvalidInput(f"input {self.name!r}{verdict}", field=self.name, reason=reason)


class OutputPlan:
    """One output, compiled: what its reply entry is made of, and what decides the form of its data."""

    __slots__ = ("is_bytes", "is_float", "name", "nonfinite", "spec", "wire")

    def __init__(self, spec: TensorSpec, nonfinite: NonFinitePolicy) -> None:
        self.spec = spec
        self.name = spec.name
        self.wire = spec.datatype.wire
        self.nonfinite: NonFinitePolicy = nonfinite
        self.is_bytes = spec.datatype is Datatype.BYTES
        self.is_float = spec.datatype.kind == "f"


class Input(msgspec.Struct, gc=False):
    """One input of a request.

    Attributes:
        plan: Of the input with this name.
        shape: Agrees with the signature.
        data: Flat leaves of the right kind; None when the tensor is in the binary part.
        parameters: As sent.
    """

    plan: InputPlan
    shape: tuple[int, ...]
    data: list[Any] | None
    parameters: Parameters


class Output(msgspec.Struct, gc=False):
    """One requested output."""

    name: str
    parameters: Parameters = None


class Message(msgspec.Struct, gc=False):
    """The JSON part of a request. Unknown keys are ignored, `model_name` from the kserve client among them."""

    inputs: list[Input]
    id: str | None = None
    parameters: Parameters = None
    outputs: list[Output] | None = None
    model_name: str | None = None


class ReplyOutput(msgspec.Struct, gc=False):
    """One output of a reply; it has `data`, or its size in the binary part in `parameters`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[Any] | msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class Reply(msgspec.Struct, gc=False):
    """The JSON part of a reply."""

    model_name: str
    model_version: str
    id: str | msgspec.UnsetType
    outputs: list[ReplyOutput]


def typed_decoder(plans: Collection[InputPlan]) -> Callable[[bytes], Message]:
    """A parser that checks name, datatype, rank, fixed dimensions and leaves of every input.

    Returns:
        A function that raises ValueError for whatever it does not take, right or wrong. Unknown keys are among that:
        they may hold anything, at any depth.
    """
    structs = tuple(_input_struct(plan, len(plans) == 1) for plan in plans)
    items: Any = list[Union[structs]] if structs else tuple[()]  # type: ignore[valid-type] # noqa: UP007
    message: Any = msgspec.defstruct(
        "Message", [("inputs", items)], bases=(Message,), forbid_unknown_fields=True, gc=False
    )
    return msgspec.json.Decoder(message).decode


def _input_struct(plan: InputPlan, is_alone: bool) -> type[msgspec.Struct]:
    """Several inputs are told apart by a tag; a lone one has its name as a field, since its tag would be optional."""
    leaf = _LEAF_TYPES[plan.spec.datatype.kind]
    fields: Sequence[tuple[str, Any] | tuple[str, Any, Any]] = [
        ("shape", tuple.__class_getitem__(tuple(map(_dimension_type, plan.spec.shape)))),
        ("datatype", Literal[plan.spec.datatype.wire]),
        ("data", list[leaf] | None, None),  # type: ignore[valid-type]
        ("parameters", Parameters, None),
    ]
    name = f"Input{plan.position}"
    namespace = {"plan": plan}
    if is_alone:
        named = [("name", Literal[plan.name]), *fields]
        return msgspec.defstruct(name, named, namespace=namespace, forbid_unknown_fields=True, gc=False)
    return msgspec.defstruct(
        name, fields, namespace=namespace, tag_field="name", tag=plan.name, forbid_unknown_fields=True, gc=False
    )


def _dimension_type(dimension: int) -> Any:
    return Literal[dimension] if dimension >= 0 else Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
