"""`headrace model`: versions, and which of them is the default."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from headrace.app.inventory import load_problem, version_rows
from headrace.cli.output import HomeFlag, Output, print_json, print_table
from headrace.cli.problems import CommandFailed, say
from headrace.config import home_folder
from headrace.control_plane import publish
from headrace.home import Home

app = App(name="model", help="Versions of models, and which of them is the default.")


@app.command(name="list")
def list_versions(*, output: Output = "table", home: HomeFlag = None) -> None:
    """Show every version of every model; `*` marks the default.

    For example:

      headrace model list
    """
    root = home_folder(home)
    rows = version_rows(Home(root))
    if rows is None:
        raise CommandFailed(f"nothing was served from {root} yet", "headrace serve model.onnx, or --home FOLDER")
    if output == "json":
        print_json([asdict(row) for row in rows])
        return
    print_table(
        ("MODEL", "VERSION", "", "STATE", "DIGEST", "PATH"),
        [
            (row.model, row.version, "*" if row.is_default else "", row.state, row.digest[7:19], _short(row.path))
            for row in rows
        ],
    )


def _short(path: str) -> str:
    """The path as seen from the working folder when it is below it."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


@app.command
def alias(
    name: Annotated[str, Parameter(help="Endpoint.")],
    version: Annotated[str, Parameter(help="Version that shall answer requests that name none.")],
    /,
    *,
    home: HomeFlag = None,
) -> None:
    """Choose the default version of an endpoint.

    Takes effect within a second on a running server, without losing a request; else at the next start. A version that
    cannot be loaded does not take effect: what answered before goes on.

    For example:

      headrace model alias iris 2
    """
    root = Home(home_folder(home))
    snapshot = publish.alias(root, name, version)
    print(f"{name}: version {version} is the default (snapshot {snapshot.id})")
    if problem := load_problem(root, name, version):
        say(f"version {version} could not be loaded, and what answered before goes on: {problem}")
