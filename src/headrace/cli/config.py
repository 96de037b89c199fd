"""`headrace config explain`: every setting, its value, and who set it."""

import textwrap
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from headrace.cli.output import COLUMNS, Output, print_json, print_table
from headrace.cli.serve import with_settings
from headrace.config import SETTINGS, Configuration, divide_cores, load, usable_cores
from headrace.config_values import show_value

app = App(name="config", help="Settings and where they come from.")


@app.command
def explain(
    source: Annotated[str | None, Parameter(help="Configuration file, or what would be given to serve.")] = None,
    /,
    *,
    config: Annotated[str | None, Parameter(help="Configuration file; else headrace.yaml when there is one.")] = None,
    home: Annotated[str | None, Parameter(help="State folder; else HEADRACE_HOME, else .headrace.")] = None,
    output: Output = "table",
    **settings: str,
) -> None:
    """Show every setting with its value, its origin and what it means.

    Sources, the later outranking the earlier: default, headrace.yaml, environment (HEADRACE_<NAME>), flags. Takes the
    flags of serve, so that a command line can be tried without serving.

    For example:

      headrace config explain

      HEADRACE_WORKERS=4 headrace config explain --body-bytes-max 8MiB -o json
    """
    configuration = load(source, flags=settings, config=config, home=home)
    if output == "json":
        print_json(_document(configuration))
        return
    origin = configuration.origins["home"]
    here = dict(zip(("workers", "threads"), divide_cores(configuration.settings, usable_cores()), strict=True))
    rows = [("home", str(configuration.home), origin, "State folder.")]
    for setting in SETTINGS:
        value = getattr(configuration.settings, setting.name)
        shown = show_value(value, setting.unit) or "none"
        if setting.name in ("workers", "threads") and value == 0:
            shown = f"0: {here[setting.name]} on this machine"
        rows.append((setting.name, shown, configuration.origins[setting.name], setting.help))
    if configuration.file is not None:
        print(f"file: {configuration.file}\n")
    width = max(len(row[0]) for row in rows)
    for name, value, place, help_text in rows:
        print(f"{name:<{width}}  {value:<24}  {place}")
        print(textwrap.indent("\n".join(textwrap.wrap(help_text, COLUMNS - 4)), "    "))
    if configuration.models:
        print()
        print_table(
            ("MODEL", "ORIGIN", "PATH"),
            [(entry.name or "(from the path)", entry.origin, entry.path) for entry in configuration.models],
        )


def _document(configuration: Configuration) -> dict[str, Any]:
    return {
        "file": None if configuration.file is None else str(configuration.file),
        "home": {"value": str(configuration.home), "origin": configuration.origins["home"]},
        "settings": [
            {
                "name": setting.name,
                "value": getattr(configuration.settings, setting.name),
                "origin": configuration.origins[setting.name],
                "default": setting.default,
                "unit": setting.unit,
                "least": setting.least,
                "most": setting.most,
                "help": setting.help,
            }
            for setting in SETTINGS
        ],
        "models": [msgspec.to_builtins(entry) for entry in configuration.models],
    }


with_settings(explain)
