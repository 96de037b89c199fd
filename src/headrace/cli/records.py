"""`headrace records tail`: the latest requests, as written down."""

import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

import msgspec
from cyclopts import App, Parameter

from headrace.app.tail import follow_records, last_records
from headrace.cli.output import HomeFlag, Output, duration
from headrace.cli.problems import USAGE, CommandFailed
from headrace.config import home_folder
from headrace.home import Home
from headrace.records import Amendment, Record

app = App(name="records", help="The record of every request.")

HEADINGS: Final = ("TIME", "ENDPOINT", "VERSION", "ENDING OR CODE", "ROWS", "TOTAL", "REQUEST")
# Fixed, because lines are shown as they come; the longest code has 20 characters.
WIDTHS: Final = (8, 12, 7, 20, 4, 7, 10)


@app.command
def tail(
    *,
    count: Annotated[int, Parameter(name=["--count", "-n"], help="How many.")] = 10,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative="", show_default=False, help="Go on with what is written.")
    ] = False,
    output: Output = "table",
    home: HomeFlag = None,
) -> None:
    """Show the last requests, one line each: `answered`, or the code that says why not.

    REQUEST is the end of the request's id. With `-o json` every line is one JSON object with all columns, sampled
    inputs and outputs included.

    For example:

      headrace records tail -n 20

      headrace records tail --follow -o json | jq .total_s
    """
    if count < 0:
        raise CommandFailed(f"--count is {count}; accepted: 0 or more", status=USAGE)
    root = home_folder(home)
    prepared = Home(root)
    if not prepared.records.is_dir():
        raise CommandFailed(f"there are no records in {root}", "headrace serve model.onnx, or --home FOLDER")
    since_unix_s = time.time()
    if output == "table":
        print(_cells(HEADINGS))
    _print(last_records(prepared, count) if count else [], output)
    if follow:
        _print(follow_records(prepared, since_unix_s), output)


def _print(records: Iterable[Record | Amendment], output: Output) -> None:
    for record in records:
        if output == "json":
            print(msgspec.json.encode(_document(record), enc_hook=str).decode(), flush=True)
        else:
            print(record_line(record), flush=True)


def record_line(record: Record | Amendment) -> str:
    """One line of the table, at most 80 columns."""
    clock = time.strftime("%H:%M:%S", time.localtime(record.time_unix_s))
    ending = record.code or record.ending  # every code belongs to one ending, see docs/reference/errors.md
    if isinstance(record, Amendment):
        return _cells((clock, "(amendment)", "", ending, "", "", _end(record.request_id)))
    return _cells(
        (clock, record.endpoint, record.version, ending, str(record.rows), duration(record.total_s),
         _end(record.request_id))
    )  # fmt: skip


def _cells(cells: Sequence[str]) -> str:
    shown = (
        f"{cell if len(cell) <= width else cell[: width - 1] + '…':<{width}}"
        for cell, width in zip(cells, WIDTHS, strict=True)
    )
    return "  ".join(shown).rstrip()


def _end(request_id: str) -> str:
    # The ids of one worker begin alike.
    return request_id if len(request_id) <= WIDTHS[-1] else "…" + request_id[1 - WIDTHS[-1] :]


def _document(record: Record | Amendment) -> dict[str, Any]:
    document = {name: getattr(record, name) for name in record.__struct_fields__}
    document["kind"] = "amendment" if isinstance(record, Amendment) else "record"
    for name in ("inputs", "outputs"):
        if document.get(name) is not None:
            document[name] = msgspec.msgpack.decode(document[name])
    return document
