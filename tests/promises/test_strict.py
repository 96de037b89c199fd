"""Strict durability over real processes: what a caller was told is written down, whenever the process is killed."""

import os
import random
import signal
import time
from pathlib import Path

from headrace.records import Record
from headrace.storage.segments import iter_records
from headrace.testing.server import CLOSED, ServerProcess, Traffic, sleep_config, wait_until
from headrace.testing.sleep_runtime import SleepArtefact

SEED = 7


def test_every_answer_that_a_caller_has_seen_is_on_disk_after_kills_at_any_instant(tmp_path: Path) -> None:
    """O3, F7: workers are killed at random instants under load, at last all processes at once; each answer that arrived
    has its record, and no request has two."""
    config = sleep_config(
        tmp_path / "models",
        {"m": SleepArtefact(base_s=0.0005)},
        server={"workers": 2},
        slo="p99=5s",
        records={"durability": "strict"},
    )
    chance = random.Random(SEED)
    with ServerProcess(config, tmp_path / "home") as server:
        server.wait_workers(2)
        with Traffic(server.http_port, "m", callers=8, pause_s=0.0) as traffic:
            for _ in range(4):
                time.sleep(chance.uniform(0.05, 0.4))
                victim = chance.choice(server.worker_pids())
                os.kill(victim, signal.SIGKILL)
                wait_until(lambda victim=victim: len(set(server.worker_pids()) - {victim}) == 2, 40)
            time.sleep(chance.uniform(0.05, 0.4))
            for pid in [server.process.pid, *server.children()]:
                os.kill(pid, signal.SIGKILL)
    seen = {reply.request_id for reply in traffic.replies if reply.status == 200}
    records = [record for record in iter_records(server.home / "records") if isinstance(record, Record)]
    written = [record.request_id for record in records if record.ending == "answered"]

    assert {200, CLOSED, 503} >= set(traffic.statuses())
    assert len(seen) > 100
    assert set() == seen - set(written)
    assert len(written) == len(set(written))
