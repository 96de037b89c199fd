"""The Open Inference Protocol over HTTP, as plain bytes: what is sent, what must come back."""

import gzip
import json
import socket
import struct
import time
import zlib
from typing import Any

import pytest

from headrace.testing.server import ServerProcess, wait_until


def tensor(data: Any, shape: list[int], datatype: str = "FP32", **parts: Any) -> dict[str, Any]:
    return {"name": "x", "shape": shape, "datatype": datatype, "data": data, **parts}


def error_of(reply: tuple[int, dict[str, Any]]) -> str:
    status, body = reply
    assert {"error", "code"} == set(body)
    assert 400 <= status < 600
    return str(body["error"])


def test_nested_and_flat_data_get_byte_equal_flat_answers(server: ServerProcess) -> None:
    """X6, cases 2 and 3."""
    body = '{"inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data":%s}]}'
    url = "/v2/models/identity_fp32/infer"
    nested = server.request("POST", url, (body % "[[1,2,3],[4,5,6]]").encode())
    flat = server.request("POST", url, (body % "[1,2,3,4,5,6]").encode())

    assert (200, 200) == (nested[0], flat[0])
    assert nested[2] == flat[2]
    assert [1, 2, 3, 4, 5, 6] == json.loads(flat[2])["outputs"][0]["data"]


def test_a_shape_that_the_data_does_not_fill_is_named_with_both_counts(server: ServerProcess) -> None:
    """P3, case 4."""
    reply = server.infer("identity_fp32", [tensor([1, 2, 3, 4, 5], [2, 3])])

    assert 400 == reply[0]
    assert all(part in error_of(reply) for part in ("'x'", "6", "5"))


@pytest.mark.parametrize(
    ("datatype", "value", "is_accepted"),
    [
        ("UINT8", 300, False),
        ("UINT8", -1, False),
        ("INT64", 2**63 - 1, True),
        ("INT64", 2**63, False),
        ("UINT64", 2**64 - 1, True),
        ("INT8", -128, True),
        ("INT8", -129, False),
        ("FP32", 1e300, False),
        ("INT32", 1.5, False),
        ("BOOL", 1, False),
        ("FP32", "1.5", False),
    ],
)
def test_numbers_are_range_checked_exactly(
    server: ServerProcess, datatype: str, value: float, is_accepted: bool
) -> None:
    """P3, case 5: nothing wraps, nothing is rounded, nothing is coerced."""
    model = f"identity_{datatype.lower()}"
    status, body = server.infer(model, [tensor([value] * 3, [1, 3], datatype)])

    assert is_accepted == (status == 200)
    if is_accepted:
        assert [value] * 3 == body["outputs"][0]["data"]
    else:
        assert "'x'" in error_of((status, body))


