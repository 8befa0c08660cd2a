"""`specbatch report`: writes tables, charts and an HTML page from the records of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from specbatch.cli.options import Json
from specbatch.cli.output import show
from specbatch.errors import refuse

if TYPE_CHECKING:
    from specbatch.evals.grid_table import Grid

SCORES = ("scores.md", "scores.csv", "scores.json")


def report(
    folder: Annotated[
        Path,
        Argument(help="Folder of a sweep, with CONFIGURATION/cN/rN/record.json, or a .tar.xz that --records wrote."),
    ],
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "--out",
            help="Folder for the report. Default: the folder of the sweep; of an evaluation, report in its folder.",
        ),
    ] = None,
    records: Annotated[
        Path | None,
        Option(
            metavar="FILE.tar.xz",
            help="Also pack the records into this file, to keep them with published tables. Times between tokens "
            "(itl_s) are left out.",
        ),
    ] = None,
    pivot: Annotated[
        list[str] | None,
        Option(
            metavar="ROWS,COLUMNS,VALUE,...",
            help="A table with two settings as rows and columns and a metric (or accuracy) in the cells, such as "
            "tensor_parallel,concurrency,accept_length; may be repeated. In pivots.md, pivots.csv and the page; "
            "also of a folder of several sweeps, such as that of --request-rate 1,5,inf.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a sweep from its records: tables, charts and an HTML page.

    specbatch report out/sweep-20260102-030405

    specbatch report out/sweep-20260102-030405 --output out/report

    specbatch report out/sweep-20260102-030405 --records results/records.tar.xz

    specbatch report results/records.tar.xz --output out/report

    specbatch report out/eval --pivot tensor_parallel,concurrency,accuracy,accept_length

    Of sweeps that differ in one thing (--input-len with several lengths, models), name the folder that they are in: it
    gets their common table, and each a report.

    Of an evaluation in several configurations, scores.md, .csv and .json are its table with the scores.

    report.html is a single file that needs no network. Files of an earlier report are replaced; records are only read.
    """
    from specbatch.records.archive import pack, unpacked
    from specbatch.records.sweep_plan import PLAN
    from specbatch.sweeps.bench.sections import KINDS, kind_of
    from specbatch.sweeps.bench.tables import write_tables
    from specbatch.sweeps.report.parts import RECORDS, write_parts
    from specbatch.sweeps.report.pivots import FILES, Pivot, write_pivots
    from specbatch.sweeps.report.report import refuse_no_output, write_report

    asked = list(dict.fromkeys(map(Pivot.parse, pivot or ())))
    if records is not None:
        pack(folder, records)
    if asked and _has_several(folder):
        if folder.is_file():
            refuse_no_output(output)
        files = write_pivots(folder, output or folder, asked)
        text = "\n".join([files[0].read_text(encoding="utf-8"), *map(str, files)])
        named = {"report": str(files[0]), "files": list(map(str, files))}
        show(text, named, as_json=as_json, kept=str(files[0]))
        return
    with unpacked("folder", folder) as place:
        is_archive, is_sweep = place != folder, (place / PLAN).exists()
        begun = [path.parent for path in place.glob(f"*/{PLAN}") if any(path.parent.glob(RECORDS))]
        sections = sorted(folder / path.name for path in begun)
        is_bench = bool(sections) and all(kind_of(section.name) in KINDS for section in sections)
        has_parts = not (is_sweep or is_bench or (is_archive and output is None))  # the last is refused below
        summary = write_parts(place, output)[0] if has_parts else ""
    if is_bench and not is_archive:
        if output is not None:
            raise refuse("output", str(output), "the tables of a bench are written to its folder; leave it out")
        write_tables(folder)
        paths = [folder / "summary.md", folder / "summary.csv"]
        lines = "\n".join(map(str, [*paths, "for a page of one section name its folder:", *sections]))
        show(
            lines,
            {"report": str(paths[0]), "files": [str(path) for path in paths]},
            as_json=as_json,
            kept=str(paths[-1]),
        )
        return
    if summary:
        path = (output or folder) / "summary.md"
        pages = [str(write_report(one, output and output / one.name)[-1]) for one in sections]
        lines = "\n".join([f"{summary}\n{path}", *pages])
        show(lines, {"report": str(path), "files": [str(path), *pages]}, as_json=as_json, kept=str(path))
        return
    grid = _grid(folder)
    paths = write_report(folder, output, () if grid is None else grid.scores(), asked)
    if grid is not None:
        grid.save(paths[-1].parent, SCORES)
        paths = [*(paths[-1].parent / name for name in SCORES), *paths]
    lines = "\n".join(map(str, paths))
    if asked:
        lines = f"{(paths[-1].parent / FILES[0]).read_text(encoding='utf-8')}\n{lines}"
    show(
        lines, {"report": str(paths[-1]), "files": [str(path) for path in paths]}, as_json=as_json, kept=str(paths[-1])
    )


def _has_several(folder: Path) -> bool:
    """Whether the folder holds several sweeps, or evaluations, and none itself."""
    from specbatch.records.archive import unpacked
    from specbatch.records.sweep_plan import PLAN

    with unpacked("folder", folder) as files:
        return not (files / PLAN).exists() and any(files.rglob(PLAN))


def _grid(folder: Path) -> Grid | None:
    """The table of an evaluation in several configurations, with its scores."""
    from specbatch.evals.grid_table import load_grid
    from specbatch.records.answers import is_evaluated
    from specbatch.records.archive import unpacked

    with unpacked("folder", folder) as files:
        return load_grid(files) if is_evaluated(files) else None
