"""Prompts from a JSONL file, one JSON object a line, or the rows of a Parquet file, in one of four forms.

{"prompt": "text"}                                   continued as it stands
{"prompt_token_ids": [1, 2, 3]}                      not tokenized again
{"question": "text"}                                 asked as "Question: text\\nAnswer:"
{"messages": [{"role": "user", "content": "text"}]}  rendered by the model's chat template

Other keys are allowed; "id" is carried to the output. Where a reader allows it, {"turns": ["text", ...]} of MT-Bench is
a fifth form: the first turn is asked as a message, as the others would need the answer before them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.errors import SpecbatchError, refuse

if TYPE_CHECKING:
    from specbatch.tokenizer import Tokenizer

FORMS = ("prompt", "prompt_token_ids", "question", "messages")
TURNS = "turns"


@dataclass(frozen=True)
class Prompt:
    """One line of the file: its number (from 1), its form, what it holds, and its id if it has one."""

    line: int
    form: str
    value: Any
    id: str | int | None = None

    def as_message(self) -> Prompt:
        """The same asked as a message of a user. Refused for token ids, whose text is not known."""
        if self.form == "messages":
            return self
        if self.form == "prompt_token_ids":
            raise refuse("chat_template", True, f"line {self.line} holds token ids, which are no message; leave it out")
        return replace(self, form="messages", value=[{"role": "user", "content": self.value}])

    def encode(self, tokenizer: Tokenizer, *, chat_template: bool = True, thinking: bool | None = None) -> list[int]:
        """Token ids. Without `chat_template`, messages are joined by blank lines instead. `thinking`: the template's
        switch; None leaves it alone."""
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


def read_prompts(path: Path, setting: str = "input", forms: tuple[str, ...] = FORMS) -> list[Prompt]:
    """All prompts of a JSONL or Parquet file, in one of the `forms`. The first malformed line is refused with its
    number; blank ones are skipped."""
    try:
        lines = _parquet_lines(path) if path.suffix == ".parquet" else path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise refuse(setting, str(path), f"cannot be read ({error.strerror}); name a JSONL file") from error
    except UnicodeDecodeError as error:
        raise refuse(setting, str(path), "is not UTF-8 text; name a JSONL file") from error
    numbered = enumerate(lines, start=1)
    prompts = [_parse(path, setting, forms, number, text) for number, text in numbered if text.strip()]
    if not prompts:
        raise refuse(setting, str(path), "holds no prompts; write one JSON object a line")
    return prompts


def _parquet_lines(path: Path) -> list[str]:
    """The rows of a data set's file as lines of JSON, of the columns that may hold prompts."""
    from pyarrow import ArrowInvalid, parquet

    try:
        names = parquet.read_schema(path).names
        table = parquet.read_table(path, columns=[name for name in names if name in (*FORMS, "id")])
    except ArrowInvalid as error:
        raise refuse("data", str(path), f"is no Parquet file ({str(error).splitlines()[0]})") from None
    return [json.dumps(row) for row in table.to_pylist()]


def _parse(path: Path, setting: str, forms: tuple[str, ...], number: int, text: str) -> Prompt:
    def malformed(what: str) -> SpecbatchError:
        return refuse(setting, f"{path}:{number}", what)

    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise malformed(f"not JSON ({error.msg} at column {error.colno}); write one JSON object a line") from error
    except RecursionError as error:
        raise malformed("not JSON that can be read (nested too deeply); write one JSON object a line") from error
    found = [form for form in forms if isinstance(row, dict) and form in row]
    if not found:
        raise malformed(f"write a JSON object with one of the keys {', '.join(forms)}")
    if len(found) > 1:
        raise malformed(f"has both {' and '.join(found)}; keep one")
    form, value = found[0], row[found[0]]
    if not value:
        raise malformed(f"{form} is empty; write at least one token of text")
    if not _well_formed(form, value):
        raise malformed(f"{form} must be {_EXPECTED[form]}")
    if not is_text(json.dumps(value, ensure_ascii=False)):
        raise malformed(f"{form} holds half of a surrogate pair, which is no text; write the whole character")
    name = row.get("question_id") if form == TURNS else row.get("id")
    if name is not None and not isinstance(name, (str, int)):
        raise malformed("id must be a string or a number")
    if form == TURNS:
        form, value = "messages", [{"role": "user", "content": value[0]}]
    return Prompt(line=number, form=form, value=value, id=name)


def is_text(value: str) -> bool:
    """False where JSON smuggled in half of a surrogate pair (\\ud800), which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


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
