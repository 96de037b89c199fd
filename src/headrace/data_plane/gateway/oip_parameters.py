"""Parameters of the request, of an input and of an output: those that mean something here, and those refused.

Source: Open Inference Protocol (KServe V2), "Parameters"; Triton binary tensor data extension.
"""

from typing import Final

from headrace.data_plane.gateway.oip_leaves import describe
from headrace.data_plane.gateway.oip_plans import Input, Parameters
from headrace.data_plane.ticket import Scalar
from headrace.data_plane.validate import quote
from headrace.errors import BadRequest, MalformedJson, NotImplementedYet

__all__ = ["TIMEOUT_S_MAX", "binary_bytes", "is_output_binary", "read_parameters", "request_parameters"]

TIMEOUT_S_MAX: Final = 3600.0
"""Longest time that a caller may allow: with longer, rows that nobody bounds could fill the queue."""


def read_parameters(whose: str, parameters: object) -> Parameters:
    """Check parameters that were parsed without types."""
    if parameters is None:
        return None
    if type(parameters) is not dict:
        raise MalformedJson(f"the parameters of {whose} are {describe(parameters)}; expected an object")
    for key, value in parameters.items():
        if type(value) not in (str, int, float, bool):
            raise BadRequest(
                f"parameter {quote(key)} of {whose} is {describe(value)}; expected a string, a number or a boolean"
            )
        if type(value) is int and not -(2**63) <= value < 2**64:
            raise BadRequest(f"parameter {quote(key)} of {whose} is {describe(value)}; expected an integer of 64 bits")
    return parameters


def request_parameters(parameters: dict[str, Scalar]) -> tuple[float | None, bool]:
    """Parameters of the request.

    Returns:
        The timeout in seconds (None when not said, or 0; an hour when more), and whether outputs are binary unless they
        say otherwise.
    """
    _refuse_reserved(parameters)
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or timeout < 0:
        raise BadRequest(f"parameter 'timeout' is {describe(timeout)}; expected microseconds, an integer of at least 0")
    is_binary = parameters.get("binary_data_output", False)
    if type(is_binary) is not bool:
        raise BadRequest(f"parameter 'binary_data_output' is {describe(is_binary)}; expected true or false")
    # Cut and not refused: clients write the largest integer and mean "for ever".
    return (min(timeout / 1e6, TIMEOUT_S_MAX) if timeout else None), is_binary


def binary_bytes(item: Input, parameters: dict[str, Scalar]) -> int | None:
    """The `binary_data_size` of an input with parameters; None when its data are in the JSON."""
    plan = item.plan
    _refuse_reserved(parameters)
    if "shared_memory_region" in parameters:
        raise _no_shared_memory(f"input {plan.name!r}", "send data or binary_data_size")
    size = parameters.get("binary_data_size")
    if size is None:
        return None
    if item.data is not None:
        raise plan.error("size", " has both data and binary_data_size; expected one of them")
    if type(size) is not int or size < 0:
        raise plan.error("size", f": binary_data_size is {quote(size)}; expected an integer of at least 0")
    return size


def is_output_binary(name: str, parameters: dict[str, Scalar], is_binary_default: bool) -> bool:
    """Whether an output with parameters is binary."""
    _refuse_reserved(parameters)
    if "classification" in parameters:
        raise NotImplementedYet(
            f"output {name!r} asks for classification, which this server does not offer yet; leave the parameter out "
            "and take the largest values of the plain tensor"
        )
    if "shared_memory_region" in parameters:
        raise _no_shared_memory(f"output {name!r}", "ask for binary_data")
    is_binary = parameters.get("binary_data", is_binary_default)
    if type(is_binary) is not bool:
        raise BadRequest(f"parameter 'binary_data' of output {name!r} is {describe(is_binary)}; expected true or false")
    return is_binary


def _refuse_reserved(parameters: dict[str, Scalar]) -> None:
    for key in parameters:
        if key.startswith("triton_"):
            raise BadRequest(f"parameter {quote(key)} is reserved; expected a name that does not start with triton_")


def _no_shared_memory(whose: str, instead: str) -> NotImplementedYet:
    return NotImplementedYet(f"{whose} asks for shared memory, which this server does not offer; {instead} instead")
