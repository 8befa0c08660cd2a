"""Predicted seconds of decode steps, by batch size, drafts and cached tokens. Host code only: no device, no clock.

Steps are measured at start for some batch sizes, with short contexts and with long ones. Between batch sizes the time
is linear in the number of requests, and in the context it is linear in the cached tokens of the batch, which attention
reads once, however many drafts it verifies. A step in which some of the requests draft takes the time of one without
drafts, that of drafting for a single request, and of the rest a share. The times of the run's steps correct all this.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from math import inf

SMOOTH = 1 / 8  # weight of a step's time against those before it, as an exponent
FIRST = 1 / 2  # the same for a probe, and for the first steps of a kind; the very first counts in full
SETTLE = 8  # so many first steps of a kind correct its own time; later ones show what changes all times, as clocks do
MOST_OFF = 2.0  # an observed time counts as at most so many times the predicted one

# A kind of step: batch bucket, drafts, and how many of the requests draft.
Kind = tuple[int, int, int]
ByBatch = Mapping[int, Mapping[int, float]]  # by batch bucket and number of drafts


def rising(measured: ByBatch) -> dict[int, dict[int, float]]:
    """Seconds by batch bucket and length, none above that of a larger bucket or a longer draft: disturbances only add
    to a time."""
    found: dict[int, dict[int, float]] = {}
    above: dict[int, float] = {}
    for bucket in sorted(measured, reverse=True):
        lengths = sorted(measured[bucket], reverse=True)
        times = accumulate((min(measured[bucket][n], above.get(n, inf)) for n in lengths), min)
        above = found[bucket] = dict(reversed([*zip(lengths, times, strict=True)]))
    return found


class StepModel:
    """Predicts times from `measured` seconds with short contexts, and from seconds per cached token."""

    def __init__(self, buckets: list[int], measured: ByBatch, per_token: ByBatch | None = None) -> None:
        """buckets: batch sizes, ascending, the last of which holds every batch. The other two have the first and the
        last of them, and all numbers of drafts; per_token: None for times that do not depend on the context."""
        self.buckets = buckets
        self._measured = measured
        self._per_token = per_token or {size: dict.fromkeys(of, 0.0) for size, of in measured.items()}
        self._common: dict[int, float] = {}  # by bucket: what all times are multiplied by
        self._own: dict[Kind, float] = {}
        self._seen: dict[Kind, int] = {}

    def bucket(self, rows: int) -> int:
        return self.buckets[bisect_left(self.buckets, rows)]

    def kind(self, rows: int, drafts: int, drafting: int | None = None) -> Kind:
        """drafting: how many of the requests draft; None for all."""
        bucket = self.bucket(rows)
        return bucket, drafts, (bucket if drafting is None else drafting) if drafts else 0

    def expected(self, kind: Kind, cached: int) -> float:
        """Seconds of a step over so many cached tokens, by the measurements at start alone."""
        bucket, drafts, drafting = kind

        def at(size: int, count: int) -> float:
            return _between(self._measured, size, count) + cached * _between(self._per_token, size, count)

        whole = at(bucket, drafts)
        if drafting in (0, bucket):
            return whole
        least = self.buckets[0]
        plain = at(bucket, 0)
        added = max(whole - plain, 0.0)
        single = min(_between(self._measured, least, drafts) - _between(self._measured, least, 0), added)
        return plain + single + (added - single) * drafting / bucket

    def seconds(self, kind: Kind, cached: int) -> float:
        """The same, corrected by the steps of this run."""
        return self.expected(kind, cached) * self._common_of(kind[0]) * self._own.get(kind, 1.0)

    def observe(self, kind: Kind, expected: float, seconds: float, *, probing: bool = False) -> None:
        """A step took `seconds`. expected: of it, when it was launched; probing: it is a single one among others."""
        bucket, known = kind[0], self._common_of(kind[0])
        ratio = seconds / (expected * known * self._own.get(kind, 1.0))
        ratio = min(max(ratio, 1 / MOST_OFF), MOST_OFF)
        is_first = not any(other[0] == bucket and other != kind for other in self._seen)
        self._seen[kind] = self._seen.get(kind, 0) + 1
        if not is_first and (probing or self._seen[kind] <= SETTLE):
            self._own[kind] = self._own.get(kind, 1.0) * ratio ** (FIRST if self._seen[kind] > 1 else 1.0)
        else:
            self._common[bucket] = known * ratio ** (SMOOTH if bucket in self._common else 1.0)

    def _common_of(self, bucket: int) -> float:
        """That of the nearest batch size that has run."""
        if bucket in self._common or not self._common:
            return self._common.get(bucket, 1.0)
        return self._common[min(self._common, key=lambda other: abs(other - bucket))]


def _between(table: ByBatch, size: int, count: int) -> float:
    """The value at a batch size, linear between those in the table."""
    if size in table:
        return table[size][count]
    sizes = sorted(table)
    place = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    low, high = sizes[place - 1 : place + 1]
    return table[low][count] + (table[high][count] - table[low][count]) * (size - low) / (high - low)
