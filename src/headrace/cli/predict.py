"""`headrace predict`: one prediction, readable."""

import http.client
import json
import math
import ssl
import sys
import urllib.parse
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter

from headrace.cli.output import HomeFlag, Output, table_lines
from headrace.cli.problems import USAGE, CommandFailed
from headrace.config import home_folder

_SHOW_ENDPOINTS: Final = "headrace get endpoints shows what is served"
_HINTS: Final = {
    "unknown_model": _SHOW_ENDPOINTS,
    "unknown_version": "headrace model list shows the versions",
    "not_found": "is {base} the HTTP port? The start screen says which one is serving",
    "invalid_input": "curl {base}{model} shows names, types and shapes",
}
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
    if not name:
        raise CommandFailed(f"{endpoint!r} names no endpoint; accepted: NAME or NAME/VERSION", _SHOW_ENDPOINTS, USAGE)
    path = f"/v2/models/{urllib.parse.quote(name, safe='')}"
    if version:
        path += f"/versions/{urllib.parse.quote(version, safe='')}"
    content = parse(read_data(data))
    server = Server(url) if url else _local_server(home)
    metadata = server.call("GET", path)
    answer = server.call("POST", f"{path}/infer", build_request(content, metadata))
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
        reason = "it is not text" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
        raise CommandFailed(
            f"--data: {data[1:] or 'no file'!r} cannot be read: {reason}; accepted: @FILE with JSON in it", status=USAGE
        ) from error


def parse(text: str) -> Any:
    """Read JSON.

    Raises:
        CommandFailed: It is not JSON; says where.
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise CommandFailed(
            f"--data is not JSON at line {error.lineno} column {error.colno}: {error.msg}; saw {text[:40]!r}",
            "--data '[[5.1, 3.5, 1.4, 0.2]]', or --data @file.json",
            USAGE,
        ) from error


def _refuse(word: str) -> Any:
    raise CommandFailed(
        f"--data holds {word}, which JSON cannot carry; accepted: finite numbers, and null where the contract has a "
        "default",
        "send NaN and infinity in binary form, for example with tritonclient",
        USAGE,
    )


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


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
                f"--data is ragged: row 0 has the shape {shapes[0]}, row {row} {shape}; accepted: equal rows",
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
    """The answer as a table: a line per row, counted from 0 as the server's errors do, and a column per output."""
    outputs = answer.get("outputs", [])
    columns = [_cells(output, labels) for output in outputs]
    rows = max((len(cells) for cells in columns), default=0)
    table = [
        [str(row), *(cells[row] if row < len(cells) else "" for cells in columns)]
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


class Server:
    """Whoever answers at an address.

    Args:
        url: `http://host:port`, `https://host:port` or `host:port`.
        certificate: Of a server of our own; it is trusted as it is, whatever name it was made for.
    """

    def __init__(self, url: str, certificate: str = "") -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        try:
            parts = urllib.parse.urlsplit(self.url)
            self._port = parts.port
        except ValueError:
            raise self._wrong() from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise self._wrong()
        self._is_secure = parts.scheme == "https"
        self._host, self._path = parts.hostname, parts.path
        self._certificate = certificate

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send one request.

        Returns:
            The answer's JSON object.

        Raises:
            CommandFailed: There is no answer, or it is an error.
        """
        connection = self._connection()
        try:
            content = None if body is None else msgspec.json.encode(body)
            connection.request(method, self._path + path, content, {"content-type": "application/json"})
            response = connection.getresponse()
            status, text = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from error
        finally:
            connection.close()
        return _read_answer(self.url, path, status, text)

    def _connection(self) -> http.client.HTTPConnection:
        if not self._is_secure:
            return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        context = ssl.create_default_context()
        if self._certificate:
            # It is the file that our own server was started with, so it is itself all the proof that is needed.
            context.load_verify_locations(self._certificate)
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.check_hostname = False
        return http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=context)

    def _wrong(self) -> CommandFailed:
        return CommandFailed(f"--url is {self.url!r}; accepted: such as http://127.0.0.1:8080", status=USAGE)

    def _silent(self, error: Exception) -> CommandFailed:
        if isinstance(error, ssl.SSLCertVerificationError):
            return CommandFailed(
                f"the certificate of {self.url} is not trusted: {error.verify_message}",
                "SSL_CERT_FILE=/path/to/ca.pem headrace predict …",
            )
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, http.client.RemoteDisconnected):
            other = self.url.replace("http:", "https:") if not self._is_secure else self.url.replace("https:", "http:")
            return CommandFailed(f"{self.url} closed the connection without an answer", f"does it speak {other} ?")
        return CommandFailed(
            f"{self.url} does not answer: {reason}", "is it running? headrace serve model.onnx, or another --url"
        )


def _local_server(home: Path | None) -> Server:
    """The server of this home, as its settings say."""
    from headrace.app.example import base_url
    from headrace.app.start import StartError, read_settings
    from headrace.home import Home

    try:
        settings = read_settings(Home(home_folder(home)))
    except StartError:
        return Server("http://127.0.0.1:8080")
    return Server(base_url(settings), settings.tls_cert)


def _read_answer(base: str, path: str, status: int, text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise CommandFailed(f"{base} answered {status} with {text[:60]!r}; accepted: a JSON object")
    if status != 200:
        code = str(answer.get("code") or "")
        hint = _HINTS.get(code, "").format(base=base, model=path.removesuffix("/infer"))
        name = urllib.parse.unquote(path.split("/")[3])
        seen = f" to {name!r}" if code == "unknown_model" else ""
        shown = f" ({code})" if code else ""
        raise CommandFailed(f"the server answered {status}{shown}{seen}: {answer.get('error', '')}", hint)
    return answer
