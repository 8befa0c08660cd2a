"""Published accept lengths beside measured ones: python -m specbatch.sweeps.published TABLE.csv FOLDER.

TABLE.csv has the columns dataset, configuration and accept_length. FOLDER/DATASET holds a sweep with configurations of
these names. A measured accept length is over all requests of a configuration, with the 95% interval of the ratio of
tokens to verifies over requests.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from specbatch.errors import SpecbatchError, refuse
from specbatch.records.intervals import sample
from specbatch.records.markdown import markdown_table
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.points import load_records

COLUMNS = ("dataset", "configuration", "accept_length")
HEADINGS = ("dataset", "configuration", "published", "measured", "95% interval", "draft", "requests")
_VERIFIED = ("emitted", "verify_steps")
_HALF_WIDTH = 1.96  # standard errors


def published_table(table: Path, folder: Path) -> str:
    """Markdown: a line for each line of `table`; one that was not measured has the reason."""
    return markdown_table(list(_lines(table, folder)), HEADINGS)


def _lines(table: Path, folder: Path) -> Iterator[list[str]]:
    for dataset, configuration, published in _read(table):
        found = _records(folder / dataset, configuration)
        cells = _measured(found) if found else ["-", _why_not(folder / dataset), "-", "-"]
        yield [dataset, configuration, f"{published:.2f}", *cells]


def _read(table: Path) -> list[tuple[str, str, float]]:
    try:
        with table.open(encoding="utf-8", newline="") as file:
            return [(row[COLUMNS[0]], row[COLUMNS[1]], float(row[COLUMNS[2]])) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        works = f"cannot be read ({error}); write a CSV file with the columns {', '.join(COLUMNS)}"
        raise refuse("table", str(table), works) from None


def _records(folder: Path, configuration: str) -> list[RunRecord]:
    if not folder.is_dir():
        return []
    records = [one for one in load_records(folder) if one.workload["configuration"] == configuration]
    return [one for one in records if one.error is None and one.drafts]


def _why_not(folder: Path) -> str:
    return f"not measured: {'not in the sweep, or failed' if folder.is_dir() else f'no {folder}'}"


def _measured(records: list[RunRecord]) -> list[str]:
    draft = str(records[0].config["speculation"].get("draft") or "-")
    if (simulated := records[0].simulated_acceptance) is not None:
        return ["-", f"not measured: simulated acceptance ({simulated})", draft, "-"]
    found = sample(_VERIFIED, records)
    if found is None or not found.bottom.sum():
        return ["-", "not measured: no verifies", draft, "-"]
    tokens, verifies = found.top, found.bottom
    ratio = float(tokens.sum() / verifies.sum())
    count = len(tokens)
    half = math.nan
    if count > 1:
        errors = tokens - ratio * verifies
        half = _HALF_WIDTH * float(np.sqrt((errors**2).sum() * count / (count - 1)) / verifies.sum())
    interval = "-" if math.isnan(half) else f"{ratio - half:.2f} to {ratio + half:.2f}"
    return [f"{ratio:.2f}", interval, draft, str(sum(len(one.requests) for one in records))]


def main(
    table: Annotated[Path, typer.Argument(help="CSV of dataset, configuration and accept_length.")],
    folder: Annotated[Path, typer.Argument(help="A folder with a sweep for each dataset.")],
) -> None:
    """Show published accept lengths beside measured ones."""
    try:
        typer.echo(published_table(table, folder))
    except SpecbatchError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
