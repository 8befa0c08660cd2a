"""Makes published tables again from the records beside them (`records.tar.xz`), with the plots of their common tables,
and the README.md of every folder.

    python results/remake.py            # replace tables and pages that differ, in all folders here
    python results/remake.py --check    # only name them, and exit with status 1

Numbers that differ by less than 1e-9 of their size are equal: the last digits of an interval depend on the version of
NumPy and on the processor. A folder keeps those files of `specbatch report` or of `specbatch eval --configs` that were
published.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pages import ARCHIVE, PAGE, pages

from specbatch.evals.grid_table import SUMMARY, load_grid
from specbatch.evals.report import EvalReport
from specbatch.jobs.send_one import table as send_one_table
from specbatch.records.answers import is_evaluated
from specbatch.records.archive import unpacked
from specbatch.records.store import RECORD
from specbatch.records.sweep_plan import PLAN, unfinished
from specbatch.sweeps.bench.sections import KINDS, kind_of
from specbatch.sweeps.bench.tables import write_tables
from specbatch.sweeps.report.gains import FILES as GAINS
from specbatch.sweeps.report.gains import gains_of
from specbatch.sweeps.report.parts import load_parts, part_files
from specbatch.sweeps.report.pivots import FILES as PIVOTS
from specbatch.sweeps.report.pivots import asked_in, made
from specbatch.sweeps.report.points import load_records
from specbatch.sweeps.report.report import draw_all, table_files

RESULTS = Path(__file__).parent


def tables_of(archive: Path) -> dict[str, str]:
    """All tables that the records of a sweep or of several, a bench or an evaluation make: content by name. Pivot
    tables and gains are those that the files beside the archive name; plots of a sweep are drawn if some are there."""
    with unpacked("records", archive) as folder:
        return _of_runs(folder) | _plots(archive, folder) | _pivots(archive, folder) | _gains(archive, folder)


def _of_runs(folder: Path) -> dict[str, str]:
    if is_evaluated(folder):
        load_grid(folder).save(folder)
        return {name: (folder / name).read_text(encoding="utf-8") for name in SUMMARY}
    if (folder / PLAN).exists():
        return table_files(load_records(folder), unfinished(folder))
    if (folder / RECORD).exists():
        return EvalReport.load(folder).files()
    if all(kind_of(path.parent.name) in KINDS for path in folder.glob(f"*/{PLAN}")):
        return {"summary.md": write_tables(folder), "summary.csv": (folder / "summary.csv").read_text()}
    parts = load_parts(folder)
    return {} if parts is None else part_files(parts)[0]  # without: there are pivot tables of them


def _plots(archive: Path, folder: Path) -> dict[str, str]:
    if not (archive.with_name("plots").exists() and (folder / PLAN).exists()):
        return {}
    return {f"plots/{one.plot.name}.svg": one.svg for one in draw_all(load_records(folder)) if one.svg}


def _pivots(archive: Path, folder: Path) -> dict[str, str]:
    if not (beside := archive.with_name(PIVOTS[0])).exists():
        return {}
    return dict(zip(PIVOTS, made(folder, asked_in(beside.read_text(encoding="utf-8"))), strict=True))


def _gains(archive: Path, folder: Path) -> dict[str, str]:
    if not (beside := archive.with_name(GAINS[0])).exists():
        return {}
    runs = re.findall(r"^\* (?:before|after): (.*)$", beside.read_text(encoding="utf-8"), re.MULTILINE)
    found = gains_of({name: folder / name for name in runs})
    return dict(zip(GAINS, (found.markdown(), found.csv()), strict=True))


def remade(archive: Path) -> Iterator[tuple[Path, str]]:
    """The tables beside `archive` and what its records make of them."""
    for name, text in tables_of(archive).items():
        if (table := archive.parent / name).exists():
            yield table, text


def is_same(table: str, text: str) -> bool:
    """Whether two tables have the same words and, but for rounding, the same numbers; two plots: to a 100th of a
    point."""
    number = re.compile(r"\d+\.\d+(?:e-?\d+)?")
    old, new = number.findall(table), number.findall(text)
    if number.sub("#", table) != number.sub("#", text):
        return False
    least = 0.01 if "<svg" in table else 1e-12
    return all(math.isclose(float(a), float(b), rel_tol=1e-9, abs_tol=least) for a, b in zip(old, new, strict=True))


def every_table() -> Iterator[tuple[Path, str]]:
    """All tables, then all pages, with what the records make of them."""
    for archive in sorted(RESULTS.rglob(ARCHIVE)):
        yield from remade(archive)
    for result in sorted(RESULTS.rglob("send-one.json")):
        yield result.with_suffix(".md"), f"{send_one_table(json.loads(result.read_text(encoding='utf-8')))}\n"
    yield from pages(RESULTS).items()


def main() -> int:
    """The exit status."""
    check = "--check" in sys.argv[1:]
    tables = written = differ = 0
    for path, text in every_table():
        is_page = path.name == PAGE
        tables, written = tables + (not is_page), written + is_page
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old != text if is_page else not is_same(old, text):
            differ += 1
            print(f"{path.relative_to(RESULTS)} {'differs' if check else 'is made again'}")
            if not check:
                path.write_text(text, encoding="utf-8")
    if not differ:
        print(f"all {tables} tables and {written} pages are those of their records")
    return int(check and differ > 0)


if __name__ == "__main__":
    sys.exit(main())
