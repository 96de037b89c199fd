"""Examples in the documentation are real: configuration loads, commands and settings exist."""

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from headrace.cli.main import COMMANDS
from headrace.config import BY_NAME, load

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]

_BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", re.M | re.S)
_COMMAND = re.compile(r"\bheadrace ([a-z]+)\b")
_VARIABLE = re.compile(r"\bHEADRACE_([A-Z_]+[A-Z])\b")
_CODE = re.compile(r"`([^`\n]+)`")


def _blocks(language: str) -> list[tuple[str, str]]:
    """Fenced blocks of a language: where they are, and their text."""
    found = []
    for page in sorted(PAGES):
        text = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            if match[2] == language:
                line = text.count("\n", 0, match.start()) + 1
                found.append((f"{page.relative_to(ROOT)}:{line}", textwrap.dedent(match[3])))
    return found


def _configurations() -> list[tuple[str, str]]:
    """YAML blocks that are a headrace.yaml: a mapping with `server:` or `models:`."""
    return [
        (place, text)
        for place, text in _blocks("yaml")
        if isinstance(content := yaml.safe_load(text), dict) and content.keys() & {"server", "models"}
    ]


def test_there_is_a_configuration_example() -> None:
    """The README shows a configuration; if it is not found here, the search is broken."""
    assert [] != [place for place, _ in _configurations() if place.startswith("README.md")]


@pytest.mark.parametrize(("place", "text"), _configurations(), ids=[place for place, _ in _configurations()])
def test_a_documented_configuration_loads(place: str, text: str, tmp_path: Path) -> None:
    """What a page shows as headrace.yaml passes the real loader, and all of its models are taken."""
    (tmp_path / "headrace.yaml").write_text(text, encoding="utf-8")

    configuration = load(folder=tmp_path, environment={})

    assert len(yaml.safe_load(text).get("models", [])) == len(configuration.models)


def _shown_code() -> list[tuple[str, str]]:
    """Shell blocks and code in running text of all pages."""
    shown = _blocks("sh")
    for page in sorted(PAGES):
        shown += [(str(page.relative_to(ROOT)), code) for code in _CODE.findall(page.read_text(encoding="utf-8"))]
    return shown


def test_every_command_that_a_page_shows_exists() -> None:
    """`headrace something` in a page is a command of the program."""
    known = {name for name, _, _ in COMMANDS}
    unknown = {f"{place}: headrace {name}" for place, text in _shown_code() for name in _COMMAND.findall(text)
               if name not in known}  # fmt: skip

    assert set() == unknown


def test_every_environment_variable_that_a_page_shows_is_read() -> None:
    """`HEADRACE_SOMETHING` in a page is a setting, the state folder or the configuration file."""
    known = {*(name.upper() for name in BY_NAME), "HOME", "CONFIG"}
    unknown = {f"{place}: {name}" for place, text in _shown_code() for name in _VARIABLE.findall(text)
               if name not in known}  # fmt: skip

    assert set() == unknown
