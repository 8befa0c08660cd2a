"""`specbatch report`: tables, plots and one HTML page of a sweep, made from its records alone.

    summary.{md,csv,json}      the table of the sweep, its heading and notes
    concurrency.{md,csv,json}  one summary by concurrency for each configuration
    serving.{md,csv,json}      each point as serving benchmarks print it
    acceptance.{md,csv,json}   acceptance of each point, which does not depend on the speed of the machine
    plots/*.svg, plots/*.png   the plots
    report.html                all of that as one file that needs no network

The same records give the same files, byte for byte.
"""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specbatch.core.sampling_params import sampling_text
from specbatch.errors import refuse
from specbatch.files.atomic_file import write_atomic, writing
from specbatch.files.text_files import read_json
from specbatch.records.answers import is_evaluated
from specbatch.records.archive import SUFFIX, unpacked
from specbatch.records.bases import bases_sentence
from specbatch.records.low_acceptance import is_low
from specbatch.records.markdown import acceptance_cells, denominators_note
from specbatch.records.metrics import ACCEPTANCE, glossary
from specbatch.records.run_record import RunRecord
from specbatch.records.sweep_plan import LEFT_OUT, Point, unfinished
from specbatch.sweeps.report import plot_style
from specbatch.sweeps.report.acceptance import (
    SERVER_HEADINGS,
    SERVERS,
    acceptance_markdown,
    acceptance_rows,
    server_acceptance_rows,
)
from specbatch.sweeps.report.groups import grouped_tables
from specbatch.sweeps.report.heading import about, how_made
from specbatch.sweeps.report.note import Note
from specbatch.sweeps.report.notes import losses_of, notes
from specbatch.sweeps.report.pivots import FILES as PIVOTS
from specbatch.sweeps.report.pivots import Pivot, PivotTable, pivots
from specbatch.sweeps.report.pivots import csv as pivot_csv
from specbatch.sweeps.report.pivots import markdown as pivot_markdown
from specbatch.sweeps.report.plots import draw
from specbatch.sweeps.report.points import POINT, SWEEP, bases, load_records, points_of
from specbatch.sweeps.report.sentences import headline
from specbatch.sweeps.report.serving import (
    Row,
    block,
    blocks_markdown,
    name_of,
    serving_rows,
    summary_markdown,
    summary_rows,
    summary_tables,
)
from specbatch.sweeps.report.tables import VERDICT, Cells, as_json, decision, markdown, shown, table

TEMPLATE = Path(__file__).with_name("report.html.jinja")
PAGE = "report.html"


@dataclass(frozen=True)
class Picture:
    """A plot as files and in the page."""

    plot: plot_style.Plot
    svg: str = ""
    png: bytes = b""

    @property
    def inline(self) -> str:
        return plot_style.inline(self.svg, f"{self.plot.title}. {self.plot.caption}")


def write_report(
    folder: Path,
    output: Path | None = None,
    scores: Sequence[Mapping[str, str]] = (),
    asked: Sequence[Pivot] = (),
) -> list[Path]:
    """Write all files from the records in `folder` to `output`; return their paths, the page last.

    output: by default `folder`; of an evaluation, which has its own summary there, `folder/report`.
    scores: of an evaluation, the cells of each point by their heading, for the page. asked: pivot tables.

    folder: of a sweep, or an archive of its records (`specbatch.records.archive`). Refused: one without records of a
    sweep, an archive without `output`, and an `output` with files of these names but no report. Raises UnwritableError.
    """
    if folder.is_file():
        if not folder.name.endswith(SUFFIX):
            raise refuse("folder", str(folder), f"is a file; name the folder of a sweep, or its records ({SUFFIX})")
        refuse_no_output(output)
    evaluated = is_evaluated(folder)
    target = output or (folder / "report" if evaluated else folder)
    with unpacked("folder", folder) as place:
        records, missing = load_records(place), unfinished(place)
        left_out = read_json("folder", place / LEFT_OUT) if (place / LEFT_OUT).exists() else {}
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)  # fail before the work
    tables = pivots(folder, asked) if asked else []
    files = _files(records, missing, command_of(folder, output), left_out, scores, tables)
    if asked:
        files = {**dict(zip(PIVOTS, (pivot_markdown(folder, tables, asked), pivot_csv(tables)), strict=True)), **files}
    there = [name for name in files if (target / name).exists()]
    if there and PAGE not in there and not target.samefile(folder):
        works = f"has {', '.join(there)}, which no report has written; name another folder"
        raise refuse("output", str(output), works)
    for name, content in files.items():
        path = target / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    return [target / name for name in files]


