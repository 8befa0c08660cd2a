"""Reads prompts from JSONL, with one object per line, or from the rows of a data set, in one of four forms.

{"prompt": "text"}                                   continued as it is
{"prompt_token_ids": [1, 2, 3]}                      token ids, not tokenized again
{"question": "text"}                                 asked as "Question: text\\nAnswer:"
{"messages": [{"role": "user", "content": "text"}]}  rendered with the model's chat template

Other keys are allowed; "id" is copied to the output. Some readers allow a fifth form, MT-Bench's {"turns": ["text",
...]}: the first turn is asked as a message. Later turns would need the answer to the first.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.errors import refuse
from specbatch.jobs.dataset import is_dataset, read_rows

if TYPE_CHECKING:
    from specbatch.tokenizer import Tokenizer

FORMS = ("prompt", "prompt_token_ids", "question", "messages")
TURNS = "turns"


@dataclass(frozen=True)
class Prompt:
    """The prompt of one line: its number (from 1), its form, its value, and its id if it has one."""

    line: int
    form: str
    value: Any
    id: str | int | None = None

    def as_message(self) -> Prompt:
        """The same prompt as a user message. Raises SpecbatchError for token ids, whose text is not known."""
        if self.form == "messages":
            return self
        if self.form == "prompt_token_ids":
            raise refuse(
                "chat_template", True, f"line {self.line} has token ids, which cannot be a message; leave it out"
            )
        return replace(self, form="messages", value=[{"role": "user", "content": self.value}])

    def encode(self, tokenizer: Tokenizer, *, chat_template: bool = True, thinking: bool | None = None) -> list[int]:
        """Token ids. Without `chat_template`, messages are joined with blank lines. `thinking`: `enable_thinking` of
        the template; None leaves its default."""
        if self.form == "prompt_token_ids":
            return list(self.value)
        if self.form == "prompt":
            return tokenizer.encode(self.value)
        if self.form == "question":
            return tokenizer.encode(f"Question: {self.value}\nAnswer:")
        if chat_template:
            switch = {} if thinking is None else {"enable_thinking": thinking}
            return tokenizer.encode(tokenizer.apply_chat_template(self.value, **switch), add_special_tokens=False)
        return tokenizer.encode("\n\n".join(message["content"] for message in self.value))


@dataclass(frozen=True)
class MalformedLine:
    """A malformed line: its number (from 1), and what is wrong with it."""

    line: int
    problem: str


def read_prompts(path: Path, setting: str = "input", forms: tuple[str, ...] = FORMS) -> list[Prompt]:
    """All prompts of a JSONL file or a data set, in one of the `forms`; blank lines are skipped. Raises SpecbatchError
    with the number of the first malformed line."""
    prompts: list[Prompt] = []
    for item in scan_prompts(path, setting, forms):
        if isinstance(item, MalformedLine):
            raise refuse(setting, location(path, item.line), item.problem)
        prompts.append(item)
    return prompts


def location(source: str | Path, line: int) -> str:
    """FILE:LINE for a line of JSONL; for a data set or a JSON array, whose rows are not lines, the row."""
    return f"{source} row {line}" if is_dataset(source) or Path(source).suffix == ".json" else f"{source}:{line}"


def scan_prompts(
    source: str | Path,
    setting: str = "input",
    forms: tuple[str, ...] = FORMS,
    *,
    split: str | None = None,
    column: str | None = None,
) -> list[Prompt | MalformedLine]:
    """The prompt of each line of a JSONL file that is not blank, of each item of the array in a .json file, or of each
    row of a data set (`specbatch.jobs.dataset`), in order.

    column   the key of the prompt, instead of `forms`. If it is the name of a form, it has that form; else a string is
             a prompt, a list of numbers is token ids, and any other list is messages
    split    of a data set

    Raises SpecbatchError for a file that cannot be read or has no prompts.
    """
    forms = forms if column is None else (column,)
    found: list[Prompt | MalformedLine] = []
    for number, row in _rows(source, setting, forms, split):
        try:
            found.append(_prompt(_parsed(row, _LINES) if isinstance(row, bytes) else row, forms, number))
        except _MalformedError as error:
            found.append(MalformedLine(number, str(error)))
    if not found:
        raise refuse(setting, str(source), f"has no prompts; write {_LINES}")
    return found


def _rows(
    source: str | Path, setting: str, forms: tuple[str, ...], split: str | None
) -> Iterator[tuple[int, bytes | Any]]:
    """Non-blank lines, or rows, with their numbers from 1."""
    if is_dataset(source):
        yield from enumerate(read_rows(setting, source, split, forms, _IDS), start=1)
        return
    if split is not None:
        raise refuse("split", split, f"{source} has no splits; leave it out")
    try:
        content = Path(source).read_bytes()
    except OSError as error:
        works = f"cannot be read ({error.strerror}); name a JSONL file, or hf:OWNER/NAME"
        raise refuse(setting, str(source), works) from error
    content = content.removeprefix(codecs.BOM_UTF8)
    if Path(source).suffix == ".json" and content.lstrip().startswith(b"["):
        try:
            yield from enumerate(_parsed(content, "an array of objects, or one object a line"), start=1)
        except _MalformedError as error:
            raise refuse(setting, str(source), str(error)) from None
        return
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield number, line


class _MalformedError(ValueError):
    """What is wrong with a line."""


def _parsed(text: bytes, works: str) -> Any:
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError as error:
        what = f"not UTF-8 (byte {error.start + 1})"
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno} column {error.colno}"
        what = f"not JSON ({error.msg.removesuffix(' at')} at {place})"
    except RecursionError:
        what = "not JSON that can be read (nested too deeply)"
    except ValueError as error:  # a number with thousands of digits
        what = f"not JSON that can be read ({str(error).partition(';')[0]})"
    raise _MalformedError(f"{what}; write {works}")


def _prompt(row: Any, forms: tuple[str, ...], number: int) -> Prompt:
    found = [form for form in forms if isinstance(row, dict) and form in row]
    if not found:
        keys = "one of the keys " if len(forms) > 1 else "the key "
        raise _MalformedError(f"write a JSON object with {keys}{', '.join(forms)}")
    if len(found) > 1:
        raise _MalformedError(f"has both {' and '.join(found)}; keep one")
    name, value = found[0], row[found[0]]
    form = name if name in _EXPECTED else _form_of(value)
    if not value:
        raise _MalformedError(f"{name} is empty; write at least one token of text")
    if not _well_formed(form, value):
        expected = _EXPECTED[form] if form == name else "a string, a list of whole numbers from 0, or of messages"
        raise _MalformedError(f"{name} must be {expected}")
    if not is_text(json.dumps(value, ensure_ascii=False)):
        raise _MalformedError(f"{name} has half of a surrogate pair, which is not text; write the whole character")
    own = row.get(_IDS[1] if form == TURNS else _IDS[0])
    if own is not None and (not isinstance(own, (str, int)) or isinstance(own, bool)):
        raise _MalformedError("id must be a string or a number")
    if isinstance(own, str) and not is_text(own):
        raise _MalformedError("id has half of a surrogate pair, which is not text; write the whole character")
    if form == TURNS:
        form, value = "messages", [{"role": "user", "content": value[0]}]
    return Prompt(line=number, form=form, value=value, id=own)


def _form_of(value: Any) -> str:
    """The form of a value in a column with another name."""
    if not isinstance(value, list):
        return "prompt"
    return "messages" if value and isinstance(value[0], dict) else "prompt_token_ids"


def is_text(value: str) -> bool:
    """False for a string with half of a surrogate pair (\\ud800), which JSON allows and tokenizers reject."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


_LINES = "one JSON object per line"
_IDS = ("id", "question_id")  # MT-Bench has the second
_EXPECTED = {
    "prompt": "a string",
    "prompt_token_ids": "a list of whole numbers from 0",
    "question": "a string",
    "messages": 'a list of {"role": string, "content": string}',
    TURNS: "a list of strings",
}


def _well_formed(form: str, value: Any) -> bool:
    if form in ("prompt", "question"):
        return isinstance(value, str)
    if not isinstance(value, list):
        return False
    if form == TURNS:
        return all(isinstance(turn, str) and turn for turn in value)
    if form == "prompt_token_ids":
        return all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value)
    return all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    )
