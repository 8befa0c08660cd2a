"""Which share of drafts is accepted, by position and by length of the context, from few observations. Host code only.

p_j is the share of drafts at position j that are accepted if all before them are. It is counted for contexts between
powers of two. To the counts of one range those of the others are added, half for each power of two between them
and those of no more than some verifies: a range that was not seen has the shares of its neighbours, and one that was
seen soon has its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

MEMORY = 256  # steps after which an observation counts e times less ...
KEPT = 32.0  # ... but never less than so many verifies: positions that are not tried stay known
NEAR, MOST_NEAR = 1 / 2, 64.0  # what verifies of the next range count, and how many of another one count at most
TIES = 4.0  # verifies that the previous position counts as, for positions with few of their own
# Prior acceptance of the first draft, worth 8 verifies. It is high on purpose: drafts are observed, and a prior that is
# too high is gone after a few steps, while one that is too low drafts nothing and learns from probes only. In
# simulations (tests) 0.5 to 0.95 lose at most 3% of the first 400 steps, 0.3 loses half.
GUESS, GUESSED = 0.8, 8.0
KNOWN = 64  # verifies after which it is no longer a guess


def range_of(context: int) -> int:
    """The number of the range of a context of so many tokens."""
    return max(context, 1).bit_length() - 1


class AcceptanceByContext:
    """Learns from verifies with up to `most` drafts."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._verifies = 0
        self._tried: dict[int, list[float]] = {}
        self._right: dict[int, list[float]] = {}
        self._emitted: dict[int, list[float]] = {}  # of `emitted`, until the next verify

    @property
    def is_known(self) -> bool:
        return self._verifies >= KNOWN

    def learn(self, length: int, accepted: Iterable[tuple[int, int]]) -> None:
        """Observe a step with `length` drafts: for each request its range and how many it accepted."""
        if not length:
            return
        counts: dict[int, list[int]] = {}
        for place, count in accepted:
            counts.setdefault(place, [0] * (length + 1))[count] += 1
        if not counts:
            return
        self._verifies += sum(map(sum, counts.values()))
        self._emitted.clear()
        self._fade()
        for place, of_range in counts.items():
            if place not in self._tried:
                guessed = GUESSED if not self._tried else 0.0
                self._tried[place] = [guessed, *[0.0] * (self._most - 1)]
                self._right[place] = [guessed * GUESS, *[0.0] * (self._most - 1)]
            reached = list(accumulate(reversed(of_range)))[::-1]  # [j]: how many accepted j drafts or more
            for position, (tried, right) in enumerate(pairwise(reached)):
                self._tried[place][position] += tried
                self._right[place][position] += right

    def shares(self, place: int) -> list[float]:
        """p_1, p_2, ... of a range; a position that was never tried has that of the one before."""
        found: list[float] = []
        for position in range(self._most):
            tried, right = (TIES, TIES * found[-1]) if found else (1e-3, 1e-3 * GUESS)
            for other, of_range in self._tried.items():
                weight = 1.0
                if other != place and of_range[position]:
                    weight = NEAR ** abs(other - place) * min(1.0, MOST_NEAR / of_range[position])
                tried += weight * of_range[position]
                right += weight * self._right[other][position]
            found.append(right / tried)
        return found

    def emitted(self, place: int) -> list[float]:
        """E(0), E(1), ...: mean tokens per verify with so many drafts, bonus included."""
        if place not in self._emitted:
            reached = accumulate(self.shares(place), lambda one, other: one * other)
            self._emitted[place] = list(accumulate(reached, initial=1.0))
        return self._emitted[place]

    def _fade(self) -> None:
        for place, of_range in self._tried.items():
            for position, tried in enumerate(of_range):
                if tried > KEPT:
                    of_range[position] *= 1 - 1 / MEMORY
                    self._right[place][position] *= 1 - 1 / MEMORY