def refuse_no_output(output: Path | None) -> None:
    """Refuse the default folder of a report of an archive."""
    if output is None:
        raise refuse("output", "", "an archive is only read: name a folder for the report")


def command_of(folder: Path, output: Path | None) -> str:
    """The command that makes the report again."""
    return shlex.join(["specbatch", "report", str(folder), *(["--output", str(output)] if output else [])])


def table_files(records: list[RunRecord], missing: list[Point]) -> dict[str, str]:
    """The tables of a report: content by name. missing: points of the sweep without a record."""
    rows, serving, accepted = table(records), serving_rows(records), acceptance_rows(records)
    remarks = notes(records, rows, missing)
    summary = {"about": about(records), "rows": as_json(rows), "notes": list(map(str, remarks))}
    by_concurrency = summary_rows(serving)
    return {
        "summary.md": markdown(records, rows, missing),
        "summary.csv": rows.to_csv(index=False),
        "summary.json": _json(summary),
        "concurrency.md": summary_markdown(serving),
        "concurrency.csv": _csv(by_concurrency),
        "concurrency.json": _json(by_concurrency),
        "serving.md": blocks_markdown(serving),
        "serving.csv": _csv(serving),
        "serving.json": _json(serving),
        "acceptance.md": acceptance_markdown(records, accepted, remarks),
        "acceptance.csv": _csv(accepted),
        "acceptance.json": _json(accepted),
    }


def _files(
    records: list[RunRecord],
    missing: list[Point],
    command: str,
    left_out: Mapping[str, str],
    scores: Sequence[Mapping[str, str]],
    tables: Sequence[PivotTable] = (),
) -> dict[str, str | bytes]:
    """Content by path below the folder."""
    files: dict[str, str | bytes] = dict(table_files(records, missing))
    pictures = draw_all(records)
    for picture in pictures:
        if picture.plot.figure is not None:
            files[f"plots/{picture.plot.name}.svg"] = picture.svg
            files[f"plots/{picture.plot.name}.png"] = picture.png
    return files | {PAGE: page(records, pictures, serving_rows(records), command, missing, left_out, scores, tables)}


def draw_all(records: list[RunRecord]) -> list[Picture]:
    """All plots; those that could not be drawn have no files."""
    with plot_style.style():
        return [
            Picture(plot)
            if plot.figure is None
            else Picture(plot, plot_style.svg(plot.figure, plot.name), plot_style.png(plot.figure))
            for plot in draw(records)
        ]


