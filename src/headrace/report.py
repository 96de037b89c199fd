"""What a worker says about itself: written to `run/worker-N.json` in the home folder whenever it changes.

The supervisor, the control process and the start screen read these files; nobody asks a worker anything.
"""

from typing import Literal

import msgspec

from headrace.types import ReplicaState

WorkerState = Literal["starting", "ready", "draining", "retiring", "stopped"]


class ReplicaReport(msgspec.Struct, frozen=True):
    """One model version in one worker.

    Attributes:
        state: Where in its life it is.
        problem: Why it failed, or why its changed artefact could not take its place; empty otherwise.
        facts: From the runtime: provider, threads, versions.
        is_default: Serves requests that name no version.
        is_inline: Runs on the event loop (cheaper than a thread's round trip), otherwise on the executor thread.
        batching: `batched`, or why it is not.
        base_s, per_row_s: Latency curve: a batch of b rows takes base_s + per_row_s · b seconds.
        sigma: Relative spread of single runs around the curve.
        rows_max: Largest batch.
        deadline_s: Time allowed per request that brings no deadline of its own.
        slo: As declared, empty when none was.
        request_s: Processor time of a request apart from the run, seconds.
        sustainable_rate: One-row requests per second that one worker can keep up within the deadline (U2, with
            request_s added to per_row_s).
        ceiling_rate: One-row requests per second that no schedule can exceed (U1, likewise).
        lossy_rate: When the deadline is below two single runs: the rate at which 99 % still make it; None otherwise.
        load_s: Time to load.
        warm_s: Time to warm up.
    """

    endpoint: str
    model: str
    version: str
    state: ReplicaState
    problem: str = ""
    facts: dict[str, str] = {}
    is_default: bool = False
    is_inline: bool = False
    batching: str = ""
    base_s: float = 0.0
    per_row_s: float = 0.0
    sigma: float = 0.0
    rows_max: int = 0
    deadline_s: float = 0.0
    slo: str = ""
    request_s: float = 0.0
    sustainable_rate: float = 0.0
    ceiling_rate: float = 0.0
    lossy_rate: float | None = None
    load_s: float = 0.0
    warm_s: float = 0.0


class WorkerReport(msgspec.Struct, frozen=True):
    """One worker.

    Attributes:
        number: 1, 2, …; stays the same over restarts.
        pid: Process id.
        state: `ready` latches once every endpoint of the first snapshot has a warm default replica.
        snapshot_id: The last snapshot of which every endpoint was warm here; empty before.
        started_s: Seconds from process start to ready; 0 before.
        is_recording: False while records cannot be written.
        replicas: Every replica, loaded or failed.
    """

    number: int
    pid: int
    state: WorkerState
    snapshot_id: str = ""
    started_s: float = 0.0
    is_recording: bool = True
    replicas: tuple[ReplicaReport, ...] = ()
