"""How `--help` looks: plain text in two columns within 80, no boxes and no colour, the same in pipes and terminals."""

import textwrap
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

COLUMNS: Final = 80
NAMES_WIDTH_MAX: Final = 26


class PlainHelp:
    """A cyclopts help formatter (`cyclopts.help.protocols.HelpFormatter`)."""

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
        """Print one panel: a title, then names and what they mean side by side."""
        entries = [(self._names(entry, panel.format), self._meaning(entry)) for entry in panel.entries]
        if not entries:
            return
        title = "Options" if panel.title == "Parameters" else panel.title
        console.print(f"{title}:", highlight=False, markup=False)
        width = min(NAMES_WIDTH_MAX, max(len(names) for names, _ in entries))
        for names, meaning in entries:
            for line in self._entry(names, meaning, width):
                console.print(line, highlight=False, markup=False, soft_wrap=True)
        console.print()

    def render_usage(self, console: "Console", options: "ConsoleOptions", usage: Any) -> None:
        """Print the usage line."""
        if usage:
            # Positional arguments that may be left out come as [ARGS]; all of ours are the one source.
            console.print(_plain(usage).strip().replace("[ARGS]", "[SOURCE]"), highlight=False, markup=False)
            console.print()

    def render_description(self, console: "Console", options: "ConsoleOptions", description: Any) -> None:
        """Print the text of the command."""
        if description:
            for line in reflow(_plain(description)):
                console.print(line, highlight=False, markup=False, soft_wrap=True)
            console.print()

    def _names(self, entry: "HelpEntry", kind: str) -> str:
        labels = sorted({*entry.positive_names, *entry.positive_shorts}, key=lambda label: (-len(label), label))
        if kind == "parameter" and not labels:
            labels = list(entry.display_labels)  # a positional argument, already in capitals
        return ", ".join(labels)

    def _meaning(self, entry: "HelpEntry") -> str:
        parts = [_plain(entry.description)]
        if entry.choices:
            parts.append(f"[{', '.join(entry.choices)}]")
        if entry.default is not None:
            parts.append(f"[default: {entry.default}]")
        if entry.required:
            parts.append("[required]")
        return " ".join(part for part in parts if part)

    def _entry(self, names: str, meaning: str, width: int) -> list[str]:
        lines = textwrap.wrap(meaning, COLUMNS - width - 4) or [""]
        start = "" if len(names) <= width else f"  {names}\n"
        first = f"  {'' if start else names:<{width}}  {lines[0]}".rstrip()
        return [start + first, *(" " * (width + 4) + line for line in lines[1:])]


def reflow(text: str) -> list[str]:
    """Paragraphs in lines of at most 80 columns, whatever the width of the source; indented lines stay as they are."""
    lines: list[str] = []
    paragraph: list[str] = []
    for line in [*text.strip().splitlines(), ""]:
        if line.strip() and not line.startswith(" "):
            paragraph.append(line)
            continue
        lines += textwrap.wrap(" ".join(paragraph), COLUMNS, break_on_hyphens=False)
        paragraph = []
        lines.append(line.rstrip())
    return lines[:-1]


def _plain(text: Any) -> str:
    if text is None:
        return ""
    if isinstance(text, str):
        return text
    if hasattr(text, "plain"):
        return str(text.plain)
    primary = getattr(text, "primary_renderable", None)  # cyclopts wraps inline text once more
    return _plain(primary) if primary is not None else str(text)
