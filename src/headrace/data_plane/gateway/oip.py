"""The Open Inference Protocol over HTTP: request bodies to arrays, arrays to reply bodies.

A `Codec` is compiled once per loaded version. A request takes one of two ways to the same arrays:

    JSON part ─┬─ typed  oip_plans  msgspec structs made from the signature; checks names, datatypes, fixed dimensions
               │                    and the kind of every element while it parses. Flat data without nulls, which is
               │                    nearly all traffic.
               └─ exact  oip_json   anything the typed way refuses is parsed again without types and looked at piece by
                                    piece. Accepts nested data and nulls, and finds the words for what is wrong. It
                                    alone decides what is an error.

    Message ─── Codec._build ─┬─ oip_leaves.pack    data in the JSON
    from either               ├─ oip_binary.view    data in the binary part
                              └─ oip_parameters     timeout, form of the outputs, what is refused

    arrays ──── Codec.encode ─┬─ OutputRows.leaves
    from the model            └─ oip_binary.tensor_bytes

A body that is nothing but a tensor (the raw form) goes straight to `oip_binary.raw_tensor`.

Source: Open Inference Protocol (KServe V2), "Inference"; Triton binary tensor data extension. Where the
implementations disagree, `docs/reference/open-inference-protocol.md` says what Headrace does.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from headrace.data_plane.gateway.oip_binary import raw_tensor, tensor_bytes, view
from headrace.data_plane.gateway.oip_json import check_depth, read_message, unknown_name
from headrace.data_plane.gateway.oip_leaves import encode_json, pack, texts, with_nonfinite
from headrace.data_plane.gateway.oip_parameters import binary_bytes, is_output_binary, request_parameters
from headrace.data_plane.gateway.oip_plans import (
    Input,
    InputPlan,
    Message,
    Output,
    OutputPlan,
    Reply,
    ReplyOutput,
    typed_decoder,
)
from headrace.data_plane.ticket import InferRequest, OutputRows, RequestedOutput, Scalar
from headrace.data_plane.validate import compile_contract, name_list, quote
from headrace.errors import BadRequest, InvalidInput
from headrace.snapshot import Contract, NonFinitePolicy
from headrace.tensors import Array, Signature, element_count

__all__ = ["Codec", "Encoded"]

_EMPTY_DIMENSION_MAX: Final = 65_536  # no element backs the dimensions of an empty tensor, so something must bound them


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
        self._depth_max = depth_max
        checker = compile_contract(signature, contract)
        rules = {} if checker is None else checker.rules
        self._plans = {
            spec.name: InputPlan(spec, position, rules.get(spec.name)) for position, spec in enumerate(signature.inputs)
        }
        self._decode_typed = typed_decoder(self._plans.values())
        self._is_single = len(self._plans) == 1
        self._output_index = {spec.name: index for index, spec in enumerate(signature.outputs)}
        self._all_json = tuple(RequestedOutput(index, False) for index in range(len(signature.outputs)))
        self._all_binary = tuple(RequestedOutput(index, True) for index in range(len(signature.outputs)))
        self._version = version
        self._output_plans = tuple(OutputPlan(spec, nonfinite) for spec in signature.outputs)

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
        try:
            message = self._decode_typed(head)
        except ValueError:
            # What the typed way takes has four levels at most, so only here can anything be deep.
            if head.count(b"[") + head.count(b"{") > self._depth_max:
                check_depth(head, self._depth_max)
            message = read_message(head, self._plans, self._model_name)
        if self._is_single and tail is None and message.parameters is None and message.outputs is None:
            inputs = message.inputs
            if len(inputs) == 1 and inputs[0].parameters is None:
                return self._build_single(message.id, inputs[0])
        return self._build(message, tail)

    def _build_single(self, identifier: str | None, item: Input) -> InferRequest:
        """`_build` for one input of a model that has one, with its data in the JSON and nothing else said."""
        plan, shape = item.plan, item.shape
        count = shape[0] * plan.row_elements if plan.row_elements is not None else element_count(shape)
        if count == 0:
            _check_empty_shape(plan, shape)
        array = pack(plan, shape, count, item.data)
        rows = shape[0] if self._signature.is_batched else 1
        return InferRequest(identifier, {}, {plan.name: array}, rows, self._all_json)

    def _build(self, message: Message, tail: memoryview | None) -> InferRequest:
        """Make the arrays; whatever spans several inputs is checked here."""
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
                raise plan.error("repeated", " is given more than once; expected it once")
            if plan.position != len(arrays):
                is_ordered = False
            if plan.row_elements is not None:
                count = shape[0] * plan.row_elements
            else:
                count = element_count(shape)
            if count == 0:
                _check_empty_shape(plan, shape)
            size = binary_bytes(item, item.parameters) if item.parameters else None
            if size is None:
                arrays[name] = pack(plan, shape, count, item.data)
            else:
                arrays[name] = view(plan, shape, count, tail, offset, size)
                offset += size
            if is_batched:
                if rows < 0:
                    rows = shape[0]
                elif shape[0] != rows:
                    raise plan.error("rows", f" has {shape[0]} rows; expected {rows}, as in the input before it")
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
            timeout_s, is_binary_default = request_parameters(parameters)
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

    def _requested(self, outputs: Sequence[Output], is_binary_default: bool) -> list[RequestedOutput]:
        """Which outputs, in which form: the output's own flag, else the request's, else JSON."""
        requested: dict[int, RequestedOutput] = {}
        for output in outputs:
            index = self._output_index.get(output.name)
            if index is None:
                raise unknown_name("output", output.name, list(self._output_index), self._model_name)
            if index in requested:
                raise InvalidInput(
                    f"output {output.name!r} is asked for more than once; expected it once",
                    field=output.name,
                    reason="repeated",
                )
            is_binary = is_binary_default
            if output.parameters:
                is_binary = is_output_binary(output.name, output.parameters, is_binary_default)
            requested[index] = RequestedOutput(index, is_binary)
        return list(requested.values())

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
        array = raw_tensor(plan, self._signature.is_batched, body)
        return InferRequest(None, {}, {plan.name: array}, 1, self._all_binary)

    # ---------------------------------------------------------------------------------------------- replies

    def encode(self, request: InferRequest, outputs: OutputRows) -> Encoded:
        """Write a reply.

        JSON data are flat. An FP32 or FP16 is written as the shortest decimal that a parser reads back as a double of
        exactly its value, so that it survives any client whatever it parses into.

        Args:
            request: What was asked; its id and outputs are used.
            outputs: All outputs of the signature, in its order, of its dtypes.

        Raises:
            NonFiniteOutput: NaN or infinity in a JSON output, under the policy `error`.
            BadRequest: A BYTES output that JSON was asked for is not UTF-8.

        Source: Open Inference Protocol (KServe V2), "Inference Response JSON Object"; Triton binary tensor data
        extension.
        """
        entries: list[ReplyOutput] = []
        tensors: list[memoryview | bytes] = []
        is_binary = False
        for requested in request.outputs:
            index = requested.index
            plan = self._output_plans[index]
            if requested.is_binary:
                is_binary = True
                array = outputs.array(index)
                tensor = tensor_bytes(plan, array)
                if len(tensor):
                    tensors.append(tensor)
                entry = ReplyOutput(plan.name, plan.wire, array.shape, parameters={"binary_data_size": len(tensor)})
            else:
                shape, leaves = outputs.leaves(index)
                if plan.is_bytes:
                    leaves = texts(plan, leaves)
                entry = ReplyOutput(plan.name, plan.wire, shape, leaves)
            entries.append(entry)
        identifier = request.id if request.id is not None else msgspec.UNSET
        reply = Reply(self._model_name, self._version, identifier, entries)
        text = encode_json(reply)
        # msgspec writes null for NaN and infinity, and no number has an n in it: cheaper than isfinite.
        if b"null" in text:
            for requested, entry in zip(request.outputs, entries, strict=True):
                entry.data = with_nonfinite(self._output_plans[requested.index], entry)
            text = encode_json(reply)
        return Encoded(text, tensors, is_binary)


def _check_empty_shape(plan: InputPlan, shape: Sequence[int]) -> None:
    if max(shape, default=0) > _EMPTY_DIMENSION_MAX:
        raise plan.error(
            "shape",
            f" has no elements and a dimension of {quote(max(shape))}; expected at most {_EMPTY_DIMENSION_MAX} then",
        )
