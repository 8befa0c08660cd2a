"""`specbatch report`: writes tables, charts and an HTML page from the records of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from specbatch.cli.options import Json
from specbatch.cli.output import show


def report(
    folder: Annotated[Path, Argument(help="Folder of a sweep, with CONFIGURATION/cN/rN/record.json.")],
    output: Annotated[
        Path | None, Option("--output", "--out", help="Folder for the report. Default: the folder of the sweep.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a sweep from its records: tables, charts and an HTML page.

    specbatch report out/sweep-20260102-030405

    specbatch report out/sweep-20260102-030405 --output out/report

    report.html is a single file that needs no network. Files of an earlier report are replaced; records are only read.
    """
    from specbatch.sweeps.report.report import write_report

    paths = write_report(folder, output)
    lines = "\n".join(map(str, paths))
    show(lines, {"report": str(paths[-1]), "files": [str(path) for path in paths]}, as_json=as_json)
