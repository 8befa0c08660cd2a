"""`specbatch compare`: shows what changed from one run to another. Reads records and loads no model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from specbatch.cli.options import Json
from specbatch.cli.output import RUN_HELP, derived_folder, show
from specbatch.extras import needs


def compare(
    before: Annotated[Path, Argument(metavar="BEFORE", help=RUN_HELP)],
    after: Annotated[Path, Argument(metavar="AFTER", help="The run to compare with BEFORE.")],
    output: Annotated[
        Path | None, Option("--output", "--out", help="New folder for summary.md, summary.csv, compare.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what changed from one run to another, with confidence intervals.

    specbatch compare out/before out/after

    specbatch compare out/sweep/v1 out/sweep/v2

    specbatch compare out/eval-before out/eval-after --json

    Every metric has a 95% interval: over repeats if both runs have them, else over prompts, in pairs; answers are
    paired by question. Metrics that got worse are marked (regression). An interval that contains zero shows no
    difference. Times are judged only if the two runs were interleaved: in a sweep with --repeats 3,
    or as A/1 B/1 A/2 B/2 for two versions.

    Runs with different models, prompts or lengths cannot be compared; the error names what differs.
    """
    needs("report")
    from specbatch.atomic_file import write_atomic, write_json
    from specbatch.sweeps.compare import compare as run

    with nullcontext() if output is None else derived_folder(output, "compare") as folder:
        result = run(before, after)
        if folder is not None:
            write_atomic(folder / "summary.md", result.markdown())
            write_atomic(folder / "summary.csv", result.csv())
            write_json(folder / "compare.json", result.as_dict())
    show(result.markdown(), result.as_dict(), as_json=as_json)
