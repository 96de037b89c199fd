"""A worker that dies takes only what it held; its callers are told at once, the others notice nothing."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing.server import (
    CLOSED,
    SILENCE,
    ServerProcess,
    Traffic,
    is_running,
    receive_all,
    sleep_config,
    title,
    wait_until,
)
from headrace.testing.sleep_runtime import SleepArtefact

SLOWED = SleepArtefact(base_s=0.002, is_slowed_by_input=True)
LOST = 'headrace_requests_total{code="worker_lost",ending="failed",endpoint="m",model="m",version="1"}'
DIFFERENCE = 'headrace_conservation_difference{endpoint="m"}'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """Two workers, one model whose runs take as long as the request says."""
    config = sleep_config(tmp_path / "models", {"m": SLOWED}, server={"workers": 2}, slo="p99=20s")
    with ServerProcess(config, tmp_path / "home") as running:
        running.wait_workers(2)
        yield running


class Scrapes:
    """Scrapes the metrics all the time on a thread and keeps every value of the law; a context manager."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.differences: list[float] = []

    def __enter__(self) -> "Scrapes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(20)

    def _run(self) -> None:
        while not self._is_over.wait(0.03):
            metrics = self._server.metrics()
            self.differences += [value for name, value in metrics.items() if "conservation_difference" in name]


def lost(server: ServerProcess) -> int:
    """Requests counted as failed with the code worker_lost."""
    metrics = server.metrics()
    return int(sum(value for name, value in metrics.items() if "worker_lost" in name and "_requests_total" in name))


def held_by(server: ServerProcess) -> dict[int, int]:
    """Open connections by worker number."""
    prefix = 'headrace_connections{worker="'
    return {
        int(name.removeprefix(prefix).rstrip('"}')): int(value)
        for name, value in server.metrics().items()
        if name.startswith(prefix)
    }


def refuses(server: ServerProcess) -> bool:
    """Nobody listens any more. A process is gone for others when its first thread has ended, and its sockets close with
    the last one: in between a connection is taken and reset."""
    try:
        server.request("GET", "/v2/health/live")
    except ConnectionRefusedError:
        return True
    except ConnectionError:
        return False
    return False


def test_only_requests_held_by_the_killed_worker_are_lost_and_each_is_counted(server: ServerProcess) -> None:
    """F7, O1: kill -9 of one of two workers with 16 requests in flight: those it held see their connection close within
    seconds, the others are answered; failed{code=worker_lost} is the number of the former, and the books balance at
    every look."""
    victim, survivor = server.worker_pids()
    callers = []
    for number in range(16):
        callers.append(server.caller(f"c{number}"))
        callers[-1].send("m", (-1.5,))
        time.sleep(0.01)  # both workers take some, even on a machine that does other things
    wait_until(lambda: server.metrics().get('headrace_in_flight{endpoint="m"}') == 16)
    held = held_by(server)
    with Scrapes(server) as scrapes:
        os.kill(victim, signal.SIGKILL)
        replies = receive_all(callers)
        wait_until(lambda: victim not in server.worker_pids() and len(server.worker_pids()) == 2)
    closed = [reply for reply in replies if reply.status == CLOSED]

    assert len(closed) == held[1], "exactly the connections of the killed worker"
    assert 16 == len(closed) + sum(reply.status == 200 for reply in replies)
    assert 0 < len(closed) < 16
    assert max(reply.took_s for reply in closed) < 1.5, "a lost request must not look like a slow one"
    assert len(closed) == lost(server)
    assert len(scrapes.differences) > 5
    assert {0.0} == set(scrapes.differences)
    assert is_running(survivor)


def test_the_killed_worker_is_replaced_under_the_same_number_and_title(server: ServerProcess) -> None:
    """F7: the process titles tell the processes apart, and a replacement takes the dead one's number."""
    wait_until(lambda: all(title(pid).startswith("headrace: ") for pid in server.children()))
    before = {pid: title(pid) for pid in server.children()}
    victim = server.worker_pids()[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not is_running(victim) and len(server.worker_pids()) == 2)
    wait_until(lambda: len({title(pid) for pid in server.children()}) == 3)
    after = {pid: title(pid) for pid in server.children()}

    titles = ["headrace: control", "headrace: worker 1", "headrace: worker 2"]
    assert titles == sorted(before.values())
    assert titles == sorted(after.values())
    assert "headrace: supervisor" == title(server.process.pid)
    assert 2 == len(set(before) & set(after))
    assert "restarting in 0.1 s" in server.log()


