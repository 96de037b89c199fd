"""From what was found on disk to the next desired snapshot, and into the home folder.

    configuration ──find──► wanted models ──plan_snapshot (pure)──► snapshot + notices ──publish──► snapshots/desired

Three rules decide the default version, and no other event changes it:

1. At the first start it is the numerically highest version (10 above 9).
2. Later a chosen default stays the default as long as it exists. A new version never becomes default by itself.
3. When the default is gone, the highest that remains takes over, and a notice says so loudly.

`alias` is the operator's way to choose; `default_version:` in the configuration file outranks it.
"""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.config import Configuration, ModelEntry, load, nearest
from headrace.control_plane.discover import survey
from headrace.errors import LoadError
from headrace.home import Home, write_atomically
from headrace.snapshot import EndpointSpec, Snapshot, VersionSpec, make_snapshot, version_key


@dataclass(frozen=True, slots=True)
class Wanted:
    """One endpoint to be: what was configured and what was found for it.

    Attributes:
        name: Endpoint name.
        versions: Found versions; empty when the path could not be read.
        problem: Why there are no versions; empty otherwise.
    """

    name: str
    entry: ModelEntry
    versions: tuple[VersionSpec, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The next desired state.

    Attributes:
        notices: What the operator must hear about, one line each.
    """

    snapshot: Snapshot
    notices: tuple[str, ...]


class Source(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `headrace serve` was asked to serve; `run/source.json` keeps it so that a reload can look again.

    Attributes:
        folder: Working folder at the time, against which the rest is read.
        source: The positional argument; None when there was none.
        config, name, slo: The flags.
    """

    folder: str
    source: str | None = None
    config: str | None = None
    name: str = ""
    slo: str = ""


class PublishError(Exception):
    """Nothing was published; the message says what was seen and what is accepted."""


def _is_not_text(path: str) -> bool:
    """A file name may be any bytes; a snapshot and a report are JSON, which cannot carry all of them."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return True
    return False


# ------------------------------------------------------------------------------------------------------- deciding


def plan_snapshot(wanted: Sequence[Wanted], previous: Snapshot | None) -> Plan:
    """Decide the next snapshot.

    Args:
        wanted: What is configured and found now.
        previous: What was desired so far; None at the first start.

    Returns:
        The snapshot and what is to be said about it. A model whose path cannot be read now keeps its previous
        endpoint: a folder that is missing for a moment must not take a model out of service.

    Raises:
        PublishError: Nothing could be served at all.
    """
    before = {endpoint.name: endpoint for endpoint in previous.endpoints} if previous is not None else {}
    endpoints: dict[str, EndpointSpec] = {}
    notices: list[str] = []
    for item in wanted:
        endpoint = _endpoint(item, before.get(item.name), notices)
        if endpoint is None:
            continue
        if any(_is_not_text(version.path) for version in endpoint.versions):
            notices.append(f"{item.name}: {item.entry.path!a} is not valid UTF-8; accepted: a path that is text")
            continue
        if item.name in endpoints:
            notices.append(f"{item.name}: found twice ({item.entry.path}); the first is served. Give one another name:")
            continue
        endpoints[item.name] = endpoint
    if not endpoints:
        raise PublishError("\n".join(notices) or "no model is configured; accepted: a model file, a folder or models:")
    notices += [f"{name}: no longer configured; it is taken out of service" for name in before if name not in endpoints]
    return Plan(make_snapshot(list(endpoints.values())), tuple(notices))


def _endpoint(item: Wanted, before: EndpointSpec | None, notices: list[str]) -> EndpointSpec | None:
    if not item.versions:
        if before is None:
            notices.append(f"{item.name}: not served: {item.problem}")
        else:
            notices.append(f"{item.name}: {item.problem}; its last versions stay in service")
        return before
    entry = item.entry
    return EndpointSpec(
        name=item.name,
        model=item.name,
        versions=tuple(sorted(item.versions, key=lambda version: version_key(version.version))),
        default_version=_default_version(item, before, notices),
        slo=entry.slo,
        contract=entry.contract,
        records=entry.records,
        batching=entry.batching,
        runtime=entry.runtime,
        nonfinite=entry.nonfinite,
    )


def _default_version(item: Wanted, before: EndpointSpec | None, notices: list[str]) -> str:
    names = sorted((version.version for version in item.versions), key=version_key)
    asked = item.entry.default_version
    if asked in names:
        return asked
    if asked:
        notices.append(f"{item.name}: default_version {asked!r} does not exist; found: {', '.join(names)}")
    if before is None:
        return names[-1]
    if before.default_version in names:
        known = {version.version for version in before.versions}
        notices += [
            f"{item.name}: version {name} is new and will be loaded; the default stays {before.default_version} "
            f"(headrace model alias {item.name} {name})"
            for name in names
            if name not in known
        ]
        return before.default_version
    notices.append(
        f"{item.name}: DEFAULT VERSION {before.default_version} IS GONE; {names[-1]}, the highest that remains, "
        "answers requests that name no version"
    )
    return names[-1]


def with_default(snapshot: Snapshot, name: str, version: str) -> Snapshot:
    """The same snapshot with another default version for one endpoint.

    Raises:
        PublishError: No such endpoint or version.
    """
    names = [endpoint.name for endpoint in snapshot.endpoints]
    if name not in names:
        raise PublishError(f"no endpoint is named {name!r}{nearest(name, names)}; served: {', '.join(names)}")
    endpoint = snapshot.endpoints[names.index(name)]
    versions = [spec.version for spec in endpoint.versions]
    if version not in versions:
        raise PublishError(f"{name} has no version {version!r}; it has: {', '.join(versions)}")
    changed = msgspec.structs.replace(endpoint, default_version=version)
    return make_snapshot([changed if old.name == name else old for old in snapshot.endpoints])


# --------------------------------------------------------------------------------------------------------- finding


def find(configuration: Configuration) -> tuple[list[Wanted], list[str]]:
    """Look at every configured path.

    Returns:
        What was found; a path that cannot be read is told in `problem`. And files left aside, with the reasons.
    """
    notices: list[str] = []
    return [wanted for entry in configuration.models for wanted in _find_entry(entry, notices)], notices


def _find_entry(entry: ModelEntry, notices: list[str]) -> list[Wanted]:
    fallback = entry.name or Path(entry.path).stem
    try:
        found = survey(Path(entry.path))
    except (LoadError, OSError) as error:
        return [Wanted(fallback, entry, (), str(error))]
    models = found.models
    notices.extend(str(problem) for problem in found.problems)
    if entry.name and len(models) > 1:
        names = ", ".join(model.name for model in models)
        return [Wanted(fallback, entry, (), f"{entry.path}: holds several models ({names}); leave out name:")]
    return [_select(entry.name or model.name, entry, tuple(model.versions)) for model in models]


def _select(name: str, entry: ModelEntry, found: tuple[VersionSpec, ...]) -> Wanted:
    """Apply `version:` and `labels:` of the entry."""
    versions = found
    if entry.version and len(found) == 1 and not Path(entry.path).is_dir():
        versions = (msgspec.structs.replace(found[0], version=entry.version),)
    elif entry.version:
        versions = tuple(spec for spec in found if spec.version == entry.version)
        if not versions:
            names = ", ".join(spec.version for spec in found)
            return Wanted(name, entry, (), f"version {entry.version!r} does not exist; found: {names}")
    if entry.labels:
        versions = tuple(msgspec.structs.replace(spec, labels=entry.labels) for spec in versions)
    return Wanted(name, entry, versions)


# ------------------------------------------------------------------------------------------------------ publishing


@contextmanager
def publishing(home: Home) -> Iterator[Snapshot | None]:
    """Hold the right to publish; gives the snapshot that is desired so far.

    Concurrency: `model alias` and a reload may come at the same time from two processes; reading, planning and
    writing under one lock keeps either from undoing the other.
    """
    with open(home.snapshots / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield current(home)


def current(home: Home) -> Snapshot | None:
    """The desired snapshot, or the last good one when the desired one is damaged; None when there is neither."""
    for snapshot_id in (home.desired_id(), home.last_good_id()):
        if snapshot_id is not None:
            try:
                return home.read_snapshot(snapshot_id)
            except (OSError, ValueError):
                continue
    return None


def publish(home: Home, snapshot: Snapshot) -> bool:
    """Make a snapshot the desired one.

    Returns:
        False when it already was. One whose file was damaged meanwhile is written again.
    """
    if home.desired_id() == snapshot.id and _is_readable(home, snapshot.id):
        return False
    home.write_snapshot(snapshot)
    return True


def _is_readable(home: Home, snapshot_id: str) -> bool:
    try:
        return home.read_snapshot(snapshot_id).id == snapshot_id
    except (OSError, ValueError):
        return False


def publish_configuration(home: Home, configuration: Configuration) -> Plan:
    """Find, plan and publish.

    Raises:
        PublishError: Nothing could be served at all.
    """
    wanted, left_aside = find(configuration)  # before the lock: hashing large files takes seconds
    if wanted and not any(item.versions for item in wanted):
        raise PublishError("\n".join(item.problem for item in wanted))
    with publishing(home) as previous:
        plan = plan_snapshot(wanted, previous)
        publish(home, plan.snapshot)
    return Plan(plan.snapshot, (*left_aside, *plan.notices))


def alias(home: Home, name: str, version: str) -> Snapshot:
    """Choose the default version of an endpoint.

    Raises:
        PublishError: There is no such endpoint or version, or nothing was ever served from this home.
    """
    if not home.snapshots.is_dir():
        raise PublishError(f"nothing was served from {home.root} yet")
    with publishing(home) as snapshot:
        if snapshot is None:
            raise PublishError(f"nothing was served from {home.root} yet")
        changed = with_default(snapshot, name, version)
        publish(home, changed)
    return changed


def remember_source(home: Home, source: Source) -> None:
    """Keep what was asked to be served."""
    write_atomically(home.run / "source.json", msgspec.json.encode(source))


def reload(home: Home) -> Plan:
    """Look again at what is served and publish the difference.

    Raises:
        headrace.errors.ConfigError: The configuration file is wrong now; what is served stays.
        PublishError: Nothing could be served at all; what is served stays.
        OSError, ValueError: `run/source.json` cannot be read.
    """
    source = msgspec.json.decode((home.run / "source.json").read_bytes(), type=Source)
    configuration = load(
        source.source,
        config=source.config,
        name=source.name,
        slo=source.slo,
        folder=Path(source.folder),
    )
    return publish_configuration(home, configuration)
