"""Prompts as seeded token ids: random ones, groups with a shared prefix, and texts whose tokens are scrambled."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from specbatch.sweeps.workload.lengths import Length, bounds

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer

SCRAMBLES = ("none", "shuffled", "random")


def draw_length(seed: int, what: str, index: int, length: Length) -> int:
    """A length of the range. what: part of the seed."""
    least, most = bounds(length)
    return least if least == most else random.Random(f"{seed}/{what} length {index}").randint(least, most)


def random_ids(tokenizer: Tokenizer, count: int, length: Length, seed: int) -> list[list[int]]:
    """`count` prompts of that length, of ids that neither begin nor end a text."""
    usable = _usable(tokenizer)
    return [_draw(usable, seed, f"{index}", draw_length(seed, "input", index, length)) for index in range(count)]


def grouped_ids(
    tokenizer: Tokenizer, count: int, groups: int, group_prompts: int, shared: Length, own: Length, seed: int
) -> list[list[int]]:
    """The first `count` prompts of all groups in shuffled order: `shared` ids that are the group's, and then `own`."""
    usable = _usable(tokenizer)
    prefixes = [
        _draw(usable, seed, f"group {group}", draw_length(seed, "shared", group, shared)) for group in range(groups)
    ]
    order = [group for group in range(groups) for _ in range(group_prompts)]
    random.Random(f"{seed}/order").shuffle(order)
    rest = random_ids(tokenizer, min(count, len(order)), own, seed)
    return [prefixes[group] + prompt for group, prompt in zip(order, rest, strict=False)]


def scrambled(tokenizer: Tokenizer, prompts: list[list[int]], kind: str, seed: int) -> list[list[int]]:
    """The prompts as they are ("none"), with their ids in random order ("shuffled"), or with random ids in their place
    ("random"). A bos token stays the first."""
    if kind == SCRAMBLES[0]:
        return prompts
    usable = _usable(tokenizer) if kind == "random" else []
    found = []
    for index, prompt in enumerate(prompts):
        order = random.Random(f"{seed}/scramble {index}")
        start = [token for token in prompt[:1] if token == tokenizer.bos_id]
        rest = prompt[len(start) :]
        found.append(start + (order.choices(usable, k=len(rest)) if usable else order.sample(rest, len(rest))))
    return found


def _draw(usable: list[int], seed: int, name: str, length: int) -> list[int]:
    return random.Random(f"{seed}/{name}").choices(usable, k=length)


def _usable(tokenizer: Tokenizer) -> list[int]:
    avoid = tokenizer.eos_ids | {tokenizer.bos_id}
    return [token for token in range(tokenizer.vocab_size) if token not in avoid]
