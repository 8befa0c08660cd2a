"""Acceptance counters: how many drafts verifies made, tried and accepted, by position and by context length."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Acceptance:
    """Counts of verifies. Each list grows as needed.

    drafted[n]    verifies that drafted a sequence of n tokens (of a tree: its depth)
    accepted[n]   verifies that accepted n of them
    exhausted[n]  verifies that drafted n and accepted them all
    verifies[k]   verifies after 2^k to 2^(k+1) - 1 tokens of context
    emitted[k]    tokens that these verifies emitted, bonus included
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    exhausted: list[int] = field(default_factory=list)
    verifies: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)

    def count(
        self, *, context: int, room: int, kept: int, drafted: int, accepted: int, times: int = 1
    ) -> tuple[int, int]:
        """Count a verify after `context` tokens that could emit at most `room` tokens and emitted `kept`, or several
        that are alike. Returns how many of its drafts count, and how many of those were correct."""
        # Drafts after a stop or the length limit are excluded: their correctness is unknown.
        known = min(drafted, room if kept > accepted else kept)
        right = min(accepted, known)
        _add(self.drafted, known, times)
        _add(self.accepted, right, times)
        if right == known:
            _add(self.exhausted, known, times)
        bucket = context.bit_length() - 1
        _add(self.verifies, bucket, times)
        _add(self.emitted, bucket, times * kept)
        return known, right

    def __iadd__(self, other: Acceptance) -> Acceptance:
        for item in fields(self):
            mine = getattr(self, item.name)
            for place, amount in enumerate(getattr(other, item.name)):
                _add(mine, place, amount)
        return self

    @property
    def first(self) -> tuple[int, int]:
        """Verifies that drafted anything, and those that accepted their first draft."""
        return sum(self.drafted[1:]), sum(self.accepted[1:])

    def as_counters(self) -> dict[str, Any]:
        """The counters of a record. By draft position, from 0: verifies that drafted it; that tried it, which means
        that they accepted all drafts before it; that accepted it. By context bucket, where there are any: its first
        length in tokens, verifies, tokens emitted."""
        count = max(len(self.drafted) - 1, 0)
        drafted, accepted = _at_least(self.drafted, count + 1), _at_least(self.accepted, count + 1)
        # A verify that accepted n drafts tried draft n + 1, if it had drafted one.
        ended = self.exhausted + [0] * count
        buckets = zip(self.verifies, self.emitted, strict=True)
        return {
            "drafted": drafted[1:],
            "tried": [accepted[place] - ended[place] for place in range(count)],
            "accepted": accepted[1:],
            "context": [[1 << k, verifies, emitted] for k, (verifies, emitted) in enumerate(buckets) if verifies],
        }


def _add(counts: list[int], place: int, amount: int = 1) -> None:
    if place >= len(counts):
        counts += [0] * (place + 1 - len(counts))
    counts[place] += amount


def _at_least(counts: list[int], length: int) -> list[int]:
    """How many count 0, 1, 2, ... or more."""
    padded = counts + [0] * (length - len(counts))
    return [sum(padded[place:]) for place in range(length)]
