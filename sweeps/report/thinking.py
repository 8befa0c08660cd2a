"""One table of a sweep with thinking on and off; each has its points in a folder, `thinking-on` and `thinking-off`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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

MODES = {"on": True, "off": False}
THINKING = "thinking"


def folders_of(folder: Path) -> dict[str, Path]:
    """The folder of each mode."""
    return {mode: folder / f"{THINKING}-{mode}" for mode in MODES}


def write_thinking(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """Write `summary.csv` and `summary.md` into `folder`; return the Markdown and the rows as JSON values. Empty where
    no point is finished."""
    import pandas as pd

    found = {
        mode: load_records(path) for mode, path in folders_of(folder).items() if any(path.glob("*/c*/r*/record.json"))
    }
    if not found:
        return "", []
    rows = {mode: table(records) for mode, records in found.items()}
    text = markdown(folder, found, rows)
    every = pd.concat([own.assign(**{THINKING: mode}) for mode, own in rows.items()])
    every.insert(0, THINKING, every.pop(THINKING))
    write_atomic(folder / "summary.csv", every.to_csv(index=False))
    write_atomic(folder / "summary.md", text)
    return text, as_json(every)


def markdown(folder: Path, found: dict[str, list[RunRecord]], rows: dict[str, pd.DataFrame]) -> str:
    """Heading, the decision table of both modes, and reasoning and answer apart. Ratios are within a mode."""
    first, *_ = found.values()
    lines = about(first)
    body: list[dict[str, str]] = []
    points: dict[tuple[Any, ...], list[RunRecord]] = {}
    for mode, records in found.items():
        headings, cells = decision(rows[mode], SWEEP, "concurrency", bases(records))
        body += [{THINKING: mode, **dict(zip(headings, row, strict=True))} for row in cells]
        points |= {(mode, *point): repeats for point, repeats in points_of(records).items()}
    names = list(dict.fromkeys(name for row in body for name in row))
    missing = [mode for mode, path in folders_of(folder).items() if not (path / PLAN).exists() or unfinished(path)]
    parts = [
        heading(lines | {"workload": lines["workload"].replace(", thinking on", "").replace(", thinking off", "")}),
        f"{markdown_table([[row.get(name, '-') for name in names] for row in body], names)}\n",
        f"{apart}\n" if (apart := parts_table(points, (THINKING, *POINT))) else "",
        f"* UNFINISHED: thinking {' and '.join(missing)}\n" if missing else "",
        f"* {', '.join(f'{path.name}/summary.md' for path in folders_of(folder).values())}: all columns and notes\n",
    ]
    return "\n".join(filter(None, parts))
