"""Reads prompts from JSONL or the rows of a data set, and builds the text of each: of GSM8K questions, messages, ...

A line or row is an object in one of four forms:

{"prompt": "text"}                                   continued as it is
{"prompt_token_ids": [1, 2, 3]}                      token ids, not tokenized again
{"question": "text"}                                 asked as "Question: text\\nAnswer:"
{"messages": [{"role": "user", "content": "text"}]}  rendered with the model's chat template

"id" is copied to the output, and "sampling" is an object with sampling parameters of the prompt. Other keys are
allowed, and named in a note once per file (`UnreadKeys`). Some readers allow a fifth form, MT-Bench's
{"turns": ["text", ...]}: messages of the user, each after the answer to the one before. These readers read SPEED-Bench
as well, as its own script prepares it: several messages, all of the user, are turns, and "category" is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.config.field_errors import did_you_mean
from specbatch.core.sampling_params import FOREIGN_NAMES, SamplingParams
from specbatch.errors import SpecbatchError, refuse, refuse_json, shown_json
from specbatch.files.text_files import UnreadableError
from specbatch.jobs.input_version import InputVersion
from specbatch.jobs.prompt_file import location, parse_line, stream_rows
from specbatch.text.tokenizer import refuse_longer

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer

FORMS = ("prompt", "prompt_token_ids", "question", "messages")
TURNS = "turns"
SAMPLING = "sampling"
PER_ROW = tuple(item.name for item in fields(SamplingParams))
MISPLACED = frozenset({*PER_ROW, *FOREIGN_NAMES, "params", "sampling_params"})  # beside a prompt


@dataclass(slots=True)  # a frozen one takes three times as long to make
class Prompt:
    """The prompt of one line: its number (from 1), its form, its value, and its id if it has one.

    sampling   the sampling parameters that the line sets
    category   of a benchmark with several
    later      what follows, turn by turn: a message of the user after the answer to the one before, or recorded
               messages that take the place of that answer (`specbatch.jobs.replay`)
    tools      functions that the answers may call
    unread     keys of the line, or columns of the data set, that are not read
    """

    line: int
    form: str
    value: Any
    id: str | int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    category: str | None = None
    later: tuple[str | list[dict[str, Any]], ...] = ()
    tools: list[dict[str, Any]] = field(default_factory=list)
    unread: tuple[str, ...] = ()

    def as_message(self) -> Prompt:
        """The same prompt as a user message. Raises SpecbatchError for token ids, whose text is not known."""
        if self.form == "messages":
            return self
        if self.form == "prompt_token_ids":
            raise refuse(
                "chat_template", True, f"line {self.line} has token ids, which cannot be a message; leave it out"
            )
        return replace(self, form="messages", value=[{"role": "user", "content": self.value}])

    def encode(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: bool = True,
        thinking: bool | None = None,
        most: int | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids. Without `chat_template`, messages are joined with blank lines. `thinking`: `enable_thinking` of
        the template; None leaves its default. `tools`: functions that the answer may call; None: its own. Texts of far
        more than `most` tokens are refused before they are encoded.
        """
        if self.form == "prompt_token_ids":
            return list(self.value)
        tools = self.tools if tools is None else tools
        if self.form == "messages":
            text = "\n\n".join(message["content"] or "" for message in self.value)
        else:
            text = self.value if self.form == "prompt" else f"Question: {self.value}\nAnswer:"
        if most is not None:
            refuse_longer(tokenizer, text, most)
        if self.form == "messages" and not chat_template and any(item.get("tool_calls") for item in self.value):
            raise refuse_json("messages", self.value, "only a chat template renders tool calls; use chat_template=True")
        if tools and not chat_template:
            names = [tool["function"]["name"] for tool in tools]
            raise refuse_json(
                "tools", names, "only a chat template shows tools to the model; switch it on, or leave them out"
            )
        if self.form != "messages" or not chat_template:
            return tokenizer.encode(text)
        switch: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        rendered = tokenizer.apply_chat_template(self.value, **switch | ({"tools": tools} if tools else {}))
        if most is not None:
            refuse_longer(tokenizer, rendered, most)
        return tokenizer.encode(rendered, add_special_tokens=False)


@dataclass(frozen=True)
class MalformedLine:
    """A malformed line: its number (from 1), and what is wrong with it."""

    line: int
    problem: str


