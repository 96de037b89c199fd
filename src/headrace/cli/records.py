"""`headrace records tail`: the latest requests, as written down."""

import time
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec
from cyclopts import App, Parameter

from headrace.app.tail import follow_records, last_records
from headrace.cli.output import HomeFlag, Output, duration, table_lines
from headrace.cli.problems import USAGE, CommandFailed
from headrace.config import home_folder
from headrace.home import Home
from headrace.records import Amendment, Record

app = App(name="records", help="The record of every request.")

HEADINGS: Final = ("TIME    ", "ENDPOINT      ", "VERSION", "ENDING   ", "ROWS", "TOTAL  ", "REQUEST")


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
    """Show the last requests: one line each.

    With `-o json` every line is one JSON object with all columns, sampled inputs and outputs included.

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
        print(table_lines(HEADINGS, [])[0])
    _print(last_records(prepared, count) if count else [], output)
    if follow:
        _print(follow_records(prepared, since_unix_s), output)


def _print(records: Iterable[Record | Amendment], output: Output) -> None:
    for record in records:
        if output == "json":
            print(msgspec.json.encode(_document(record), enc_hook=str).decode(), flush=True)
        else:
            print(_line(record), flush=True)


def _line(record: Record | Amendment) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(record.time_unix_s))
    if isinstance(record, Amendment):
        cells = [clock, "(amendment)", "", record.ending, "", "", f"{record.request_id} {record.code}"]
    else:
        cells = [
            clock, record.endpoint[:14], record.version[:7], record.ending, str(record.rows),
            duration(record.total_s), f"{record.request_id[:16]} {record.code}",
        ]  # fmt: skip
    widths = [len(heading) for heading in HEADINGS]
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()[:80]


def _document(record: Record | Amendment) -> dict[str, Any]:
    document = {name: getattr(record, name) for name in record.__struct_fields__}
    document["kind"] = "amendment" if isinstance(record, Amendment) else "record"
    for name in ("inputs", "outputs"):
        if document.get(name) is not None:
            document[name] = msgspec.msgpack.decode(document[name])
    return document
