from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from specbatch.errors import SpecbatchError
from specbatch.evals.data import QuestionFile, read_questions, refuse_shared

GOOD = '{"question": "a?", "answer": "1"}'


def test_keeps_question_and_answer_and_skips_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a?", "answer": "1", "source": 7}\n\n{"answer": "zwölf", "question": "b?"}')
    found = read_questions("data", path)
    assert found.rows == [{"question": "a?", "answer": "1"}, {"question": "b?", "answer": "zwölf"}]
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert str(found) == f"rows.jsonl (2 rows, sha256 {found.sha256[:12]})"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (f"{GOOD}\n{{broken\n", "line 2 is not JSON"),
        (f"{GOOD}\n\n[1, 2]\n", "line 3 is not an object"),
        ('{"question": "a?"}\n', "line 1 has no text in 'answer'"),
        (f'{GOOD}\n{{"question": "  ", "answer": "1"}}\n', "line 2 has no text in 'question'"),
        ('{"question": "a?", "answer": 18}\n', "line 1 has no text in 'answer'"),
        ("\n\n", "has no rows"),
    ],
)
def test_names_the_line_that_is_wrong(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(SpecbatchError) as refused:
        read_questions("fewshot_data", path)
    assert complaint in str(refused.value)
    assert str(refused.value).startswith(f"fewshot_data={str(path)!r}")
    assert "\n" not in str(refused.value)


def test_refuses_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "\xff\xfe", "answer": "1"}\n')
    with pytest.raises(SpecbatchError, match="line 1 is not JSON"):
        read_questions("data", path)


def test_refuses_a_file_that_is_not_there_or_is_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(SpecbatchError, match="cannot be read"):
            read_questions("data", path)


def test_an_example_must_not_be_scored() -> None:
    scored = QuestionFile(Path("a.jsonl"), [{"question": "one?", "answer": "1"}], "0" * 64)
    other = QuestionFile(Path("b.jsonl"), [{"question": "two?", "answer": "2"}], "0" * 64)
    same = QuestionFile(Path("b.jsonl"), [*other.rows, {"question": " one?\n", "answer": "uno"}], "0" * 64)
    refuse_shared(scored, other)
    with pytest.raises(SpecbatchError, match=r"fewshot_data='b.jsonl': 1 of its questions"):
        refuse_shared(scored, same)
