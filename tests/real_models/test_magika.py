"""Magika: Google's file-type detector, a trained model with a known answer."""

import importlib.util
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from headrace.control_plane.discover import discover
from headrace.runtimes.onnx import OnnxRuntime, load
from headrace.snapshot import RuntimeOptions

HALF, PADDING = 1024, 256


@pytest.fixture(scope="module")
def magika():
    """The model and its labels, found without importing the package: its imports are none of our business."""
    spec = importlib.util.find_spec("magika")
    if spec is None or not spec.submodule_search_locations:
        message = "magika is not installed; pip install --no-deps -r tests/requirements-no-deps.txt"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    folder = Path(spec.submodule_search_locations[0]) / "models" / "standard_v3_3"
    labels = json.loads((folder / "config.min.json").read_text())["target_labels_space"]
    ((version,),) = [model.versions for model in discover(folder / "model.onnx")]
    runtime = load(version, RuntimeOptions(), 1)
    yield runtime, labels
    runtime.close()


def features(content: bytes) -> list[int]:
    """The first and the last 1,024 bytes of a file of at most 4,096, stripped and padded.

    Source: magika 1.0.3, `Magika._extract_features_from_seekable`.
    """
    head, tail = content.lstrip()[:HALF], content.rstrip()[-HALF:]
    return [*head, *[PADDING] * (HALF - len(head)), *[PADDING] * (HALF - len(tail)), *tail]


def best(runtime: OnnxRuntime, labels: list[str], *contents: bytes) -> list[tuple[str, float]]:
    rows = np.array([features(content) for content in contents], np.int32)
    (scores,) = runtime.run({"bytes": rows}, ["target_label"])
    return [(labels[row.argmax()], float(row.max())) for row in scores]


def png() -> bytes:
    header = b"\0\0\0\x40\0\0\0\x40\x08\x02\0\0\0"
    pixels = zlib.compress(np.random.default_rng(0).integers(0, 256, (64, 193), dtype=np.uint8).tobytes())
    chunks = b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    )
    return b"\x89PNG\r\n\x1a\n" + chunks


def test_the_signature_is_the_published_one(magika):
    """X1, P7: `bytes` INT32 [N, 2048] → `target_label` FP32 [N, 214]."""
    runtime, labels = magika
    (given,), (answer,) = runtime.signature.inputs, runtime.signature.outputs

    assert (given.name, given.datatype.wire, given.shape) == ("bytes", "INT32", (-1, 2 * HALF))
    assert (answer.name, answer.datatype.wire, len(labels)) == ("target_label", "FP32", 214)
    assert runtime.signature.is_batched


def test_a_python_file_is_python(magika):
    """P7: the known answer."""
    ((label, score),) = best(*magika, Path(__file__).read_bytes()[:4096])

    assert label == "python"
    assert score > 0.99


def test_rows_of_a_batch_get_their_own_answers(magika):
    """P7: three kinds of file in one run answer as they do alone."""
    source = Path(__file__).read_bytes()[:4096]
    html = b"<!DOCTYPE html>\n<html><head><title>Hello</title></head><body><p>Hello, world.</p></body></html>\n"
    contents = [source, png()[:4096], html]

    together = best(*magika, *contents)

    assert [label for label, _ in together] == ["python", "png", "html"]
    for content, (label, score) in zip(contents, together, strict=True):
        assert [(label, pytest.approx(score, abs=1e-3))] == best(*magika, content)
