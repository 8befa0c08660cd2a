"""`specbatch compare`: exit status, and what is printed and written."""

from __future__ import annotations

import json
import re

import pytest

from .conftest import SMALL_SWEEP


def test_table_and_files(run, swept, tmp_path):
    result = run("compare", swept / "baseline", swept / "v1", "--output", tmp_path / "new")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["compare.json", "summary.csv", "summary.md"]
    assert result.stdout.rstrip() == (tmp_path / "new/summary.md").read_text().rstrip()
    assert "* differs: speculation.algorithm: none -> ngram" in result.stdout
    assert re.search(r"accept length *\| 2.00 \(2.00-2.00\) pays *\| 1.000 *\| 2.000 *\|", result.stdout)
    (line,) = run("compare", swept / "baseline", swept / "v1", "--json").stdout.splitlines()
    assert json.loads(line) == json.loads((tmp_path / "new/compare.json").read_text())
    assert run("compare", swept / "baseline", swept / "v1", "--output", tmp_path / "new").exit_code == 2


def test_run_does_not_differ_from_itself(run, swept):
    rows = json.loads(run("compare", swept, swept, "--json").stdout)["rows"]
    assert {row["configuration"] for row in rows} == {"baseline", "v1", "v2"}
    assert {row["verdict"] for row in rows} == {"undecided"}


def test_errors_are_one_line(run, swept, tmp_path):
    other = tmp_path / "other"
    longer = (*SMALL_SWEEP, "--input-len", 7)
    run("sweep", "--concurrency", "1", "--configs", "v1", "--output", other, *longer)
    for words, message in (((swept, other), "input_len 6 and 7"), ((swept, tmp_path / "x"), "no such file or folder")):
        result = run("compare", *words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def test_resumed_job_is_compared_by_prompts_but_not_by_times(run, resumed):
    out = resumed / "b.jsonl"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    rows[2]["token_ids"][-1] += 1
    for row in rows[7:]:  # those of the first run
        row["accept_length"], row["verify_steps"] = 1.0, 4
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for before, after, side in (("a.jsonl", "b.jsonl", "after"), ("b.jsonl", "a.jsonl", "before")):
        body = json.loads(run("compare", resumed / before, resumed / after, "--json").stdout)
        found = {row["metric"]: row for row in body["rows"]}
        accept, throughput = found["accept_length"], found["output_throughput"]
        assert accept[side] == pytest.approx(12 * 4 / (7 * 2 + 5 * 4))
        assert accept["over"] == "12 prompts, paired"
        assert accept["verdict"] == {"after": "loses", "before": "pays"}[side]
        for metric, row in found.items():
            assert (row[side] is None) == (metric != "accept_length")
        assert (throughput["verdict"], throughput["over"]) == ("not judged", "not measured")
        (resumed_note,) = (note for note in body["notes"] if note.startswith("RESUMED"))
        assert f"{out}: 5 of 12 answers come from earlier, interrupted runs" in resumed_note
        assert "ANSWERS: 11 of 12 have the same tokens; others by index: 2" in body["notes"]
        assert not any(note.startswith("INCOMPLETE") for note in body["notes"])
    whole = json.loads(run("compare", resumed / "a.jsonl", resumed / "a.jsonl", "--json").stdout)
    assert "ANSWERS: 12 of 12 have the same tokens" in whole["notes"]
    assert not any(note.startswith("RESUMED") for note in whole["notes"])
    assert all(row["after"] is not None for row in whole["rows"])
