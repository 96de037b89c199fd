"""A bar chart on a logarithmic axis as SVG, written by hand: three panels side by side, one bar per server."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

__all__ = ["chart"]

LABELS: Final = 108
PANEL: Final = 224
BAR: Final = 24
TOP: Final = 66
STYLE: Final = """
text { font: 12px system-ui, sans-serif; fill: #1f2933 } .title { font-size: 16px; font-weight: 600 }
.quiet { fill: #616e7c } .value { font-variant-numeric: tabular-nums }
.line { stroke: #e4e7eb } .whisker { stroke: #1f2933 }
.bar { fill: #9aa5b1 } .ours { fill: #0b7285 } .echo { fill: #d9dee4 }
@media (prefers-color-scheme: dark) { text { fill: #e4e7eb } .quiet { fill: #9aa5b1 } .line { stroke: #3e4c59 }
.whisker { stroke: #e4e7eb } .ours { fill: #3bc9db } .echo { fill: #52606d } .bar { fill: #7b8794 } }
"""


def chart(
    title: str, note: str, panels: Mapping[str, Mapping[str, tuple[float, float, float]]], names: Sequence[str]
) -> str:
    """Draw it.

    Args:
        title: Above.
        note: Below the title, smaller.
        panels: Heading → name → (median, smallest, largest), all above 0; a name that is missing gets no bar.
        names: Rows from top to bottom; the one called Headrace is coloured, one that begins with "bare" is pale.

    Returns:
        A complete SVG document.
    """
    values = [value for panel in panels.values() for triple in panel.values() for value in triple]
    low, high = math.floor(math.log10(min(values))), math.log10(max(values)) + 0.05
    room = PANEL - 64  # the rest holds the number at a bar's end
    width, height = LABELS + PANEL * len(panels) + 12, TOP + BAR * len(names) + 34

    def x(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * room

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}"><style>{STYLE}</style>',
        f'<text class="title" x="12" y="22">{escape(title)}</text>',
        f'<text class="quiet" x="12" y="40">{escape(note)}</text>',
    ]
    for row, name in enumerate(names):
        parts.append(f'<text x="{LABELS - 8}" y="{TOP + BAR * row + 16}" text-anchor="end">{escape(name)}</text>')
    for column, (heading, panel) in enumerate(panels.items()):
        left = LABELS + PANEL * column
        parts.append(f'<text class="quiet" x="{left}" y="{TOP - 8}">{escape(heading)}</text>')
        for power in range(low, math.floor(high) + 1):
            at, bottom = left + x(10.0**power), TOP + BAR * len(names)
            parts.append(f'<line class="line" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
            label = f"{10**power:,}" if power < 6 else f"10^{power}"
            parts.append(f'<text class="quiet" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
        for row, name in enumerate(names):
            if name not in panel:
                continue
            median, least, most = panel[name]
            kind = "ours" if name == "Headrace" else "echo" if name.startswith("bare") else "bar"
            y, wide, begin, end = TOP + BAR * row, max(1.0, x(median)), left + x(least), left + x(most)
            parts += [
                f'<rect class="bar {kind}" x="{left}" y="{y + 4}" width="{wide:.1f}" height="{BAR - 8}" rx="2"/>',
                f'<line class="whisker" x1="{begin:.1f}" x2="{end:.1f}" y1="{y + 12}" y2="{y + 12}"/>',
                f'<text class="value" x="{end + 6:.1f}" y="{y + 16}">{median:,.0f}</text>',
            ]
    return "\n".join([*parts, "</svg>"]) + "\n"
