"""Pivot tables of sweeps and evaluations: two settings of the runs as rows and columns, a number in the cells.

    | tensor_parallel \\ concurrency | 1      | 32       |
    | 1                             | 845.98 | 11405.85 |

What differs within a cell, such as the configuration, has a table for each value. A cell is over all repeats, as in the
other tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from specbatch.config.values import names
from specbatch.errors import counted, refuse
from specbatch.files.atomic_file import write_atomic, writing
from specbatch.jobs.output_files import read_output
from specbatch.records.archive import unpacked
from specbatch.records.differences import flatten
from specbatch.records.markdown import markdown_table
from specbatch.records.metric import Metric
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord
from specbatch.records.runs import conflicts_of, measured, read_records
from specbatch.records.sweep_plan import PLAN, unfinished
from specbatch.sweeps.report.heading import made_up
from specbatch.sweeps.report.parts import RATE, rate_of

if TYPE_CHECKING:
    import pandas as pd

ACCURACY = "accuracy"
FILES = ("pivots.md", "pivots.csv")
SECTION = "section"  # of a bench; of a sweep with several rates it says what the rate does
LENGTHS = ("input_len", "output_len")
# A table for each of their values, unless they are rows or columns.
SPLIT = ("model", "dataset", *LENGTHS, "configuration", "concurrency", RATE, "thinking", SECTION)
UNNAMED = ("model", "dataset", "configuration", SECTION)  # whose values say in titles what they are
NOT_SET = "-"
FORM = "write ROWS,COLUMNS,VALUE, such as tensor_parallel,concurrency,accept_length"


@dataclass(frozen=True)
class Pivot:
    """Settings as rows and columns, and the values, each of which has tables of its own."""

    rows: str
    columns: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        parts = [name.replace("-", "_") if place < 2 else name for place, name in enumerate(names("pivot", text))]
        if len(parts) < 3 or not all(parts):
            raise refuse("pivot", text, FORM)
        if parts[0] == parts[1]:
            raise refuse("pivot", text, f"rows and columns are the same; {FORM}")
        return cls(parts[0], parts[1], tuple(dict.fromkeys(parts[2:])))

    def __str__(self) -> str:
        return ",".join((self.rows, self.columns, *self.values))


@dataclass(frozen=True)
class PivotTable:
    """title: the value, what all cells have in common, and what was not real; numbers: unrounded, in the unit of
    records; shown: cells as text."""

    title: str
    corner: str
    numbers: pd.DataFrame
    shown: pd.DataFrame

    @property
    def headings(self) -> list[str]:
        return [self.corner, *map(_text, self.shown.columns)]

    @property
    def cells(self) -> list[list[str]]:
        return [[_text(name), *row] for name, row in zip(self.shown.index, self.shown.values.tolist(), strict=True)]

    @property
    def markdown(self) -> str:
        return f"### {self.title}\n\n{markdown_table(self.cells, self.headings)}\n"


def settings_of(record: RunRecord) -> dict[str, Any]:
    """All that rows and columns can be: settings of the engine by their own names, and what its workload varies."""
    found = {key.rpartition(".")[2]: value for key, value in flatten(record.config).items()}
    work = record.workload
    about = {name: work.get(name) for name in ("configuration", "concurrency", "thinking", SECTION, *LENGTHS)}
    about["dataset"] = work.get("task") or work.get("dataset")
    return found | {name: value for name, value in about.items() if value is not None} | {RATE: rate_of(work)}


def pivots(folder: Path, asked: Iterable[Pivot], setting: str = "folder") -> list[PivotTable]:
    """The tables of all records below `folder`, or in an archive of them. Refused: settings and values that no record
    has."""
    records = [record for _, record in read_records(setting, folder, read_output)]
    return [table for pivot in asked for value in pivot.values for table in _tables(records, pivot, value)]


def write_pivots(folder: Path, output: Path, asked: Sequence[Pivot]) -> list[Path]:
    """Write the tables of the records below `folder` into `output`; return the paths of the files."""
    files = dict(zip(FILES, made(folder, asked), strict=True))
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomic(output / name, text)
    return [output / name for name in files]


def made(folder: Path, asked: Sequence[Pivot]) -> tuple[str, str]:
    """The contents of `FILES`."""
    tables = pivots(folder, asked)
    return markdown(folder, tables, asked), csv(tables)


def asked_in(text: str) -> list[Pivot]:
    """What the file that `markdown` has made was asked for."""
    return [Pivot.parse(found) for found in re.findall(r"--pivot ([^\s`]+)", text)]


def markdown(folder: Path, tables: Sequence[PivotTable], asked: Iterable[Pivot]) -> str:
    """All tables, what is missing in them, and the options that make them again."""
    options = " ".join(f"--pivot {pivot}" for pivot in asked)
    parts = [*(table.markdown for table in tables), *_unfinished(folder), f"`specbatch report {options}`\n"]
    return "\n".join(parts)


def _unfinished(folder: Path) -> Iterator[str]:
    with unpacked("folder", folder) as files:
        for plan in sorted(files.rglob(PLAN)):
            if missing := unfinished(plan.parent):
                where = plan.parent.relative_to(files)
                of = f" of {where}" if where.parts else ""
                yield f"* UNFINISHED: {counted(len(missing), 'point')}{of} not measured; the sweep can be continued\n"


def csv(tables: Sequence[PivotTable]) -> str:
    """All tables one below the other, with the title of each in the first column."""
    import pandas as pd

    every = []
    for table in tables:
        own = table.numbers.rename(columns=_text).rename_axis(table.corner, axis=0).reset_index()
        own.insert(0, "table", table.title)
        every.append(own)
    return str(pd.concat(every).to_csv(index=False))


def _tables(records: list[RunRecord], pivot: Pivot, value: str) -> Iterable[PivotTable]:
    """One table for each combination of what differs within cells. Refused: cells of which more differs."""
    import pandas as pd

    axes = (pivot.rows, pivot.columns)
    placed = [(_placed(record, pivot), record) for record in records]
    for axis in axes:
        if all(place.get(axis) is None for place, _ in placed):
            known = ", ".join(sorted({name for place, _ in placed for name in place}))
            raise refuse("pivot", str(pivot), f"no record has the setting {axis}; use one of {known}")
    others: list[str] = []
    for name in SPLIT:
        given = axes if name != SECTION else (*axes, *others)
        if name not in axes and any(len({_place(one, (name,)) for one, _ in cell}) > 1 for cell in _by(placed, given)):
            others.append(name)
    every = {name: _ordered(place.get(name) for place, _ in placed) for name in others}

    def at(group: list[Any]) -> list[int]:
        return [every[name].index(_place(group[0][0], (name,))[0]) for name in others]

    for group in sorted(_by(placed, others), key=at):
        rows, columns = (_ordered(place.get(axis) for place, _ in group) for axis in axes)
        metric, read = _reader([*records, *(record for _, record in group)], value, pivot)
        numbers, shown = dict[Any, float](), dict[Any, str]()
        for cell in _by(group, axes):
            own = _repeats([record for _, record in cell], pivot)
            where, number = _place(cell[0][0], axes), read(own)
            numbers[where] = _number(number)
            shown[where] = "FAILED" if own[0].error is not None else metric.text(number)
        here = group[0][0]
        common = ", ".join(_named(name, here[name]) for name in others if here.get(name) is not None)
        unreal = made_up([record for _, record in group])
        title = f"{common}{': ' if common else ''}{metric.heading}{f' ({unreal})' if unreal else ''}"
        frames = (
            pd.DataFrame([[cells.get((row, column), empty) for column in columns] for row in rows], rows, columns)
            for cells, empty in ((numbers, _number(None)), (shown, metric.text(None)))
        )
        yield PivotTable(title, f"{pivot.rows} \\ {pivot.columns}", *frames)


def _placed(record: RunRecord, pivot: Pivot) -> dict[str, Any]:
    """Where a record belongs. The name of its configuration has no part that an axis has."""
    found = settings_of(record)
    if "configuration" in found and "configuration" not in (pivot.rows, pivot.columns):
        words = str(found["configuration"]).split(" ")
        axes = {pivot.rows, pivot.columns}
        found["configuration"] = " ".join(
            word for word in words if word.partition("=")[0].replace("-", "_") not in axes
        )
    return found


def _by(placed: list[tuple[dict[str, Any], RunRecord]], names: Iterable[str]) -> list[Any]:
    """The records that agree in all of these, in their order."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for place, record in placed:
        found.setdefault(_place(place, names), []).append((place, record))
    return list(found.values())