def test_strings_with_nul_and_letters_beyond_ascii_survive(server: ServerProcess) -> None:
    """X6, case 6, JSON and binary."""
    texts = ["", "é", "a\0b"]
    _, reply = server.infer("identity_bytes", [tensor(texts, [1, 3], "BYTES")])
    packed = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
    head = json.dumps(
        {
            "inputs": [
                {"name": "x", "shape": [1, 3], "datatype": "BYTES", "parameters": {"binary_data_size": len(packed)}}
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    length = {"inference-header-content-length": str(len(head))}
    status, headers, body = server.request("POST", "/v2/models/identity_bytes/infer", head + packed, length)

    assert texts == reply["outputs"][0]["data"]
    assert (200, "application/octet-stream") == (status, headers["content-type"])
    assert packed == body[int(headers["inference-header-content-length"]) :]


@pytest.mark.parametrize("change", [1, -1, -1000, 10**9])
def test_a_wrong_header_length_is_refused_and_does_not_hang(server: ServerProcess, change: int) -> None:
    """P3, case 7."""
    head = b'{"inputs":[{"name":"x","shape":[1,3],"datatype":"FP32","parameters":{"binary_data_size":12}}]}'
    length = {"inference-header-content-length": str(len(head) + change)}
    status, _, body = server.request("POST", "/v2/models/identity_fp32/infer", head + bytes(12), length)

    assert 400 == status
    assert "error" in json.loads(body)


@pytest.mark.parametrize("extra", [b"abc", b"\0" * 12])
def test_bytes_behind_the_last_tensor_are_refused(server: ServerProcess, extra: bytes) -> None:
    """P3, case 8."""
    head = b'{"inputs":[{"name":"x","shape":[1,3],"datatype":"FP32","parameters":{"binary_data_size":12}}]}'
    length = {"inference-header-content-length": str(len(head))}
    status, _, body = server.request("POST", "/v2/models/identity_fp32/infer", head + bytes(12) + extra, length)

    assert 400 == status
    assert str(len(extra)) in json.loads(body)["error"]


def test_binary_and_json_inputs_and_outputs_mix(server: ServerProcess) -> None:
    """X6, case 9."""
    first = struct.pack("<16i", *range(16))
    head = json.dumps(
        {
            "inputs": [
                {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "parameters": {"binary_data_size": 64}},
                {"name": "INPUT1", "shape": [1, 16], "datatype": "INT32", "data": [1] * 16},
            ],
            "outputs": [{"name": "OUTPUT1", "parameters": {"binary_data": True}}, {"name": "OUTPUT0"}],
        }
    ).encode()
    length = {"inference-header-content-length": str(len(head))}
    status, headers, body = server.request("POST", "/v2/models/simple/infer", head + first, length)
    at = int(headers["inference-header-content-length"])
    reply = json.loads(body[:at])

    assert 200 == status
    assert ["OUTPUT1", "OUTPUT0"] == [output["name"] for output in reply["outputs"]]
    assert struct.pack("<16i", *range(-1, 15)) == body[at:]
    assert list(range(1, 17)) == reply["outputs"][1]["data"]


def test_an_unknown_output_is_refused(server: ServerProcess) -> None:
    """P3, case 10."""
    reply = server.infer("identity_fp32", [tensor([1, 2, 3], [1, 3])], outputs=[{"name": "nope"}])

    assert 400 == reply[0]
    assert "'y'" in error_of(reply)


def test_the_request_flag_decides_for_outputs_without_their_own(server: ServerProcess) -> None:
    """X6, case 11."""
    body = json.dumps(
        {
            "inputs": [tensor([1, 2, 3], [1, 3])],
            "outputs": [{"name": "y"}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    _, headers, _ = server.request("POST", "/v2/models/identity_fp32/infer", body)

    assert "application/octet-stream" == headers["content-type"]


def test_the_repository_index_takes_an_empty_body(server: ServerProcess) -> None:
    """D5, case 13."""
    status, _, body = server.request("POST", "/v2/repository/index")
    entries = json.loads(body)

    assert 200 == status
    assert {"name": "versioned", "version": "10", "state": "READY"} in entries
    assert {"name": "versioned", "version": "9", "state": "READY"} in entries


def test_nan_in_an_output_is_an_error_in_json_and_exact_in_binary(server: ServerProcess) -> None:
    """P4, case 19, the default rule `error`."""
    inputs = [tensor([-1], [1, 1])]
    status, body = server.infer("nan", inputs)
    binary = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    binary_status, _, _ = server.request("POST", "/v2/models/nan/infer", binary)

    assert (500, "nonfinite_output", 200) == (status, body["code"], binary_status)


def test_a_gzip_bomb_is_refused_early(server: ServerProcess) -> None:
    """S2, case 21: one megabyte that would become a gigabyte."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(1024)) + compressor.flush()
    before = server.metrics()
    status, _, body = server.request(
        "POST", "/v2/models/identity_fp32/infer", bomb, {"content-encoding": "gzip"}, timeout_s=30
    )
    after = server.metrics()

    assert (413, "body_too_large") == (status, json.loads(body)["code"])
    for worker in ("1", "2"):
        name = f'headrace_memory_bytes{{worker="{worker}"}}'
        assert after[name] - before[name] < 150e6


@pytest.mark.parametrize("character", ["[", '{"a":'])
def test_deep_nesting_is_refused_quickly(server: ServerProcess, character: str) -> None:
    """S2, case 22."""
    started_s = time.monotonic()
    status, _, body = server.request("POST", "/v2/models/identity_fp32/infer", character.encode() * 10_000)

    assert 400 == status
    assert "error" in json.loads(body)
    assert time.monotonic() - started_s < 2


def test_statistics_count_rows_batches_and_requests_over_all_workers(server: ServerProcess) -> None:
    """O1, case 25: a request of eight rows adds 8, 1 and 1, whichever worker took it and whichever is asked."""

    def look() -> tuple[int, int, int]:
        _, _, body = server.request("GET", "/v2/models/identity_fp64/stats")
        (stats,) = json.loads(body)["model_stats"]
        success = stats["inference_stats"]["success"]["count"]
        return stats["inference_count"], stats["execution_count"], success

    before = look()
    server.infer("identity_fp64", [tensor([1.5] * 24, [8, 3], "FP64")])
    time.sleep(0.1)  # counters are gathered for 10 ms before they are published
    after = look()

    assert (8, 1, 1) == tuple(new - old for new, old in zip(after, before, strict=True))


def test_the_highest_number_is_the_first_default_and_versions_are_reachable(server: ServerProcess) -> None:
    """L1: 10 is above 9; a new version becomes default only by command (tests/app/test_publish.py)."""
    inputs = [tensor([1, 2, 3], [1, 3])]
    wait_until(lambda: server.request("GET", "/v2/models/versioned/versions/9/ready")[0] == 200)
    _, default = server.infer("versioned", inputs)
    _, _, nine = server.request(
        "POST", "/v2/models/versioned/versions/9/infer", json.dumps({"inputs": inputs}).encode()
    )
    status, _, _ = server.request(
        "POST", "/v2/models/versioned/versions/11/infer", json.dumps({"inputs": inputs}).encode()
    )

    assert ("10", [2, 4, 6]) == (default["model_version"], default["outputs"][0]["data"])
    assert ("9", [1, 2, 3]) == (json.loads(nine)["model_version"], json.loads(nine)["outputs"][0]["data"])
    assert 404 == status


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v2/nothing", 404, "not_found"),
        ("GET", "/v2/models/nobody", 404, "unknown_model"),
        ("POST", "/v2/models/nobody/infer", 404, "unknown_model"),
        ("GET", "/v2/models/versioned/versions/7", 404, "unknown_version"),
        ("GET", "/v2/models/identity_fp32/infer", 405, "method_not_allowed"),
        ("DELETE", "/v2/health/live", 405, "method_not_allowed"),
        ("POST", "/v2/repository/models/identity_fp32/load", 501, "not_implemented"),
        ("POST", "/v2/models/identity_fp32/generate", 501, "not_implemented"),
        ("GET", "/v2/systemsharedmemory/status", 501, "not_implemented"),
        ("GET", "/v2/trace/setting", 501, "not_implemented"),
        ("GET", "/v2/models/a%2Fb", 404, "unknown_model"),
    ],
)
def test_every_error_is_json_with_error_and_code(
    server: ServerProcess, method: str, path: str, status: int, code: str
) -> None:
    """P3: the content type is exactly application/json, on every route."""
    got, headers, body = server.request(method, path, b"{}" if method == "POST" else None)

    assert (status, code, "application/json") == (got, json.loads(body)["code"], headers["content-type"])
    assert {"error", "code"} == set(json.loads(body))


def test_a_deeply_nested_index_request_is_the_callers_fault(server: ServerProcess) -> None:
    """P3: unknown members are passed over, but not without end."""
    body = b'{"unknown":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    status, _, reply = server.request("POST", "/v2/repository/index", body)

    assert (400, "malformed_json") == (status, json.loads(reply)["code"])


def test_statistics_are_told_although_the_counters_of_one_worker_are_damaged(server: ServerProcess) -> None:
    """O1: a slots file that nobody can read hides its own counts only."""
    foreign = server.home / "run" / "worker-9.slots"
    foreign.write_bytes(b"HRSLOT99" + bytes(4088))
    try:
        status, _, reply = server.request("GET", "/v2/models/stats")
    finally:
        foreign.unlink()

    assert 200 == status
    assert len(json.loads(reply)["model_stats"]) > 10


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v2/models/simple/infer", "POST"),
        ("OPTIONS", "/v2/models/simple/infer", "POST"),
        ("DELETE", "/v2/models/simple", "GET, HEAD"),
        ("POST", "/v2/health/live", "GET, HEAD"),
        ("GET", "/v2/repository/index", "POST"),
    ],
)
def test_a_wrong_verb_is_told_the_right_ones(server: ServerProcess, method: str, path: str, allow: str) -> None:
    """P3: as RFC 9110 asks of every 405."""
    status, headers, _ = server.request(method, path)

    assert (405, allow) == (status, headers["allow"])


def test_malformed_json_is_the_callers_fault(server: ServerProcess) -> None:
    """P3."""
    for body in (
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"inputs": 3}',
        b'{"inputs":[{"name":"x"}]}',
        b"\xff\xfe",
        b'{"inputs":[]}',
    ):
        status, _, reply = server.request("POST", "/v2/models/identity_fp32/infer", body)

        assert (400, True) == (status, "error" in json.loads(reply)), body


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_requests_and_answers(server: ServerProcess, encoding: str) -> None:
    """X6: both ways, over the decompressed text."""
    text = json.dumps({"inputs": [tensor([0.5] * 3000, [1000, 3])]}).encode()
    packed = gzip.compress(text) if encoding == "gzip" else zlib.compress(text)
    headers = {"content-encoding": encoding, "accept-encoding": encoding}
    status, got, body = server.request("POST", "/v2/models/identity_fp32/infer", packed, headers)
    plain = gzip.decompress(body) if encoding == "gzip" else zlib.decompress(body)
    refused, _, _ = server.request("POST", "/v2/models/identity_fp32/infer", packed, {"content-encoding": "br"})

    assert (200, encoding, 415) == (status, got["content-encoding"], refused)
    assert [0.5] * 3000 == json.loads(plain)["outputs"][0]["data"]


def test_ids_and_headers_come_back(server: ServerProcess) -> None:
    """P1: the caller's ids where they are well formed, ours otherwise."""
    body = json.dumps({"id": "mine", "inputs": [tensor([1, 2, 3], [1, 3])]}).encode()
    trace = "0af7651916cd43dd8448eb211c80319c"
    given = {"x-request-id": "r-1", "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    _, with_ids, reply = server.request("POST", "/v2/models/identity_fp32/infer", body, given)
    _, without, _ = server.request("POST", "/v2/models/identity_fp32/infer", body, {"x-request-id": "bad id\t"})

    assert ("mine", "r-1", "1") == (json.loads(reply)["id"], with_ids["x-request-id"], with_ids["x-headrace-version"])
    assert trace == with_ids["traceparent"].split("-")[1]
    assert "bad" not in without["x-request-id"]


def test_a_deadline_that_cannot_be_met_is_refused_at_once(server: ServerProcess) -> None:
    """S2: by header and by parameter; 503 with Retry-After and the reason."""
    inputs = [tensor([1, 2, 3], [1, 3])]
    status, headers, body = server.request(
        "POST", "/v2/models/identity_fp32/infer", json.dumps({"inputs": inputs}).encode(),
        {"x-request-timeout-ms": "0.0001"},
    )  # fmt: skip
    by_parameter = server.infer("identity_fp32", inputs, parameters={"timeout": 0})
    enough = server.infer("identity_fp32", inputs, parameters={"timeout": 900_000})

    assert (503, "deadline_unreachable", "1") == (status, json.loads(body)["code"], headers["retry-after"])
    assert 200 == by_parameter[0]  # zero is the protocol's word for "no timeout of my own"
    assert 200 == enough[0]


def test_a_model_that_raises_is_the_servers_fault_without_a_stack_trace(server: ServerProcess) -> None:
    """P4."""
    reply = server.infer("failing", [{"name": "index", "shape": [1, 1], "datatype": "INT64", "data": [5]}])

    assert (500, "model_failed") == (reply[0], reply[1]["code"])
    assert not any(word in error_of(reply) for word in ("Traceback", ".py", ".cc", "/home", "site-packages"))


def test_health_metadata_and_configuration_have_the_bodies_that_clients_parse(server: ServerProcess) -> None:
    """P1: the kserve client reads the keys, tritonclient only the status."""

    def get(path: str) -> Any:
        status, _, body = server.request("GET", path)
        assert 200 == status
        return json.loads(body)

    assert {"live": True} == get("/v2/health/live")
    assert {"ready": True} == get("/v2/health/ready")
    assert {"name": "stats", "ready": True} == get("/v2/models/stats/ready")
    assert "model_stats" in get("/v2/models/stats")
    assert "dots.and-dashes_1" == get("/v2/models/dots.and-dashes_1")["name"]
    assert ["9", "10"] == sorted(get("/v2/models/versioned")["versions"], key=int)
    configuration = get("/v2/models/identity_bytes/config")
    assert [{"name": "x", "data_type": "TYPE_STRING", "dims": [3]}] == configuration["input"]
    assert "binary_tensor_data" in get("/v2")["extensions"]


def test_pipelined_requests_are_answered_in_order(server: ServerProcess) -> None:
    """X5: a good one, a bad one and a health check written at once come back in that order."""
    good = json.dumps({"inputs": [tensor([1, 2, 3], [1, 3])]}).encode()
    post = b"POST /v2/models/identity_fp32/infer HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s"
    last = b"GET /v2/health/live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.http_port), 10) as connection:
        connection.sendall(post % (len(good), good) + post % (1, b"{") + last)
        text = b"".join(iter(lambda: connection.recv(65536), b""))

    assert [b"200", b"400", b"200"] == [
        part.split(b" ")[1] for part in text.split(b"HTTP/1.1")[1:] for part in [b"x" + part]
    ]
