"""Question files: JSONL, one object with `question` and `answer` per line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from specbatch.errors import refuse
from specbatch.jobs.prompts import is_text

FIELDS = ("question", "answer")
_FORM = 'JSONL with one {"question": ..., "answer": ...} per line'


@dataclass(frozen=True)
class QuestionFile:
    """The rows of a file and which bytes they came from. Other fields than question and answer are left out."""

    path: Path
    rows: list[dict[str, str]]
    sha256: str

    def __str__(self) -> str:
        return f"{self.path.name} ({len(self.rows)} rows, sha256 {self.sha256[:12]})"


def read_questions(setting: str, path: Path) -> QuestionFile:
    """Read `path`, the value of `setting`. Whatever is wrong is refused with the number of its line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise refuse(setting, str(path), f"cannot be read ({error.strerror}); name a file of {_FORM}") from error
    rows = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
            raise refuse(setting, str(path), f"line {number} is not JSON; write {_FORM}") from error
        if not isinstance(row, dict):
            raise refuse(setting, str(path), f"line {number} is not an object; write {_FORM}")
        for field in FIELDS:
            if not isinstance(row.get(field), str) or not row[field].strip() or not is_text(row[field]):
                raise refuse(setting, str(path), f"line {number} has no text in {field!r}; write {_FORM}")
        rows.append({field: row[field] for field in FIELDS})
    if not rows:
        raise refuse(setting, str(path), f"has no rows; write {_FORM}")
    return QuestionFile(path, rows, hashlib.sha256(content).hexdigest())


def refuse_shared(data: QuestionFile, fewshot_data: QuestionFile) -> None:
    """An example that is also scored would give its answer away."""
    scored = {row["question"].strip() for row in data.rows}
    shared = sum(row["question"].strip() in scored for row in fewshot_data.rows)
    if shared:
        raise refuse(
            "fewshot_data",
            str(fewshot_data.path),
            f"{shared} of its questions are scored in {data.path.name} too; name other rows, or leave it out "
            "(then each question's examples come from the other rows of the scored file)",
        )
