"""Finds what can be served at a path: a model file, a folder of them, or a model store.

    model.onnx                           one model named after the file, version 1
    FOLDER/<name>.onnx …                 one model per file, version 1 each
    FOLDER/<name>/<version>/model.onnx   Triton's layout; also <name>/model.onnx (version 1)
    FOLDER/<version>/model.onnx          one model named after the folder, when every folder in it is a version number

Class labels stand beside the artefact, one a line: `<file stem>.labels.txt`, or `labels.txt` when the artefact is the
only one in its folder; failing that, `labels.txt` in the model's folder, where Triton keeps it.

The supervisor imports this module: standard library and msgspec only, no numpy, no runtime.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from headrace.artefact import file_digest
from headrace.errors import LoadError
from headrace.foreign_formats import foreign_format, foreign_suffix
from headrace.snapshot import VersionSpec, version_key

__all__ = ["DiscoverProblem", "Discovery", "FoundModel", "discover", "survey"]

SUFFIXES: Final = (".onnx", ".sleep.json")
"""What an artefact's name ends with; the second is for the `sleep` runtime of scheduler tests."""

NAME_RULE: Final = "1 to 128 of the characters A-Z a-z 0-9 . _ -, beginning with a letter, a digit or _"
ACCEPTED: Final = "a .onnx file, a folder of <name>.onnx, or a folder of <name>/<version>/model.onnx"
LABELS_BYTES_MAX: Final = 1 << 20
LISTED_MAX: Final = 10

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_VERSION_NUMBER = re.compile(r"v?\d+([._-]\d+)*")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """One model at the source.

    Attributes:
        name: From the file or folder.
        versions: At least one, ascending by `headrace.snapshot.version_key`; paths are absolute.
    """

    name: str
    versions: tuple[VersionSpec, ...]


@dataclass(frozen=True, slots=True)
class DiscoverProblem:
    """Something at the source that is not served.

    Attributes:
        path: Which file or folder.
        message: Why not, and what would be accepted.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a source holds.

    Attributes:
        models: Sorted by name, each name once.
        problems: Sorted by path.
    """

    models: tuple[FoundModel, ...]
    problems: tuple[DiscoverProblem, ...]


def discover(source: Path) -> list[FoundModel]:
    """Find the models at a path; `survey` also tells what was left aside.

    Args:
        source: A file or folder.

    Returns:
        At least one model, sorted by name.

    Raises:
        headrace.errors.LoadError: Nothing can be served there; says what was seen and what would be accepted.
    """
    return list(survey(source).models)


def survey(source: Path) -> Discovery:
    """Find the models at a path and what beside them cannot be served.

    Args:
        source: A file or folder; a symbolic link is followed.

    Returns:
        At least one model. Hidden files are ignored. Wrong names, unreadable files and files whose extension says
        another model format are problems; any other file (a README, external weights) is told only when nothing can
        be served.

    Raises:
        headrace.errors.LoadError: Nothing can be served there; says what was seen and what would be accepted.
    """
    # Absolute without resolving links: a stable link (`current -> v7`) stays the name that operators know.
    source = Path(os.path.abspath(source.expanduser()))
    found = _Found()
    try:
        if source.is_dir():
            _survey_folder(source, found)
        elif source.is_file():
            _survey_file(source, found)
        elif source.exists():
            _refuse(f"{source} is neither a file nor a folder; accepted: {ACCEPTED}")
        else:
            _refuse(f"{source} does not exist; accepted: {ACCEPTED}")
    except PermissionError as error:
        _refuse(f"{error.filename or source} cannot be read: permission denied; accepted: {ACCEPTED}")
    if not found.models:
        _refuse_empty(source, found)
    for path in found.others:
        if (foreign := foreign_suffix(path)) is not None:
            found.problem(path, f"is {foreign.what}; accepted: ONNX. hint: {foreign.how}")
    models = [
        FoundModel(name, tuple(sorted(versions, key=lambda spec: version_key(spec.version))))
        for name, versions in sorted(found.models.items())
    ]
    return Discovery(tuple(models), tuple(sorted(found.problems, key=lambda problem: problem.path)))


