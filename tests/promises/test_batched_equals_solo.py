"""Whatever company a request had in its batch, its answer is what the model says to it alone."""

import http.client
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import pytest

from headrace.drills.load import binary_infer_body, json_infer_body
from headrace.tensors import DATATYPES, Array
from headrace.testing import models
from headrace.testing.server import ServerProcess

CALLERS, REQUESTS_PER_CALLER = 12, 12
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Subject:
    """One model and how to ask it."""

    build: Callable[[], bytes]
    make: Callable[[np.random.Generator, int], Array]
    rows_max: int
    is_batched: bool = True


def _features(dice: np.random.Generator, rows: int) -> Array:
    data, _ = models.breast_cancer_rows()
    return data[dice.integers(0, len(data), rows)]


def _tokens(dice: np.random.Generator, rows: int) -> Array:
    return dice.integers(0, 1000, (rows, int(dice.choice([3, 5, 17, 64]))), dtype=np.int64)


def _images(dice: np.random.Generator, rows: int) -> Array:
    return dice.random((rows, 3, 32, 32), dtype=np.float32)


def _vectors(dice: np.random.Generator, rows: int) -> Array:
    return dice.random((rows, 3), dtype=np.float32)


def _pairs(dice: np.random.Generator, _rows: int) -> Array:
    return dice.random((2, 3), dtype=np.float32)


