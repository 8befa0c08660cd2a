"""Loads run records from disk: folders of sweep, bench, eval and check, and outputs of generate.

Whatever cannot be read is refused as a `SpecbatchError` that names the setting, the file and, where it breaks the
schema (`specbatch.records.schema`), the field.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specbatch.errors import refuse
from specbatch.files.text_files import read_json
from specbatch.records.run_record import REQUESTS, SCHEMA, RunRecord
from specbatch.records.schema import OutputRow, Record, RequestRow
from specbatch.records.validation import checked, read_rows

RECORD = "record.json"
OUTPUT_RECORD = ".record.json"  # after the name of an output of generate
EARLIER = "earlier_answers"  # in a workload: answers of runs before the one that the record is of
WORKS = "move it away or run it again"

ReadRows = Callable[[Path], list[dict[str, Any]]]


def find_records(
    setting: str, path: Path, pattern: str = f"**/{RECORD}", schema: type[Record] = Record
) -> list[tuple[Path, RunRecord]]:
    """Every record below the folder `path`, which is the value of `setting`, with its folder."""
    return [(file.parent, load_record(setting, file.parent, schema)) for file in sorted(path.glob(pattern))]


def load_record(setting: str, folder: Path, schema: type[Record] = Record) -> RunRecord:
    """The record in `folder` with the rows of its requests. Refused: one that is unreadable or breaks the schema."""
    record = _read(setting, folder / RECORD, schema)
    if (rows := folder / REQUESTS).exists():
        record.requests = list(read_rows(setting, rows, RequestRow, WORKS))
    return record


def output_of(path: Path) -> Path | None:
    """The output of generate that `path` names, or the record beside it; None if it is neither."""
    output = path.with_name(path.name.removesuffix(OUTPUT_RECORD))
    return output if _beside(output).is_file() else None


def load_output(setting: str, output: Path, rows_of: ReadRows) -> RunRecord:
    """The record of an output of generate, with the rows of that output as its requests.

    The record of a job that was interrupted and continued covers the last run alone. The metrics that follow from the
    rows replace its own, and its times are left out: those of the earlier runs were not kept.
    """
    record = _read(setting, _beside(output), Record)
    rows = rows_of(output) if output.exists() else []
    for number, row in enumerate(rows, start=1):
        checked(setting, f"{output}: row {number}", OutputRow, row, WORKS)
    earlier = len(rows) - int(record.metrics["requests"] or 0)
    if earlier < 0:  # rows were removed
        return record
    record.requests = [row | {"emitted": round((row["accept_length"] or 0) * row["verify_steps"])} for row in rows]
    if earlier:
        answered = [row for row in record.requests if row.get("error") is None]
        emitted, verifies = (sum(row[name] for row in answered) for name in ("emitted", "verify_steps"))
        record.metrics = {"requests": len(answered), "accept_length": emitted / verifies if verifies else None}
        record.workload[EARLIER] = earlier
    return record


def _read(setting: str, path: Path, schema: type[Record]) -> RunRecord:
    body = read_json(setting, path, WORKS)
    found = body.get("schema") if isinstance(body, dict) else None
    if isinstance(found, int) and found != SCHEMA:
        versions = body.get("versions")
        version = versions.get("specbatch") if isinstance(versions, dict) else None
        works = f"has schema {found} and this version reads {SCHEMA}; use specbatch {version} or run it again"
        raise refuse(setting, str(path), works)
    checked(setting, str(path), schema, body, WORKS)
    return RunRecord(**{"provenance": {}} | body, requests=[])  # earlier versions wrote none


def _beside(output: Path) -> Path:
    return output.with_name(output.name + OUTPUT_RECORD)
