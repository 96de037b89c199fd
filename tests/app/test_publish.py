"""Which version is the default, and what is said about it."""

from pathlib import Path

import pytest

from headrace.config import ModelEntry, load
from headrace.control_plane.publish import (
    PublishError,
    Source,
    Wanted,
    alias,
    current,
    plan_snapshot,
    publish,
    publish_configuration,
    reload,
    remember_source,
    with_default,
)
from headrace.home import Home
from headrace.snapshot import Snapshot, VersionSpec


def wanted(*versions: str, name: str = "m", problem: str = "", **entry: str) -> Wanted:
    specs = tuple(VersionSpec(version=version, path=f"/{version}", digest="sha256:0") for version in versions)
    return Wanted(name, ModelEntry(path="/m", **entry), specs, problem)  # type: ignore[arg-type]


def default(snapshot: Snapshot, name: str = "m") -> str:
    return next(spec.default_version for spec in snapshot.endpoints if spec.name == name)


def test_at_the_first_start_the_highest_version_is_the_default() -> None:
    """10 is above 9, v10 above v9 (L1)."""
    assert "10" == default(plan_snapshot([wanted("9", "10", "2")], None).snapshot)
    assert "v10" == default(plan_snapshot([wanted("v9", "v10")], None).snapshot)


def test_a_new_version_never_becomes_the_default_by_itself() -> None:
    """It is loaded, and a notice says how to choose it (L1)."""
    first = plan_snapshot([wanted("1")], None)

    second = plan_snapshot([wanted("1", "2")], first.snapshot)

    assert "1" == default(second.snapshot)
    assert ["1", "2"] == [spec.version for spec in second.snapshot.endpoints[0].versions]
    assert any("headrace model alias m 2" in notice for notice in second.notices)


def test_a_chosen_default_stays_over_reloads() -> None:
    """An operator's choice is not undone by a restart (L1)."""
    first = plan_snapshot([wanted("1", "2", "3")], None)

    chosen = with_default(first.snapshot, "m", "1")

    assert "1" == default(plan_snapshot([wanted("1", "2", "3", "4")], chosen).snapshot)


def test_when_the_default_is_removed_the_highest_that_remains_takes_over_loudly() -> None:
    """Never silently (L1)."""
    first = plan_snapshot([wanted("1", "2", "10")], None)

    plan = plan_snapshot([wanted("1", "2")], first.snapshot)

    assert "2" == default(plan.snapshot)
    assert any("DEFAULT VERSION 10 IS GONE" in notice for notice in plan.notices)


def test_the_configuration_file_outranks_the_alias() -> None:
    """What is written down in files is what is served (L6)."""
    first = plan_snapshot([wanted("1", "2")], None)

    assert "1" == default(plan_snapshot([wanted("1", "2", default_version="1")], first.snapshot).snapshot)


def test_a_model_whose_folder_is_missing_for_a_moment_stays_in_service() -> None:
    """A reload takes nothing away that it cannot see (L1)."""
    first = plan_snapshot([wanted("1")], None)

    plan = plan_snapshot([wanted(problem="/m: gone")], first.snapshot)

    assert first.snapshot == plan.snapshot
    assert any("stay in service" in notice for notice in plan.notices)


def test_one_bad_model_does_not_keep_the_others_from_being_served() -> None:
    """And nothing at all is an error (L1)."""
    plan = plan_snapshot([wanted("1"), wanted(name="bad", problem="/bad: no model there")], None)

    assert ["m"] == [spec.name for spec in plan.snapshot.endpoints]
    assert ["bad: not served: /bad: no model there"] == list(plan.notices)
    with pytest.raises(PublishError, match="no model there"):
        plan_snapshot([wanted(problem="/bad: no model there")], None)


def test_the_same_content_is_the_same_snapshot() -> None:
    """Publishing is idempotent (L6)."""
    assert (
        plan_snapshot([wanted("1", "2")], None).snapshot.id
        == plan_snapshot([wanted("2", "1")], plan_snapshot([wanted("1", "2")], None).snapshot).snapshot.id
    )


def store(folder: Path, *versions: str) -> None:
    for version in versions:
        (folder / version).mkdir(parents=True, exist_ok=True)
        (folder / version / "model.onnx").write_bytes(version.encode())


def test_serve_reload_and_alias_meet_in_the_home(tmp_path: Path) -> None:
    """From a model store on disk to the desired snapshot and back (L1, L6)."""
    models, home = tmp_path / "iris", Home(tmp_path / "home")
    home.prepare()
    store(models, "1", "2")
    publish_configuration(home, load(str(models), environment={}, folder=tmp_path))
    remember_source(home, Source(folder=str(tmp_path), source=str(models)))

    alias(home, "iris", "1")
    store(models, "3")
    plan = reload(home)

    served = current(home)
    assert served is not None
    assert "1" == default(served, "iris")
    assert ["1", "2", "3"] == [spec.version for spec in served.endpoints[0].versions]
    assert any("version 3 is new" in notice for notice in plan.notices)
    assert home.desired_id() == served.id
    assert not publish(home, served)


def test_an_alias_to_what_does_not_exist_says_what_does(tmp_path: Path) -> None:
    """Nothing is published on a slip of the pen (L1)."""
    snapshot = plan_snapshot([wanted("1", "2", name="iris")], None).snapshot

    with pytest.raises(PublishError, match="did you mean 'iris'"):
        with_default(snapshot, "irsi", "1")
    with pytest.raises(PublishError, match="it has: 1, 2"):
        with_default(snapshot, "iris", "3")
    with pytest.raises(PublishError, match="nothing was served"):
        alias(Home(tmp_path / "nothing"), "iris", "1")


def test_a_damaged_desired_snapshot_falls_back_to_the_last_good_one(tmp_path: Path) -> None:
    """Static stability starts on disk (design §1)."""
    home = Home(tmp_path)
    home.prepare()
    good = plan_snapshot([wanted("1")], None).snapshot
    publish(home, good)
    home.mark_good(good.id)
    newer = plan_snapshot([wanted("1", "2")], good).snapshot
    publish(home, newer)

    (home.snapshots / f"{newer.id}.json").write_bytes(b"{")

    assert good == current(home)


def test_a_path_that_is_not_text_is_named_and_costs_that_model_only() -> None:
    """L1, P3: on Linux a folder's name may be any bytes, and not all of them can be written into a snapshot."""
    bad = Wanted("bad", ModelEntry(path="/x\udcff"), (VersionSpec("1", "/x\udcff/m.onnx", "sha256:0"),))

    plan = plan_snapshot([bad, wanted("1")], None)

    assert ["m"] == [spec.name for spec in plan.snapshot.endpoints]
    assert ["bad: '/x\\udcff' is not valid UTF-8; accepted: a path that is text"] == list(plan.notices)
    with pytest.raises(PublishError, match="is not valid UTF-8"):
        plan_snapshot([bad], None)
