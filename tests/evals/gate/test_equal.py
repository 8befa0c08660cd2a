"""The rule `equal`: every answer is the baseline's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_report
from typer.testing import CliRunner

from specbatch.cli.app import app
from specbatch.errors import SpecbatchError
from specbatch.evals.gate.gate import GateResult, run_gate
from specbatch.evals.gate.report import markdown

RULE = "[answers]\nequal = true\n"
NAME = "answers equal the baseline's"


def write(folder: Path, answers: list[tuple[list[int], str]], **changes: Any) -> Path:
    """A run whose answers have these tokens and texts; changes: other fields of the last row."""
    report = make_report("1" * len(answers))
    for row, (tokens, text) in zip(report.questions, answers, strict=True):
        row |= {"token_ids": tokens, "text": text}
    report.questions[-1].update(changes)
    folder.mkdir()
    report.save(folder)
    return folder


BEFORE = [([5, 6, 7], "it is 7"), ([5, 8], "it is 8"), ([4], "no")]


def gate(tmp_path: Path, policy: Any, after: Any, **changes: Any) -> GateResult:
    return run_gate(policy(RULE), write(tmp_path / "new", after, **changes), write(tmp_path / "old", BEFORE))


def test_equal_answers_pass(tmp_path: Path, policy: Any) -> None:
    result = gate(tmp_path, policy, BEFORE)
    (check,) = (item for item in result.checks if item.name == NAME)
    assert (result.passed, check.found, check.allowed) == (True, "3", "all 3")


@pytest.mark.parametrize(
    ("question", "answer", "shown"),
    [
        (1, ([5, 9], "it is 9"), "question 1, token 1 of 2: 8 -> 9; text from there: '8' -> '9'"),
        (1, ([5], "it is"), "question 1, token 1 of 2: 8 -> the end; text from there: ' 8' -> ''"),
        (2, ([4, 4], "no no"), "question 2, token 1 of 1: the end -> 4; text from there: '' -> ' no'"),
    ],
)
def test_one_differing_answer_fails_and_is_shown(
    tmp_path: Path, policy: Any, question: int, answer: Any, shown: str
) -> None:
    result = gate(tmp_path, policy, [*BEFORE[:question], answer, *BEFORE[question + 1 :]])
    (check,) = result.failed
    assert (check.name, check.found, check.detail) == (NAME, "2", f"first divergence: {shown}")
    assert shown in markdown(result)


def test_repeats_of_a_question_are_compared_each(tmp_path: Path, policy: Any) -> None:
    new, old = (write(tmp_path / name, BEFORE[:1] * 3) for name in ("new", "old"))
    for folder, tokens in ((new, [[5, 6, 7], [5, 9], [5, 6, 7]]), (old, [[5, 6, 7]] * 3)):
        rows = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
        for repeat, row in enumerate(rows):
            row |= {"doc_id": 4, "repeat": repeat, "prompt_hash": "same", "token_ids": tokens[repeat]}
        (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (check,) = run_gate(policy(RULE), new, old).failed
    assert check.detail.startswith("first divergence: question 4, token 1 of 3: 6 -> 9")


def test_one_differing_answer_exits_with_1(tmp_path: Path, policy: Any) -> None:
    new, old = write(tmp_path / "new", [*BEFORE[:2], ([3], "no")]), write(tmp_path / "old", BEFORE)
    words = ("gate", new, "--policy", policy(RULE), "--baseline", old)
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == 1, result.output
    assert "question 2, token 0 of 1: 4 -> 3" in " ".join(result.stdout.split())


def test_answers_that_cannot_be_compared_are_refused(tmp_path: Path, policy: Any) -> None:
    with pytest.raises(SpecbatchError, match="prompt of question 2 differs"):
        gate(tmp_path, policy, BEFORE, prompt_hash="another")
    with pytest.raises(SpecbatchError, match=r"equal in .* compares with a baseline; name .* out$"):
        run_gate(policy(RULE), tmp_path / "new")
    with pytest.raises(SpecbatchError, match="equl is unknown; did you mean equal"):
        run_gate(policy(RULE + "equl = true"), tmp_path / "new")
    with pytest.raises(SpecbatchError, match="equal = false asks nothing"):
        run_gate(policy("[answers]\nequal = false"), tmp_path / "new")
    without = make_report("1")
    (tmp_path / "bare").mkdir()
    without.save(tmp_path / "bare")
    with pytest.raises(SpecbatchError, match="its answer to question 0 has no token_ids"):
        run_gate(policy(RULE), tmp_path / "bare", tmp_path / "bare")
