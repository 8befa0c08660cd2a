"""Rows without an answer: those that the engine refuses, and that none is encoded twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from echo import Echo

from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.jobs import missing_rows
from specbatch.jobs.formats import PromptRows
from specbatch.jobs.input_scan import BadLines, scan
from specbatch.jobs.missing_rows import MissingRows
from specbatch.jobs.partial_output import RowsOnDisk

ENGINE: Any = Echo()
LONG = "x" * 100


def rows_of(folder: Path, *prompts: str, skip_bad: bool = False) -> tuple[MissingRows, list[str]]:
    """The rows of an input of which none is finished, and what is logged of them."""
    path, logged = folder / "in.jsonl", list[str]()
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    form = PromptRows(path, SamplingParams(max_new_tokens=2), seed=0, chat_template=False, split=None, column=None)
    found = scan(form, BadLines(path))
    return MissingRows(str(path), form, found, RowsOnDisk(folder / "partial"), logged.append, skip_bad), logged


def test_finished_rows_are_not_missing(tmp_path: Path) -> None:
    rows, _ = rows_of(tmp_path, "a", "b", "c")
    rows.finished.put({"index": 1}, 0)
    assert [row.index for row in rows.read(ENGINE)] == [0, 2]


def test_a_row_that_the_engine_refuses_ends_the_job_before_it_runs(tmp_path: Path) -> None:
    rows, _ = rows_of(tmp_path, "a", LONG, "c")
    with pytest.raises(SpecbatchError, match=r"in.jsonl:2.*does not fit.*--skip-bad leaves it out"):
        rows.check(ENGINE)
    assert (rows.found.rows, rows.skipped, rows.left_out) == (3, 0, set())


def test_with_skip_bad_it_is_left_out(tmp_path: Path) -> None:
    rows, logged = rows_of(tmp_path, "a", LONG, "c", skip_bad=True)
    rows.check(ENGINE)
    assert (rows.found.rows, rows.skipped) == (2, 1)
    assert [row.index for row in rows.read(ENGINE)] == [0, 2]
    assert ["in.jsonl:2" in line for line in logged] == [True]


def test_rows_are_encoded_once_and_only_the_first_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_rows, "CHECKED_TOKENS", 3)
    rows, _ = rows_of(tmp_path, "ab", "cd", "ef", LONG)
    rows.check(ENGINE)
    assert rows.encoded.keys() == {0, 1}
    first, _, third, last = rows.read(ENGINE)
    checked = rows.encoded[0]
    assert rows.requests_of(first, ENGINE) is checked
    assert rows.encoded.keys() == {1}
    assert [tokens for tokens, _ in rows.requests_of(third, ENGINE)] == [list(b"ef")]
    with pytest.raises(SpecbatchError, match="does not fit"):
        rows.requests_of(last, ENGINE)
