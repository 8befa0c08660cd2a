"""One run of a job: its limits, rows that the engine refuses meanwhile, and what it reports."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from echo import Echo

from specbatch.core.sampling_params import SamplingParams
from specbatch.jobs.formats import PromptRows
from specbatch.jobs.input_scan import BadLines, scan
from specbatch.jobs.job_run import JobRun
from specbatch.jobs.job_settings import NO_LIMITS, Limits
from specbatch.jobs.missing_rows import MissingRows
from specbatch.jobs.partial_output import RowsOnDisk

ROWS: list[dict[str, Any]] = [{"prompt": "ab"}, {"prompt": "x" * 100}, {"prompt": "c", "sampling": {"n": 3}}]


class Run:
    """A job over `ROWS` whose finished rows are kept in memory."""

    def __init__(self, folder: Path, *, skip_bad: bool = False) -> None:
        path = folder / "in.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        params = SamplingParams(max_new_tokens=2)
        form = PromptRows(path, params, seed=0, chat_template=False, split=None, column=None)
        self.kept: list[dict[str, Any]] = []
        self.logged: list[str] = []
        self.reports: list[tuple[int, int, str]] = []
        finished = RowsOnDisk(folder / "partial")
        self.rows = MissingRows(str(path), form, scan(form, BadLines(path)), finished, self.logged.append, skip_bad)

    def keep(self, row: dict[str, Any]) -> None:
        self.kept.append(row)
        self.rows.finished.put(row, 0)

    def report(self, done: int, total: int, note: str = "") -> None:
        self.reports.append((done, total, note))

    def run(self, limits: Limits = NO_LIMITS) -> str | None:
        engine: Any = Echo()
        return JobRun(self.rows, engine, self.keep, limits, self.report).run(None)


def test_a_row_that_the_engine_refuses_is_an_error_and_the_others_are_answered(tmp_path: Path) -> None:
    job = Run(tmp_path)
    assert job.run() is None
    errors = {row["index"]: row.get("error") for row in job.kept}
    assert "does not fit" in errors.pop(1)
    assert errors == {0: None, 2: None}
    assert job.reports[-1][:2] == (3, 3)
    assert job.reports[-1][2].startswith("1 failed, ")
    assert "in.jsonl:2" in job.logged[0]


def test_with_skip_bad_it_is_no_row_of_the_job(tmp_path: Path) -> None:
    job = Run(tmp_path, skip_bad=True)
    assert job.run() is None
    assert sorted(row["index"] for row in job.kept) == [0, 2]
    assert (job.rows.found.rows, job.rows.skipped) == (2, 1)
    assert job.logged[0].startswith("skipped ")


def test_a_run_with_a_limit_of_tokens_begins_no_more_rows_and_the_next_one_goes_on(tmp_path: Path) -> None:
    job = Run(tmp_path, skip_bad=True)
    assert job.run(Limits(max_tokens_total=1)) == "--max-tokens-total"
    assert [row["index"] for row in job.kept] == [0]
    assert job.run(Limits(max_tokens_total=6)) is None
    assert [row["index"] for row in job.kept] == [0, 2]


def test_a_time_limit_ends_a_run(tmp_path: Path) -> None:
    job = Run(tmp_path)
    assert job.run(Limits(time_limit=1.0, started=time.monotonic() - 2)) == "--time-limit"
    assert 0 < len(job.kept) < 3
