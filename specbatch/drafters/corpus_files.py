"""Reads the files of a corpus (`--corpus`): outputs of `generate` and `eval`, and lines of text."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.drafters.corpus import Answer, CorpusPlan
from specbatch.errors import refuse
from specbatch.files.text_files import UnreadableError, open_regular, parse_json
from specbatch.kernels.drafting.corpus import LEVELS

if TYPE_CHECKING:
    from specbatch.config.speculation import Speculation
    from specbatch.text.tokenizer import Tokenizer
    from specbatch.weights import Checkpoint, Log

_COMPARED = 64  # rows of a file whose tokens and text are compared
_WORKS = "use an output of generate (.jsonl), a folder of eval, or a .txt file with a text in each line"


def plan_corpus(asked: Speculation, target: Checkpoint, log: Log) -> CorpusPlan | None:
    """The corpus that is asked for, with the answers of its files; None without one. Raises SpecbatchError for files
    that cannot be read, have no answers, or tokens of another tokenizer."""
    if asked.corpus is None:
        return None
    given: list[Answer] = []
    for name in asked.corpus_files:
        reader = _Reader(Path(name), target, asked.corpus_ngram << (LEVELS - 1))
        found = list(reader.answers())
        if not found:
            raise refuse("corpus", name, f"holds no answer; {_WORKS}")
        tokens = sum(len(answer.tokens) for answer in found)
        log(f"corpus: {len(found)} answers of {name}, {tokens} tokens")
        given += found
    held = sum(len(answer.tokens) + 1 for answer in given)
    if held > asked.corpus_tokens:
        log(f"corpus: holds the last {asked.corpus_tokens} of {held} tokens; raise --corpus-tokens to hold all")
    return CorpusPlan(asked.corpus_tokens, asked.corpus_ngram, given)


class _Reader:
    """Reads one file."""

    def __init__(self, path: Path, target: Checkpoint, context: int) -> None:
        """context: tokens of a prompt's end that are kept."""
        self._path = path / "questions.jsonl" if path.is_dir() else path
        self._tokenizer: Tokenizer = target.tokenizer()
        self._vocabulary = target.config.vocab_size
        self._name = target.name
        self._context = context
        self._compared = 0

    def answers(self) -> Iterator[Answer]:
        try:
            file = open_regular(self._path)
        except UnreadableError as error:
            raise refuse("corpus", str(self._path), f"{error}; {_WORKS}") from None
        if self._path.suffix not in (".jsonl", ".txt"):
            raise refuse("corpus", str(self._path), f"is of no known format; {_WORKS}")
        with file:
            file.seek(len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0)
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    if self._path.suffix == ".txt":
                        yield from self._answer({"text": line.decode().rstrip("\r\n")})
                    else:
                        yield from self._row(parse_json(line.rstrip(b"\r\n"), unique=True))
                except UnicodeError:
                    raise self._malformed(number, "is not UTF-8") from None
                except (UnreadableError, _MalformedError) as error:
                    raise self._malformed(number, str(error)) from None

    def _malformed(self, number: int, reason: str) -> Exception:
        return refuse("corpus", f"{self._path}:{number}", f"{reason}; {_WORKS}")

    def _row(self, row: Any) -> Iterator[Answer]:
        """The answers of a row of `generate`, `eval` or an OpenAI batch; none if its request failed."""
        if not isinstance(row, dict):
            raise _MalformedError("is no JSON object")
        if row.get("error") is not None:
            return
        if "response" in row:
            yield from self._choices(row["response"])
            return
        yield from self._answer(row)

    def _choices(self, response: Any) -> Iterator[Answer]:
        try:
            for choice in response["body"]["choices"]:
                text = choice["text"] if "text" in choice else choice["message"]["content"]
                yield from self._answer({"text": text or ""})
        except (KeyError, TypeError):
            raise _MalformedError("is no line of an OpenAI batch output, with body and choices") from None

    def _answer(self, row: dict[str, Any]) -> Iterator[Answer]:
        """The answer of a row with `token_ids` or `text`, after the end of its prompt where the row has it."""
        text, tokens = row.get("text"), row.get("token_ids")
        if not isinstance(text, str | None) or not (tokens is None or _are_ids(tokens)) or text is tokens is None:
            raise _MalformedError("must have token_ids, a list of whole numbers, or text")
        for part in (text, row.get("question")):
            if isinstance(part, str):
                part.encode()  # refuses half of a surrogate pair, which JSON can escape
        if tokens is None:
            tokens = self._tokenizer.encode(text or "", add_special_tokens=False)
        elif (largest := max(tokens, default=0)) >= self._vocabulary:
            raise _MalformedError(
                f"has token {largest}, and {self._name} has tokens 0 to {self._vocabulary - 1}: these answers are of "
                "another tokenizer, so use their text without token_ids"
            )
        elif text is not None:
            self._compare(tokens, text)
        if tokens:
            prompt = self._prompt(row)
            yield Answer([*prompt, *tokens], len(prompt))

    def _prompt(self, row: dict[str, Any]) -> Sequence[int]:
        """The last tokens of the prompt; nothing where the row does not have it, as those of `generate`."""
        text = row.get("question")
        if not isinstance(text, str):
            return ()
        # A token has a character at least.
        return self._tokenizer.encode(text[-16 * self._context :], add_special_tokens=False)[-self._context :]

    def _compare(self, tokens: list[int], text: str) -> None:
        """Refuse tokens that do not mean the text, which stops before an end token or a stop string."""
        if self._compared == _COMPARED:
            return
        self._compared += 1
        shown = text.rstrip("\ufffd")  # half of a character
        readings = [self._tokenizer.decode(tokens, skip_special_tokens=skips) for skips in (True, False)]
        if not any(reading.startswith(shown) for reading in readings):
            place = next((n for n, pair in enumerate(zip(readings[0], shown, strict=False)) if pair[0] != pair[1]), 0)
            ours, theirs = (item[max(0, place - 20) : place + 20] for item in (readings[0], shown))
            raise _MalformedError(
                f"token_ids mean {ours!r} to {self._name}, and the text is {theirs!r}: these answers are of another "
                "tokenizer, so use their text without token_ids"
            )


class _MalformedError(ValueError):
    """What is wrong with a line."""


def _are_ids(tokens: Any) -> bool:
    return isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