class _Found:
    """Collects while the walk goes on."""

    def __init__(self) -> None:
        self.models: dict[str, list[VersionSpec]] = {}
        self.problems: list[DiscoverProblem] = []
        self.others: list[Path] = []

    def problem(self, path: Path, message: str) -> None:
        self.problems.append(DiscoverProblem(str(path), message))

    def add(self, name: str, artefacts: list[tuple[str, Path]]) -> None:
        """Take a model with its (version, artefact) pairs; what is wrong with one version leaves the others."""
        origin = artefacts[0][1]
        if not _NAME.fullmatch(name):
            self.problem(origin, f"{name!r} is not a model name; accepted: {NAME_RULE}")
            return
        if name in self.models:
            first = self.models[name][0].path
            self.problem(origin, f"the name {name!r} is already taken by {first}; accepted: one place per name")
            return
        specs = [spec for version, path in artefacts if (spec := self._spec(name, version, path)) is not None]
        if specs:
            self.models[name] = specs

    def _spec(self, name: str, version: str, path: Path) -> VersionSpec | None:
        if not _NAME.fullmatch(version):
            self.problem(path, f"{version!r} of model {name!r} is not a version name; accepted: {NAME_RULE}")
            return None
        try:
            digest = file_digest(path)
        except OSError as error:
            self.problem(path, f"cannot be read: {error.strerror}; accepted: a file that this user may read")
            return None
        return VersionSpec(version=version, path=str(path), digest=digest, labels=self._labels(path, version))

    def _labels(self, path: Path, version: str) -> tuple[str, ...]:
        own = path.with_name(f"{_stem(path)}.labels.txt")
        if own.is_file():
            return self._read_labels(own)
        shared = path.with_name("labels.txt")
        if shared.is_file():
            if len(_artefacts(path.parent)) == 1:
                return self._read_labels(shared)
            problem = DiscoverProblem(
                str(shared), "stands beside several models and is not used; accepted: <model>.labels.txt for each"
            )
            if problem not in self.problems:
                self.problems.append(problem)
        elif path.parent.name == version and (path.parent.parent / "labels.txt").is_file():
            return self._read_labels(path.parent.parent / "labels.txt")
        return ()

    def _read_labels(self, path: Path) -> tuple[str, ...]:
        try:
            if path.stat().st_size > LABELS_BYTES_MAX:
                self.problem(path, f"labels take {path.stat().st_size} bytes; accepted: {LABELS_BYTES_MAX} at most")
                return ()
            text = path.read_text("utf-8-sig")
        except OSError as error:
            self.problem(path, f"labels cannot be read: {error.strerror}")
            return ()
        except UnicodeDecodeError as error:
            self.problem(path, f"labels hold byte {error.object[error.start]:#04x}; accepted: UTF-8, one label a line")
            return ()
        # A label's line number is its index, so an empty line in between stays.
        return tuple(line.strip() for line in text.rstrip().split("\n")) if text.strip() else ()


def _survey_file(path: Path, found: _Found) -> None:
    if _is_artefact(path) and path.is_file():
        found.add(_stem(path), [("1", path)])
    else:
        found.others.append(path)


def _survey_folder(source: Path, found: _Found) -> None:
    folders: list[Path] = []
    for path in _visible(source):
        # A folder named model.onnx is Triton's form for a model with external weights.
        if path.is_dir() and not _is_artefact(path):
            folders.append(path)
        elif not path.is_dir():
            _survey_file(path, found)
    direct = {folder: artefact for folder in folders if (artefact := _artefact_if_readable(folder)) is not None}
    has_only_versions = bool(direct) and not found.models and len(direct) == len(folders)
    if has_only_versions and all(_VERSION_NUMBER.fullmatch(folder.name) for folder in direct):
        found.add(source.name, [(folder.name, artefact) for folder, artefact in direct.items()])
        return
    for folder in folders:
        try:
            _survey_model(folder, found)
        except PermissionError as error:
            found.problem(folder, f"cannot be read: {error.strerror}; accepted: a folder that this user may read")
    # The source may itself be `<name>/model.onnx/model.onnx`.
    if not found.models and (artefact := _artefact_if_readable(source)) is not None and artefact.parent != source:
        found.add(source.name, [("1", artefact)])


