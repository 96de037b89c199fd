"""The start screen where it is narrow, where labels do not fit, and when it is over."""

import io
import json
import sys
from typing import Any

import msgspec
import pytest

from headrace.app.screen import StartScreen, start_lines
from headrace.config import Settings
from headrace.home import Home
from headrace.report import ReplicaReport, WorkerReport
from headrace.types import ReplicaState


def worker(*names: str) -> WorkerReport:
    replicas = tuple(
        ReplicaReport(
            endpoint=name, model=name, version="1", state=ReplicaState.READY, is_default=True, base_s=7e-6,
            per_row_s=1e-7, rows_max=128, deadline_s=0.05, slo="p99=50ms", sustainable_rate=22_500.0,
            facts={"provider": "CPUExecutionProvider"},
        )
        for name in names
    )  # fmt: skip
    return WorkerReport(number=1, pid=1, state="ready", replicas=replicas)


def metadata(*labels: str) -> dict[str, Any]:
    return {
        "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 30]}],
        "outputs": [
            {"name": "label", "datatype": "INT64", "shape": [-1]},
            {"name": "scores", "datatype": "FP32", "shape": [-1, 3]},
        ],
        "parameters": {"labels": list(labels)} if labels else {},
    }


def screen(*names: str, labels: tuple[str, ...] = (), columns: int = 80) -> list[str]:
    about = dict.fromkeys(names, metadata(*labels))
    lines = start_lines(Settings(workers=1, threads=1), [worker(*names)], about, 0.6, columns)
    return ["".join(text for text, _ in line) for line in lines]


@pytest.mark.parametrize("columns", [80, 60, 52])
def test_a_narrow_terminal_gets_narrow_lines_and_a_command_that_still_pastes(columns: int) -> None:
    """Nothing is broken by the terminal itself, and the request is whole (L1)."""
    shown = screen("iris", labels=("setosa", "versicolor", "virginica"), columns=columns)

    assert max(len(line) for line in shown) <= columns, shown
    command = "\n".join(shown).partition("curl ")[2].partition("metrics")[0]
    body = json.loads(command.partition("-d '")[2].rpartition("'")[0])
    assert [1, 30] == body["inputs"][0]["shape"]
    assert 30 == len(body["inputs"][0]["data"])
    before = command.partition("-d '")[0].splitlines()
    assert all(line.endswith("\\") for line in before[:-1])


def test_the_rate_says_which_requests_it_counts() -> None:
    """A number is honest when it says what it is a number of (S1)."""
    assert "  load   sustains 22,500 one-row requests/s over 1 worker" in screen("iris")


def test_labels_are_shown_and_a_wrong_number_of_them_is_told() -> None:
    """Two labels for three classes would name classes wrongly (L1)."""
    right = screen("iris", labels=("setosa", "versicolor", "virginica"))
    wrong = " ".join(screen("iris", labels=("a", "b")))

    assert "  labels setosa, versicolor, virginica" in right
    assert not any("warning" in line for line in right)
    assert "warning: 2 labels, but scores has 3 columns; accepted: one label per" in wrong


def test_several_endpoints_share_one_pattern() -> None:
    """The address of the second one is no riddle (L1)."""
    shown = "\n".join(screen("digits", "iris"))

    assert "serving  http://127.0.0.1:8080/v2/models/NAME/infer" in shown
    assert "curl http://127.0.0.1:8080/v2/models/digits/infer" in shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_spinner_leaves_the_first_column_to_whoever_writes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log line does not hang on to it; a terminal that cannot redraw gets none (L1)."""
    seen = []
    for kind in ("xterm", "dumb"):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("TERM", kind)
        StartScreen().loading([])
        seen.append(terminal.getvalue())

    assert seen[0].endswith(" s\r")
    assert "" == seen[1]


def test_the_screen_says_when_it_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Ctrl-C is answered; a server that never was ready has nothing to say (L1)."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    shown, never = StartScreen(), StartScreen()

    never.close()
    before = terminal.getvalue()
    shown.ready(Home(tmp_path), Settings(), [])
    shown.close()
    shown.close()

    assert "" == before
    assert terminal.getvalue().endswith("\nHeadrace has stopped; it was up for 0 s\n")
    assert 1 == terminal.getvalue().count("has stopped")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"is_inline": True}, ["1 row 7.1 µs, 128 rows 19.8 µs · batches up to 128", "on the event loop"]),
        ({"rows_max": 1, "batching": "batched"}, ["1 row 7.1 µs · largest batch 1 row", "on a thread of its own"]),
        (
            {"base_s": 0.0, "per_row_s": 1e-9, "rows_max": 1, "batching": "not batched: why"},
            ["speed  not measured · not"],
        ),
        (
            {"rows_max": 1, "batching": "not batched: rows_max is 1", "per_row_s": 0.0},
            ["a request 7 µs · not batched: rows_max is 1", "22,500 requests/s"],
        ),
    ],
)
def test_the_largest_batch_and_where_it_runs_are_shown(changes: dict[str, Any], expected: list[str]) -> None:
    """X2: what was measured and what follows from it can be read, whatever the model."""
    report = worker("iris")
    replica = msgspec.structs.replace(report.replicas[0], **changes)
    lines = start_lines(Settings(), [msgspec.structs.replace(report, replicas=(replica,))], {"iris": None}, 0.6)
    shown = "\n".join("".join(text for text, _ in line) for line in lines)

    assert [] == [text for text in expected if text not in shown], shown
