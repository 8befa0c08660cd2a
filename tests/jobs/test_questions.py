"""Question files, and the bundled GSM8K questions."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from specbatch.errors import SpecbatchError
from specbatch.files.atomic_file import temporary_path
from specbatch.jobs.questions import BUNDLED, Questions, bundled_questions, read_questions, refuse_shared

GOOD = '{"question": "a?", "answer": "1"}'


def test_keeps_question_and_answer_and_skips_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a?", "answer": "1", "source": 7}\n\n{"answer": "zwölf", "question": "b?"}')
    found = read_questions("data", path)
    assert found.rows == [{"question": "a?", "answer": "1"}, {"question": "b?", "answer": "zwölf"}]
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert str(found) == f"rows.jsonl (2 questions, sha256 {found.sha256[:12]})"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (f"{GOOD}\n{{broken\n", "line 2 is not JSON"),
        (f"{GOOD}\n\n[1, 2]\n", "line 3 is not an object"),
        ('{"question": "a?"}\n', "line 1 has no text in 'answer'"),
        (f'{GOOD}\n{{"question": "  ", "answer": "1"}}\n', "line 2 has no text in 'question'"),
        ('{"question": "a?", "answer": 18}\n', "line 1 has no text in 'answer'"),
        ("\n\n", "has no rows"),
        (b'{"question": "\xff\xfe", "answer": "1"}\n', "line 1 is not UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, content: str | bytes | None, complaint: str) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(SpecbatchError) as refused:
        read_questions("fewshot_data", path)
    assert complaint in str(refused.value)
    assert str(refused.value).startswith(f"fewshot_data={str(path)!r}")
    assert "\n" not in str(refused.value)


def test_example_must_not_be_scored() -> None:
    scored = Questions(Path("a.jsonl"), "a.jsonl", [{"question": "one?", "answer": "1"}], "0" * 64)
    other = Questions(Path("b.jsonl"), "b.jsonl", [{"question": "two?", "answer": "2"}], "0" * 64)
    same = Questions(Path("b.jsonl"), "b.jsonl", [*other.rows, {"question": " one?\n", "answer": "uno"}], "0" * 64)
    refuse_shared(scored, other)
    with pytest.raises(SpecbatchError, match=r"fewshot_data='b.jsonl': 1 of its questions"):
        refuse_shared(scored, same)


def test_bundled_questions_are_the_published_ones() -> None:
    found = {name: bundled_questions(name) for name in BUNDLED}
    assert {name: len(item.rows) for name, item in found.items()} == {
        "gsm8k": 1319,
        "gsm8k_platinum": 1209,
        "gsm8k_train": 7473,
    }
    assert str(found["gsm8k"]) == "bundled gsm8k test (1,319 questions, sha256 3730d312f6e3)"
    readme = (found["gsm8k"].path.parent / "README.md").read_text()
    for item in found.values():
        assert f"| `{item.path.name}` | {len(item.rows):,} | `{item.sha256}` |" in readme
        assert len({(row["question"], row["answer"]) for row in item.rows}) == len(item.rows)
        assert all("#### " in row["answer"] for row in item.rows)
    for scored in ("gsm8k", "gsm8k_platinum"):
        refuse_shared(found[scored], found["gsm8k_train"])
    questions = {row["question"] for row in found["gsm8k"].rows}
    assert all(row["question"] in questions for row in found["gsm8k_platinum"].rows)


def test_temporary_file_is_not_read(tmp_path):
    path = temporary_path(tmp_path / "questions.jsonl")
    path.write_text('{"question": "a", "answer": "b"}')
    with pytest.raises(SpecbatchError, match="is a temporary file of specbatch"):
        read_questions("data", path)