def read_prompts(
    path: Path,
    setting: str = "input",
    forms: tuple[str, ...] = FORMS,
    *,
    takes_sampling: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> list[Prompt]:
    """All prompts of a JSONL file or a data set, in one of the `forms`; blank lines are skipped. Raises SpecbatchError
    with the number of the first malformed line.

    takes_sampling   whether the caller uses the sampling parameters of lines; else a line that has some is refused
    log              called with notes of keys that are not read
    """
    prompts: list[Prompt] = []
    unread = UnreadKeys(path, log)
    for item in scan_prompts(path, setting, forms):
        if isinstance(item, MalformedLine):
            raise refuse(setting, location(path, item.line), item.problem)
        if item.sampling and not takes_sampling:
            works = f"has {SAMPLING}, which this command does not use for single rows; leave it out"
            raise refuse(setting, location(path, item.line), works)
        unread.add(item)
        prompts.append(item)
    return prompts


def params_of(prompt: Prompt, params: SamplingParams) -> SamplingParams:
    """The parameters of the job with those that the line sets. Raises SpecbatchError if these do not go together."""
    return params.with_row(prompt.sampling) if prompt.sampling else params


class UnreadKeys:
    """Logs the keys of the rows of a file that are not read, each once: users may take some of them for settings."""

    def __init__(self, source: str | Path, log: Callable[[str], None]) -> None:
        self._source, self._log = source, log
        self._last: tuple[str, ...] = ()
        self._noted = set[str]()

    def add(self, row: Prompt) -> None:
        if row.unread == self._last or len(self._noted) > _MOST_UNREAD:
            return
        self._last, most = row.unread, _MOST_UNREAD - len(self._noted)
        new = sorted(set(row.unread) - self._noted)
        self._noted.update(new)
        where = f"note: {location(self._source, row.line)}:"
        if misplaced := [name for name in new if name in MISPLACED]:
            listed, works = ", ".join(misplaced), f'parameters of a row go into "{SAMPLING}"'
            self._log(f"{where} {listed} beside the prompt has no effect; {works}")
        if others := [name for name in new if name not in MISPLACED][: max(most, 0)]:
            self._log(f"{where} keys that are not read: {', '.join(map(_with_guess, others))}")
        if len(self._noted) > _MOST_UNREAD:
            self._log(f"{where} further keys that are not read are not listed")


def _with_guess(name: str) -> str:
    """A key that is not read, and the one that may have been meant."""
    near = get_close_matches(name, (*FORMS, SAMPLING, *MISPLACED), n=1, cutoff=_SIMILAR)
    shown = shown_json(name)
    plain = name if name and shown == f'"{name}"' and "," not in name else shown
    return plain + (f" (did you mean {near[0]}?)" if near and near[0] != name else "")


def unsampled_note(source: str | Path, line: int, names: Iterable[str]) -> str:
    """What to log of sampling parameters of a row, or of the job, that greedy answers ignore."""
    listed = ", ".join(sorted(names))
    return f"note: {location(source, line)}: the answer is greedy, so {listed} has no effect; set a temperature"


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
    reader = PromptReader(forms, column)
    found = [reader.read(number, row) for number, row in reader.rows(setting, source, split)]
    if not found:
        raise refuse(setting, str(source), f"has no prompts; write {LINES}")
    return found


class PromptReader:
    """Reads prompts from rows; `forms` and `column` as in `scan_prompts`."""

    def __init__(self, forms: tuple[str, ...] = FORMS, column: str | None = None) -> None:
        self._forms = forms if column is None else (column,)
        self._known = {*self._forms, SAMPLING, *((*_IDS, "category") if TURNS in forms else _IDS[:1])}
        self._columns: list[str] = []  # of a data set, that are not read

    def rows(
        self, setting: str, source: str | Path, split: str | None, *, version: InputVersion | None = None
    ) -> Iterator[tuple[int, bytes | Any]]:
        """As `stream_rows`."""
        return stream_rows(
            setting, source, self._forms, (*_IDS, SAMPLING), split, version=version, unread=self._columns
        )

    def read(self, number: int, row: bytes | Any) -> Prompt | MalformedLine:
        """The prompt of a line, or of a row of a data set."""
        try:
            is_plain = isinstance(row, bytes) and b"\\u" not in row and _PLACEHOLDER_BYTES not in row
            value = parse_row(row)
            found = _prompt(value, self._forms, number, is_plain=is_plain)
        except MalformedRowError as error:
            return MalformedLine(number, str(error))
        if self._columns or not self._known.issuperset(value):
            own = (name for name, item in value.items() if item is not None and name not in self._known)
            found.unread = (*self._columns, *own)
        return found


class MalformedRowError(ValueError):
    """What is wrong with a line."""


def parse_row(row: bytes | Any) -> Any:
    """The value of a row: a line of JSON is parsed. Raises MalformedRowError."""
    try:
        return parse_line(row) if isinstance(row, bytes) else row
    except UnreadableError as error:
        raise MalformedRowError(f"{str(error).removeprefix('is ')}; write {LINES}") from None


def _prompt(row: Any, forms: tuple[str, ...], number: int, *, is_plain: bool) -> Prompt:
    """is_plain: the line is known to have neither half of a surrogate pair nor a placeholder."""
    found = [form for form in forms if form in row] if isinstance(row, dict) else ()
    if not found:
        keys = "one of the keys " if len(forms) > 1 else "the key "
        raise MalformedRowError(f"write a JSON object with {keys}{', '.join(forms)}")
    if len(found) > 1:
        raise MalformedRowError(f"has both {' and '.join(found)}; keep one")
    name, value = found[0], row[found[0]]
    form = name if name in _EXPECTED else _form_of(value)
    if not value:
        raise MalformedRowError(f"{name} is empty; write at least one token of text")
    if not _well_formed(form, value):
        expected = _EXPECTED[form] if form == name else "a string, a list of whole numbers from 0, or of messages"
        raise MalformedRowError(f"{name} must be {expected}")
    if not is_plain and form != "prompt_token_ids":
        if (place := no_text_in(value, name)) is not None:
            raise MalformedRowError(f"{place} {HALF_PAIR}")
        if _PLACEHOLDER in (value if isinstance(value, str) else str(value)):
            works = "prepare the data set with the script of SPEED-Bench first"
            raise MalformedRowError(f"{name} is a placeholder: {works}")
    own = next((row[key] for key in _IDS[: 2 if TURNS in forms else 1] if row.get(key) is not None), None)
    if own is not None and (not isinstance(own, (str, int)) or isinstance(own, bool)):
        raise MalformedRowError(f"id={shown_json(own)}: use a string or a whole number")
    if not is_plain and isinstance(own, str) and not is_text(own):
        raise MalformedRowError(f"id={shown_json(own)} {HALF_PAIR}")
    later: tuple[str, ...] = ()
    if form == TURNS:
        form, value, later = "messages", [{"role": "user", "content": value[0]}], tuple(value[1:])
    elif form == "messages" and TURNS in forms and all(message["role"] == "user" for message in value):
        value, later = value[:1], tuple(message["content"] for message in value[1:])
    category = row.get("category") if TURNS in forms else None
    if category is not None and (not isinstance(category, str) or not category.isprintable() or not category):
        raise MalformedRowError(f"category={shown_json(category)}: use a string")
    return Prompt(number, form, value, own, sampling_of(row.get(SAMPLING)), category, later)


def sampling_of(value: Any) -> dict[str, Any]:
    """The parameters that a row sets. Raises MalformedRowError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedRowError(f"{SAMPLING}={shown_json(value)}: use an object")
    for name in value:
        if name not in PER_ROW:
            works = FOREIGN_NAMES.get(name) or did_you_mean(name, PER_ROW)
            raise MalformedRowError(f"{SAMPLING} has no parameter {shown_json(name)}; {works}")
    try:
        SamplingParams.of_row(value)
    except SpecbatchError as error:
        problem = refuse_json(str(error.setting), error.value, error.works or "")
        raise MalformedRowError(f"{SAMPLING}.{problem}") from None
    return value


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


def no_text_in(value: Any, name: str = "") -> str | None:
    """The field of a JSON value, or the key, with half of a surrogate pair; None if there is none."""
    if is_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)):
        return None
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        place = f"{name}.{key}" if name else str(key)
        if not is_text(place):
            return f"the key {shown_json(key)}"
        if (found := no_text_in(item, place)) is not None:
            return found
    return f"{name}={shown_json(value, 60)}" if name else "it"


def as_text(value: str) -> str:
    """The string with a replacement character in place of each half of a surrogate pair."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


HALF_PAIR = "has half of a surrogate pair, which is not text; write the whole character"
LINES = "one JSON object per line"
_MOST_UNREAD = 20  # keys that are not read and are listed
_SIMILAR = 0.8  # names from which a key may be misspelled
_IDS = ("id", "question_id")  # MT-Bench and SPEED-Bench have the second
# In place of the texts that SPEED-Bench must not distribute.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
_PLACEHOLDER_BYTES = _PLACEHOLDER.encode()
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
        return {*map(type, value)} == {int} and min(value) >= 0
    for message in value:
        if not isinstance(message, dict):
            return False
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            return False
    return True
