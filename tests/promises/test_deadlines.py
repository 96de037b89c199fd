"""Whoever cannot be answered in time is told so, early, whatever the model is doing."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.data_plane.batch_curve import LatencyCurve
from headrace.drills.load import (
    Outcome,
    infer_request_bytes,
    json_infer_body,
    open_loop,
    poisson_offsets,
    run_in_process,
)
from headrace.errors import DeadlineError, DeadlineUnreachable, HeadraceError
from headrace.records import Record
from headrace.storage.segments import iter_records
from headrace.testing.rig import Gate, Rig
from headrace.testing.server import ServerProcess, is_running, receive_all, sleep_config, wait_until
from headrace.testing.sleep_runtime import SleepArtefact
from headrace.types import Ending


async def test_a_request_is_told_by_its_deadline_even_while_the_executor_hangs(tmp_path: Path) -> None:
    """S2: nobody decides while a batch is stuck in the model, and those who wait behind it are refused all the same."""
    gate = Gate()
    async with Rig(tmp_path, {"m": gate}) as rig:
        rig.use_thread_lane("m")
        gate.is_closed_to_trials = True
        rig.start("m", [0], timeout_s=30)
        await asyncio.to_thread(gate.entered.wait)
        began_s = time.monotonic()
        allowed_s = [0.15, 0.05, 0.1, 0.3]
        calls = [rig.start("m", [1], timeout_s=seconds) for seconds in allowed_s]
        told_s = []
        for _, call in calls:
            await asyncio.wait_for(call.answer, 5)
        told_s = [ticket.deadline_at_s - began_s for ticket, _ in calls]
        took_s = time.monotonic() - began_s
        errors = [call.answer.result() for _, call in calls]
        gate.is_open.set()
        await rig.idle()

    assert all(isinstance(error, DeadlineError | DeadlineUnreachable) for error in errors), errors
    assert {Ending.EXPIRED} >= {ticket.ending for ticket, _ in calls} - {Ending.REJECTED}
    assert max(told_s) <= took_s < max(allowed_s) + 0.5, "told at the deadline, not when the model came back"


async def test_an_expired_request_is_not_executed(tmp_path: Path) -> None:
    """S2, F6: late work is refused, so that the time goes to those who can still use it."""
    gate = Gate()
    seen: list[float] = []

    def noting(rows: np.ndarray) -> np.ndarray:
        seen.extend(rows[:, 0].tolist())
        return gate(rows)

    async with Rig(tmp_path, {"m": noting}) as rig:
        rig.use_thread_lane("m")
        gate.is_closed_to_trials = True
        rig.start("m", [-1], timeout_s=30)
        await asyncio.to_thread(gate.entered.wait)
        _, late = rig.start("m", [-2], timeout_s=0.05)
        _, patient = rig.start("m", [-3], timeout_s=30)
        error = await asyncio.wait_for(late.answer, 5)
        gate.is_open.set()
        answer = await asyncio.wait_for(patient.answer, 5)

    assert isinstance(error, DeadlineError)
    assert "queue" == error.stage
    assert not isinstance(answer, HeadraceError)
    assert -3 in seen
    assert -2 not in seen


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One worker; runs of 20 ms and more if the input says so."""
    artefact = SleepArtefact(base_s=0.02, is_slowed_by_input=True)
    return sleep_config(tmp_path / "models", {"m": artefact}, server={"workers": 1, "run_s_max": 1}, slo="p99=40s")


def test_a_stuck_run_ends_its_callers_with_500_and_the_worker_is_replaced(model: Path, tmp_path: Path) -> None:
    """S2, F7: a run of 30 s against a limit of 1 s: its callers and those who wait behind it get an answer within
    seconds, and the next request is served by a fresh worker."""
    with ServerProcess(model, tmp_path / "home") as server:
        (stuck_pid,) = server.wait_workers(1)
        stuck = server.caller("stuck")
        stuck.send("m", (-30.0,))
        wait_until(lambda: server.metrics().get('headrace_in_flight{endpoint="m"}') == 1)
        waiting = [server.caller(f"waiting-{number}") for number in range(3)]
        for caller in waiting:
            caller.send("m")
        first, *others = receive_all([stuck, *waiting])
        wait_until(lambda: not is_running(stuck_pid))
        server.wait_workers(1)
        fresh = server.caller().infer("m")
        metrics = server.metrics()

    assert (500, "model_failed") == (first.status, first.code)
    assert "did not return within 1 s" in first.body["error"]
    assert first.took_s < 10
    assert max(reply.took_s for reply in others) < 10
    assert 200 == fresh.status
    assert 0 == metrics['headrace_conservation_difference{endpoint="m"}']
    assert 0 == metrics['headrace_in_flight{endpoint="m"}']


