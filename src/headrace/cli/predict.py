"""`headrace predict`: one prediction, readable."""

import http.client
import json
import sys
import urllib.parse
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter

from headrace.cli.output import HomeFlag, Output, table_lines
from headrace.cli.problems import USAGE, CommandFailed
from headrace.config import home_folder

TIMEOUT_S: Final = 60.0
ROWS_SHOWN_MAX: Final = 50


def predict(
    endpoint: Annotated[str, Parameter(help="Name of the endpoint, or NAME/VERSION.")],
    /,
    *,
    data: Annotated[str, Parameter(help="JSON, @FILE, or @- for standard input.")],
    url: Annotated[str, Parameter(help="Server; else the one of this home, else port 8080.", show_default=False)] = "",
    output: Output = "table",
    home: HomeFlag = None,
) -> None:
    """Ask an endpoint for one prediction and show it.

    DATA is a row, a list of rows, an object of rows by input name, or a whole Open Inference Protocol request.

    For example:

      headrace predict iris --data '[5.1, 3.5, 1.4, 0.2]'

      headrace predict iris --data @rows.json --url http://server:8080 -o json
    """
    name, _, version = endpoint.partition("/")
    path = f"/v2/models/{urllib.parse.quote(name, safe='')}"
    if version:
        path += f"/versions/{urllib.parse.quote(version, safe='')}"
    base = (url or _local_url(home)).rstrip("/")
    content = parse(read_data(data))
    metadata = _call(base, "GET", path)
    answer = _call(base, "POST", f"{path}/infer", build_request(content, metadata))
    if output == "json":
        print(json.dumps(answer, indent=2, ensure_ascii=False))
        return
    for line in answer_lines(answer, labels_of(metadata)):
        print(line)