def test_repeated_kills_under_traffic_hang_nobody_and_the_books_balance_at_every_look(server: ServerProcess) -> None:
    """F7, O1: each caller gets 200, 503 or a closed connection, whatever is killed and how often; what was lost is
    counted, and no worker but the killed ones loses anything."""
    with Scrapes(server) as scrapes, Traffic(server.http_port, "m", callers=6, pause_s=0.005) as traffic:
        for _ in range(4):
            time.sleep(0.4)
            pids = server.worker_pids()
            os.kill(pids[0], signal.SIGKILL)
            wait_until(lambda pids=pids: len(server.worker_pids()) == 2 and pids[0] not in server.worker_pids())
        time.sleep(0.3)
    statuses = traffic.statuses()
    broken = [reply for reply in traffic.replies if reply.status == CLOSED]

    assert set(statuses) <= {200, 503, CLOSED}
    assert 0 == statuses[SILENCE]
    assert statuses[200] > 300
    # At most what was open at that moment: six callers with one request each.
    assert len(broken) <= 4 * 6
    # A request that the killed worker had not read yet was lost too, but never received; and one whose answer had left
    # may still have been open in the books.
    assert lost(server) <= len(broken) + 4
    assert {0.0} == set(scrapes.differences)
    assert all(reply.took_s < 5 for reply in traffic.replies)


def test_the_wait_before_a_restart_doubles_when_a_worker_dies_again_and_again(server: ServerProcess) -> None:
    """F7: a worker that cannot live must not be a fork bomb; the other one serves on meanwhile."""
    with Traffic(server.http_port, "m", callers=2) as traffic:
        for wait in ("0.1", "0.2", "0.4"):
            victim = next(pid for pid in server.worker_pids() if title(pid) == "headrace: worker 2")
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda victim=victim: not is_running(victim))
            wait_until(lambda wait=wait: f"restarting in {wait} s" in server.log())
            server.wait_workers(2)

    assert {200} >= set(traffic.statuses()) - {CLOSED}
    restarts = [value for name, value in server.metrics().items() if name.startswith("headrace_replica_restarts_total")]
    assert [3] == restarts


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_killing_the_supervisor_leaves_no_orphans_and_its_callers_their_answers(
    server: ServerProcess, state: str
) -> None:
    """F7: the children notice, finish what they hold, and go; then the port is free."""
    caller = server.caller()
    if state == "busy":
        caller.send("m", (-1.5,))
        wait_until(lambda: server.metrics().get('headrace_in_flight{endpoint="m"}') == 1)
    children = server.children()
    server.process.kill()
    server.process.wait()
    reply = caller.receive() if state == "busy" else None
    wait_until(lambda: not any(is_running(pid) for pid in children), 10, "children outlive the supervisor")

    assert 3 == len(children)
    assert reply is None or reply.status == 200
    wait_until(lambda: refuses(server), what="the port is free")


def test_a_server_can_be_started_again_in_the_home_of_one_that_was_killed(
    server: ServerProcess, tmp_path: Path
) -> None:
    """F7, O1: it waits for the orphans to finish, and the counters of the dead ones go on adding up."""
    server.caller().infer("m")
    server.process.kill()
    server.process.wait()
    with ServerProcess(tmp_path / "models" / "headrace.yaml", server.home) as second:
        reply = second.caller().infer("m")
        metrics = second.metrics()

    assert 200 == reply.status
    assert 2 == metrics['headrace_received_total{endpoint="m"}']
    assert 0 == metrics[DIFFERENCE]


def test_a_worker_that_hangs_as_a_whole_is_replaced_and_its_callers_are_told(tmp_path: Path) -> None:
    """F7: stopped in its tracks it can neither answer nor say so; the supervisor ends it, its connections close, what
    it held is counted, and the neighbour is left alone."""
    config = sleep_config(tmp_path / "models", {"m": SLOWED}, server={"workers": 2, "run_s_max": 1}, slo="p99=60s")
    with ServerProcess(config, tmp_path / "home") as server:
        server.wait_workers(2)
        callers = [server.caller(f"held-{number}") for number in range(8)]
        for caller in callers:
            caller.connect()
            time.sleep(0.01)
        wait_until(lambda: sum(held_by(server).values()) == 8)
        held = held_by(server)
        number = max(held, key=held.__getitem__)
        victim, neighbour = (server.worker_pids()[at - 1] for at in (number, 3 - number))
        os.kill(victim, signal.SIGSTOP)
        for caller in callers:
            caller.send("m")
        replies = receive_all(callers)
        wait_until(lambda: victim not in server.worker_pids() and len(server.worker_pids()) == 2, 40)
        is_left_alone = neighbour in server.worker_pids()
        differences = [value for name, value in server.metrics().items() if "conservation_difference" in name]

    assert held[number] == sum(reply.status == CLOSED for reply in replies)
    assert 8 - held[number] == sum(reply.status == 200 for reply in replies)
    assert is_left_alone
    assert {0.0} == set(differences)
