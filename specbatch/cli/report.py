"""The command that remakes tables and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from specbatch.cli.options import Json
from specbatch.cli.output import show


def report(
    folder: Annotated[Path, Argument(help="What a sweep has written: CONFIGURATION/cN/rN/record.json.")],
    output: Annotated[
        Path | None, Option("--output", "--out", help="Where the report goes. Default: the folder itself.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Remake the tables of a sweep from its records, and add pictures and one page with all of it.

    specbatch report out/sweep-20260102-030405

    specbatch report out/sweep-20260102-030405 --output out/report

    report.html is one file: it needs no network, can be sent by mail, and is readable on a phone.
    Files of an earlier report are replaced; records are only read.
    """
    from specbatch.sweeps.report.report import write_report

    paths = write_report(folder, output)
    lines = "\n".join(map(str, paths))
    show(lines, {"report": str(paths[-1]), "files": [str(path) for path in paths]}, as_json=as_json)
