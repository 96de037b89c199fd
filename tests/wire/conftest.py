"""One real server with a model for every purpose, shared by the wire tests."""

from collections.abc import Iterator

import pytest

from headrace.tensors import Datatype
from headrace.testing import models
from headrace.testing.server import ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two workers; models named after what they do."""
    root = tmp_path_factory.mktemp("wire")
    folder = root / "models"
    for datatype in Datatype:
        models.save(folder / f"identity_{datatype.wire.lower()}.onnx", models.identity(datatype))
    models.save(folder / "simple.onnx", models.simple())
    models.save(folder / "nan.onnx", models.nan())
    models.save(folder / "failing.onnx", models.failing())
    models.save(folder / "stats.onnx", models.identity())
    models.save(folder / "dots.and-dashes_1.onnx", models.identity())
    models.save(folder / "versioned" / "9" / "model.onnx", models.identity())
    models.save(folder / "versioned" / "10" / "model.onnx", models.double())
    models.save(folder / "labelled.onnx", models.labelled())
    with ServerProcess(folder, root / "home", "--workers", "2") as running:
        yield running
