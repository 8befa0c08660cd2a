"""Evaluations with thinking on and off, in one table. Each mode has a folder, `thinking-on` and `thinking-off`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbatch.evals.grid_table import Grid
from specbatch.evals.options import EvalOptions
from specbatch.evals.report import EvalReport
from specbatch.evals.several import SeveralReports
from specbatch.files.atomic_file import write_atomic
from specbatch.records.markdown import markdown_table
from specbatch.records.reasoning import parts_of, parts_table
from specbatch.sweeps.report.parts import MODES, THINKING, folders_of


def in_modes(options: EvalOptions, folder: Path) -> dict[str, EvalOptions]:
    """The options of each mode, with its folder in `folder` as output."""
    paths = folders_of(folder)
    return {mode: replace(options, thinking=is_on, output=paths[mode]) for mode, is_on in MODES.items()}


@dataclass(frozen=True)
class ThinkingReports:
    """The reports of an evaluation by mode."""

    modes: Mapping[str, EvalReport | SeveralReports]

    def table(self) -> str:
        """Markdown: scores and speed of each mode and task, reasoning and answer apart, and below them each mode."""
        each = self._each()
        scores = [{THINKING: mode, **row} for (mode, _), report in each.items() for row in report.score_cells()]
        speed = [
            {THINKING: mode, "task": task, **cells}
            for (mode, task), report in each.items()
            if report.generates
            for cells in report.speed_cells()
        ]
        parts = parts_table({place: [report.record] for place, report in each.items()}, (THINKING, "task"))
        below = [f"## thinking {mode}\n\n{report.table()}" for mode, report in self.modes.items()]
        tables = [markdown_table(rows) for rows in (scores, speed) if rows]
        return "\n\n".join(filter(None, [*tables, parts, *below]))

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {THINKING: {mode: report.as_dict() for mode, report in self.modes.items()}}

    def save(self, folder: Path) -> None:
        """Write the table as Markdown and CSV."""
        rows = [
            {THINKING: mode} | row | parts_of([report.record]) | {THINKING: mode}  # in place of that of the settings
            for (mode, _), report in self._each().items()
            for row in report.flat()
        ]
        _save(folder, self.table(), rows)

    def _each(self) -> dict[tuple[str, str], EvalReport]:
        """The reports by mode and task."""
        return {
            (mode, name): one
            for mode, found in self.modes.items()
            for name, one in (found.reports if isinstance(found, SeveralReports) else {found.task: found}).items()
        }


@dataclass(frozen=True)
class ThinkingGrids:
    """The tables of configurations by mode and task."""

    modes: Mapping[str, Mapping[str, Grid]]

    @property
    def all(self) -> list[Grid]:
        return [grid for grids in self.modes.values() for grid in grids.values()]

    def table(self) -> str:
        """Markdown: for each task the points of both modes, reasoning and answer apart, and below them each mode."""
        parts = []
        for task in dict.fromkeys(task for grids in self.modes.values() for task in grids):
            found = {mode: grids[task] for mode, grids in self.modes.items() if task in grids}
            rows = [{THINKING: mode, **cells} for mode, grid in found.items() for cells in grid.cells()]
            points = {(mode, *place): own for mode, grid in found.items() for place, own in grid.records().items()}
            names = list(dict.fromkeys(name for row in rows for name in row))
            parts += [
                f"## {task}" if any(len(grids) > 1 for grids in self.modes.values()) else "",
                markdown_table([[row.get(name, "-") for name in names] for row in rows], names) if rows else "",
                parts_table(points, (THINKING, "concurrency", "configuration")),
                *(f"### thinking {mode}\n\n{grid.table()}" for mode, grid in found.items()),
            ]
        return "\n\n".join(filter(None, parts))

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            THINKING: {
                mode: {task: grid.as_dict() for task, grid in grids.items()} for mode, grids in self.modes.items()
            }
        }

    def save(self, folder: Path) -> None:
        """Write the table as Markdown and CSV."""
        rows = [
            {THINKING: mode, "task": task, **row}
            for mode, grids in self.modes.items()
            for task, grid in grids.items()
            for row in grid.rows()
        ]
        _save(folder, self.table(), rows)


def _save(folder: Path, table: str, rows: list[dict[str, Any]]) -> None:
    found = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(found, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(folder / "summary.md", table + "\n")
    write_atomic(folder / "summary.csv", found.getvalue())