BATCHED = {
    "trees": Subject(lambda: models.breast_cancer(trees=30), _features, 40),
    "cnn": Subject(lambda: models.cnn(side=32, channels=(8, 16)), _images, 6),
    "tokens": Subject(models.tokens, _tokens, 9),
    "many": Subject(models.identity, _vectors, 700),
}
UNBATCHED = {
    "output_not_batch": Subject(models.output_not_batch, _vectors, 9, is_batched=False),
    "output_transposed": Subject(models.output_transposed, _vectors, 9, is_batched=False),
    "batch_mixing": Subject(models.batch_mixing, _vectors, 9, is_batched=False),
    "fixed_batch": Subject(models.fixed_batch, _pairs, 2, is_batched=False),
}
SUBJECTS = {**BATCHED, **UNBATCHED}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One worker, so that all requests of a model can meet in its batches, with a generous deadline."""
    root = tmp_path_factory.mktemp("solo")
    for name, subject in SUBJECTS.items():
        models.save(root / "models" / f"{name}.onnx", subject.build())
    models.save(root / "models" / "text.onnx", models.text_identity())
    with ServerProcess(root / "models", root / "home", "--workers", "1", "--slo", "p99=20s") as running:
        yield running


def ask(connection: http.client.HTTPConnection, model: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    """One inference; the outputs as arrays, whether they came as JSON or as bytes."""
    connection.request("POST", f"/v2/models/{model}/infer", body, headers)
    response = connection.getresponse()
    content = response.read()
    assert 200 == response.status, content[:500]
    json_bytes = int(response.headers.get("inference-header-content-length", len(content)))
    reply: dict[str, Any] = json.loads(content[:json_bytes])
    at = json_bytes
    for output in reply["outputs"]:
        dtype = DATATYPES[output["datatype"]].dtype
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            output["array"] = np.array(output["data"], dtype=dtype).reshape(output["shape"])
        else:
            output["array"] = np.frombuffer(content[at : at + size], dtype=dtype).reshape(output["shape"])
            output["is_binary"] = True
            at += size
    reply["request_id"] = response.headers["x-request-id"]
    return reply


def one_caller(server: ServerProcess, number: int, names: list[str]) -> int:
    """Send requests of random sizes, in JSON or binary by lot, and compare each answer with a session of its own.

    Returns:
        How many were compared.
    """
    dice, lot = np.random.default_rng(number), random.Random(number)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    folder = server.home.with_name("models")
    sessions = {name: onnxruntime.InferenceSession(folder / f"{name}.onnx", options) for name in names}
    with closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)) as connection:
        return sum(compare(connection, sessions, dice, lot, f"{number}-{turn}") for turn in range(REQUESTS_PER_CALLER))


def compare(
    connection: http.client.HTTPConnection,
    sessions: dict[str, onnxruntime.InferenceSession],
    dice: np.random.Generator,
    lot: random.Random,
    identity: str,
) -> int:
    """One request of random form and size to one of the models; 1 when its answer is right."""
    name = lot.choice(sorted(sessions))
    subject, session = SUBJECTS[name], sessions[name]
    array = subject.make(dice, int(dice.integers(1, subject.rows_max + 1)))
    input_name = session.get_inputs()[0].name
    is_binary = lot.random() < 0.5
    if is_binary:
        body, headers = binary_infer_body(input_name, array)
    else:
        body, headers = json_infer_body(input_name, array), {}
    body = with_id(body, headers, identity)
    reply = ask(connection, name, body, headers | {"x-request-id": identity})
    expected = session.run(None, {input_name: array})

    assert (identity, identity) == (reply["id"], reply["request_id"])
    assert [output.name for output in session.get_outputs()] == [output["name"] for output in reply["outputs"]]
    assert [is_binary] * len(expected) == [output.get("is_binary", False) for output in reply["outputs"]]
    for output, wanted in zip(reply["outputs"], expected, strict=True):
        np.testing.assert_allclose(output["array"], wanted, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
    return 1


def with_id(body: bytes, headers: dict[str, str], identity: str) -> bytes:
    """The same body with a request id; corrects the length of its JSON part."""
    size = int(headers.get("Inference-Header-Content-Length", len(body)))
    head = json.dumps({**json.loads(body[:size]), "id": identity}).encode()
    if "Inference-Header-Content-Length" in headers:
        headers["Inference-Header-Content-Length"] = str(len(head))
    return head + body[size:]


@pytest.mark.parametrize("names", [*([name] for name in BATCHED), sorted(SUBJECTS)], ids=lambda names: "+".join(names))
def test_answers_of_concurrent_requests_are_those_of_the_model_alone(server: ServerProcess, names: list[str]) -> None:
    """X2: random row counts, JSON and binary mixed, several callers at once: every answer equals a direct run within
    1e-5, carries its own id, and comes in the form that its own request asked for."""
    with ThreadPoolExecutor(CALLERS) as threads:
        compared = list(threads.map(lambda number: one_caller(server, number, names), range(CALLERS)))

    assert [REQUESTS_PER_CALLER] * CALLERS == compared


def test_requests_do_meet_in_batches(server: ServerProcess) -> None:
    """X2: the proof above would be worth nothing if each request had run alone."""
    with ThreadPoolExecutor(CALLERS) as threads:
        list(threads.map(lambda number: one_caller(server, number, ["cnn"]), range(CALLERS)))
    _, _, body = server.request("GET", "/v2/models/cnn/stats")
    (stats,) = json.loads(body)["model_stats"]

    assert stats["execution_count"] < stats["inference_stats"]["success"]["count"]


def test_texts_come_back_to_their_own_callers(server: ServerProcess) -> None:
    """X2: BYTES tensors of different lengths, batched, are not mixed up."""

    def call(number: int) -> bool:
        dice = random.Random(number)
        rows = dice.randint(1, 5)
        letters = "abcdefghijklmnopqrstuvwxyzäöü€😀"
        texts = ["".join(dice.choices(letters, k=dice.randint(0, 40))) for _ in range(16 * rows)]
        inputs = [{"name": "INPUT0", "shape": [rows, 16], "datatype": "BYTES", "data": texts}]
        status, reply = server.infer("text", inputs, id=str(number))
        assert (200, str(number)) == (status, reply.get("id")), reply
        return bool(reply["outputs"][0]["data"] == texts)

    with ThreadPoolExecutor(CALLERS) as threads:
        assert [True] * 60 == list(threads.map(call, range(60)))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("trees", "batched"),
        ("tokens", "batched"),
        ("output_not_batch", "so its first dimension is not the batch"),
        ("output_transposed", "do not all begin with a variable batch dimension"),
        ("batch_mixing", "changes with the rows beside it"),
        ("fixed_batch", "do not all begin with a variable batch dimension"),
    ],
)
def test_models_that_cannot_be_batched_are_found_at_load_and_reported(
    server: ServerProcess, name: str, reason: str
) -> None:
    """X2: by shape where shape tells, by a trial run where only that does; the report says why."""
    _, _, body = server.request("GET", "/v1/status", admin=True)
    replicas = [replica for worker in json.loads(body)["workers"] for replica in worker["replicas"]]
    (batching,) = {replica["batching"] for replica in replicas if replica["endpoint"] == name}

    assert SUBJECTS[name].is_batched is (batching == "batched")
    assert reason in batching
