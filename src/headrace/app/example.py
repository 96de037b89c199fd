"""A request that a model takes, and where to send it from this machine: what the start screen proposes to paste."""

import json
from typing import Any, Final

from headrace.config import Settings

_SAMPLES: Final[dict[str, object]] = {"BOOL": True, "BYTES": "text"}


def base_url(settings: Settings) -> str:
    """Where the data plane is reached from this machine."""
    return f"{'https' if settings.tls_cert else 'http'}://{host_in_url(settings.http_host)}:{settings.http_port}"


def host_in_url(host: str) -> str:
    """A listening address as a caller on this machine writes it."""
    if host in ("0.0.0.0", "::", ""):
        return "localhost"
    return f"[{host}]" if ":" in host else host


def fetch_metadata(settings: Settings, name: str) -> dict[str, Any] | None:
    """Ask the data plane for a model's inputs and outputs; None when it does not say within a second."""
    host = settings.http_host if settings.http_host not in ("0.0.0.0", "::", "") else "localhost"
    import http.client  # 20 ms, paid after the workers were started

    connection: http.client.HTTPConnection
    if settings.tls_cert:
        import ssl

        # Only shapes are read, from our own socket, whose certificate names the outside.
        connection = http.client.HTTPSConnection(
            host, settings.http_port, timeout=1.0, context=ssl._create_unverified_context()
        )
    else:
        connection = http.client.HTTPConnection(host, settings.http_port, timeout=1.0)
    try:
        connection.request("GET", f"/v2/models/{name}")
        response = connection.getresponse()
        content = json.loads(response.read())
        return content if response.status == 200 and isinstance(content, dict) else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def example_request(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """A request of one row that the model takes; None when its inputs are not known or too large to paste."""
    inputs = [] if metadata is None else metadata.get("inputs") or []
    tensors = []
    for tensor in inputs:
        shape = [1 if dimension < 0 else dimension for dimension in tensor["shape"]]
        count = 1
        for dimension in shape:
            count *= dimension
        if not 0 < count <= 128:
            return None
        data = [_SAMPLES.get(tensor["datatype"], 0)] * count
        tensors.append({"name": tensor["name"], "shape": shape, "datatype": tensor["datatype"], "data": data})
    return {"inputs": tensors} if tensors else None


def json_lines(request: dict[str, Any], columns: int) -> list[str]:
    """JSON in lines that fit, broken between values only."""
    pieces: list[str] = []
    for index, tensor in enumerate(request["inputs"]):
        heads = [f"{_json(key)}:{_json(value)}" for key, value in tensor.items() if key != "data"]
        heads[0] = ('{"inputs":[{' if index == 0 else "{") + heads[0]
        pieces += [*heads, '"data":[' + _json(tensor["data"][0])]
        pieces += [_json(value) for value in tensor["data"][1:]]
        pieces[-1] += "]}" if index < len(request["inputs"]) - 1 else "]}]}'"
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) + 2 > columns:
            lines[-1] += ","
            lines.append(piece)
        else:
            lines[-1] += f",{piece}"
    return lines


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