def read_data(data: str) -> str:
    """The text of `--data`.

    Raises:
        CommandFailed: The file cannot be read.
    """
    if data == "@-":
        return sys.stdin.read()
    if not data.startswith("@"):
        return data
    try:
        return Path(data[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"--data: {data[1:]} cannot be read: {error}", status=USAGE) from error


def parse(text: str) -> Any:
    """Read JSON.

    Raises:
        CommandFailed: It is not JSON; says where.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise CommandFailed(
            f"--data is not JSON at line {error.lineno} column {error.colno}: {error.msg}; saw {text[:40]!r}",
            "--data '[[5.1, 3.5, 1.4, 0.2]]', or --data @file.json",
            USAGE,
        ) from error


def build_request(content: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Turn rows into a request of the Open Inference Protocol.

    Raises:
        CommandFailed: The rows do not say which input they belong to, or are ragged.
    """
    if isinstance(content, dict) and isinstance(content.get("inputs"), list):
        return content
    inputs = {tensor["name"]: tensor for tensor in metadata.get("inputs", [])}
    values = content
    if isinstance(content, dict):
        values = content.get("inputs", content.get("instances", content))
    if not isinstance(values, dict):
        if len(inputs) != 1:
            raise CommandFailed(
                f"the model has {len(inputs)} inputs; accepted: an object with a list for each of {', '.join(inputs)}",
                f"--data '{{{', '.join(json.dumps(name) + ': […]' for name in list(inputs)[:3])}}}'",
                USAGE,
            )
        values = {next(iter(inputs)): values}
    unknown = [name for name in values if name not in inputs]
    if unknown:
        raise CommandFailed(f"the model has no input {unknown[0]!r}; it has: {', '.join(inputs)}", status=USAGE)
    return {"inputs": [_tensor(inputs[name], value) for name, value in values.items()]}


def _tensor(spec: dict[str, Any], value: Any) -> dict[str, Any]:
    shape = _shape(value)
    flat = _flat(value)
    wanted = [int(dimension) for dimension in spec["shape"]]
    if len(shape) == len(wanted) - 1:
        # One row, given without the brackets of the batch; or a column of single values.
        shape = [len(flat), 1] if len(wanted) == 2 and wanted[1] == 1 else [1, *shape]
    return {"name": spec["name"], "shape": shape, "datatype": spec["datatype"], "data": flat}


def _shape(value: Any) -> list[int]:
    if not isinstance(value, list):
        return []
    shapes = [_shape(item) for item in value]
    for row, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise CommandFailed(
                f"--data is ragged: row 1 has the shape {shapes[0]}, row {row + 1} {shape}; accepted: equal rows",
                status=USAGE,
            )
    return [len(value), *(shapes[0] if shapes else [])]


def _flat(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flat(item)] if isinstance(value, list) else [value]


def labels_of(metadata: dict[str, Any]) -> list[str]:
    """Class labels from the model's metadata; empty when there are none."""
    labels = (metadata.get("parameters") or {}).get("labels")
    return [str(label) for label in labels] if isinstance(labels, list) else []


def answer_lines(answer: dict[str, Any], labels: list[str]) -> list[str]:
    """The answer as a table: a line per row, a column per output."""
    outputs = answer.get("outputs", [])
    columns = [_cells(output, labels) for output in outputs]
    rows = max((len(cells) for cells in columns), default=0)
    table = [
        [str(row + 1), *(cells[row] if row < len(cells) else "" for cells in columns)]
        for row in range(min(rows, ROWS_SHOWN_MAX))
    ]
    lines = table_lines(["ROW", *(str(output["name"]) for output in outputs)], table)
    if rows > ROWS_SHOWN_MAX:
        lines.append(f"… and {rows - ROWS_SHOWN_MAX} more rows (-o json shows all)")
    version = answer.get("model_version")
    lines.append(f"{answer.get('model_name', '')}{f' version {version}' if version else ''}")
    return lines


def _cells(output: dict[str, Any], labels: list[str]) -> list[str]:
    """One text per row of an output."""
    shape, data = output["shape"], output.get("data", [])
    rows = shape[0] if shape else 1
    width = len(data) // rows if rows else 0
    return [_cell(data[row * width : (row + 1) * width], output["datatype"], labels) for row in range(rows)]


def _cell(values: list[Any], datatype: str, labels: list[str]) -> str:
    if labels and datatype.startswith(("INT", "UINT")) and len(values) == 1 and 0 <= values[0] < len(labels):
        return f"{labels[values[0]]} ({values[0]})"
    if labels and datatype.startswith("FP") and len(values) == len(labels):
        ranked = sorted(zip(values, labels, strict=True), key=lambda pair: -(pair[0] or 0.0))
        return ", ".join(f"{label} {_number(value)}" for value, label in ranked[:3])
    shown = ", ".join(_number(value) for value in values[:8]) + (", …" if len(values) > 8 else "")
    return shown if len(values) == 1 else f"[{shown}]"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _local_url(home: Path | None) -> str:
    """Where the server of this home listens, as its settings say."""
    from headrace.app.screen import base_url
    from headrace.app.start import StartError, read_settings
    from headrace.home import Home

    try:
        return base_url(read_settings(Home(home_folder(home))))
    except StartError:
        return "http://127.0.0.1:8080"


def _call(base: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    parts = urllib.parse.urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CommandFailed(f"--url is {base!r}; accepted: such as http://127.0.0.1:8080", status=USAGE)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        content = None if body is None else msgspec.json.encode(body)
        connection.request(method, parts.path + path, content, {"content-type": "application/json"})
        response = connection.getresponse()
        status, text = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise CommandFailed(
            f"{base} does not answer: {error}", "is it running? headrace serve model.onnx, or another --url"
        ) from error
    finally:
        connection.close()
    return _read_answer(base, status, text)


def _read_answer(base: str, status: int, text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise CommandFailed(f"{base} answered {status} with {text[:60]!r}; expected a JSON object")
    if status != 200:
        code = f" ({answer['code']})" if answer.get("code") else ""
        hint = "headrace get endpoints shows what is served" if status == 404 else ""
        raise CommandFailed(f"the server answered {status}{code}: {answer.get('error', '')}", hint)
    return answer
