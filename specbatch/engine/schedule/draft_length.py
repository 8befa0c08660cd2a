"""Chooses how many tokens to draft, for `draft_tokens="auto"`. Host code only: no device, no clock.

A step with N drafts emits E(N) = 1 + p_1 + p_1 p_2 + ... + p_1 .. p_N tokens per request on average, where p_j is the
share of drafts at position j that are accepted if all before them are, and takes t(N) seconds at its batch size. The N
with the largest E(N) / t(N) is drafted, where N = 0 may be worse by APART.

p comes from results as they are handled, at any batch size. t comes from steps timed at start, corrected by the times
of the run's steps: a longer context adds about the same to all N. Positions past the drafts that are made show no
acceptance, and keep their last known one. Rarely, therefore, a step probes another N: in turn the largest, which shows
the acceptance of all positions, and the next best, whose time may have changed since the start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from math import inf

from specbatch.config.draft_shape import AUTO

MARGIN = 1.01  # how much better another length must be. 3% may be lost: to this, to probes and to a drafter's work at 0
# A cost of drafting that no step shows: requests that began together end at different times, so that batches shrink and
# prompts come in more passes.
APART = 1.02
MEMORY = 256  # steps after which an observation counts e times less ...
KEPT = 32.0  # ... but never less than so many verifies: positions that are not tried stay known
TIES = 4.0  # verifies that the previous position counts as, for positions with few of their own
# Prior acceptance of the first draft, worth 8 verifies. It is high on purpose: drafts are observed, and a prior that is
# too high is gone after a few steps, while one that is too low drafts nothing and learns from probes only. In
# simulations (tests) 0.5 to 0.95 lose at most 3% of the first 400 steps, 0.3 loses half.
GUESS = 0.8
PROBES = 0.005  # share of the time that probes may cost
REST = 64  # fewest steps between probes
SMOOTH = 1 / 8  # weight of a step's time against those before it
PROBE = 1 / 2  # the same for a probe


def rising(measured: Mapping[int, Mapping[int, float]]) -> dict[int, dict[int, float]]:
    """Seconds by batch bucket and length, none above that of a larger bucket or a longer draft: disturbances only add
    to a time."""
    found: dict[int, dict[int, float]] = {}
    above: dict[int, float] = {}
    for bucket in sorted(measured, reverse=True):
        lengths = sorted(measured[bucket], reverse=True)
        times = accumulate((min(measured[bucket][n], above.get(n, inf)) for n in lengths), min)
        above = found[bucket] = dict(reversed([*zip(lengths, times, strict=True)]))
    return found


class DraftLength:
    """Chooses one of `draft_lengths` for each decode step; with a single one there is nothing to choose or to learn.

    times: seconds of a step by batch bucket and length, filled in at start. catch_up_s: the additional cost of a probe
    after steps without drafts.
    """

    def __init__(self, draft_lengths: tuple[int, ...], buckets: list[int]) -> None:
        """draft_lengths: ascending; buckets: batch sizes, ascending, the last of which holds every batch."""
        self.draft_lengths = draft_lengths
        self.buckets = buckets
        self.times: dict[int, dict[int, float]] = {}
        self.catch_up_s = 0.0
        self.probing = False  # is the last choice a probe?
        self._most = draft_lengths[-1]
        self._tried = [0.0] * self._most
        self._right = [0.0] * self._most
        if self._most:
            self._tried[0], self._right[0] = 8.0, 8.0 * GUESS
        self._current: dict[int, int] = {}
        self._drift: dict[int, float] = {}  # seconds that steps of a bucket take more than `times`
        self._saved = 0.0  # seconds that a probe may cost
        self._rested = 0
        self._longest_next = True

    @property
    def is_auto(self) -> bool:
        return len(self.draft_lengths) > 1

    def bucket(self, rows: int) -> int:
        return self.buckets[bisect_left(self.buckets, rows)]

    def choose(self, rows: int) -> int:
        """The length for a step of so many requests."""
        self.probing = False
        if not self.is_auto:
            return self._most
        bucket, left = self.bucket(rows), self._left()
        speed = {n: left[n] / self._time(bucket, n) / (APART if n else 1.0) for n in self.draft_lengths}
        best = max(self.draft_lengths, key=speed.__getitem__)
        current = self._current.get(bucket, best)
        if speed[best] > MARGIN * speed[current]:
            current = best
        self._current[bucket] = current
        self._saved += PROBES * self._time(bucket, current)
        self._rested += 1
        probe = self._most
        if current == self._most or not self._longest_next:
            probe = max((length for length in self.draft_lengths if length != current), key=speed.__getitem__)
        # The time of the probe, less what its tokens would have taken.
        loss = self._time(bucket, probe) - left[probe] / speed[current]
        loss += 0.0 if current and probe else self.catch_up_s
        if self._rested < REST or self._saved < loss:
            return current
        self._saved, self._rested, self.probing = 0.0, 0, True
        self._longest_next = not self._longest_next
        return probe

    def learn(self, length: int, accepted: Iterable[int]) -> None:
        """Observe a step with `length` drafts, of which its requests accepted so many each."""
        counts = [0] * (length + 1)
        for count in accepted:
            counts[count] += 1
        reached = list(accumulate(reversed(counts)))[::-1]  # [j]: how many accepted j drafts or more
        for place, tried in enumerate(self._tried):
            fade = 1 - 1 / MEMORY if tried > KEPT else 1.0
            self._tried[place] *= fade
            self._right[place] *= fade
        for place, (tried, right) in enumerate(pairwise(reached)):
            self._tried[place] += tried
            self._right[place] += right

    def took(self, rows: int, length: int, seconds: float) -> None:
        """Observe that a step of so many requests took `seconds`. Probes correct the time of their length; other steps
        correct the drift of all lengths of their bucket."""
        bucket = self.bucket(rows)
        expected = self._time(bucket, length)
        off = min(max(seconds - expected, -expected / 2), expected)  # outliers are limited
        if length != self._current.get(bucket, length):
            self.times[bucket][length] += PROBE * off
        else:
            first = bucket not in self._drift
            self._drift[bucket] = self._drift.get(bucket, 0.0) + (off if first else SMOOTH * off)

    def acceptance(self) -> list[float]:
        """p_1, p_2, ...; a position that was never tried has that of the one before."""
        found: list[float] = []
        for tried, right in zip(self._tried, self._right, strict=True):
            found.append((right + TIES * found[-1]) / (tried + TIES) if found else right / tried)
        return found

    def _left(self) -> list[float]:
        """E(0), E(1), ..."""
        reached = accumulate(self.acceptance(), lambda one, other: one * other)
        return list(accumulate(reached, initial=1.0))

    def _time(self, bucket: int, length: int) -> float:
        return max(self.times[bucket][length] + self._drift.get(bucket, 0.0), 1e-9)


def announced(draft_lengths: tuple[int, ...]) -> str:
    return f"draft tokens: {AUTO}, one of {', '.join(map(str, draft_lengths))}"
