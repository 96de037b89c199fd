"""Logs say what they can, and never stand in anybody's way."""

import json
import logging
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from headrace.telemetry import logs, stderr
from headrace.telemetry.logs import LibraryLogs, log
from headrace.telemetry.stderr import LINE_BYTES_MAX, put_line


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The reading end of a pipe that stands in for standard error."""
    read_fd, write_fd = os.pipe()
    monkeypatch.setattr(logs, "_windows", {})
    monkeypatch.setattr(logs, "_lost", [0])
    with os.fdopen(write_fd, "w") as stream:
        monkeypatch.setattr(stderr, "sys", SimpleNamespace(stderr=stream))  # pytest puts its own back between phases
        yield read_fd
    os.close(read_fd)


def said(pipe: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in os.read(pipe, 1 << 20).splitlines() if line.startswith(b"{")]


def test_a_reader_that_has_stopped_costs_lines_and_not_time(pipe: int) -> None:
    """X5, O2: whoever reads the log may hang; a worker that waited for it would answer nobody. What was lost is told
    once it reads again."""
    began_s = time.monotonic()
    while put_line(b"x" * LINE_BYTES_MAX):
        pass
    for number in range(3):
        log("error", f"event {number}")
    took_s = time.monotonic() - began_s
    os.read(pipe, 1 << 20)
    log("error", "event 3")
    log("error", "event 4")

    assert took_s < 5
    assert [("event 3", 3), ("event 4", None)] == [(line["event"], line.get("lost")) for line in said(pipe)]


def test_a_reader_that_has_gone_is_no_error(pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """O2: a closed standard error ends neither the line before it nor the server."""
    log("info", "before")
    before = said(pipe)
    with monkeypatch.context() as patch:
        patch.setattr(stderr, "sys", SimpleNamespace(stderr=None))
        log("info", "without")
    log("info", "after")

    assert ["before"] == [line["event"] for line in before]
    assert [("after", 1)] == [(line["event"], line["lost"]) for line in said(pipe)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/models/\udcff.onnx", "/models/\\udcff.onnx"),
        ("x" * 10_000, "x" * 400),
        (object, "<class 'object'>"),
        (2**70, 2**70),
    ],
    ids=["no UTF-8", "long", "foreign", "large"],
)
def test_whatever_a_field_holds_the_line_is_whole_and_is_json(pipe: int, value: object, expected: object) -> None:
    """O2: a file name that is not UTF-8 in a log line must not fail the load that it tells about."""
    log("error", "model not loaded", reason=value)
    (line,) = said(pipe)

    assert ("model not loaded", "error", expected) == (line["event"], line["level"], line["reason"])


def test_what_libraries_say_goes_the_same_way(pipe: int) -> None:
    """O2, X5: the event loop reports a failed callback as one JSON line, however it is worded."""
    library = logging.Logger("library")
    library.addHandler(LibraryLogs())
    try:
        raise KeyError("k")
    except KeyError:
        library.exception("callback %s\nfailed", "f")
    (line,) = said(pipe)

    assert ("said by library", "error", "callback f\nfailed", "KeyError('k')") == (
        line["event"], line["level"], line["text"], line["error"],
    )  # fmt: skip


def test_a_site_that_says_too_much_is_cut_short_and_says_so(pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """O2: a fault that every request meets writes five lines a second, not thousands."""
    now_s = [100.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now_s[0])
    for _ in range(50):
        log("error", "again")
    now_s[0] += 1
    log("error", "again")
    lines = said(pipe)

    assert 6 == len(lines)
    assert 45 == lines[-1]["suppressed"]
