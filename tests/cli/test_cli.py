"""The command line as a user meets it: in a process of its own, with its exit status, output and errors."""

import errno
import json
import os
import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from msgspec.structs import fields

import headrace
from headrace.app.screen import start_lines
from headrace.cli.main import COMMANDS
from headrace.cli.problems import explain
from headrace.cli.records import record_line
from headrace.config import SETTINGS, Settings, usable_cores
from headrace.home import Home
from headrace.records import Record
from headrace.report import ReplicaReport, WorkerReport
from headrace.snapshot import EndpointSpec, VersionSpec, make_snapshot
from headrace.types import ReplicaState

SOURCE = str(Path(headrace.__file__).parents[1])


def run(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        cwd=folder,
        env={**clean, "PYTHONPATH": SOURCE, **environment},
        capture_output=True,
        text=True,
        timeout=50,
    )


class IrisServer(BaseHTTPRequestHandler):
    """Answers like the data plane, for one model."""

    bodies: ClassVar[list[Any]] = []
    METADATA: ClassVar[dict[str, Any]] = {
        "name": "iris",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "label", "datatype": "INT64", "shape": [-1]}],
        "parameters": {"labels": ["setosa", "versicolor", "virginica"]},
    }

    def do_GET(self) -> None:
        if self.path == "/v2/models/iris":
            self.reply(200, self.METADATA)
        else:
            self.reply(404, {"error": "no endpoint is named that", "code": "unknown_model"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        rows = body["inputs"][0]["shape"][0]
        outputs = [
            {"name": "label", "datatype": "INT64", "shape": [rows], "data": [index % 3 for index in range(rows)]},
            {"name": "p", "datatype": "FP32", "shape": [rows, 3], "data": [0.125, 0.75, 0.125] * rows},
        ]
        self.reply(200, {"model_name": "iris", "model_version": "1", "outputs": outputs})

    def reply(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    """A small server on a free port."""
    IrisServer.bodies.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), IrisServer) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def test_help_costs_a_quarter_of_a_cpu_second_at_most(tmp_path: Path) -> None:
    """`headrace --help` ≤ 0.25 CPU-seconds, best of three (design §4)."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run("--help", folder=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    assert 0 == done.returncode
    assert min(seconds) <= 0.25, seconds
    for command in ("serve", "predict", "model", "records", "config", "doctor", "get", "worker", "control"):
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize(
    "command",
    ["serve", "predict", "doctor", "config explain", "records tail", "get endpoints", "model list", "model alias",
     "worker", "control", "version"],
)  # fmt: skip
def test_the_help_of_every_command_has_an_example_and_fits(command: str, tmp_path: Path) -> None:
    """Help is worth reading (L6)."""
    done = run(*command.split(), "--help", folder=tmp_path)

    assert 0 == done.returncode
    assert f"headrace {command}" in done.stdout.split("For example:")[1]
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert [] == [line for line in done.stdout.splitlines() if line != line.rstrip()]
    assert "[ARGS]" not in done.stdout


def test_help_lists_the_commands_in_the_order_in_which_they_are_met(tmp_path: Path) -> None:
    """`serve` first, not last but two (L6)."""
    lines = run("--help", folder=tmp_path).stdout.partition("Commands:\n")[2].splitlines()

    assert [name for name, _, _ in COMMANDS] == [line.split()[0] for line in lines[: len(COMMANDS)]]


def test_serve_has_a_flag_for_every_setting(tmp_path: Path) -> None:
    """Flags are made from the one list of settings (L6)."""
    shown = run("serve", "--help", folder=tmp_path).stdout

    for setting in SETTINGS:
        assert f"--{setting.name.replace('_', '-')}" in shown


@pytest.mark.parametrize(
    ("arguments", "seen", "hint"),
    [
        (("serve", "--wrokers", "2"), "--wrokers. Did you mean --workers?", "headrace serve --help"),
        (("serv",), "no command 'serv' (did you mean 'serve'?); accepted: serve, predict", "headrace --help"),
        (("serve",), "no model is named", "headrace serve model.onnx"),
        (("serve", "model.onnx", "--workers", "many"), "--workers: 'many' is not a whole number", "serve --help"),
        (("serve", "model.onnx", "--slo", "fast"), "p99=50ms", "serve --help"),
        (("config", "explain", "--idle-s-max", "0"), "out of range", "serve --help"),
        (("get", "models"), "headrace get has no command 'models'; accepted: endpoints", "headrace get --help"),
        (("--home", "x", "get"), "--home stands before the command; accepted: after it", "headrace --help"),
        (("serve", "my", "model.onnx"), "cannot use 'model.onnx'; quote a name", "headrace serve --help"),
        (("predict", "iris"), "headrace predict needs --data: JSON, @FILE", "headrace predict --help"),
        (("predict",), "headrace predict needs ENDPOINT", "headrace predict --help"),
        (("records", "tail", "--count", "ten"), "--count is 'ten'; accepted: a whole number", "records tail --help"),
    ],
)
def test_a_wrong_command_line_says_what_was_seen_and_what_is_accepted(
    arguments: tuple[str, ...], seen: str, hint: str, tmp_path: Path
) -> None:
    """Exit status 2, nothing on standard output, a hint (design §3)."""
    done = run(*arguments, folder=tmp_path)

    assert 2 == done.returncode
    assert "" == done.stdout
    assert seen in done.stderr
    assert hint in done.stderr.split("hint:")[1]


def test_a_model_file_that_is_missing_is_said_in_one_line(tmp_path: Path) -> None:
    """No trace, no half-started server (L1)."""
    done = run("serve", "nothing.onnx", folder=tmp_path)

    assert 1 == done.returncode
    assert "nothing.onnx does not exist; accepted: an .onnx file" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_file_that_is_missing_names_the_one_that_is_meant(tmp_path: Path) -> None:
    """The next step can be pasted (L1)."""
    (tmp_path / "my models").mkdir()
    (tmp_path / "my models" / "iris.onnx").write_bytes(b"")

    typo = run("serve", "my models/irs.onnx", folder=tmp_path)
    far = run("serve", "my models/quite-another.onnx", folder=tmp_path)

    assert "hint: headrace serve 'my models/iris.onnx'" in typo.stderr
    assert f"hint: {tmp_path / 'my models'} has iris.onnx" in far.stderr


def test_a_pickle_gets_its_hint_on_a_line_of_its_own(tmp_path: Path) -> None:
    """The most common wrong file, and a line to paste (L1)."""
    (tmp_path / "model.pkl").write_bytes(pickle.dumps({"coef": [1.0, 2.0]}, protocol=4))

    done = run("serve", "model.pkl", folder=tmp_path)

    assert 1 == done.returncode
    assert "is a Python pickle" in done.stderr
    hints = [line for line in done.stderr.splitlines() if line.startswith("hint: ")]
    assert 1 == len(hints), hints
    assert "skl2onnx: to_onnx(" in hints[0]


def test_a_home_that_cannot_be_written_names_the_variable(tmp_path: Path) -> None:
    """The next step is in the message (S5)."""
    (tmp_path / "file").write_text("")
    (tmp_path / "m.onnx").write_bytes(b"x")

    done = run("serve", "m.onnx", folder=tmp_path, HEADRACE_HOME=str(tmp_path / "file" / "home"))

    assert 1 == done.returncode
    assert "hint:" in done.stderr
    assert "HEADRACE_HOME=" in done.stderr


def test_predict_shows_a_table_with_class_labels(server: str, tmp_path: Path) -> None:
    """One row typed by hand becomes a valid request and a readable answer (P1)."""
    done = run("predict", "iris", "--data", "[5.1, 3.5, 1.4, 0.2]", "--url", server, folder=tmp_path)

    assert 0 == done.returncode, done.stderr
    expected = {"name": "X", "shape": [1, 4], "datatype": "FP32", "data": [5.1, 3.5, 1.4, 0.2]}
    assert [{"inputs": [expected]}] == IrisServer.bodies
    lines = done.stdout.splitlines()
    assert ["ROW", "label", "p"] == lines[0].split()
    assert "setosa (0)" in lines[1]
    assert "versicolor 0.75, setosa 0.125" in lines[1]
    assert "iris version 1" == lines[2]


@pytest.mark.parametrize(
    "text",
    [
        "[[1, 2, 3, 4], [5, 6, 7, 8]]",
        '{"X": [[1, 2, 3, 4], [5, 6, 7, 8]]}',
        '{"instances": [[1, 2, 3, 4], [5, 6, 7, 8]]}',
        '{"inputs": [{"name": "X", "shape": [2, 4], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6, 7, 8]}]}',
    ],
)
def test_predict_takes_rows_in_every_common_form(text: str, server: str, tmp_path: Path) -> None:
    """Rows, by name, KServe V1, or the protocol itself; `-o json` is the answer as it came (P1)."""
    (tmp_path / "rows.json").write_text(text)

    done = run("predict", "iris", "--data", "@rows.json", "--url", server, "-o", "json", folder=tmp_path)

    assert 0 == done.returncode, done.stderr
    tensor = IrisServer.bodies[0]["inputs"][0]
    assert ([2, 4], [1, 2, 3, 4, 5, 6, 7, 8]) == (tensor["shape"], tensor["data"])
    assert [0, 1] == json.loads(done.stdout)["outputs"][0]["data"]


@pytest.mark.parametrize(
    ("endpoint", "data", "status", "seen"),
    [
        ("iris", "[1, 2", 2, "is not JSON at line 1"),
        ("iris", "[[1, 2], [3]]", 2, "ragged"),
        ("iris", '{"Y": [1]}', 2, "no input 'Y'; it has: X"),
        ("iris", "@nothing.json", 2, "'nothing.json' cannot be read: No such file"),
        ("iris", "[NaN, 1, 2, 3]", 2, "--data holds NaN, which JSON cannot carry; accepted: finite numbers"),
        ("iris", "[1e999, 1, 2, 3]", 2, "--data holds 1e999, which JSON cannot carry"),
        ("", "[1]", 2, "names no endpoint"),
        ("rose", "[1]", 1, "answered 404 (unknown_model) to 'rose': no endpoint is named that"),
    ],
)
def test_predict_says_what_is_wrong(
    endpoint: str, data: str, status: int, seen: str, server: str, tmp_path: Path
) -> None:
    """Errors of the caller and of the server are told apart by the exit status (P3)."""
    done = run("predict", endpoint, "--data", data, "--url", server, folder=tmp_path)

    assert status == done.returncode
    assert "" == done.stdout
    assert seen in done.stderr


def test_predict_takes_an_address_as_people_write_it(server: str, tmp_path: Path) -> None:
    """`localhost:8080`, as with curl (P1)."""
    done = run("predict", "iris", "--data", "[1, 2, 3, 4]", "--url", server.removeprefix("http://"), folder=tmp_path)

    assert 0 == done.returncode, done.stderr


def test_predict_without_a_server_says_how_to_start_one(tmp_path: Path) -> None:
    """The most common mistake (P1)."""
    done = run("predict", "iris", "--data", "[1]", "--url", "http://127.0.0.1:9", folder=tmp_path)

    assert 1 == done.returncode
    assert "headrace serve" in done.stderr


def test_doctor_reports_every_finding_as_json(tmp_path: Path) -> None:
    """Scripts can read what people read (D4)."""
    done = run("doctor", "-o", "json", folder=tmp_path, HEADRACE_HTTP_PORT="0", HEADRACE_ADMIN_PORT="0")

    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert 0 == done.returncode, findings
    names = {"python", "packages", "onnxruntime", "cores", "memory", "home", "disk speed", "open files", "clock"}
    assert names <= findings.keys()
    for finding in findings.values():
        assert bool(finding["fix"]) == (finding["state"] != "ok")


def test_doctor_fails_on_a_port_in_use_with_a_fix(server: str, tmp_path: Path) -> None:
    """One fix per line that needs one; exit status 1 (D4)."""
    done = run("doctor", folder=tmp_path, HEADRACE_HTTP_PORT=server.rpartition(":")[2])

    assert 1 == done.returncode
    assert "is in use by" in done.stdout
    assert "fix: stop it, or --http-port 0" in done.stdout


def test_config_explain_says_where_each_value_came_from(tmp_path: Path) -> None:
    """default, file and line, variable, flag (L6)."""
    (tmp_path / "headrace.yaml").write_text("server:\n  threads: 2\nmodels: [a.onnx]\n")

    done = run("config", "explain", "--admin-port", "9", "-o", "json", folder=tmp_path, HEADRACE_WORKERS="3")

    document = json.loads(done.stdout)
    origins = {setting["name"]: (setting["value"], setting["origin"]) for setting in document["settings"]}
    assert (2, "headrace.yaml:2") == origins["threads"]
    assert (3, "HEADRACE_WORKERS") == origins["workers"]
    assert (9, "--admin-port") == origins["admin_port"]
    assert (8080, "default") == origins["http_port"]
    assert str(tmp_path / "a.onnx") == document["models"][0]["path"]


def test_an_unknown_key_in_the_file_names_the_nearest(tmp_path: Path) -> None:
    """All problems, with file and line, exit status 2 (L6)."""
    (tmp_path / "headrace.yaml").write_text("server:\n  wokers: 2\n  http_prot: 1\n")

    done = run("config", "explain", folder=tmp_path)

    assert 2 == done.returncode
    assert "headrace.yaml:2: unknown setting 'wokers' (did you mean 'workers'?)" in done.stderr
    assert "headrace.yaml:3: unknown setting 'http_prot' (did you mean 'http_port'?)" in done.stderr


def test_alias_changes_the_default_that_list_shows(tmp_path: Path) -> None:
    """The operator chooses (L1)."""
    home = Home(tmp_path / ".headrace")
    home.prepare()
    versions = tuple(VersionSpec(version=v, path=f"/m/{v}/model.onnx", digest="sha256:" + v * 64) for v in "12")
    home.write_snapshot(make_snapshot([EndpointSpec(name="m", model="m", versions=versions, default_version="2")]))

    changed = run("model", "alias", "m", "1", folder=tmp_path)
    listed = json.loads(run("model", "list", "-o", "json", folder=tmp_path).stdout)
    endpoints = json.loads(run("get", "endpoints", "-o", "json", folder=tmp_path).stdout)
    wrong = run("model", "alias", "m", "9", folder=tmp_path)

    assert 0 == changed.returncode, changed.stderr
    assert [("1", True), ("2", False)] == [(row["version"], row["is_default"]) for row in listed]
    assert [("m", "1", "stopped")] == [(row["endpoint"], row["version"], row["state"]) for row in endpoints]
    assert 1 == wrong.returncode
    assert "it has: 1, 2" in wrong.stderr


def test_a_state_folder_of_another_user_is_said_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """D4: it is no defect, and there is a next step."""
    status = explain(PermissionError(errno.EACCES, "Permission denied", "/var/lib/headrace/snapshots/.lock"))

    said = capsys.readouterr().err
    assert 1 == status
    assert said.startswith("headrace: /var/lib/headrace/snapshots/.lock: Permission denied\nhint: run it as the user")


def test_a_default_that_cannot_be_loaded_is_told_with_what_answers_meanwhile(tmp_path: Path) -> None:
    """L1: who chooses a broken version hears it at once, and the list says what callers get."""
    home = Home(tmp_path / ".headrace")
    home.prepare()
    versions = tuple(VersionSpec(version=v, path=f"/m/{v}/model.onnx", digest="sha256:" + v * 64) for v in "12")
    home.write_snapshot(make_snapshot([EndpointSpec(name="m", model="m", versions=versions, default_version="1")]))
    good = ReplicaReport(endpoint="m", model="m", version="1", state=ReplicaState.READY, is_default=True)
    bad = ReplicaReport(endpoint="m", model="m", version="2", state=ReplicaState.FAILED, problem="m.onnx: is empty")
    report = WorkerReport(number=1, pid=os.getpid(), state="ready", replicas=(good, bad))
    home.report_file(1).write_bytes(msgspec.json.encode(report))

    changed = run("model", "alias", "m", "2", folder=tmp_path)
    table = run("get", "endpoints", folder=tmp_path).stdout
    (row,) = json.loads(run("get", "endpoints", "-o", "json", folder=tmp_path).stdout)

    assert 0 == changed.returncode
    assert "version 2 could not be loaded, and what answered before goes on: m.onnx: is empty" in changed.stderr
    assert ("2", "1", "failed") == (row["version"], row["answering_version"], row["state"])
    assert "version 1 answers" in " ".join(table.split())


def test_paths_below_the_working_folder_are_shown_short_enough_to_copy(tmp_path: Path) -> None:
    """A path that is broken over two lines cannot be pasted (L1)."""
    home = Home(tmp_path / ".headrace")
    home.prepare()
    path = str(tmp_path / "models" / "flowers" / "10" / "model.onnx")
    versions = (VersionSpec(version="10", path=path, digest="sha256:" + "0" * 64),)
    home.write_snapshot(make_snapshot([EndpointSpec(name="m", model="m", versions=versions, default_version="10")]))

    shown = run("model", "list", folder=tmp_path).stdout

    assert "models/flowers/10/model.onnx" == shown.splitlines()[1].split()[-1]


def test_a_record_is_a_line_with_its_code_and_the_end_of_its_id() -> None:
    """Why, and which: within 80 columns (O1)."""
    blank = {field.name: field.type() if field.type in (str, int, float) else None for field in fields(Record)}
    shed = Record(
        **{
            **blank,
            "request_id": "0c5964133c3a8f94000000007f6f6d63",
            "endpoint": "a-rather-long-name",
            "version": "10",
            "ending": "rejected",
            "code": "deadline_unreachable",
            "rows": 128,
            "total_s": 0.000258,
        }
    )
    fine = Record(**{**blank, "request_id": "mine", "endpoint": "iris", "ending": "answered", "total_s": 1.5})

    shown = [record_line(shed), record_line(fine)]

    assert ["a-rather-lo…", "10", "deadline_unreachable", "128", "258", "µs", "…07f6f6d63"] == shown[0].split()[1:]
    assert ["iris", "answered", "0", "1.5", "s", "mine"] == shown[1].split()[1:]
    assert max(len(line) for line in shown) <= 80


def test_config_explain_says_what_zero_means_here(tmp_path: Path) -> None:
    """A person reads `2 on this machine`, `64 MiB` and `75 s` (L6)."""
    shown = run("config", "explain", "--threads", "1", folder=tmp_path).stdout

    cores = usable_cores()
    lines = {line.split()[0]: line for line in shown.splitlines() if line and not line.startswith(" ")}
    assert f"0: {cores} on this machine" in lines["workers"]
    assert "64 MiB" in lines["body_bytes_max"]
    assert "75 s" in lines["idle_s_max"]
    assert max(len(line) for line in shown.splitlines() if str(tmp_path) not in line) <= 80


def report(number: int, *replicas: ReplicaReport) -> WorkerReport:
    return WorkerReport(number=number, pid=1, state="ready", replicas=replicas)


def test_a_broken_model_beside_a_good_one_is_told_in_the_heading() -> None:
    """The screen comes, says what is served, and does not claim to be ready (L1)."""
    good = ReplicaReport(endpoint="a", model="a", version="1", state=ReplicaState.READY, is_default=True)
    broken = ReplicaReport(endpoint="b", model="b", version="1", state=ReplicaState.FAILED, problem="is empty")
    partly = WorkerReport(number=1, pid=1, state="starting", replicas=(good, broken))

    text = "\n".join("".join(part for part, _ in line) for line in start_lines(Settings(workers=1), [partly], {}, 1.0))

    assert text.startswith("Headrace serves what it can, and is not ready")
    assert "failed: b version 1: is empty" in text
    assert "/v2/models/a/infer" in text


def test_the_start_screen_fits_and_warns_with_numbers() -> None:
    """What is served, where, how fast, what is out of reach, what failed; 80 columns (S1, S2)."""
    slow = ReplicaReport(
        endpoint="churn", model="churn", version="10", state=ReplicaState.READY, is_default=True, base_s=0.004,
        per_row_s=0.001, rows_max=32, deadline_s=0.005, slo="p99=5ms", sustainable_rate=0.0, lossy_rate=120.0,
        facts={"provider": "CPUExecutionProvider"},
    )  # fmt: skip
    broken = ReplicaReport(
        endpoint="fraud", model="fraud", version="1", state=ReplicaState.FAILED, problem="not an ONNX file " * 9
    )
    metadata = {"churn": IrisServer.METADATA}
    settings = Settings(workers=2, threads=1)

    lines = start_lines(settings, [report(1, slow, broken), report(2, slow, broken)], metadata, 1.234)

    text = "\n".join("".join(part for part, _ in line) for line in lines)
    assert max(len(line) for line in text.splitlines()) <= 80, text
    for part in (
        "churn  version 10 · SLO p99=5ms",
        "X FP32 [any, 4]",
        "1 row 5 ms, 32 rows 36 ms",
        "240 requests/s",
        "failed: fraud version 1: not an ONNX file",
        "http://127.0.0.1:8080/v2/models/churn/infer",
        'infer -d \'\n{"inputs":[{"name":"X"',
        "2 workers × 1 thread",
        "http://127.0.0.1:8082/metrics",
        "Ctrl-C",
    ):
        assert part in text, text
