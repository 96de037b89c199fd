"""The small files that processes exchange."""

import errno
import os
from pathlib import Path

import pytest

from headrace import home
from headrace.home import write_atomically


def test_what_could_not_be_written_leaves_the_old_content_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7: on a full disk half a file under a name of its own would take the room that the next attempt needs."""
    path = tmp_path / "worker-1.json"
    write_atomically(path, b"old")

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(home.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")

    assert b"old" == path.read_bytes()
    assert ["worker-1.json"] == [each.name for each in tmp_path.iterdir()]
