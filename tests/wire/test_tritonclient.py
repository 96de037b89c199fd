"""The unmodified Triton client for HTTP."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from headrace.testing.server import ServerProcess


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        yield client


def request_of(array: np.ndarray[Any, Any], *, is_binary: bool) -> list[Any]:
    tensor = triton.InferInput("x", array.shape, np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array, binary_data=is_binary)
    return [tensor]


@pytest.mark.parametrize("is_binary", [True, False])
@pytest.mark.parametrize("dtype", ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "object"])
def test_every_datatype_comes_back_exactly(client: Any, dtype: str, is_binary: bool) -> None:
    """X6, case 17: as binary and as JSON; the client itself cannot write FP16 as JSON."""
    if dtype == "f2" and not is_binary:
        pytest.skip("the client refuses to write FP16 as JSON")
    if dtype == "object":
        array = np.array([["é", "", "a"], ["b", "c", "d"]], dtype=object)
        sent = np.char.encode(array.astype("U"), "utf-8").astype(object)
    else:
        limits = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else None
        values = [limits.min, limits.max, 1, 0, 2, 3] if limits else [0, 1, 0.5, 0.25, 1, 0]
        array = sent = np.array(values, dtype=dtype).reshape(2, 3)
    wire = {"bool": "bool", "object": "bytes"}.get(dtype) or np_to_triton_dtype(np.dtype(dtype)).lower()
    outputs = [triton.InferRequestedOutput("y", binary_data=is_binary)]
    result = client.infer(f"identity_{wire}", request_of(sent, is_binary=is_binary), outputs=outputs).as_numpy("y")
    if dtype == "object" and not is_binary:
        result = np.char.encode(result.astype("U"), "utf-8").astype(object)

    np.testing.assert_array_equal(sent, result)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compression_both_ways(client: Any, coding: str) -> None:
    """X6, case 17."""
    array = np.zeros((400, 3), np.float32)
    result = client.infer(
        "identity_fp32", request_of(array, is_binary=True),
        request_compression_algorithm=coding, response_compression_algorithm=coding,
    )  # fmt: skip

    np.testing.assert_array_equal(array, result.as_numpy("y"))


def test_what_the_client_asks_about_the_server(client: Any) -> None:
    """P1: health, metadata, configuration, index, statistics."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("simple")
    assert not client.is_model_ready("nobody")
    assert client.get_server_metadata()["name"] == "headrace"
    assert ["INPUT0", "INPUT1"] == [each["name"] for each in client.get_model_metadata("simple")["inputs"]]
    assert client.get_model_config("simple")["max_batch_size"] > 1
    assert "simple" in {each["name"] for each in client.get_model_repository_index()}
    assert client.get_inference_statistics("simple")["model_stats"][0]["name"] == "simple"


def test_errors_reach_the_client_as_text(client: Any) -> None:
    """P3: the client parses the body and shows the words."""
    with pytest.raises(InferenceServerException, match="FP32"):
        client.infer("identity_fp32", request_of(np.zeros((1, 3), np.int64), is_binary=True))


async def test_the_asynchronous_client(server: ServerProcess) -> None:
    """X6, case 17: aio, binary and JSON."""
    async with triton_aio.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        for is_binary in (True, False):
            result = await client.infer("identity_fp32", request_of(array, is_binary=is_binary))

            np.testing.assert_array_equal(array, result.as_numpy("y"))
