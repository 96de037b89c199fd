"""`headrace doctor`: looks at the machine, one line per finding, one fix per line that needs one."""

import importlib.metadata
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from headrace import __version__
from headrace.app.sockets import BACKLOG, port_owner, somaxconn
from headrace.app.start import no_telemetry
from headrace.cli.output import HomeFlag, Output, print_json, print_table
from headrace.config import load, usable_cores

REQUIRED: Final = (
    "cyclopts", "httptools", "msgspec", "numpy", "onnxruntime", "prometheus-client", "rich", "setproctitle",
    "starlette", "uvicorn", "uvloop", "pyyaml",
)  # fmt: skip
MEMORY_BYTES_LEAST: Final = 512 << 20
DISK_BYTES_LEAST: Final = 1 << 30
FSYNC_S_MAX: Final = 0.02
FILES_LEAST: Final = 8192


@dataclass(frozen=True, slots=True)
class Finding:
    """One line.

    Attributes:
        state: `ok`; `warn`, it works but not well; `fail`, it does not work.
        seen: The value.
        fix: What to do; empty when ok.
    """

    name: str
    state: Literal["ok", "warn", "fail"]
    seen: str
    fix: str = ""


def doctor(*, output: Output = "table", home: HomeFlag = None) -> int:
    """Check this machine: what it has, what is missing, one fix per line.

    For example:

      headrace doctor

      headrace doctor -o json

    Exit status: 0 when nothing fails (warnings may remain), 1 otherwise.
    """
    findings = list(examine(home))
    if output == "json":
        print_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    return 1 if any(finding.state == "fail" for finding in findings) else 0


def examine(home: Path | None) -> Iterator[Finding]:
    """Every finding, cheap ones first."""
    configuration = load(home=None if home is None else str(home))
    settings = configuration.settings
    yield _python()
    yield from _packages()
    yield _providers()
    yield Finding("cores", "ok", f"{usable_cores()} usable of {os.cpu_count()}")
    yield _memory()
    yield from _disk(configuration.home)
    yield _open_files(settings.connections_max)
    yield _connection_queue()
    yield _port("http_port", settings.http_port)
    yield _port("admin_port", settings.admin_port)
    yield _clock()


def _print(findings: list[Finding]) -> None:
    words = {"ok": "ok", "warn": "WARN", "fail": "FAIL"}
    rows: list[tuple[str, str, str]] = []
    for finding in findings:
        rows.append((words[finding.state], finding.name, finding.seen))
        if finding.fix:
            rows.append(("", "", f"fix: {finding.fix}"))
    print_table(("STATE", "WHAT", "SEEN"), rows)
    trouble = [finding for finding in findings if finding.state != "ok"]
    print(f"\n{len(findings) - len(trouble)} of {len(findings)} in order")


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> Iterator[Finding]:
    versions = {}
    for name in REQUIRED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("package", "fail", f"{name} is missing", f"pip install {name}")
    yield Finding("packages", "ok", ", ".join([f"headrace {__version__}", *(f"{k} {v}" for k, v in versions.items())]))


def _providers() -> Finding:
    no_telemetry()
    try:
        import onnxruntime  # 0.2 s, paid by this check alone
    except ImportError as error:
        return Finding(
            "onnxruntime", "fail", f"cannot be imported: {error}", "pip install --force-reinstall onnxruntime"
        )
    return Finding("onnxruntime", "ok", ", ".join(onnxruntime.get_available_providers()))


def _memory() -> Finding:
    free = _memory_available()
    if free is None:
        return Finding("memory", "warn", "unknown", "this system has no /proc/meminfo; Linux is what is tested")
    if free < MEMORY_BYTES_LEAST:
        return Finding("memory", "warn", f"{_size(free)} available", "stop other programs, or serve with --workers 1")
    return Finding("memory", "ok", f"{_size(free)} available")


def _memory_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _disk(home: Path) -> Iterator[Finding]:
    folder = home
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        seconds = _sync_seconds(folder)
    except OSError as error:
        yield Finding("home", "fail", f"{home}: {error.strerror}", "HEADRACE_HOME=/path/to/a/folder/of/yours")
        return
    yield Finding("home", "ok", f"{home} can be written")
    seen = f"{seconds * 1e3:.2g} ms to write and sync 4 KiB"
    if seconds > FSYNC_S_MAX:
        yield Finding("disk speed", "warn", seen, "put the home on a local disk; records: strict waits for every sync")
    else:
        yield Finding("disk speed", "ok", seen)
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < DISK_BYTES_LEAST:
        yield Finding("disk space", "warn", f"{_size(free)} free", "free some, or lower records_bytes_max")
    else:
        yield Finding("disk space", "ok", f"{_size(free)} free")


def _sync_seconds(folder: Path) -> float:
    """Median of five writes of 4 KiB, each synced to the device."""
    seconds = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(5):
            began_s = time.perf_counter()
            file.write(b"\0" * 4096)
            file.flush()
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def _open_files(connections_max: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = max(FILES_LEAST, 2 * connections_max)
    if soft != resource.RLIM_INFINITY and soft < least:
        wanted = least if hard == resource.RLIM_INFINITY else min(least, hard)
        return Finding("open files", "warn", f"{soft} per process", f"ulimit -n {max(wanted, soft)}, before serving")
    return Finding("open files", "ok", f"{soft} per process")


def _connection_queue() -> Finding:
    limit = somaxconn()
    if limit < BACKLOG:
        return Finding("somaxconn", "warn", str(limit), f"sudo sysctl -w net.core.somaxconn={BACKLOG}")
    return Finding("somaxconn", "ok", str(limit))


def _port(name: str, port: int) -> Finding:
    owner = port_owner(port) if port else ""
    if owner.startswith("headrace"):
        return Finding(name, "ok", f"{port}: a Headrace server is running, {owner}")
    if owner:
        return Finding(name, "fail", f"{port} is in use by {owner}", f"stop it, or --{name.replace('_', '-')} 0")
    return Finding(name, "ok", f"{port} is free")


def _clock() -> Finding:
    """The wall clock must not stand before files that were written earlier, and the monotonic one must move."""
    newest_s = Path(__file__).stat().st_mtime
    before_s = time.monotonic()
    time.sleep(0.001)
    if time.time() < newest_s - 60 or time.monotonic() <= before_s:
        return Finding("clock", "fail", time.strftime("%Y-%m-%d %H:%M:%S"), "sudo timedatectl set-ntp true")
    return Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %z"))


def _size(count_bytes: float) -> str:
    return f"{count_bytes / 2**30:.1f} GiB" if count_bytes >= 2**30 else f"{count_bytes / 2**20:.0f} MiB"