@pytest.mark.parametrize(
    ("rows", "allowed_ms", "reason"),
    [
        (1, "5", "running alone takes about"),
        (1, "130", "the model is busy for"),
    ],
)
def test_a_request_that_no_schedule_can_save_is_refused_at_the_door_with_the_reason(
    tmp_path: Path, rows: int, allowed_ms: str, reason: str
) -> None:
    """S2: 503 with Retry-After at once, saying whether the model is too slow for the deadline or too busy."""
    config = sleep_config(tmp_path / "models", {"m": SleepArtefact(base_s=0.1)}, server={"workers": 1}, slo="p99=10s")
    with ServerProcess(config, tmp_path / "home") as server:
        busy = [server.caller("busy")] if reason.startswith("the model") else []
        for caller in busy:
            caller.send("m")
            time.sleep(0.01)
        hasty = server.caller("hasty").infer("m", (1.0,) * rows, x_request_timeout_ms=allowed_ms)
        others = [caller.receive() for caller in busy]

    assert (503, "deadline_unreachable") == (hasty.status, hasty.code), hasty.body
    assert reason in hasty.body["error"]
    assert f"{rows} row" in hasty.body["error"]
    assert int(hasty.headers["retry-after"]) >= 1
    assert hasty.took_s < 0.5
    assert [200] * len(busy) == [reply.status for reply in others]


BASE_S, PER_ROW_S, DEADLINE_S = 0.02, 0.002, 0.1
SLO = "p99=100ms"


def fluid_goodput(rate: float) -> float:
    """G(rate): the most that can be answered in time when losing is allowed.

    Source: scheduler theory 2.3: min(rate, b/l(b)) with b = (D - a)/(c + 1/rate).
    """
    curve = LatencyCurve(BASE_S, PER_ROW_S, 0.0)
    rows = min(128.0, (DEADLINE_S - BASE_S) / (PER_ROW_S + 1 / rate))
    return min(rate, rows / (curve.base_s + curve.per_row_s * rows))


def test_at_three_times_the_sustainable_rate_goodput_holds_and_refusals_come_early(tmp_path: Path) -> None:
    """F6, S2: in-time answers stay at 0.8 of the fluid optimum, refusals do not make their callers wait beyond the
    deadline, and hardly any run is wasted on an answer that comes too late."""
    artefact = SleepArtefact(base_s=BASE_S, per_row_s=PER_ROW_S)
    config = sleep_config(tmp_path / "models", {"m": artefact}, server={"workers": 1}, slo=SLO)
    rows = (DEADLINE_S / 2 - BASE_S) / PER_ROW_S
    rate = 3 * rows / (DEADLINE_S / 2)  # three times U2, see scheduler theory 2.2
    with ServerProcess(config, tmp_path / "home") as server:
        body = json_infer_body("x", np.ones((1, 1), np.float32))
        request = infer_request_bytes("127.0.0.1", server.http_port, "m", body)
        plan = open_loop(
            "127.0.0.1", server.http_port, [request], poisson_offsets(rate, 4.0, seed=5), duration_s=4.0,
            connections=64, deadline_s=DEADLINE_S * 1.5, grace_s=3.0,
        )  # fmt: skip
        result = run_in_process(plan)
        metrics = server.metrics()
    records = [record for record in iter_records(server.home / "records") if isinstance(record, Record)]
    answered = [record for record in records if record.ending == "answered"]
    in_time = [record for record in answered if record.total_s <= record.deadline_s]
    share = len(in_time) / 4.0 / fluid_goodput(rate)
    figures = (
        f"{rate:.0f}/s offered, {len(in_time) / 4.0:.0f}/s in time, {share:.2f} of {fluid_goodput(rate):.0f}/s; "
        f"{len(answered) - len(in_time)} of {len(answered)} answers late; refusal p99 {result.refusal_s(0.99):.3f} s; "
        f"client p99 {result.latency_s(0.99):.3f} s; {result.codes}"
    )

    assert share >= 0.8, figures
    assert len(answered) - len(in_time) <= 0.1 * len(answered), figures
    assert result.refusal_s(0.99) <= 2 * DEADLINE_S + 0.1, figures
    assert result.count(Outcome.FAILED) + result.count(Outcome.UNANSWERED) == 0, figures
    assert 0 == metrics['headrace_conservation_difference{endpoint="m"}']
