"""Where things lie under `$HEADRACE_HOME` (default `.headrace` in the working folder).

    snapshots/<id>.json     every snapshot that was published
    snapshots/desired       id of the one that shall be served
    snapshots/last-good     id of the last one that was warm everywhere
    run/settings.json       settings in force
    run/supervisor.pid      process id of the running supervisor
    run/worker-N.json       report of worker N
    run/worker-N.slots      counters of worker N, memory-mapped
    records/worker-N/       record segments of worker N

Small files are replaced by rename, so that a reader never sees half of one.
"""

import contextlib
import os
from pathlib import Path

from headrace.snapshot import Snapshot, decode_snapshot, encode_snapshot


class Home:
    """Paths and the few small files that processes exchange."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.snapshots = self.root / "snapshots"
        self.run = self.root / "run"
        self.records = self.root / "records"

    def prepare(self) -> None:
        """Make the folders.

        Raises:
            OSError: The place cannot be written.
        """
        for folder in (self.snapshots, self.run, self.records):
            folder.mkdir(parents=True, exist_ok=True)

    def settings_file(self) -> Path:
        return self.run / "settings.json"

    def pid_file(self) -> Path:
        return self.run / "supervisor.pid"

    def slots_file(self, worker: int) -> Path:
        return self.run / f"worker-{worker}.slots"

    def report_file(self, worker: int) -> Path:
        return self.run / f"worker-{worker}.json"

    def records_folder(self, worker: int) -> Path:
        return self.records / f"worker-{worker}"

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Keep a snapshot and make it the desired one."""
        write_atomically(self.snapshots / f"{snapshot.id}.json", encode_snapshot(snapshot))
        write_atomically(self.snapshots / "desired", snapshot.id.encode())

    def mark_good(self, snapshot_id: str) -> None:
        """Note that every endpoint of this snapshot is warm."""
        write_atomically(self.snapshots / "last-good", snapshot_id.encode())

    def desired_id(self) -> str | None:
        """Id of the desired snapshot; None before the first."""
        return self._read_id("desired")

    def last_good_id(self) -> str | None:
        """Id of the last snapshot that was warm; None before the first."""
        return self._read_id("last-good")

    def read_snapshot(self, snapshot_id: str) -> Snapshot:
        """Read one snapshot.

        Raises:
            OSError: It cannot be read.
            ValueError: It is damaged.
        """
        return decode_snapshot((self.snapshots / f"{snapshot_id}.json").read_bytes())

    def _read_id(self, name: str) -> str | None:
        try:
            return (self.snapshots / name).read_text().strip() or None
        except (FileNotFoundError, UnicodeDecodeError):
            return None


def write_atomically(path: Path, content: bytes, *, is_synced: bool = True) -> None:
    """Replace a file in one step; a crash of the process leaves the old or the new content.

    Args:
        is_synced: So does a crash of the machine; costs a wait for the disk.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        # On a full disk half a file would take the room that the next attempt needs.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
