"""The tables of `specbatch bench`: those of its sweeps, with the metrics of each section, made from its folder alone.

Figures of other engines are shown where the folder holds a `peers.csv` with rows for the same model, dtype, device and
speculation.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.errors import refuse
from specbatch.files.atomic_file import write_atomic
from specbatch.files.text_files import read_json
from specbatch.records.bases import bases_sentence
from specbatch.records.markdown import markdown_table
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import CAPS, RunRecord
from specbatch.records.schema import BenchRecord
from specbatch.records.sweep_plan import PLAN, unfinished
from specbatch.sweeps.bench.one_batch import one_batch
from specbatch.sweeps.bench.options import MACHINE
from specbatch.sweeps.bench.peers import Figures, figures_of
from specbatch.sweeps.bench.sections import KINDS, Kind, kind_of
from specbatch.sweeps.machine.limits import data_sheet_bandwidth
from specbatch.sweeps.report.heading import caps_text, described, heading, run_on
from specbatch.sweeps.report.notes import GENERAL, notes
from specbatch.sweeps.report.points import bases, load_records
from specbatch.sweeps.report.tables import decision, shown, table
from specbatch.sweeps.workload.heading import lines_of

if TYPE_CHECKING:
    import pandas as pd

MACHINE_FILE = f"{MACHINE}.json"
_CAPS = (*CAPS, "kv_dtype", "attention_backend", "capture_s")


def read_machine(folder: Path) -> dict[str, Any]:
    """What was measured of the device; empty without the section machine."""
    path = folder / MACHINE_FILE
    if not path.exists():
        return {}
    found = read_json("output", path)
    if not isinstance(found, dict):
        raise refuse("output", str(path), "it must hold a JSON object; measure the section machine again")
    return found


def load_sections(folder: Path) -> dict[str, list[RunRecord]]:
    """The records of each section in `folder`, in the order of `KINDS`; first tokens from the shortest prompt."""
    names = [path.parent.name for path in folder.glob(f"*/{PLAN}")]
    names.sort(key=lambda name: ([*KINDS].index(kind_of(name)), int(name.partition("-")[2] or 0)))
    return {name: load_records(folder / name, BenchRecord) for name in names}


def rows_of(records: dict[str, list[RunRecord]]) -> dict[str, pd.DataFrame]:
    """The table of each section, with the section's name and, of first tokens, the length of the prompts."""
    found = {}
    for name, own in records.items():
        kind = KINDS[kind_of(name)]
        found[name] = rows = table(own, kind.view)
        rows.insert(0, "section", name)
        if kind.size not in rows:
            rows.insert(1, kind.size, own[0].workload["input_len"])
    return found


def joined(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """The rows of several tables, with the columns of all."""
    import pandas as pd

    return pd.DataFrame([row for rows in tables for row in rows.to_dict("records")])


def write_tables(folder: Path) -> str:
    """Write `summary.csv` and `summary.md` from the records in `folder`; return the Markdown."""
    records = load_sections(folder)
    rows = rows_of(records)
    write_atomic(folder / "summary.csv", joined(rows.values()).to_csv(index=False))
    text = markdown(folder, records, rows)
    write_atomic(folder / "summary.md", text)
    return text


def markdown(
    folder: Path, records: dict[str, list[RunRecord]], rows: dict[str, pd.DataFrame], *, brief: bool = False
) -> str:
    """For each section its decision table, the table of all columns, and notes.

    brief: for the console, without the tables of all columns and the notes that explain them.
    """
    figures = figures_of(folder, records)
    found: dict[str, list[str]] = {}
    for name, section in records.items():
        view = KINDS[kind_of(name)].view
        keys = view.brief if brief else view.keys
        found[name] = [str(note) for note in notes(section, rows[name], unfinished(folder / name), view, keys)]
    parts = [_heading(read_machine(folder), [record for own in records.values() for record in own])]
    for key, kind in KINDS.items():
        names = [name for name in records if kind_of(name) == key]
        if names:
            parts += [f"## {kind.title}\n", heading(_workload([records[name][0].workload for name in names]))]
            every = joined(rows[name] for name in names)
            over = bases([record for name in names for record in records[name]])
            cells = decision(every, kind.view, kind.size, over)
            parts.append(f"{markdown_table(*_with_figures(key, kind, cells, figures))}\n")
            if sentence := bases_sentence(over):
                parts.append(f"{sentence}\n")
            if not brief:
                cells = shown(every, over, kind.view, kind.size)
                parts.append(f"### All columns\n\n{markdown_table(*_with_figures(key, kind, cells, figures))}\n")
            own = ((f"{name}: {note}" if len(names) > 1 else note, note) for name in names for note in found[name])
            parts.append("".join(f"* {text}\n" for text, note in own if note not in GENERAL))
    if not brief:
        parts.append(one_batch(records))
        parts.append("".join(f"* {note}\n" for note in GENERAL if any(note in own for own in found.values())))
    return "\n".join(filter(None, parts))


def _workload(works: list[dict[str, Any]]) -> dict[str, str]:
    """Heading lines of sweeps that differ in the length of their prompts."""
    lengths = sorted(work["input_len"] for work in works)
    several = {"input_len": None, "input_range": [lengths[0], lengths[-1]]} if lengths[0] < lengths[-1] else {}
    return lines_of(works[0] | several)


def _with_figures(
    section: str, kind: Kind, cells: tuple[list[str], list[list[str]]], figures: Figures
) -> tuple[list[list[str]], list[str]]:
    """Cells and headings of a table, with a column for each column and engine that `figures` has."""
    titles, body = cells
    own = [figures.get((section, int(size), name), {}) for size, name, *_ in body]
    columns = sorted({key: None for found in own for key in found}, key=lambda key: kind.peers.index(key[0]))
    for column, peer in columns:
        titles.append(f"{peer}: {kind.view.columns[column].heading}" if len(kind.peers) > 1 else peer)
    rows = [[*row, *(found.get(key, "-") for key in columns)] for row, found in zip(body, own, strict=True)]
    return rows, titles


def _heading(machine: dict[str, Any], records: list[RunRecord]) -> str:
    lines = run_on(records) if records else {}
    if records and (sheet := data_sheet_bandwidth(records[0].gpu)):
        lines["data sheet"] = f"{sheet / 1e12:.1f} TB/s"
    if machine:
        metrics = [metric for key in ("read_bytes_s", "gemm_flop_s") if machine.get((metric := METRICS[key]).key)]
        speeds = (f"{item.title} {item.text(machine[item.key])} {item.unit}" for item in metrics)
        if metrics:
            lines["measured"] = ", ".join(speeds)
        else:
            lines["machine"] = f"not measured, {machine.get('error', 'needs a CUDA device')}"
    records = sorted(records, key=lambda record: bool(record.caps))  # a failed point has none
    for name, record in {record.workload["configuration"]: record for record in records}.items():
        lines[name] = "; ".join(filter(None, (described(record), caps_text(record, _CAPS))))
    return heading(lines)
