"""Trial runs at load: does the model work, may it be batched, and how long does it take?

Inputs are generated, since an artefact says shapes and types but brings no examples. A model that takes none of the
generated inputs is still served, unbatched and with its time learned from traffic, and the reason is reported.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from headrace.clock import Clock
from headrace.errors import HeadraceError, LoadError
from headrace.ports import Runtime
from headrace.tensors import Array, Datatype, Signature, TensorSpec

WARMUP_ROWS = (1, 1, 1, 8, 8, 8)
"""Timed runs that seed the latency curve: two sizes, three times each."""

VARIABLE_SIZES = (16, 1, 8, 32, 64, 224)
"""Sizes tried for variable dimensions behind the first."""

TRIAL_ELEMENTS_MAX = 1 << 24
"""Largest input that is generated for its variable dimensions: four of them at 224 would be 20 GB of random numbers."""

BATCH_TOLERANCE = 0.05
"""How far a row's outputs may move when it is batched, relative to the largest output. A model that mixes rows moves
them grossly; one with dynamic quantisation moves them by a few per cent, because it scales over the whole batch."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What the trial runs found.

    Attributes:
        signature: With `is_batched` confirmed or withdrawn.
        batching: `batched`, or why it is not.
        warmup: (rows, seconds) of the timed runs; empty when no generated input was taken.
        example: One row of inputs that the model took; empty when there was none.
    """

    signature: Signature
    batching: str
    warmup: tuple[tuple[int, float], ...]
    example: dict[str, Array]

    @property
    def input_bytes_per_row(self) -> int:
        """Bytes of one row of inputs."""
        return sum(array.nbytes for array in self.example.values())


def try_out(runtime: Runtime, clock: Clock, *, rows_max: int | None) -> TrialResult:
    """Run a freshly loaded model on generated inputs.

    Args:
        runtime: The model.
        clock: Times the runs.
        rows_max: Declared largest batch; 1 declares that the model shall not be batched.

    Raises:
        LoadError: The model has an input of a kind that cannot be served, or outputs that are not what it declares.
    """
    signature = runtime.signature
    names = [spec.name for spec in signature.outputs]
    batching = "batched"
    if not signature.is_batched:
        batching = "not batched: its inputs and outputs do not all begin with a variable batch dimension"
    elif rows_max == 1:
        batching = "not batched: rows_max is 1"
    try:
        solo, outputs = _first_that_runs(runtime, signature, names)
    except HeadraceError as error:
        reason = f"not batched: it took no generated input ({_one_line(error)})"
        return TrialResult(replace(signature, is_batched=False), reason, (), {})
    _check_outputs(signature, outputs)
    if batching == "batched":
        problem = _batching_problem(runtime, names, solo)
        if problem:
            batching = f"not batched: {problem}"
    is_batched = batching == "batched"
    warmup = tuple(_timed_runs(runtime, names, solo, clock, WARMUP_ROWS if is_batched else (1, 1, 1)))
    return TrialResult(
        signature=replace(signature, is_batched=is_batched),
        batching=batching,
        warmup=warmup,
        example=solo,
    )


def _first_that_runs(
    runtime: Runtime, signature: Signature, names: list[str]
) -> tuple[dict[str, Array], Sequence[Array]]:
    """Inputs of one row that the model takes, and its outputs; tries a few sizes for variable dimensions."""
    has_variable = any(-1 in spec.shape[1:] for spec in signature.inputs)
    failure: HeadraceError | None = None
    for size, is_low in product(VARIABLE_SIZES if has_variable else (1,), (False, True)):
        if failure is not None and any(_elements(spec, size) > TRIAL_ELEMENTS_MAX for spec in signature.inputs):
            continue
        inputs = {spec.name: _generate(spec, size, is_low) for spec in signature.inputs}
        try:
            return inputs, runtime.run(inputs, names)
        except HeadraceError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _check_outputs(signature: Signature, outputs: Sequence[Array]) -> None:
    """Refuse a model that would answer with other tensors than its metadata says: nobody looks at it later."""
    if len(outputs) != len(signature.outputs):
        raise LoadError(f"the model returned {len(outputs)} outputs; accepted are the {len(signature.outputs)} it says")
    for spec, output in zip(signature.outputs, outputs, strict=True):
        got = output.dtype if isinstance(output, np.ndarray) else type(output).__name__
        if got != spec.datatype.dtype:
            raise LoadError(
                f"output {spec.name!r} came back as {got}; accepted is {spec.datatype.dtype}, since the model says "
                f"{spec.datatype.wire}"
            )


def _elements(spec: TensorSpec, size: int) -> int:
    return math.prod(size if dimension == -1 else dimension for dimension in spec.shape[1:])


def _generate(spec: TensorSpec, size: int, is_low: bool) -> Array:
    """One row: small numbers that are legal as features, class codes and token ids alike."""
    if any(dimension < -1 for dimension in spec.shape):
        raise LoadError(f"input {spec.name!r} has shape {list(spec.shape)}; accepted are dimensions >= 0, or -1")
    shape = tuple(
        1 if at == 0 and dimension == -1 else size if dimension == -1 else dimension
        for at, dimension in enumerate(spec.shape)
    )
    random = np.random.default_rng(1)
    kind = spec.datatype.kind
    if spec.datatype is Datatype.BYTES:
        filled = np.empty(shape, dtype=object)
        filled.fill(b"0")
        return filled
    if is_low:
        return np.zeros(shape, dtype=spec.datatype.dtype)
    if kind == "f":
        return random.random(shape).astype(spec.datatype.dtype)
    return random.integers(0, 2, shape).astype(spec.datatype.dtype)


def _batching_problem(runtime: Runtime, names: list[str], solo: dict[str, Array]) -> str:
    """Why rows may not be merged; empty when they may."""
    other = {name: _shuffled(array) for name, array in solo.items()}
    both = {name: np.concatenate([array, other[name]]) for name, array in solo.items()}
    try:
        first, again, second = (runtime.run(inputs, names) for inputs in (solo, solo, other))
        merged = runtime.run(both, names)
    except HeadraceError as error:
        return f"it failed on two rows at once ({_one_line(error)})"
    for name, alone, repeat, beside, together in zip(names, first, again, second, merged, strict=True):
        if together.shape[:1] != (2,):
            return (
                f"output {name!r} has shape {list(together.shape)} for 2 rows, so its first dimension is not the batch"
            )
        if alone.dtype.kind != "f" or not _is_close(alone, repeat):
            continue  # labels may flip between nearly equal scores, and random outputs prove nothing
        if not (_is_close(alone, together[:1]) and _is_close(beside, together[1:])):
            return f"output {name!r} of a row changes with the rows beside it"
    return ""


def _shuffled(array: Array) -> Array:
    """Another legal row: the same elements in another order."""
    return np.ascontiguousarray(array.ravel()[::-1].reshape(array.shape))


def _is_close(left: Array, right: Array) -> bool:
    if left.shape != right.shape:
        return False
    scale = float(np.max(np.abs(left), initial=0.0, where=np.isfinite(left))) + 1e-6
    return bool(np.all((np.abs(left - right) <= BATCH_TOLERANCE * scale) | ~np.isfinite(left)))


def _timed_runs(
    runtime: Runtime, names: list[str], solo: dict[str, Array], clock: Clock, sizes: Iterable[int]
) -> Iterable[tuple[int, float]]:
    for rows in sizes:
        inputs = solo if rows == 1 else {name: np.repeat(array, rows, axis=0) for name, array in solo.items()}
        runtime.run(inputs, names)  # the first run of a size allocates; it is not counted
        started_s = clock.now_s()
        runtime.run(inputs, names)
        yield rows, max(clock.now_s() - started_s, 1e-9)


def _one_line(error: HeadraceError) -> str:
    return " ".join(error.message.split())[:200]