def page(
    records: list[RunRecord],
    pictures: list[Picture],
    serving: list[Row],
    command: str,
    missing: Sequence[Point] = (),
    left_out: Mapping[str, str] = MappingProxyType({}),
    scores: Sequence[Mapping[str, str]] = (),
    tables: Sequence[PivotTable] = (),
) -> str:
    """The report as one HTML file.

    command   makes it again
    missing   points of the sweep without a record
    left_out  of an evaluation, why configurations or points have none
    scores    of an evaluation, the cells of each point by their heading
    tables    pivot tables
    """
    from jinja2 import Environment, StrictUndefined

    rows, over = table(records), bases(records)
    what = about(records)
    made = how_made(records, what["effective caps"])
    served = server_acceptance_rows(points_of(records))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=f"{'Evaluation' if scores else 'Sweep'} of {what['model']} on {what['device']}",
        result=headline(records),
        about={name: text for name, text in what.items() if name not in made.lines},
        made=made,
        warnings=warnings_of(records, missing, left_out),
        scores=_named(list(scores[0]), [list(row.values()) for row in scores]) if scores else None,
        pivots=[(table.title, table.headings, table.cells) for table in tables],
        notes=[note.text for note in notes(records, rows) if not note.warning],
        pictures=pictures,
        comparison=_verdict_second(*_named(*decision(rows, SWEEP, "concurrency", over))),
        columns=_named(*shown(rows, over)),
        compared_with=bases_sentence(over),
        summaries=summary_tables(serving),
        acceptance=_acceptance(records),
        of_servers=_named([*POINT, *SERVER_HEADINGS], served) if served else None,
        servers=SERVERS,
        acceptance_note=denominators_note(record.counters for record in records),
        groups=[(f"By {titles[2]}", *_named(titles, body)) for titles, body in grouped_tables(records)],
        sampling=sampling_text(records[0].workload.get("sampling")),
        blocks={name_of(row): block(row) for row in serving},
        definitions=glossary(),
        command=command,
    )


def warnings_of(
    records: list[RunRecord], missing: Sequence[Point] = (), left_out: Mapping[str, str] = MappingProxyType({})
) -> dict[str, list[str]]:
    """Texts of the warnings by kind, simulated acceptance first."""
    found: dict[str, list[str]] = {"SIMULATED": [], "LEFT OUT": [f"{name}: {why}" for name, why in left_out.items()]}
    missing = [
        point
        for point in missing
        if left_out.keys().isdisjoint(
            (point.configuration, f"{point.configuration} at concurrency {point.concurrency}")
        )
    ]
    for note in (*notes(records, table(records), missing), *_low_acceptance(records)):
        if note.warning:
            found.setdefault(note.warning, []).append(f"{note.text}; {note.advice}" if note.advice else note.text)
    return {kind: texts for kind, texts in found.items() if texts}


def _low_acceptance(records: list[RunRecord]) -> Iterator[Note]:
    """Warnings about points whose first draft is hardly ever accepted, and points at which speculation loses."""
    for (concurrency, name), found in points_of(records).items():
        counts = [record.counters.get("acceptance", {}) for record in found]
        drafted, accepted = (sum((count.get(which) or [0])[0] for count in counts) for which in ("drafted", "accepted"))
        if is_low(drafted, accepted):
            share = f"of {drafted} first drafts {accepted / drafted:.1%} were accepted"
            yield Note(f"{name} at concurrency {concurrency}: {share}.", "LOW ACCEPTANCE")
    if losses := losses_of(records):
        yield losses


def _acceptance(records: list[RunRecord]) -> Cells | None:
    """The acceptance table; None if nothing was drafted."""
    found = {place: acceptance_cells(one.counters for one in runs) for place, runs in points_of(records).items()}
    body = [[*map(str, place), *cells] for place, cells in found.items() if cells]
    return _named(["concurrency", "configuration", *ACCEPTANCE], body) if body else None


def _named(titles: list[str], body: list[list[str]]) -> Cells:
    """Join concurrency and configuration into the first column, which stays visible when a table is scrolled."""
    return ["configuration, concurrency", *titles[2:]], [[f"{row[1]}, {row[0]}", *row[2:]] for row in body]


def _verdict_second(titles: list[str], body: list[list[str]]) -> Cells:
    """Move the verdict next to the speedup, so that a phone shows both."""
    if VERDICT not in titles:
        return titles, body
    last = titles.index(VERDICT)
    order = [0, 1, last, *(place for place in range(2, len(titles)) if place != last)]
    return [titles[place] for place in order], [[row[place] for place in order] for row in body]


def _json(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"


def _csv(rows: list[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
