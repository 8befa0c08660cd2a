"""Loads questions with reference answers: JSONL files, and the GSM8K sets bundled with the package.

Each line of a file is one JSON object with `question` and `answer`.
"""

from __future__ import annotations

import hashlib
import lzma
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from specbatch.errors import refuse
from specbatch.files.atomic_file import is_leftover
from specbatch.files.text_files import TEMPORARY, UnreadableError, parse_json
from specbatch.jobs.prompts import is_text

FIELDS = ("question", "answer")
_FORM = 'JSONL with one {"question": ..., "answer": ...} per line'
_BUNDLED = {
    "gsm8k": ("bundled gsm8k test", "gsm8k_test.jsonl.xz"),
    "gsm8k_platinum": ("bundled gsm8k_platinum test", "gsm8k_platinum_test.jsonl.xz"),
    "gsm8k_train": ("bundled gsm8k train", "gsm8k_train.jsonl.xz"),
}
BUNDLED = tuple(_BUNDLED)


@dataclass(frozen=True)
class Questions:
    """Rows with `question` and `answer`, and the file that they come from; other fields are dropped.

    sha256   of the uncompressed file
    title    how reports and error messages name the source
    """

    path: Path
    title: str
    rows: list[dict[str, str]]
    sha256: str

    def __str__(self) -> str:
        return f"{self.title} ({len(self.rows):,} questions, sha256 {self.sha256[:12]})"


@cache
def bundled_questions(name: str) -> Questions:
    """A question set of the package, which needs no network: one of `BUNDLED`.

    gsm8k            the test set, 1,319 questions
    gsm8k_platinum   the revised test set, 1,209 questions
    gsm8k_train      the training set, 7,473 questions, for few-shot examples

    `data/README.md` has the origin, license and sha256 of each.
    """
    title, file = _BUNDLED[name]
    path = Path(__file__).parent / "data" / file
    content = lzma.decompress(path.read_bytes())
    return Questions(path, title, _parse("data", path, content), hashlib.sha256(content).hexdigest())


def read_questions(setting: str, path: Path) -> Questions:
    """Read the file `path`, the value of `setting`. An error names the line that is malformed."""
    if is_leftover(path):
        raise refuse(setting, str(path), TEMPORARY)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise refuse(setting, str(path), f"cannot be read ({error.strerror}); name a file of {_FORM}") from error
    return Questions(path, path.name, _parse(setting, path, content), hashlib.sha256(content).hexdigest())


def _parse(setting: str, path: Path, content: bytes) -> list[dict[str, str]]:
    rows = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except UnreadableError as error:
            raise refuse(setting, str(path), f"line {number} {error}; write {_FORM}") from None
        if not isinstance(row, dict):
            raise refuse(setting, str(path), f"line {number} is not an object; write {_FORM}")
        for field in FIELDS:
            if not isinstance(row.get(field), str) or not row[field].strip() or not is_text(row[field]):
                raise refuse(setting, str(path), f"line {number} has no text in {field!r}; write {_FORM}")
        rows.append({field: row[field] for field in FIELDS})
    if not rows:
        raise refuse(setting, str(path), f"has no rows; write {_FORM}")
    return rows


def refuse_shared(data: Questions, fewshot_data: Questions) -> None:
    """Refuse few-shot examples that are scored as well: each would give its own answer away."""
    scored = {row["question"].strip() for row in data.rows}
    shared = sum(row["question"].strip() in scored for row in fewshot_data.rows)
    if shared:
        raise refuse(
            "fewshot_data",
            str(fewshot_data.path),
            f"{shared} of its questions are scored as well, in {data.title}; name other rows, or leave it out",
        )
