"""Reading a configuration file: YAML or TOML into a mapping that remembers its lines."""

import re
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError


class Lines:
    """Lines of a file by key path; YAML says them, TOML is searched."""

    def __init__(self, name: str, lines: dict[tuple[str | int, ...], int]) -> None:
        self.name = name
        self._lines = lines

    def at(self, *path: str | int) -> str:
        """`headrace.yaml:3`, the line of the nearest known part; just the name when no line is known."""
        known = (self._lines.get(path[:depth]) for depth in range(len(path), 0, -1))
        line = next((line for line in known if line is not None), None)
        return self.name if line is None else f"{self.name}:{line}"


def read_file(path: Path) -> tuple[dict[str, Any], Lines]:
    """The content of a configuration file, and where each part of it stands.

    Raises:
        ConfigError: It cannot be read, or is not what its suffix says.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
        raise ConfigError([f"{path}: cannot be read: {reason}; accepted: a YAML or TOML file"]) from error
    content, lines = _parse_toml(path, text) if path.suffix == ".toml" else _parse_yaml(path, text)
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(
            [f"{path.name}: holds a {type(content).__name__}; accepted: a mapping with `server:` and `models:`"]
        )
    return content, lines


def _parse_yaml(path: Path, text: str) -> tuple[Any, Lines]:
    import yaml  # late: 30 ms that only those with a file pay

    lines: dict[tuple[str | int, ...], int] = {}
    repeated: list[str] = []

    def walk(node: yaml.Node, at: tuple[str | int, ...]) -> None:
        lines.setdefault(at, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                place = (*at, str(key.value))
                if place in lines:
                    repeated.append(f"{path.name}:{key.start_mark.line + 1}: {key.value} is given twice; keep one")
                lines[place] = key.start_mark.line + 1
                walk(value, place)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                walk(value, (*at, index))

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is not None:
            walk(node, ())
        content = loader.construct_document(node) if node is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = path.name if mark is None else f"{path.name}:{mark.line + 1}"
        raise ConfigError([f"{place}: is not YAML: {getattr(error, 'problem', None) or error}"]) from error
    finally:
        loader.dispose()
    if repeated:
        raise ConfigError(repeated)
    return content, Lines(path.name, lines)


def _parse_toml(path: Path, text: str) -> tuple[Any, Lines]:
    import tomllib

    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path.name}: is not TOML: {error}"]) from error
    # tomllib keeps no positions; the first line that starts with the key is right for all but exotic files.
    lines: dict[tuple[str | int, ...], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if match := re.match(r"\s*([\w-]+)\s*=", line):
            lines.setdefault(("server", match[1]), number)
    return content, Lines(path.name, lines)
