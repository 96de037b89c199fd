"""Tables and JSON on standard output: readable without colour, at most 80 columns."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from cyclopts import Parameter

COLUMNS: Final = 80

Output = Annotated[
    Literal["table", "json"], Parameter(name=["--output", "-o"], help="`table` for people, `json` for programs.")
]
HomeFlag = Annotated[
    Path | None, Parameter(name="--home", help="State folder; else HEADRACE_HOME, else .headrace.", show_default=False)
]


def print_json(value: Any) -> None:
    """One indented document."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their content; the last one wraps so that lines stay within 80 columns."""
    for line in table_lines(headings, rows):
        print(line)


def table_lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of `print_table`."""
    cells = [list(headings), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings) - 1)]
    used = sum(widths) + 2 * len(widths)
    room = max(20, COLUMNS - used)
    lines = []
    for row in cells:
        start = "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        last = textwrap.wrap(row[-1], room, break_on_hyphens=False) or [""]
        lines.append((start + last[0]).rstrip())
        lines += [" " * used + part for part in last[1:]]
    return lines


def duration(seconds: float) -> str:
    """`1.62 ms`."""
    if seconds >= 1.0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