def _survey_model(folder: Path, found: _Found) -> None:
    """Take `<name>/<version>/model.onnx`, or `<name>/model.onnx` as version 1."""
    if (foreign := foreign_format(folder)) is not None:
        found.problem(folder, f"is {foreign.what}; accepted: ONNX. hint: {foreign.how}")
        return
    artefacts: list[tuple[str, Path]] = []
    if (artefact := _artefact_of(folder, found.problem)) is not None:
        artefacts.append(("1", artefact))
    for child in _visible(folder):
        if child.is_dir() and not _is_artefact(child):
            if (artefact := _artefact_of(child, found.problem)) is None:
                found.others += [path for path in _visible(child) if path.is_file() and not _is_artefact(path)]
            elif any(version == child.name for version, _ in artefacts):
                found.problem(artefact, f"version {child.name!r} is already taken by {artefacts[0][1]}")
            else:
                artefacts.append((child.name, artefact))
        elif child.is_file() and not _is_artefact(child):
            found.others.append(child)
    if artefacts:
        found.add(folder.name, artefacts)


def _artefact_of(folder: Path, problem: Callable[[Path, str], None] | None) -> Path | None:
    """The one artefact of a version folder: `model.onnx`, or the only one under another name."""
    artefacts = _artefacts(folder)
    named = [path for path in artefacts if _stem(path) == "model"]
    chosen = named or artefacts
    if len(chosen) == 1:
        # Triton lets model.onnx be a folder that holds model.onnx and its external weights.
        inner = chosen[0] / "model.onnx"
        return inner if inner.is_file() else chosen[0] if chosen[0].is_file() else None
    if chosen and problem is not None:
        names = ", ".join(path.name for path in chosen[:LISTED_MAX])
        problem(folder, f"holds {len(chosen)} models ({names}); accepted: one, or one named model.onnx")
    return None


def _artefact_if_readable(folder: Path) -> Path | None:
    try:
        return _artefact_of(folder, None)
    except PermissionError:
        return None


def _artefacts(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if _is_artefact(path)]


def _is_artefact(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)


def _stem(path: Path) -> str:
    return next(path.name.removesuffix(suffix) for suffix in SUFFIXES if path.name.endswith(suffix))


def _visible(folder: Path) -> list[Path]:
    """What a folder holds, sorted, without hidden files (and so without `..data`, where Kubernetes keeps mounts)."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _refuse_empty(source: Path, found: _Found) -> NoReturn:
    """Say what was seen instead of a model: at most `LISTED_MAX` lines."""
    seen = [str(problem) for problem in found.problems]
    if source.is_dir() and (foreign := foreign_format(source)) is not None:
        seen.append(f"{source}: is {foreign.what}. hint: {foreign.how}")
        found.others.clear()
    for path in found.others:
        try:
            foreign = foreign_format(path)
        except OSError as error:
            seen.append(f"{path}: cannot be read: {error.strerror}")
            continue
        seen.append(f"{path}: is {foreign.what}. hint: {foreign.how}" if foreign else f"{path}: is no model file")
    if len(seen) > LISTED_MAX:
        seen[LISTED_MAX:] = [f"… and {len(seen) - LISTED_MAX} more"]
    lines = "".join(f"\n  {line}" for line in seen) or " (it is empty)"
    _refuse(f"found nothing to serve in {source}; accepted: {ACCEPTED}{lines}")


def _refuse(message: str) -> NoReturn:
    raise LoadError(message)
