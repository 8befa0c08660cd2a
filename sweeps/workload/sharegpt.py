"""ShareGPT conversations as a workload: the first message asks, and the second one sets the length of the answer.

The file is that of SGLang's and vLLM's benchmarks, ShareGPT_V3_unfiltered_cleaned_split.json, or another one of its
form: [{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}, ...].

Rows are chosen as `sglang.bench_serving` 0.5.23 does (sglang/benchmark/datasets/sharegpt.py): conversations of fewer
than two messages are left out, the others shuffled by `random.Random(seed)`, and rows whose prompt or answer has fewer
than two tokens are skipped, whoever wrote the first two messages. The answer has exactly as many tokens as that of its
row: end tokens are ignored, as bench_serving does without --disable-ignore-eos. Rows that do not fit into the context
of the engines are skipped, as with its --sharegpt-context-len.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.errors import refuse
from specbatch.files.text_files import read_json
from specbatch.jobs.prompts import Prompt
from specbatch.progress.bars import Report

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer

SHAREGPT = "sharegpt"
LEAST_TOKENS = 2  # of a prompt, and of an answer
_LARGEST = 2 << 30  # bytes; the file that benchmarks use has 642 MiB
_KEYS = ("conversations", "conversation")
_FORM = 'write [{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}, ...]'


@dataclass(slots=True)
class Exchange(Prompt):
    """A prompt and the answer of the data set, whose length that of the model is to have."""

    answer: str = ""


def read_sharegpt(path: Path, seed: int) -> list[Exchange]:
    """The first two messages of each conversation that has them, shuffled. `line` is the place of a conversation in the
    file, from 1. Refused: a file of another form, which the message names with the entry."""
    entries = read_json("data", path, _FORM, _LARGEST)
    if not isinstance(entries, list):
        raise refuse("data", str(path), f"must be a JSON list; {_FORM}")
    found = [
        row for number, entry in enumerate(entries, start=1) if (row := _exchange(path, number, entry)) is not None
    ]
    if not found:
        raise refuse("data", str(path), f"has no conversation of two messages; {_FORM}")
    random.Random(seed).shuffle(found)
    return found


def _exchange(path: Path, number: int, entry: Any) -> Exchange | None:
    where = f"{path}: entry {number}"
    key = next((key for key in _KEYS if isinstance(entry, dict) and key in entry), None)
    if not isinstance(entry, dict):
        raise refuse("data", where, f"must be a JSON object; {_FORM}")
    messages = [] if key is None else entry[key]
    if not isinstance(messages, list):
        raise refuse("data", f"{where}.{key}", f"must be a list of messages; {_FORM}")
    if len(messages) < 2:
        return None
    texts = []
    for place, message in enumerate(messages[:2]):
        value = message.get("value") if isinstance(message, dict) else None
        if not isinstance(value, str):
            raise refuse("data", f"{where}.{key}[{place}]", f"has no text under the key value; {_FORM}")
        texts.append(value)
    return Exchange(number, "prompt", texts[0], answer=texts[1])


def with_lengths(
    rows: Iterable[Prompt],
    tokenizer: Tokenizer,
    count: int,
    longest: int,
    report: Report | None = None,
    **encoding: Any,
) -> Iterator[Prompt]:
    """The first `count` rows that are neither too short nor longer than `longest` tokens with their answer, each with
    the length of its answer. report: of these rows; encoding: arguments of `Prompt.encode`."""
    kept = 0
    for row in rows:
        if kept == count:
            return
        assert isinstance(row, Exchange)
        asked, answered = len(row.encode(tokenizer, **encoding)), len(tokenizer.encode(row.answer))
        if min(asked, answered) >= LEAST_TOKENS and asked + answered <= longest:
            kept += 1
            if report is not None:
                report(kept, count)
            yield replace(row, sampling={"max_new_tokens": answered, "ignore_eos": True})
