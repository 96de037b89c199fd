"""curl, as a person would use it."""

import json
import subprocess

import pytest

from headrace.testing.server import ServerProcess

pytestmark = pytest.mark.service("curl")


def curl(*arguments: str) -> str:
    return subprocess.run(["curl", "-sS", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


def test_one_line_of_curl_gets_a_prediction(server: ServerProcess) -> None:
    """P1: no content type, no version, no id."""
    body = '{"inputs":[{"name":"x","shape":[1,3],"datatype":"FP32","data":[1,2,3]}]}'
    reply = curl(f"http://127.0.0.1:{server.http_port}/v2/models/identity_fp32/infer", "-d", body)

    assert [1, 2, 3] == json.loads(reply)["outputs"][0]["data"]


def test_a_large_body_waits_for_the_server_to_agree(server: ServerProcess) -> None:
    """X5: curl sends `Expect: 100-continue` before a large body, and chunks when it reads from a pipe."""
    data = json.dumps({"inputs": [{"name": "x", "shape": [60000, 3], "datatype": "FP32", "data": [0.5] * 180_000}]})
    reply = subprocess.run(
        ["curl", "-sS", "-H", "Transfer-Encoding: chunked", "-H", "Expect: 100-continue", "-d", "@-",
         f"http://127.0.0.1:{server.http_port}/v2/models/identity_fp32/infer"],
        input=data, check=True, capture_output=True, text=True, timeout=20,
    ).stdout  # fmt: skip

    assert [60000, 3] == json.loads(reply)["outputs"][0]["shape"]
