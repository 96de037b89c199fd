"""What the benchmark has to know of the machine: its cores, its disk, and what processes take of it."""

import importlib.metadata
import os
import platform
import re
import timeit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Usage", "available_cores", "filesystem", "machine_facts", "pinned_to", "tree", "usage"]

PACKAGES: Final = ("headrace", "httptools", "uvloop", "msgspec", "numpy", "onnxruntime")
_TICK_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a server and all its processes take.

    Attributes:
        processes: Their number.
        largest_rss_bytes: Resident memory of the largest one, which holds the model.
        total_bytes: Memory of all, shared pages counted once (sum of proportional set sizes).
        cpu_s: Processor time since they started.
    """

    processes: int
    largest_rss_bytes: int
    total_bytes: int
    cpu_s: float


def available_cores() -> list[int]:
    """Cores this process may use, ascending."""
    return sorted(os.sched_getaffinity(0))


@contextmanager
def pinned_to(cores: Sequence[int]) -> Iterator[None]:
    """Processes started meanwhile run on these cores only; this one goes back to its own afterwards."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


class _Row:
    __slots__ = ("name", "value")

    def __init__(self, name: str, value: int) -> None:
        self.name = name
        self.value = value

    def added(self, amount: int) -> int:
        self.value += amount
        return self.value


def turn_s() -> float:
    """Time of one turn of a small loop that makes an object, calls it, and fills a dictionary and a list, seconds.

    Builds of one Python version differ by half in this.
    """

    def turns() -> int:
        total = 0
        for number in range(1000):
            row = _Row("a", number)
            fields = {"number": row.added(1)}
            fields["total"] = total
            total += len([row, fields])
        return total

    return min(timeit.repeat(turns, number=50, repeat=9)) / 50_000


def machine_facts() -> dict[str, str]:
    """What a reader needs to judge the absolute figures."""
    model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": str(len(available_cores())),
        "system": platform.platform(),
        "python": f"{platform.python_version()} ({turn_s() * 1e9:.0f} ns a turn of a small loop)",
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def filesystem(path: Path) -> tuple[str, str]:
    """Type and device of the file system that a path lies on: `("ext4", "/dev/vda")`."""
    resolved = path.resolve()
    best = ("", "unknown", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        mount = mount.encode().decode("unicode_escape")  # blanks are written \040
        if resolved.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind, device)
    return best[1], best[2]


def tree(root: int) -> list[int]:
    """A process and everything it started that still runs; empty when it has ended."""
    found = [root] if Path(f"/proc/{root}/stat").exists() else []
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue  # it ended between the two looks
    return found


def usage(pids: Sequence[int]) -> Usage:
    """Memory and processor time of processes; those that have ended are left out."""
    sizes: list[tuple[int, int]] = []
    cpu_s = 0.0
    for pid in pids:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        kilobytes = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", rollup, re.MULTILINE)}
        sizes.append((kilobytes.get("Rss", 0) * 1024, kilobytes.get("Pss", 0) * 1024))
        cpu_s += (int(fields[11]) + int(fields[12])) * _TICK_S
    return Usage(len(sizes), max((rss for rss, _ in sizes), default=0), sum(pss for _, pss in sizes), cpu_s)
