"""The control process answers from files, and marks what is good."""

import asyncio
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.app.control import Admin, Control
from headrace.config import Settings
from headrace.home import Home
from headrace.report import ReplicaReport, WorkerReport, WorkerState
from headrace.snapshot import EndpointSpec, Snapshot, VersionSpec, make_snapshot
from headrace.telemetry.slots import SlotWriter
from headrace.types import ReplicaState


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home in which two endpoints shall be served."""
    made = Home(tmp_path)
    made.prepare()
    made.write_snapshot(snapshot("good", "bad"))
    return made


def snapshot(*names: str) -> Snapshot:
    version = VersionSpec(version="1", path="/m.onnx", digest="sha256:0")
    return make_snapshot([EndpointSpec(name, name, versions=(version,), default_version="1") for name in names])


def say(home: Home, number: int, state: WorkerState = "ready", snapshot_id: str = "", problem: str = "") -> None:
    bad_state = ReplicaState.FAILED if problem else ReplicaState.READY
    replicas = (
        ReplicaReport("good", "good", "1", ReplicaState.READY),
        ReplicaReport("bad", "bad", "1", bad_state, problem=problem),
    )
    report = WorkerReport(number, os.getpid(), state, snapshot_id=snapshot_id, replicas=replicas)
    home.report_file(number).write_bytes(msgspec.json.encode(report))


async def get(home: Home, path: str, method: str = "GET") -> tuple[int, str]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [], "http_version": "1.1", "scheme": "http", "server": ("x", 1), "client": ("x", 1),
    }  # fmt: skip
    await Admin(home, Settings(workers=2)).app()(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()


async def test_not_ready_names_each_model_and_its_reason(home: Home) -> None:
    """A probe that fails says what is missing (L1)."""
    status, body = await get(home, "/readyz")
    assert (503, "no worker is running yet") == (status, json.loads(body)["error"])

    say(home, 1, "starting", problem="weights are missing")
    status, body = await get(home, "/readyz")

    answer = json.loads(body)
    assert (503, False, "model_loading") == (status, answer["ready"], answer["code"])
    assert [("bad", "weights are missing")] == [(item["model"], item["problem"]) for item in answer["not_ready"]]


async def test_a_worker_that_was_ready_keeps_the_server_ready(home: Home) -> None:
    """A later failed load shows in the list and does not take the server out of its balancer (design §6)."""
    say(home, 1, "ready", problem="the new version is broken")

    status, body = await get(home, "/readyz")

    assert 200 == status
    assert ["bad"] == [item["model"] for item in json.loads(body)["not_ready"]]


async def test_live_status_and_errors_are_json(home: Home) -> None:
    """Every answer but the metrics is JSON, errors with a code (design §3)."""
    say(home, 1)

    live, _ = await get(home, "/livez")
    status, body = await get(home, "/v1/status")
    missing, missing_body = await get(home, "/nope")
    wrong, wrong_body = await get(home, "/livez", "POST")

    assert (200, 200) == (live, status)
    assert [1] == [worker["number"] for worker in json.loads(body)["workers"]]
    assert home.desired_id() == json.loads(body)["snapshot"]["desired"]
    assert (404, "not_found") == (missing, json.loads(missing_body)["code"])
    assert (405, "method_not_allowed") == (wrong, json.loads(wrong_body)["code"])


async def test_metrics_add_up_workers_and_know_their_own_process(home: Home) -> None:
    """One scrape shows the whole server (O1, O2)."""
    slots = SlotWriter.open(home.slots_file(1))
    slots.ledger("good").received()
    slots.gauge("memory_bytes", {"worker": "1"}).set(5.0)
    slots.beat()

    status, body = await get(home, "/metrics")
    slots.close()

    assert 200 == status
    assert 'headrace_received_total{endpoint="good"} 1.0' in body
    assert 'headrace_memory_bytes{worker="1"} 5.0' in body
    assert 'headrace_memory_bytes{worker="control"}' in body


async def test_a_snapshot_is_good_once_every_worker_serves_it_warm(home: Home) -> None:
    """And not one worker earlier (design §6)."""
    desired = home.desired_id() or ""
    with socket.socket() as listener:
        control = Control(home, Settings(workers=2), listener)

        say(home, 1, snapshot_id=desired)
        control.mark_good()
        assert home.last_good_id() is None
        say(home, 2, "starting")
        control.mark_good()
        assert home.last_good_id() is None
        say(home, 2, snapshot_id=desired)
        control.mark_good()

    assert desired == home.last_good_id()


async def test_a_hang_up_during_a_reload_is_followed_by_another_reload(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6: what changed after the reload under way had read it is not forgotten, and a storm makes no queue."""
    entered, go_on = threading.Event(), threading.Event()
    reloads: list[int] = []

    def reload(_home: Home) -> Any:
        reloads.append(len(reloads))
        entered.set()
        go_on.wait(10)
        raise ValueError("nothing to see")

    monkeypatch.setattr("headrace.app.control.publish.reload", reload)
    with socket.socket() as listener:
        control = Control(home, Settings(), listener)
        control._reload_soon()
        await asyncio.to_thread(entered.wait, 10)
        for _ in range(100):
            control._reload_soon()
        go_on.set()
        assert control._reloading is not None
        await control._reloading

    assert [0, 1] == reloads
