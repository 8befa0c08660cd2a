"""Prompts of random token ids, some of which share a prefix: seeded, without end tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbatch.sweeps.workload.lengths import Length, bounds

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Groups:
    """Groups of prompts that share their first tokens."""

    count: int
    prompts: int
    shared_len: Length


def random_prompts(
    tokenizer: Tokenizer, count: int, seed: int, input_len: Length, groups: Groups | None = None
) -> list[list[int]]:
    """The first `count` prompts; those of groups have input_len tokens of their own, and come in shuffled order."""
    avoid = tokenizer.eos_ids | {tokenizer.bos_id}
    usable = [token for token in range(tokenizer.vocab_size) if token not in avoid]

    def draw(name: str, length: int) -> list[int]:
        return random.Random(f"{seed}/{name}").choices(usable, k=length)

    def own(index: int) -> list[int]:
        return draw(f"{index}", draw_length(seed, "input", index, input_len))

    if groups is None:
        return [own(index) for index in range(count)]
    each = range(groups.count)
    shared = [draw(f"group {group}", draw_length(seed, "shared", group, groups.shared_len)) for group in each]
    order = [group for group in each for _ in range(groups.prompts)]
    random.Random(f"{seed}/order").shuffle(order)
    return [shared[group] + own(index) for index, group in enumerate(order[:count])]


def draw_length(seed: int, what: str, index: int, length: Length) -> int:
    """The length of one prompt or answer."""
    least, most = bounds(length)
    return least if least == most else random.Random(f"{seed}/{what} length {index}").randint(least, most)
