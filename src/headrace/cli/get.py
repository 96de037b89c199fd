"""`headrace get endpoints`: what is served, in one view."""

from dataclasses import asdict

from cyclopts import App

from headrace.app.inventory import EndpointRow, endpoint_rows
from headrace.cli.output import HomeFlag, Output, duration, print_json, print_table
from headrace.cli.problems import CommandFailed
from headrace.config import home_folder
from headrace.home import Home

app = App(name="get", help="Show what is served.")


@app.command
def endpoints(*, output: Output = "table", home: HomeFlag = None) -> None:
    """Show every endpoint with its default version, state, objective and speed.

    1 ROW is the time of a run of one row, REQUESTS/S how many requests of one row all workers together keep up with
    within the objective. Read from the home folder, so it also tells what would be served when no server runs.

    For example:

      headrace get endpoints -o json
    """
    root = home_folder(home)
    rows = endpoint_rows(Home(root))
    if rows is None:
        raise CommandFailed(f"nothing was served from {root} yet", "headrace serve model.onnx, or --home FOLDER")
    if output == "json":
        print_json([asdict(row) for row in rows])
        return
    print_table(
        ("ENDPOINT", "VERSION", "STATE", "WORKERS", "SLO", "1 ROW", "REQUESTS/S"),
        [_cells(row) for row in rows],
    )


def _cells(row: EndpointRow) -> tuple[str, ...]:
    trouble = row.problem or "-"
    if row.problem and row.answering_version not in ("", row.version):
        trouble = f"version {row.answering_version} answers meanwhile; {row.problem}"
    return (
        row.endpoint,
        row.version,
        row.state,
        str(row.workers),
        row.slo or "-",
        duration(row.one_row_s) if row.one_row_s else "-",
        f"{row.requests_per_s:,.0f}" if row.requests_per_s else trouble,
    )