def _place(place: Mapping[str, Any], names: Iterable[str]) -> tuple[Any, ...]:
    """Settings as labels of rows and columns; NOT_SET where a record does not have one, lists as text."""
    values = (place.get(name) for name in names)
    return tuple(NOT_SET if value is None else str(value) if isinstance(value, list) else value for value in values)


def _repeats(records: list[RunRecord], pivot: Pivot) -> list[RunRecord]:
    """The records of a cell that count. Refused: others than repeats of one point."""
    for record in records[1:]:
        if different := conflicts_of(records[0], record):
            works = "use it as rows or columns, or name the folder of one sweep"
            raise refuse("pivot", str(pivot), f"runs of one cell differ in {'; '.join(different)}: {works}")
    return measured(records)


def _reader(records: list[RunRecord], value: str, pivot: Pivot) -> tuple[Metric, Any]:
    """The metric of a value, titled as in the last records that have it, and how it is read from those of a cell."""
    if (metric := METRICS.get(value.replace("-", "_"))) is not None:
        return metric, metric.over_repeats
    scores = {name: score for one in records for name, score in _scores(one).items()}
    if value not in scores:
        known = ", ".join(dict.fromkeys([*scores, *_measured(records)]))
        raise refuse("pivot", str(pivot), f"no record has {value}; use one of {known}")
    title = value if value != ACCURACY else f"{ACCURACY} ({scores[value]['metric']}, {scores[value]['filter']})"
    shown = Metric(value, title, "", "", "", decimals=3)
    return shown, lambda own: _scores(own[0]).get(value, {}).get("value")  # of the first repeat


def _scores(record: RunRecord) -> dict[str, Mapping[str, Any]]:
    """The scores of an evaluation by filter, the first one also as the accuracy."""
    scores: list[dict[str, Any]] = record.workload.get("scores") or []
    found = {str(score["filter"]): score for score in reversed(scores)}
    return {ACCURACY: scores[0]} | found if scores else {}


def _measured(records: list[RunRecord]) -> list[str]:
    return [key for key, metric in METRICS.items() if any(metric.read(one) is not None for one in records)]


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _ordered(values: Iterable[Any]) -> list[Any]:
    """The labels of an axis: numbers by size, others as they come."""
    labels = list(dict.fromkeys(_place({"": value}, ("",))[0] for value in values))
    return sorted(labels) if all(isinstance(label, int | float) for label in labels) else labels


def _named(name: str, value: Any) -> str:
    """A setting in a title."""
    return _text(value) if name in UNNAMED else f"{name.replace('_', ' ')} {_text(value)}"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
