"""Every link in the documentation leads somewhere, and every function that the tour names exists."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.M | re.S)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[(?:[^\[\]]|`[^`]*`)*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_SYMBOL = re.compile(r"\[`([\w/]+\.py)::([\w.]+)`\]\(([^)\s]+)\)")
_NAMED = re.compile(r"`[^`\n]*\.py::[^`\n]*`")
_HEADING = re.compile(r"^#+\s+(.*?)\s*#*$", re.M)
_SOURCE_PATH = re.compile(r"`((?:src|tests|docs|scripts)/[\w./-]+)`")


def _documents() -> list[Path]:
    """Every Markdown file that is, or is about to be, in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:  # an unpacked archive without git
        paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path for path in paths if path.is_file())


DOCUMENTS = _documents()


def _prose(path: Path) -> str:
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def _anchors(path: Path) -> set[str]:
    """Anchors of headings as repository hosts make them."""
    titles = _HEADING.findall(_prose(path))
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "")).strip().lower().replace(" ", "-") for title in titles}


def _names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Functions, classes, methods and assigned names of a module, dotted."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
        elif isinstance(node, ast.ClassDef):
            yield prefix + node.name
            yield from _names(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign):
            yield from (prefix + target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield prefix + node.target.id


def _label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=_label)
def test_every_relative_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    """A page never sends its reader to something that is not there."""
    broken = []
    for target in _LINK.findall(_prose(document)):
        if re.match(r"[a-z]+:", target):
            continue  # elsewhere on the net, which a test must not ask
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        is_there = path.exists() and path.is_relative_to(ROOT)
        if not is_there or (anchor and path.suffix == ".md" and anchor not in _anchors(path)):
            broken.append(target)

    assert [] == broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=_label)
def test_every_named_symbol_exists_in_the_file_that_is_linked(document: Path) -> None:
    """`path.py::symbol` names a function, class or constant of the linked file, and the link says the same file."""
    text = _prose(document)
    wrong = []
    for name, symbol, target in _SYMBOL.findall(text):
        path = (document.parent / target).resolve()
        if not path.is_file() or not path.as_posix().endswith("/" + name):
            wrong.append(f"{name}::{symbol} links to {target}")
        elif symbol not in set(_names(ast.parse(path.read_text(encoding="utf-8")).body)):
            wrong.append(f"{name} has no {symbol}")
    unlinked = len(_NAMED.findall(text)) - len(_SYMBOL.findall(text))

    assert ([], 0) == (wrong, unlinked)


@pytest.mark.parametrize("document", DOCUMENTS, ids=_label)
def test_every_path_written_as_code_exists(document: Path) -> None:
    """`src/…`, `tests/…`, `docs/…` and `scripts/…` in running text are paths of this repository."""
    missing = [path for path in _SOURCE_PATH.findall(_prose(document)) if not (ROOT / path).exists()]

    assert [] == missing


def test_the_tour_has_nine_stops_and_each_names_a_function() -> None:
    """The tour is short enough to be walked, and every stop has something to look at."""
    stops = re.split(r"^\d+\. ", _prose(ROOT / "docs" / "tour.md"), flags=re.M)[1:]

    assert 9 == len(stops)
    assert [] == [stop.splitlines()[0] for stop in stops if not _SYMBOL.search(stop)]


def test_every_decision_has_the_parts_of_a_decision() -> None:
    """One page each: status, context, decision, alternatives, consequences, evidence, what would change our mind."""
    parts = ("Context", "Decision", "Alternatives", "Consequences", "Evidence", "What would change our mind")
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    lacking = [
        f"{page.name}: {part}"
        for page in pages
        for part in (*parts, "Status")
        if not re.search(rf"^## {part}" if part != "Status" else r"^\*\*Status:\*\*", page.read_text(), re.M)
    ]

    assert [] == lacking
    assert [f"{number:04}" for number in range(1, len(pages) + 1)] == [page.name[:4] for page in pages]
