"""Recognises model files that are not ONNX, and says how to get an ONNX file from them.

For error texts only: nothing here is executed, unpickled or unpacked. Standard library only, so that both planes can
ask before any runtime is imported.
"""

import stat
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Foreign", "foreign_format", "foreign_suffix"]


@dataclass(frozen=True, slots=True)
class Foreign:
    """A format that is not ONNX.

    Attributes:
        what: Its name, with article.
        how: How to get an ONNX file (or the real file) from it.
    """

    what: str
    how: str


_SKLEARN = 'skl2onnx: to_onnx(model, X[:1].astype(numpy.float32), options={"zipmap": False})'
_TORCH = 'in Python: torch.onnx.export(model, (example,), "model.onnx", dynamo=True)'
_KERAS = 'in Python: model.export("model.onnx", format="onnx")'
_TENSORFLOW = "python -m tf2onnx.convert --saved-model FOLDER --output model.onnx"
_WEIGHTS = "it holds weights without a graph; export the model it came from, for example with optimum-cli export onnx"
_XGBOOST = "onnxmltools.convert_xgboost(model, initial_types=[…])"
_LIGHTGBM = "onnxmltools.convert_lightgbm(model, initial_types=[…], zipmap=False)"
_UNPACK = "unpack it and name the .onnx file inside"

_PICKLE = Foreign("a Python pickle (scikit-learn, joblib)", _SKLEARN)
_TORCH_ZIP = Foreign("a PyTorch archive (TorchScript or torch.save)", _TORCH)
_KERAS_ZIP = Foreign("a Keras archive", _KERAS)

# Offset, magic bytes, format. Order matters: the first that fits wins.
_MAGIC: Final[tuple[tuple[int, bytes, Foreign], ...]] = (
    (0, b"version https://git-lfs", Foreign("a Git LFS pointer, not the model itself", "git lfs pull")),
    (0, b"\x89HDF\r\n\x1a\n", Foreign("an HDF5 file (Keras .h5)", _KERAS)),
    (0, b"GGUF", Foreign("a GGUF file (llama.cpp)", _WEIGHTS)),
    (0, b"tree\nversion=", Foreign("a LightGBM text model", _LIGHTGBM)),
    (0, b"binf", Foreign("an XGBoost binary model", _XGBOOST)),
    (0, b"CBM1", Foreign("a CatBoost model", 'in Python: model.save_model("model.onnx", format="onnx")')),
    (4, b"TFL3", Foreign("a TensorFlow Lite model", "python -m tf2onnx.convert --tflite FILE --output model.onnx")),
    (4, b"ORTM", Foreign("an ORT-format model", "serve the .onnx file that it was made from")),
    (0, b"ptrt", Foreign("a TensorRT engine", "serve the .onnx file that it was built from")),
    (0, b"\x1f\x8b", Foreign("a gzip archive", _UNPACK)),
    (0, b"BZh", Foreign("a bzip2 archive", _UNPACK)),
    (0, b"\xfd7zXZ", Foreign("an xz archive", _UNPACK)),
    (0, b"\x28\xb5\x2f\xfd", Foreign("a Zstandard archive", _UNPACK)),
    (257, b"ustar", Foreign("a tar archive", _UNPACK)),
)
_SUFFIXES: Final[dict[str, Foreign]] = {
    **dict.fromkeys((".pkl", ".pickle", ".joblib", ".skops"), _PICKLE),
    **dict.fromkeys((".pt", ".pth", ".torchscript"), _TORCH_ZIP),
    **dict.fromkeys((".h5", ".hdf5", ".keras"), _KERAS_ZIP),
    ".safetensors": Foreign("a safetensors file", _WEIGHTS),
    ".gguf": Foreign("a GGUF file (llama.cpp)", _WEIGHTS),
    ".ubj": Foreign("an XGBoost UBJSON model", _XGBOOST),
    ".pmml": Foreign("a PMML document", "export the model it came from to ONNX"),
    ".tflite": Foreign("a TensorFlow Lite model", "python -m tf2onnx.convert --tflite FILE --output model.onnx"),
    ".pb": Foreign("a TensorFlow graph", _TENSORFLOW),
    ".mlmodel": Foreign("a Core ML model", "export the model it came from to ONNX"),
}
_HEAD_BYTES = 4096


def foreign_format(path: Path) -> Foreign | None:
    """Recognise a model format that is not ONNX, by content first and by extension second.

    Args:
        path: A file or folder.

    Returns:
        None when it looks like nothing known. A file named `.onnx` is judged by its content alone.

    Raises:
        OSError: The path cannot be read.
    """
    if path.is_dir():
        is_saved_model = (path / "saved_model.pb").exists()
        return Foreign("a TensorFlow SavedModel folder", _TENSORFLOW) if is_saved_model else None
    if not stat.S_ISREG(path.stat().st_mode):
        return None  # Opening a pipe would wait for its writer.
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return _by_content(path, head) or foreign_suffix(path)


def foreign_suffix(path: Path) -> Foreign | None:
    """Recognise a model format that is not ONNX by the file's extension alone."""
    return _SUFFIXES.get(path.suffix.lower())


def _by_content(path: Path, head: bytes) -> Foreign | None:
    for offset, magic, found in _MAGIC:
        if head[offset : offset + len(magic)] == magic:
            return found
    # Pickle protocol 2 to 5: PROTO opcode, version, then a FRAME, a mark or an object. joblib without compression
    # writes the same. A bare zlib stream is what joblib writes with compression.
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return _PICKLE
    if head[:2] in (b"\x78\x01", b"\x78\x9c", b"\x78\xda") and path.suffix != ".onnx":
        return _PICKLE
    if head[:4] == b"PK\x03\x04":
        return _by_members(path)
    # safetensors: eight bytes of header length, then a JSON object. Source: safetensors README, "Format".
    if head[8:10] == b'{"' and 2 <= int.from_bytes(head[:8], "little") <= 100_000_000:
        return _SUFFIXES[".safetensors"]
    start = head.lstrip()[:512]
    if start[:1] == b"{":
        if head[1:2] == b"L" and b"learner" in head[:64]:
            return _SUFFIXES[".ubj"]
        if b'"learner"' in start:
            return Foreign("an XGBoost JSON model", _XGBOOST)
        return Foreign("a JSON document", "name the .onnx file instead")
    if start[:9].lower() == b"<!doctype" or start[:5].lower() == b"<html":
        return Foreign("an HTML page, not a model (a failed download?)", "download the file itself")
    if start[:5] == b"<?xml" or start[:5] == b"<net ":
        return Foreign("an XML document (OpenVINO IR or PMML)", "serve the .onnx file that it was made from")
    return None


def _by_members(path: Path) -> Foreign:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError):
        return Foreign("a damaged zip archive", _UNPACK)
    if any(name.endswith("data.pkl") for name in names):
        return _TORCH_ZIP
    if any(name.endswith("model.weights.h5") for name in names):
        return _KERAS_ZIP
    if any(name.endswith("schema.json") for name in names):
        return Foreign("a skops archive (scikit-learn)", _SKLEARN)
    return Foreign("a zip archive", _UNPACK)
