"""One table of a sweep that has a setting of its workload in several values, such as thinking on and off, or several
request rates. The points of each value are in a folder of their own, `thinking-on`, `request-rate-5`, ..."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.errors import each_once
from specbatch.files.atomic_file import write_atomic
from specbatch.records.markdown import markdown_table
from specbatch.records.reasoning import parts_table
from specbatch.records.run_record import RunRecord
from specbatch.records.sweep_plan import PLAN, unfinished
from specbatch.sweeps.report.heading import about, heading
from specbatch.sweeps.report.points import POINT, SWEEP, bases, load_records, points_of
from specbatch.sweeps.report.tables import as_json, decision, table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Axis:
    """A setting that has several values.

    name     the field of the workload, also the heading of its column
    values   by their labels
    line     the line of the heading that tells the value
    """

    name: str
    values: Mapping[str, Any]
    line: str = "workload"

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")

    def shared(self, line: str, label: str) -> str:
        """A line of a heading without the value that it tells."""
        return line.replace(f", {self.title} {label}", "")

    def folders(self, folder: Path) -> dict[str, Path]:
        """The folder of each value, by its label."""
        return {label: folder / f"{self.name.replace('_', '-')}-{label}" for label in self.values}


THINKING = Axis("thinking", {"on": True, "off": False})
RATE = "request_rate"


def rates(values: Iterable[float]) -> Axis:
    """Request rates; inf: all requests at once, or a closed loop."""
    labels = [f"{value:g}" for value in values]
    each_once(RATE, labels)
    return Axis(RATE, dict(zip(labels, values, strict=True)), "arrivals")


def rate_of(workload: Mapping[str, Any]) -> float:
    """The request rate of a record's workload."""
    rate = workload.get(RATE)
    return math.inf if rate is None else float(rate)


def write_variants(folder: Path, axis: Axis) -> tuple[str, list[dict[str, Any]]]:
    """Write `summary.csv` and `summary.md` into `folder`; return the Markdown and the rows as JSON values. Empty where
    no point is finished."""
    import pandas as pd

    found = {
        label: load_records(path)
        for label, path in axis.folders(folder).items()
        if any(path.glob("*/c*/r*/record.json"))
    }
    if not found:
        return "", []
    rows = {label: table(records) for label, records in found.items()}
    text = markdown(folder, axis, found, rows)
    every = pd.concat([own.assign(**{axis.name: label}) for label, own in rows.items()])
    every.insert(0, axis.name, every.pop(axis.name))
    write_atomic(folder / "summary.csv", every.to_csv(index=False))
    write_atomic(folder / "summary.md", text)
    return text, as_json(every)


def markdown(folder: Path, axis: Axis, found: dict[str, list[RunRecord]], rows: dict[str, pd.DataFrame]) -> str:
    """Heading, the decision table of all values, and reasoning and answer apart. Ratios are within a value."""
    lines: dict[str, str] = {}
    body: list[dict[str, str]] = []
    points: dict[tuple[Any, ...], list[RunRecord]] = {}
    told: dict[str, None] = {}
    for label, records in found.items():
        own = about(records)
        lines = lines or own
        told[axis.shared(own[axis.line], label)] = None
        headings, cells = decision(rows[label], SWEEP, "concurrency", bases(records))
        body += [{axis.title: label, **dict(zip(headings, row, strict=True))} for row in cells]
        points |= {(label, *point): repeats for point, repeats in points_of(records).items()}
    names = list(dict.fromkeys(name for row in body for name in row))
    paths = axis.folders(folder)
    missing = [label for label, path in paths.items() if not (path / PLAN).exists() or unfinished(path)]
    parts = [
        heading(lines | {axis.line: "; ".join(told)}),
        f"{markdown_table([[row.get(name, '-') for name in names] for row in body], names)}\n",
        f"{apart}\n" if (apart := parts_table(points, (axis.name, *POINT))) else "",
        f"* UNFINISHED: {axis.title} {' and '.join(missing)}\n" if missing else "",
        f"* {', '.join(f'{path.name}/summary.md' for path in paths.values())}: all columns and notes\n",
    ]
    return "\n".join(filter(None, parts))
