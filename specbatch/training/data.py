"""Training data of drafts: examples of a prompt and an answer, split, shuffled and batched.

Examples are token ids. The target's features are computed for every batch (`specbatch.training.target`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specbatch.errors import refuse
from specbatch.kernels.common.upload import upload

LEAST_OUTPUT = 3  # tokens of an answer: one from the prompt pass, one as root, one to draft
POOL = 32  # batches whose examples are sorted by length


@dataclass(frozen=True)
class Example:
    """tokens: prompt and answer; prompt: length of the prompt."""

    tokens: tuple[int, ...]
    prompt: int


@dataclass(frozen=True)
class Batch:
    """A batch of examples padded with token 0.

    tokens           int64 [B, L], on the device
    prompts, lengths int64 [B], on the host: what a batch learns is chosen without waiting for the device
    """

    tokens: torch.Tensor
    prompts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device) -> Batch:
        rows = [torch.tensor(example.tokens) for example in examples]
        return cls(
            upload(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), device),
            torch.tensor([example.prompt for example in examples]),
            torch.tensor([len(row) for row in rows]),
        )


def indices(mask: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Flat indices of the true values of a mask on the host: int64 [n], on the device."""
    return upload(mask.flatten().nonzero()[:, 0], device)


def split(examples: list[Example], held_out: int) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples. The last `held_out` examples are held out, and with them all examples of the same
    prompts."""
    if len(examples) <= held_out:
        works = f"there are {len(examples)} usable answers; hold fewer out, or give more prompts"
        raise refuse("held_out", held_out, works)
    kept = examples[len(examples) - held_out :]
    known = {item.tokens[: item.prompt] for item in kept}
    train = [item for item in examples[: len(examples) - held_out] if item.tokens[: item.prompt] not in known]
    if not train:
        raise refuse("data", "all prompts", "are also held out; give different ones")
    return train, kept


def groups(examples: Sequence[Example], batch_tokens: int) -> Iterator[list[Example]]:
    """Consecutive examples in batches of at most `batch_tokens` tokens, padding included."""
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
    """Batches of `groups`, from one shuffled pass over the data after the other.

    A batch has examples of similar length, so that little of it is padding: they are sorted within a pool of `POOL`
    batches, which are then shuffled.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(examples), generator=generator).tolist()
        for pool in groups([examples[index] for index in order], POOL * batch_tokens):
            batches = list(groups(sorted(pool, key=lambda item: len(item.tokens)), batch_tokens))
            yield from (batches[index] for index in torch.randperm(len(batches), generator=generator).tolist())


def answers_hash(examples: Sequence[Example]) -> str:
    """sha256 of the token ids, for the record."""
    body = json.dumps([[item.prompt, *item.tokens] for item in examples], separators=(",", ":"))
    return hashlib.sha256(body.encode()).hexdigest()


def frequent(examples: Sequence[Example], count: int, vocabulary: int) -> torch.Tensor:
    """The `count` most frequent tokens of the answers, sorted by id: int64 [count]. Ties: the lower id."""
    tokens = torch.tensor([token for item in examples for token in item.tokens[item.prompt :]])
    seen = torch.bincount(tokens, minlength=vocabulary)
    return seen.sort(descending=True, stable=True).indices[:count].sort().values


def unused_token(train: Sequence[Example], vocabulary: int, spare: int) -> int:
    """A token id that never occurs in a text: one that the tokenizer does not use, else the last one in no answer."""
    if spare < vocabulary:
        return spare
    seen = {token for example in train for token in example.tokens}
    unseen = (token for token in reversed(range(vocabulary)) if token not in seen)
    token = next(unseen, None)
    if token is None:
        raise refuse("data", len(train), "every token of the target occurs in the data, and none is left for a mask")
    return token
