"""Loads run records from disk: folders of sweep, bench, eval and check, and outputs of generate.

Whatever cannot be read is refused as a `SpecbatchError` that names the setting and the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbatch.errors import SpecbatchError, refuse
from specbatch.records.run_record import SCHEMA, RunRecord

RECORD = "record.json"
OUTPUT_RECORD = ".record.json"  # after the name of an output of generate
EARLIER = "earlier_answers"  # in a workload: answers of runs before the one that the record is of

ReadRows = Callable[[Path], list[dict[str, Any]]]


def find_records(setting: str, path: Path, pattern: str = f"**/{RECORD}") -> list[tuple[Path, RunRecord]]:
    """Every record below the folder `path`, which is the value of `setting`, with its folder."""
    return [(file.parent, load_record(setting, file.parent)) for file in sorted(path.glob(pattern))]


def load_record(setting: str, folder: Path) -> RunRecord:
    """The record in `folder` with the rows of its requests. Refused: one that is unreadable or of another schema."""
    with unreadable(setting, folder):
        return _checked(setting, folder, RunRecord.load(folder))


def output_of(path: Path) -> Path | None:
    """The output of generate that `path` names, or the record beside it; None if it is neither."""
    output = path.with_name(path.name.removesuffix(OUTPUT_RECORD))
    return output if _beside(output).is_file() else None


def load_output(setting: str, output: Path, read_rows: ReadRows) -> RunRecord:
    """The record of an output of generate, with the rows of that output as its requests.

    The record of a job that was interrupted and continued covers the last run alone. The metrics that follow from the
    rows replace its own, and its times are left out: those of the earlier runs were not kept.
    """
    with unreadable(setting, output):
        body = json.loads(_beside(output).read_text(encoding="utf-8"))
        record = _checked(setting, _beside(output), RunRecord(**body, requests=[]))
        rows = read_rows(output) if output.exists() else []
    earlier = len(rows) - int(record.metrics["requests"] or 0)
    if earlier < 0:  # rows were removed
        return record
    record.requests = [row | {"emitted": round((row["accept_length"] or 0) * row["verify_steps"])} for row in rows]
    if earlier:
        emitted, verifies = (sum(row[name] for row in record.requests) for name in ("emitted", "verify_steps"))
        record.metrics = {"requests": len(rows), "accept_length": emitted / verifies if verifies else None}
        record.workload[EARLIER] = earlier
    return record


@contextmanager
def unreadable(setting: str, path: Path) -> Iterator[None]:
    """Refuse `path` for whatever reading it raises."""
    try:
        yield
    except SpecbatchError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:  # no permission, not JSON, fields missing
        line = next(iter(str(error).splitlines()), "")
        works = f"cannot be read ({type(error).__name__}: {line}); move it away or run it again"
        raise refuse(setting, str(path), works) from error


def _beside(output: Path) -> Path:
    return output.with_name(output.name + OUTPUT_RECORD)


def _checked(setting: str, path: Path, record: RunRecord) -> RunRecord:
    if record.schema != SCHEMA:
        version = record.versions.get("specbatch")
        works = f"has schema {record.schema} and this version reads {SCHEMA}; use specbatch {version} or run it again"
        raise refuse(setting, str(path), works)
    return record
