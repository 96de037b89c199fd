"""A line chart as SVG, written by hand: in-time answers against offered load, a panel per cell, a line per policy."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

__all__ = ["Line", "chart"]

PANEL_WIDTH: Final = 276
PANEL_HEIGHT: Final = 220
LEFT: Final = 44
GAP: Final = 20
TOP: Final = 76
BOTTOM: Final = 70
X_RANGE: Final = (0.15, 12.0)
TICKS: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
COLOURS: Final = ("#0b7285", "#c92a2a", "#e67700", "#5f3dc4", "#2b8a3e", "#868e96")
STYLE: Final = """
text { font: 12px system-ui, sans-serif; fill: #1f2933 } .title { font-size: 16px; font-weight: 600 }
.quiet { fill: #616e7c } .grid { stroke: #e4e7eb }
.line { fill: none; stroke-width: 2 } .bound { stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) { text { fill: #e4e7eb } .quiet { fill: #9aa5b1 } .grid { stroke: #3e4c59 }
svg { background: #1f2933 } }
"""

Line = Sequence[tuple[float, float]]
"""Points (offered load, in-time answers), both as multiples of U2, ascending in the first."""


def chart(title: str, note: str, panels: Mapping[str, Mapping[str, Line]], bound: str) -> str:
    """Draw it.

    Args:
        title: Above.
        note: Below the title, smaller.
        panels: Heading → name of the line → points. Names have the same colour in every panel.
        bound: Name of the line that no policy can be much above; dashed.

    Returns:
        A complete SVG document.
    """
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    highest = max((y for panel in panels.values() for line in panel.values() for _, y in line), default=1.0)
    top = math.ceil(highest * 2) / 2
    width = LEFT + len(panels) * (PANEL_WIDTH + GAP)
    height = TOP + PANEL_HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}"><style>{STYLE}</style>',
        f'<text class="title" x="12" y="22">{escape(title)}</text>',
        f'<text class="quiet" x="12" y="40">{escape(note)}</text>',
    ]
    for column, (heading, panel) in enumerate(panels.items()):
        left = LEFT + column * (PANEL_WIDTH + GAP)
        parts += _axes(left, top, heading, has_labels=column == 0)
        for name, line in panel.items():
            points = " ".join(f"{left + _x(load):.1f},{_y(kept, top):.1f}" for load, kept in line)
            kind = "line bound" if name == bound else "line"
            parts.append(f'<polyline class="{kind}" stroke="{colours[name]}" points="{points}"/>')
            if name != bound:
                parts += [
                    f'<circle cx="{left + _x(load):.1f}" cy="{_y(kept, top):.1f}" r="3" fill="{colours[name]}"/>'
                    for load, kept in line
                ]
    at = LEFT
    for name in names:
        y = TOP + PANEL_HEIGHT + 56
        parts += [
            f'<line x1="{at}" x2="{at + 18}" y1="{y - 4}" y2="{y - 4}" stroke="{colours[name]}" stroke-width="2"'
            f"{' stroke-dasharray=' + chr(34) + '4 3' + chr(34) if name == bound else ''}/>",
            f'<text x="{at + 24}" y="{y}">{escape(name)}</text>',
        ]
        at += 44 + 8 * len(name)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(load: float) -> float:
    low, high = (math.log10(limit) for limit in X_RANGE)
    return (math.log10(min(max(load, X_RANGE[0]), X_RANGE[1])) - low) / (high - low) * PANEL_WIDTH


def _y(kept: float, top: float) -> float:
    return TOP + PANEL_HEIGHT * (1 - kept / top)


def _axes(left: int, top: float, heading: str, *, has_labels: bool) -> list[str]:
    bottom = TOP + PANEL_HEIGHT
    parts = [f'<text class="quiet" x="{left}" y="{TOP - 12}">{escape(heading)}</text>']
    for step in range(int(top * 2) + 1):
        y = _y(step / 2, top)
        parts.append(f'<line class="grid" x1="{left}" x2="{left + PANEL_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if has_labels:
            parts.append(f'<text class="quiet" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{step / 2:g}</text>')
    for load in TICKS:
        x = left + _x(load)
        parts += [
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>',
            f'<text class="quiet" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{load:g}</text>',
        ]
    parts.append(
        f'<text class="quiet" x="{left + PANEL_WIDTH / 2}" y="{bottom + 34}" text-anchor="middle">offered, x U2</text>'
    )
    return parts
