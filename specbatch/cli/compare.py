"""`specbatch compare`: shows how runs differ from the first of them. Reads records and loads no model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from specbatch.cli.options import Json
from specbatch.cli.output import RUN_HELP, derived_folder, show


def compare(
    base: Annotated[Path, Argument(metavar="BASE", help=RUN_HELP)],
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="The runs to compare with BASE.")],
    output: Annotated[
        Path | None, Option("--output", "--out", help="New folder for summary.md, summary.csv, compare.json.")
    ] = None,
    with_gains: Annotated[
        bool,
        Option(
            "--gains",
            help="Show before, after, delta and gain of output tok/s, p99 TTFT and mean TPOT, with regressions named; "
            "with --output also as gains.md and gains.csv.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show how runs differ from the first one, with confidence intervals.

    specbatch compare out/before out/after

    specbatch compare out/sweep/baseline out/sweep/v1 out/sweep/v2

    specbatch compare out/sweep/v1 out/sweep/v2 --gains

    specbatch compare out/eval-before out/eval-after --json

    The table starts with the ratio to BASE and its verdict: "pays" or "loses" if the 95% interval excludes no
    difference, else "undecided"; the files of --output have all numbers. Intervals are over repeats if both runs have
    them, else over prompts, in pairs; answers are paired by question. Times of one repeat have no verdict, and times of
    runs that were not interleaved have none either: use sweep --repeats 3, or A/1 B/1 B/2 A/2 for two versions.

    Runs with different models, prompts or lengths cannot be compared; the error names what differs.
    """
    from specbatch.files.atomic_file import write_atomic, write_json
    from specbatch.sweeps.report.compare import compare as run
    from specbatch.sweeps.report.gains import FILES, gains_of

    with nullcontext() if output is None else derived_folder(output, "compare") as folder:
        result = run(base, *runs)
        if folder is not None:
            write_atomic(folder / "summary.md", result.markdown())
            write_atomic(folder / "summary.csv", result.csv())
            write_json(folder / "compare.json", result.as_dict())
        text, values = result.markdown(), result.as_dict()
        if with_gains:
            found = gains_of(result.paths)
            text, values = found.markdown(), values | {"gains": found.as_dict()}
            if folder is not None:
                write_atomic(folder / FILES[0], text)
                write_atomic(folder / FILES[1], found.csv())
    show(text, values, as_json=as_json, kept=None if output is None else str(output))
