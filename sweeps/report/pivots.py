"""Pivot tables of sweeps and evaluations: two settings of the runs as rows and columns, a number in the cells.

    | tensor_parallel \\ concurrency | 1      | 32       |
    | 1                             | 845.98 | 11405.85 |

What differs within a cell, such as the configuration, has a table for each value. A cell is over all repeats, as in the
other tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from specbatch.config.values import names
from specbatch.errors import refuse
from specbatch.files.atomic_file import write_atomic, writing
from specbatch.jobs.output_files import read_output
from specbatch.records.differences import flatten
from specbatch.records.markdown import markdown_table
from specbatch.records.metric import Metric
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord
from specbatch.records.runs import read_records
from specbatch.sweeps.report.heading import made_up
from specbatch.sweeps.report.parts import RATE, rate_of

if TYPE_CHECKING:
    import pandas as pd

ACCURACY = "accuracy"
FILES = ("pivots.md", "pivots.csv")
SPLIT = ("model", "dataset", "configuration", "concurrency", RATE, "thinking")  # a table each, unless rows or columns
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
        return cls(parts[0], parts[1], tuple(parts[2:]))

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
    about = {name: work.get(name) for name in ("configuration", "concurrency", "thinking")}
    about["dataset"] = work.get("task") or work.get("dataset")
    return found | {name: value for name, value in about.items() if value is not None} | {RATE: rate_of(work)}


def pivots(folder: Path, asked: Iterable[Pivot], setting: str = "folder") -> list[PivotTable]:
    """The tables of all records below `folder`, or in an archive of them. Refused: settings and values that no record
    has."""
    records = [record for _, record in read_records(setting, folder, read_output) if record.error is None]
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
    return markdown(tables, asked), csv(tables)


def asked_in(text: str) -> list[Pivot]:
    """What the file that `markdown` has made was asked for."""
    return [Pivot.parse(found) for found in re.findall(r"--pivot ([^\s`]+)", text)]


def markdown(tables: Sequence[PivotTable], asked: Iterable[Pivot]) -> str:
    """All tables, and the options that make them again."""
    options = " ".join(f"--pivot {pivot}" for pivot in asked)
    return "\n".join([*(table.markdown for table in tables), f"`specbatch report {options}`\n"])


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
    """One table for each combination of what differs within cells."""
    import pandas as pd

    rows = [_placed(record, pivot) | {"record": place} for place, record in enumerate(records)]
    frame = pd.DataFrame(rows)
    axes = [pivot.rows, pivot.columns]
    for axis in axes:
        if axis not in frame or frame[axis].isna().all():
            known = ", ".join(sorted({name for record in records for name in settings_of(record)}))
            raise refuse("pivot", str(pivot), f"no record has the setting {axis}; use one of {known}")
    cells = frame.groupby(axes, sort=False)
    others = [name for name in SPLIT if name in frame and name not in axes and (cells[name].nunique() > 1).any()]
    groups = frame.groupby(others, sort=False, dropna=False) if others else [((), frame)]
    for key, group in groups:
        own = [records[place] for place in group["record"]]
        metric, read = _reader(own, value, pivot)
        places = group.groupby(axes, sort=False)["record"].agg(list)
        each = pd.Series([read([records[one] for one in found]) for found in places], places.index)
        numbers = each.unstack().reindex(index=_ordered(group[axes[0]]), columns=_ordered(group[axes[1]]))
        common = ", ".join(map(_text, key)) if others else ""
        unreal = made_up(own)
        title = f"{common}{': ' if common else ''}{metric.heading}{f' ({unreal})' if unreal else ''}"
        corner = f"{pivot.rows} \\ {pivot.columns}"
        yield PivotTable(title, corner, numbers, numbers.map(metric.text))


def _placed(record: RunRecord, pivot: Pivot) -> dict[str, Any]:
    """Where a record belongs. The name of its configuration has no part that an axis has."""
    found = settings_of(record)
    kept = {name: found[name] for name in dict.fromkeys((pivot.rows, pivot.columns, *SPLIT)) if name in found}
    if "configuration" in kept and "configuration" not in (pivot.rows, pivot.columns):
        words = str(kept["configuration"]).split(" ")
        axes = {pivot.rows, pivot.columns}
        kept["configuration"] = " ".join(word for word in words if word.partition("=")[0].replace("-", "_") not in axes)
    return kept


def _reader(records: list[RunRecord], value: str, pivot: Pivot) -> tuple[Metric, Any]:
    """The metric of a value, and how it is read from the records of a cell."""
    if value in METRICS:
        metric = METRICS[value]
        return metric, lambda own: _number(metric.over_repeats(own))
    scores = {name: score for one in records for name, score in _scores(one).items()}
    if value not in scores:
        known = ", ".join(dict.fromkeys([*scores, *_measured(records)]))
        raise refuse("pivot", str(pivot), f"no record has {value}; use one of {known}")
    title = value if value != ACCURACY else f"{ACCURACY} ({scores[value]['metric']}, {scores[value]['filter']})"
    shown = Metric(value, title, "", "", "", decimals=3)
    return shown, lambda own: _number(_scores(own[0]).get(value, {}).get("value"))  # of the first repeat


def _scores(record: RunRecord) -> dict[str, Mapping[str, Any]]:
    """The scores of an evaluation by filter, the first one also as the accuracy."""
    scores: list[dict[str, Any]] = record.workload.get("scores") or []
    found = {str(score["filter"]): score for score in reversed(scores)}
    return {ACCURACY: scores[0]} | found if scores else {}


def _measured(records: list[RunRecord]) -> list[str]:
    return [key for key, metric in METRICS.items() if any(metric.read(one) is not None for one in records)]


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _ordered(column: pd.Series) -> list[Any]:
    """The values of an axis: numbers by size, others as they come."""
    values = list(dict.fromkeys(column))
    return sorted(values) if all(isinstance(value, int | float) for value in values) else values


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
