"""Makes published tables again from the records that are kept beside them, in `records.tar.xz`.

    python results/remake.py            # replace tables that differ, in all folders here
    python results/remake.py --check    # only name them, and exit with status 1

Numbers that differ by less than 1e-9 of their size are equal: the last digits of an interval depend on the version of
NumPy and on the processor. A folder keeps those files of `specbatch report` or of `specbatch eval --configs` that were
published.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from specbatch.evals.grid_table import SUMMARY, load_grid
from specbatch.records.answers import is_evaluated
from specbatch.records.archive import unpacked
from specbatch.records.sweep_plan import PLAN, unfinished
from specbatch.sweeps.bench.tables import write_tables
from specbatch.sweeps.report.points import load_records
from specbatch.sweeps.report.report import table_files

RESULTS = Path(__file__).parent
ARCHIVE = "records.tar.xz"


def tables_of(archive: Path) -> dict[str, str]:
    """All tables that the records of a sweep, a bench or an evaluation make: content by name."""
    with unpacked("records", archive) as folder:
        if is_evaluated(folder):
            load_grid(folder).save(folder)
            return {name: (folder / name).read_text(encoding="utf-8") for name in SUMMARY}
        if (folder / PLAN).exists():
            return table_files(load_records(folder), unfinished(folder))
        return {"summary.md": write_tables(folder), "summary.csv": (folder / "summary.csv").read_text()}


def remade(archive: Path) -> Iterator[tuple[Path, str]]:
    """The tables beside `archive` and what its records make of them."""
    for name, text in tables_of(archive).items():
        if (table := archive.with_name(name)).exists():
            yield table, text


def is_same(table: str, text: str) -> bool:
    """Whether two tables have the same words and, but for rounding, the same numbers."""
    number = re.compile(r"\d+\.\d+(?:e-?\d+)?")
    old, new = number.findall(table), number.findall(text)
    if number.sub("#", table) != number.sub("#", text):
        return False
    return all(math.isclose(float(a), float(b), rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(old, new, strict=True))


def main() -> int:
    """The exit status."""
    check = "--check" in sys.argv[1:]
    count = differ = 0
    for archive in sorted(RESULTS.rglob(ARCHIVE)):
        for table, text in remade(archive):
            count += 1
            if not is_same(table.read_text(encoding="utf-8"), text):
                differ += 1
                print(f"{table.relative_to(RESULTS)} {'differs' if check else 'is made again'}")
                if not check:
                    table.write_text(text, encoding="utf-8")
    if not differ:
        print(f"all {count} tables are those of their records")
    return int(check and differ > 0)


if __name__ == "__main__":
    sys.exit(main())
