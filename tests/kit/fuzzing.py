"""Seeded fuzzing: random cases by number, outcomes counted, the seed of a failure in its message."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from specbatch.errors import SpecbatchError


@dataclass
class Fuzz:
    """The rounds of one test. `for random in fuzz.rounds(quick=200): ...` runs 200 of them, or the share of
    `--fuzz N` that belongs to this shard.

    counts  outcomes, for the summary: see `outcome`
    seed    of the round that runs; `--fuzz-seed SEED` runs only that one
    """

    total: int | None
    shard: int
    shards: int
    only: int | None
    counts: Counter[str] = field(default_factory=Counter)
    seed: int = 0

    def rounds(self, quick: int) -> Iterator[random.Random]:
        """A random number generator for each round, seeded with the number of the round."""
        seeds = range(quick) if self.total is None else range(self.shard, self.total, self.shards)
        for seed in seeds if self.only is None else [self.only]:
            self.seed = seed
            self.counts["rounds"] += 1
            yield random.Random(seed)

    def outcome(self, name: str, count: int = 1) -> None:
        """Count what came of a round, such as "accepted" or "refused"."""
        self.counts[name] += count

    def refused(self, error: SpecbatchError) -> None:
        """Count a refusal. Fails unless its message is one readable line."""
        message = str(error)
        assert message.strip(), "an empty message"
        assert "\n" not in message, message
        assert len(message) < 2_000, f"{len(message)} characters: {message[:200]}"
        self.outcome("refused")
