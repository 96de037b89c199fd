"""What processes say about themselves, read from files: worker reports and /proc. Nobody is asked anything."""

import os
from pathlib import Path

import msgspec

from headrace.home import Home
from headrace.report import WorkerReport


def read_report(path: Path) -> WorkerReport | None:
    """One worker's report; None before its first, or when it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=WorkerReport)
    except (OSError, msgspec.DecodeError):
        return None


def read_reports(home: Home) -> list[WorkerReport]:
    """Reports of workers that are alive, by number."""
    found = (read_report(path) for path in home.run.glob("worker-*.json"))
    return sorted((view for view in found if view is not None and is_alive(view.pid)), key=lambda view: view.number)


def is_serving(report: WorkerReport) -> bool:
    """True once a worker has tried everything and has something to answer with.

    Weaker than `ready`, which asks for every endpoint: one broken model beside good ones leaves a worker that serves.
    """
    states = {replica.state.value for replica in report.replicas}
    return report.state == "ready" or ("ready" in states and not states & {"loading", "warming"})


def is_alive(pid: int) -> bool:
    """True while the process runs; a zombie does not."""
    try:
        return _stat_fields(pid)[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def resident_bytes(pid: int) -> int:
    """Resident memory; 0 when the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def cpu_seconds(pid: int) -> float:
    """User and system time so far; 0 when the process is gone."""
    try:
        fields = _stat_fields(pid)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def _stat_fields(pid: int) -> list[str]:
    # The name in field 2 may hold spaces and brackets; everything after its last bracket is regular (proc(5)).
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def age_s(pid: int) -> float:
    """Seconds since the process was created, an exec in between included; 0 when it is gone."""
    try:
        with open("/proc/uptime") as file:
            uptime_s = float(file.read().split()[0])
        return max(0.0, uptime_s - int(_stat_fields(pid)[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def has_terminal() -> bool:
    """True while this process has a controlling terminal; one that closes takes itself away and says SIGHUP."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
