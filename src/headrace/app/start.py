"""From the command line to a running supervisor: one owner per home folder, desired state on disk, then exec.

    load configuration → prepare home → lock → find and publish models → write settings → exec supervisor

The last step replaces this process, which has imported a command line parser and a YAML reader, by the supervisor,
which keeps none of that in memory. The process id stays, so whoever started `headrace serve` can signal it.
"""

import errno
import fcntl
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from headrace.app.observe import is_alive
from headrace.config import Configuration, Settings, divide_cores, usable_cores
from headrace.home import Home, write_atomically

PYTHON = (sys.executable, "-P")  # -P: a file named numpy.py in the working folder must not become ours


class StartError(Exception):
    """The server cannot start.

    Attributes:
        message: What happened, what was seen, what would be accepted.
        hint: The next step; empty when there is none.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


def prepare_home(root: Path) -> Home:
    """Make the state folder and prove that it can be written.

    Raises:
        StartError: It cannot be written.
    """
    home = Home(root)
    try:
        home.prepare()
        probe = home.run / f".probe.{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
        # Locks and counters are opened, not replaced, and may be another user's in a folder that all may write.
        for path in (home.run / "lock", home.snapshots / ".lock", *home.run.glob("*.slots")):
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, f"this user may not write {path}")
    except OSError as error:
        raise StartError(
            f"the state folder {home.root} cannot be written: {error.strerror or error}",
            "choose another one: HEADRACE_HOME=/path/to/folder, or --home",
        ) from error
    return home


def take_lock(home: Home, orphan_s_max: float = 0.0) -> int:
    """Become the only server of this home.

    Args:
        orphan_s_max: How long to wait for workers whose supervisor was killed: they hold the lock while they finish
            their requests, so that no two generations ever write the same counters.

    Returns:
        The descriptor that holds the lock; children inherit it, and the kernel frees it with the last of them.

    Raises:
        StartError: Another server has it.
    """
    descriptor = os.open(home.run / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    limit_s = time.monotonic() + orphan_s_max
    is_told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                os.close(descriptor)
                raise StartError(f"{home.run / 'lock'} cannot be locked: {error.strerror}") from error
        owner = read_pid(home)
        if (owner is not None and is_alive(owner)) or time.monotonic() >= limit_s:
            os.close(descriptor)
            raise StartError(
                f"another server uses {home.root} (pid {owner or 'unknown'})",
                f"stop it (kill {owner or 'PID'}), or give this one its own state: HEADRACE_HOME=/another/folder",
            )
        if not is_told:
            print("headrace: waiting for workers of a server that was killed", file=sys.stderr)
            is_told = True
        time.sleep(0.02)


def read_pid(home: Home) -> int | None:
    """Process id of the running supervisor, as far as the file knows."""
    try:
        return int(home.pid_file().read_text())
    except (OSError, ValueError):
        return None


def effective_settings(settings: Settings) -> Settings:
    """Settings with the zeros of workers and threads decided for this machine."""
    workers, threads = divide_cores(settings, usable_cores())
    return msgspec.structs.replace(settings, workers=workers, threads=threads)


def write_settings(home: Home, settings: Settings) -> None:
    """Tell every process the settings in force."""
    write_atomically(home.settings_file(), msgspec.json.format(msgspec.json.encode(settings), indent=1))


def read_settings(home: Home) -> Settings:
    """Settings in force.

    Raises:
        StartError: There are none, or they are damaged.
    """
    try:
        return msgspec.json.decode(home.settings_file().read_bytes(), type=Settings)
    except (OSError, msgspec.DecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StartError(
            f"{home.settings_file()} cannot be read: {reason}; accepted: the state folder of a server",
            "headrace serve model.onnx makes one, --home names another",
        ) from error


def stage(configuration: Configuration, source: msgspec.Struct) -> tuple[Home, int, tuple[str, ...]]:
    """Everything before the exec: home, lock, desired snapshot, settings.

    Args:
        source: `control_plane.publish.Source`, kept for reloads.

    Returns:
        The home, the descriptor of its lock, and notices for the operator.

    Raises:
        StartError: The home cannot be used.
        headrace.control_plane.publish.PublishError: No model can be served.
    """
    from headrace.control_plane import publish

    home = prepare_home(configuration.home)
    lock = take_lock(home, configuration.settings.drain_s_max + 5.0)
    plan = publish.publish_configuration(home, configuration)
    assert isinstance(source, publish.Source)
    publish.remember_source(home, source)
    write_settings(home, effective_settings(configuration.settings))
    return home, lock, (*configuration.notices, *plan.notices)


def exec_module(module: str, *arguments: str, keep_fds: tuple[int, ...] = ()) -> NoReturn:
    """Replace this process by a module of ours."""
    for descriptor in keep_fds:
        os.set_inheritable(descriptor, True)
    sys.stdout.flush()
    sys.stderr.flush()
    no_telemetry()
    try:
        os.execv(PYTHON[0], [*PYTHON, "-m", module, *arguments])
    except OSError as error:
        raise StartError(
            f"{PYTHON[0]} cannot be run: {error.strerror}", "can this user read and execute it, and its folders?"
        ) from error


def no_telemetry() -> None:
    """Keep ONNX Runtime from reporting to its maker; what the operator says in the environment outranks us.

    Source: 1.32 for Linux starts a telemetry client with a thread of its own unless this variable is set.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
