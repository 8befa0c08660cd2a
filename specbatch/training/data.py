"""What a draft learns from: prompts, and what the target itself answers to them.

A draft is right when it says what the target would, so the answers come from the target, not from the data set.
Token ids are kept in a file; features are made anew for every batch (`specbatch.training.target`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specbatch.errors import refuse
from specbatch.metrics import write_atomic
from specbatch.progress import Report
from specbatch.prompts import Prompt
from specbatch.request import SamplingParams

if TYPE_CHECKING:
    from specbatch.engine import Engine

ANSWERS = "answers.jsonl"
LEAST_OUTPUT = 3  # tokens of an answer: one by the prompt's pass, one to stand on, one to draft


@dataclass(frozen=True)
class Example:
    """tokens: prompt and answer; prompt: how many of them are the prompt's."""

    tokens: tuple[int, ...]
    prompt: int


@dataclass(frozen=True)
class Batch:
    """Examples side by side, filled up with token 0: tokens int64 [B, L]; prompts, lengths int64 [B]."""

    tokens: torch.Tensor
    prompts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device) -> Batch:
        rows = [torch.tensor(example.tokens) for example in examples]
        return cls(
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device),
            torch.tensor([example.prompt for example in examples], device=device),
            torch.tensor([len(row) for row in rows], device=device),
        )


def answer(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    max_len: int,
    chat_template: bool,
    report: Report,
) -> list[Example]:
    """The engine's answers, in the order of the prompts. Prompts without room for an answer in `max_len` tokens, and
    answers too short to draft in, are left out."""
    encoded = [prompt.encode(engine.tokenizer, chat_template=chat_template) for prompt in prompts]
    fitting = [tokens for tokens in encoded if len(tokens) + LEAST_OUTPUT <= max_len]
    if not fitting:
        raise refuse("max_len", max_len, "no prompt of the data leaves room for an answer; raise it")
    done = 0

    def count(_: object) -> None:
        nonlocal done
        done += 1
        report(done, len(fitting))

    limits = [min(params.max_new_tokens, max_len - len(tokens)) for tokens in fitting]
    settings = [SamplingParams(**{**vars(params), "max_new_tokens": limit}) for limit in limits]
    completions = engine.generate(fitting, settings, on_completion=count)
    return [
        Example((*tokens, *item.token_ids), len(tokens))
        for tokens, item in zip(fitting, completions, strict=True)
        if len(item.token_ids) >= LEAST_OUTPUT
    ]


def write_answers(path: Path, examples: Sequence[Example]) -> None:
    rows = (_row(item) for item in examples)
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


def _row(example: Example) -> dict[str, tuple[int, ...]]:
    return {"prompt_token_ids": example.tokens[: example.prompt], "token_ids": example.tokens[example.prompt :]}


def read_answers(path: Path, vocabulary: int, max_len: int) -> list[Example]:
    """What `write_answers` wrote, cut to `max_len` tokens. A line that is no such row is refused with its number."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise refuse("answers", str(path), f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise refuse("answers", str(path), "is not UTF-8 text; name the answers.jsonl of an earlier run") from error
    examples = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            prompt, output = row["prompt_token_ids"], row["token_ids"]
            valid = all(type(token) is int and 0 <= token < vocabulary for token in (*prompt, *output))
        except (ValueError, TypeError, KeyError):
            valid = False
        if not valid or not prompt:
            works = f"a row has prompt_token_ids and token_ids below {vocabulary}, as train-draft writes them"
            raise refuse("answers", f"{path}:{number}", works)
        tokens = (*prompt, *output)[:max_len]
        if len(tokens) - len(prompt) >= LEAST_OUTPUT:
            examples.append(Example(tokens, len(prompt)))
    return examples


def split(examples: list[Example], held_out: int) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples: the last `held_out` distinct prompts never train."""
    if len(examples) <= held_out:
        works = f"there are {len(examples)} usable answers; keep fewer out, or give more prompts"
        raise refuse("held_out", held_out, works)
    kept = examples[len(examples) - held_out :]
    known = {item.tokens[: item.prompt] for item in kept}
    train = [item for item in examples[: len(examples) - held_out] if item.tokens[: item.prompt] not in known]
    if not train:
        raise refuse("data", "all prompts", "are the same as those kept out; give different ones")
    return train, kept


def groups(examples: Sequence[Example], batch_tokens: int) -> Iterator[list[Example]]:
    """Examples in their order, as many at a time as `batch_tokens` hold once they are filled up to one length."""
    group: list[Example] = []
    longest = 0
    for example in examples:
        longest = max(longest, len(example.tokens))
        if group and (len(group) + 1) * longest > batch_tokens:
            yield group
            group, longest = [], len(example.tokens)
        group.append(example)
    if group:
        yield group


def endless(examples: Sequence[Example], batch_tokens: int, seed: int) -> Iterator[list[Example]]:
    """`groups` of one shuffled pass after the other."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(examples), generator=generator).tolist()
        yield from groups([examples[index] for index in order], batch_tokens)


def answers_hash(examples: Sequence[Example]) -> str:
    """sha256 of the token ids, for the record."""
    body = json.dumps([[item.prompt, *item.tokens] for item in examples], separators=(",", ":"))
    return hashlib.sha256(body.encode()).hexdigest()


def frequent(examples: Sequence[Example], count: int, vocabulary: int) -> torch.Tensor:
    """The `count` tokens that answers hold most often, by id: int64 [count]. Of equals, the lower id."""
    tokens = torch.tensor([token for item in examples for token in item.tokens[item.prompt :]])
    seen = torch.bincount(tokens, minlength=vocabulary)
    return seen.sort(descending=True, stable=True).indices[:count].sort().values
