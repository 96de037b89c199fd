"""Runs ONNX models with ONNX Runtime.

`load` looks at the file first and explains what is wrong with it in our words; only a file that looks sound reaches
ONNX Runtime. What the runtime then says is cut down to one line: its messages carry C++ source positions, function
signatures and our paths, which help no caller.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

import msgspec
import numpy as np
import onnxruntime

from headrace.artefact import ArtefactError, external_file, read_outline
from headrace.errors import InvalidInput, LoadError, ModelFailed
from headrace.foreign_formats import foreign_format
from headrace.snapshot import RuntimeOptions, VersionSpec
from headrace.tensors import Array, Datatype, Signature, TensorSpec

__all__ = ["OnnxRuntime", "load"]

PLATFORM: Final = "onnxruntime_onnx"

PROVIDER_ORDER: Final = ("CUDAExecutionProvider", "OpenVINOExecutionProvider", "CPUExecutionProvider")
"""What is taken of what the machine has when the options name none. TensorRT compiles for minutes at load, so it must
be asked for; Azure would send inputs to another company's servers, so it is never taken, asked for or not."""

MESSAGE_CHARACTERS_MAX: Final = 300

_DATATYPES: Final[dict[str, Datatype]] = {
    "tensor(bool)": Datatype.BOOL,
    "tensor(uint8)": Datatype.UINT8,
    "tensor(uint16)": Datatype.UINT16,
    "tensor(uint32)": Datatype.UINT32,
    "tensor(uint64)": Datatype.UINT64,
    "tensor(int8)": Datatype.INT8,
    "tensor(int16)": Datatype.INT16,
    "tensor(int32)": Datatype.INT32,
    "tensor(int64)": Datatype.INT64,
    "tensor(float16)": Datatype.FP16,
    "tensor(float)": Datatype.FP32,
    "tensor(double)": Datatype.FP64,
    "tensor(string)": Datatype.BYTES,
}
_GRAPH_LEVELS: Final = {
    "disabled": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
# Every error also arrives as an exception, so the runtime's own log would only say it twice, on stderr.
_LOG_FATAL: Final = 4


class OnnxRuntime:
    """A model loaded into ONNX Runtime.

    Concurrency: `run` may be called from several threads at once; ONNX Runtime sessions are made for that, and it
    releases the interpreter lock while it computes. `close` may be called while a run is in progress: that run
    finishes, later ones fail.
    """

    def __init__(
        self, session: onnxruntime.InferenceSession, signature: Signature, facts: Mapping[str, str], folder: str
    ) -> None:
        self._run = session.run
        self._signature = signature
        self._facts = facts
        self._folder = folder
        self._text_inputs = tuple(spec.name for spec in signature.inputs if spec.datatype is Datatype.BYTES)
        self._text_outputs = frozenset(spec.name for spec in signature.outputs if spec.datatype is Datatype.BYTES)

    @property
    def signature(self) -> Signature:
        """Inputs, outputs, labels, and whether the shapes allow batching."""
        return self._signature

    @property
    def facts(self) -> Mapping[str, str]:
        """`runtime`, `provider`, `threads`, `graph_level`, and `producer` and `note` where there is one."""
        return self._facts

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Execute.

        Args:
            inputs: One array per input of the signature, C-contiguous, of the signature's dtype; BYTES as object
                arrays of `bytes`.
            outputs: Names of the wanted outputs, in the wanted order.

        Returns:
            One array per wanted output. ONNX Runtime allocates them anew, C-contiguous and of the declared type, so
            nothing is cast or copied here; only BYTES are turned from `str` into `bytes`.

        Raises:
            headrace.errors.ModelFailed: The model raised, or is closed; the text is one line.
            headrace.errors.InvalidInput: A BYTES element is not UTF-8, which ONNX strings have to be.
        """
        if not outputs:  # ONNX Runtime would take an empty list to mean all of them.
            return []
        if self._text_inputs:
            inputs = self._with_text(inputs)
        try:
            results: list[Array] = self._run(outputs, inputs)
        # ONNX Runtime's exceptions have no common base below Exception.
        except Exception as error:
            text = summarise(str(error).replace(self._folder, ""))
            raise ModelFailed(f"the model failed: {text}") from error
        if self._text_outputs:
            return [
                _to_bytes(array) if name in self._text_outputs else array
                for name, array in zip(outputs, results, strict=True)
            ]
        return results

    def close(self) -> None:
        """Give memory and threads back once the last run has finished. Idempotent."""
        self._run = _closed

    def _with_text(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        converted = dict(inputs)
        for name in self._text_inputs:
            if name in converted:
                converted[name] = _to_text(name, converted[name])
        return converted


def _closed(*_: object) -> NoReturn:
    raise RuntimeError("it is closed")


def _to_text(name: str, array: Array) -> Array:
    # ONNX Runtime calls str() on what an object array holds, so bytes would arrive as "b'…'".
    text = np.empty(array.shape, dtype=object)
    elements: list[bytes] = array.reshape(-1).tolist()
    try:
        text.reshape(-1)[:] = [element.decode() for element in elements]
    except UnicodeDecodeError as error:
        index = elements.index(error.object)
        raise InvalidInput(
            f"input {name!r}: element {index} is not UTF-8 (byte {error.object[error.start]:#04x} at position "
            f"{error.start}); this model takes text, encoded as UTF-8",
            field=name,
            reason="type",
        ) from None
    return text


def _to_bytes(array: Array) -> Array:
    encoded = np.empty(array.shape, dtype=object)
    encoded.reshape(-1)[:] = [element.encode() for element in array.reshape(-1).tolist()]
    return encoded


# ------------------------------------------------------------------------------------------------------------ load


def load(version: VersionSpec, options: RuntimeOptions, threads: int) -> OnnxRuntime:
    """Load an ONNX file.

    Args:
        version: Which artefact; its labels win over those in the file.
        options: How.
        threads: Threads per run when the options do not say; 1 or more.

    Raises:
        headrace.errors.LoadError: With what is wrong and what would be accepted.

    Concurrency: blocking; call it on a background thread. The session is built from the path, during which ONNX
    Runtime releases the interpreter lock.
    """
    path = Path(version.path)
    _examine(path)
    wanted = _providers(options)
    thread_count = options.threads or threads
    session = _session(path, options, wanted, thread_count)
    taken = session.get_providers()
    missing = [name for name in wanted if name not in taken]
    if missing and options.providers:
        raise LoadError(
            f"{path}: the provider {missing[0]} is installed but did not start on this machine; "
            f"started: {', '.join(taken)}. hint: check its driver, or leave providers empty"
        )
    meta = session.get_modelmeta()
    facts = {
        "runtime": f"onnxruntime {onnxruntime.__version__}",
        "provider": taken[0],
        "threads": str(thread_count),
        "graph_level": options.graph_level,
    }
    if meta.producer_name:
        facts["producer"] = meta.producer_name
    if missing:
        facts["note"] = f"{', '.join(missing)} did not start"
    labels = version.labels or _labels(meta.custom_metadata_map.get("labels", ""))
    signature = _signature(path, session, labels)
    return OnnxRuntime(session, signature, facts, f"{path.parent}{os.sep}")


def _session(
    path: Path, options: RuntimeOptions, providers: Sequence[str], threads: int
) -> onnxruntime.InferenceSession:
    onnxruntime.set_default_logger_severity(_LOG_FATAL)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.graph_optimization_level = _GRAPH_LEVELS[options.graph_level]
    settings.log_severity_level = _LOG_FATAL
    # Threads that wait for work sleep instead of spinning: an idle replica must not take a core from a busy one.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.add_session_config_entry("session.load_model_format", "ONNX")
    # Batches come in every size. A memory pattern is planned and kept per input shape: a small CNN after 200 runs
    # at 64 batch sizes held 137 MB without patterns, 183 MB with them, and 545 MB without the arena, at one speed.
    settings.enable_mem_pattern = False
    settings.enable_cpu_mem_arena = True
    try:
        return onnxruntime.InferenceSession(
            str(path),
            settings,
            providers=list(providers),
            enable_fallback=0,  # It prints to stdout and hides which provider runs.
            read_config_from_model=0,  # A model file does not configure the server.
        )
    # ONNX Runtime's exceptions have no common base below Exception.
    except Exception as error:
        raise LoadError(f"{path}: {_explain_load(str(error).replace(f'{path.parent}{os.sep}', ''))}") from error


def _providers(options: RuntimeOptions) -> list[str]:
    available = [name for name in onnxruntime.get_available_providers() if name != "AzureExecutionProvider"]
    if not options.providers:
        return [name for name in PROVIDER_ORDER if name in available]
    for name in options.providers:
        if name not in available:
            raise LoadError(
                f"runtime.providers names {name!r}, which this onnxruntime does not have; "
                f"accepted: {', '.join(available)}. hint: leave it empty to take what the machine has"
            )
    return list(options.providers)


# --------------------------------------------------------------------------------------------------------- examine


def _examine(path: Path) -> None:
    """Look at the file before ONNX Runtime does, which says "Protobuf parsing failed" to most of this."""
    accepted = "accepted: an ONNX file"
    try:
        foreign = foreign_format(path)
        if foreign is not None:
            raise LoadError(f"{path}: looks like {foreign.what}; {accepted}. hint: {foreign.how}")
        if path.is_dir():
            raise LoadError(f"{path}: is a folder; {accepted}")
        if not path.is_file():
            raise LoadError(f"{path}: is not a regular file; {accepted}")
        outline = read_outline(path)
    except FileNotFoundError:
        raise LoadError(f"{path}: does not exist; {accepted}") from None
    except PermissionError:
        raise LoadError(
            f"{path}: cannot be read (permission denied for user id {os.geteuid()}); {accepted} that this user may read"
        ) from None
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({error.strerror}); {accepted}") from error
    except ArtefactError as error:
        raise LoadError(f"{path}: {error}; {accepted}. hint: copy or export it again") from None
    # ONNX Runtime 1.32 refuses escaping locations too (a test holds it to that); older ones did not, so both look.
    for location in outline.external:
        target = external_file(path, location)
        if target is None:
            raise LoadError(
                f"{path}: keeps weights in {location!r}, outside the model's folder; accepted: files beside it. "
                "hint: onnx.save(model, path, save_as_external_data=True)"
            )
        if not target.is_file():
            raise LoadError(f"{path}: its weights file {location!r} is missing; accepted: the file beside the model")
    for value in (*outline.inputs, *outline.outputs):
        if value.type_text:
            _datatype(path, value.name, value.type_text)
    for value in outline.inputs:
        if value.type_text and not value.has_shape:
            raise LoadError(
                f"{path}: input {value.name!r} does not say how many dimensions it has; accepted: a shape, whose "
                "dimensions may be variable. hint: export with a shape for each input"
            )


def _datatype(path: Path, name: str, type_text: str) -> Datatype:
    datatype = _DATATYPES.get(type_text)
    if datatype is not None:
        return datatype
    if type_text.startswith(("seq", "map", "optional")):
        kind = "an optional value" if type_text.startswith("opt") else "a list or map"
        raise LoadError(
            f"{path}: {name!r} is {kind} ({type_text}); accepted: tensors. hint: with scikit-learn, export without "
            'zipmap: to_onnx(model, X[:1], options={"zipmap": False})'
        )
    raise LoadError(
        f"{path}: {name!r} has the type {type_text}, which the protocol's JSON and numpy cannot carry; accepted: "
        f"{', '.join(member.wire for member in Datatype)}. hint: cast it to FP32 inside the model"
    )


def _signature(path: Path, session: onnxruntime.InferenceSession, labels: tuple[str, ...]) -> Signature:
    inputs = tuple(_spec(path, value) for value in session.get_inputs())
    outputs = tuple(_spec(path, value) for value in session.get_outputs())
    if not outputs:
        raise LoadError(f"{path}: has no outputs; accepted: at least one")
    # An output whose rank nobody knows is reported as a scalar, and so never as one that can be split into rows.
    is_batched = bool(inputs) and all(spec.shape[:1] == (-1,) for spec in (*inputs, *outputs))
    return Signature(inputs, outputs, is_batched, PLATFORM, labels)


def _spec(path: Path, value: onnxruntime.NodeArg) -> TensorSpec:
    # A dimension is a number, the name of a variable, or None for a variable without a name.
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in value.shape)
    return TensorSpec(value.name, _datatype(path, value.name, value.type), shape)


def _labels(text: str) -> tuple[str, ...]:
    """Labels from the custom metadata key `labels`: a JSON list, or one a line, or separated by commas."""
    text = text.strip()
    if not text:
        return ()
    if text.startswith("["):
        try:
            return tuple(str(label) for label in msgspec.json.decode(text, type=list[str | int | float]))
        except msgspec.DecodeError:
            pass  # A list of names that happens to begin with a bracket.
    return tuple(label.strip() for label in text.split("\n" if "\n" in text else ","))


# -------------------------------------------------------------------------------------------------------- messages

_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_LOADING = re.compile(r"^Load model from .*? failed: ?")
# Source position, then a C++ signature with parentheses up to three deep, or a bare function name.
_SOURCE = re.compile(
    r"\S*\.(?:cc|cpp|cu|cuh|h|hpp):\d+\s+"
    r"(?:[^()\n]*?::[^()\n]*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)(?: const)?(?: \[with [^\]]*\])?\s*"
    r"|[A-Z]\w*\s+(?=[A-Z]))?"
)
_STACK = re.compile(r"\s*Stacktrace:.*", re.DOTALL)
_OPSET = re.compile(r"Opset (\d+) is under development.*?domain (\S+) is till opset (\d+)")
_IR = re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")
_OPERATOR = re.compile(r"(?:Fatal error: (\S+?)\(-?\d+\) is not a registered|No Op registered for (\S+) with)")


def summarise(text: str) -> str:
    """One clean line of what ONNX Runtime said, at most `MESSAGE_CHARACTERS_MAX` characters.

    Args:
        text: Its message, with error prefix, C++ source positions and line breaks.
    """
    text = _STACK.sub("", _PREFIX.sub("", text.strip()))
    text = _SOURCE.sub("", _LOADING.sub("", text))
    text = " ".join(text.split())
    return text if len(text) <= MESSAGE_CHARACTERS_MAX else f"{text[: MESSAGE_CHARACTERS_MAX - 1]}…"


def _explain_load(text: str) -> str:
    release = f"onnxruntime {onnxruntime.__version__}"
    flat = " ".join(text.split())
    if match := _OPSET.search(flat):
        return (
            f"uses opset {match[1]} of {match[2]}; accepted: up to {match[3]} ({release}). "
            f"hint: export with opset_version={match[3]}, or install a newer onnxruntime"
        )
    if match := _IR.search(flat):
        return (
            f"is written in ONNX format version {match[1]}; accepted: up to {match[2]} ({release}). "
            f"hint: set model.ir_version = {match[2]} before saving, or install a newer onnxruntime"
        )
    if match := _OPERATOR.search(flat):
        return (
            f"uses the operator {match[1] or match[2]}, which {release} does not have; accepted: ONNX's and "
            "ONNX Runtime's own operators. hint: export without custom operators"
        )
    return f"ONNX Runtime cannot load it ({summarise(text)}); accepted: a valid ONNX model. hint: onnx.checker"
