"""Verdicts: whether one configuration or run is better than another one, in the words that every table uses.

    pays        the 95% interval of the difference excludes zero on the better side
    loses       it excludes zero on the worse side
    undecided   it contains zero
    one repeat  a time of one run per side, which does not show how much it varies between runs
    not judged  there is no interval for another reason; `Interval.over` is that reason

`verdict_of` is the only place that decides, from an interval of `specbatch.records.intervals`. `sweep`, `bench`,
`report`, `compare` and `gate` call it, so they agree about the same folder.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbatch.records.intervals import Interval, in_common, interval
from specbatch.records.metrics import Better, Metric
from specbatch.records.runs import Replicates

PAYS, LOSES, UNDECIDED, ONE_REPEAT, NOT_JUDGED = "pays", "loses", "undecided", "one repeat", "not judged"


def verdict_of(difference: Interval, better: Better | None = "higher") -> str:
    """The verdict on a metric of which more (`better` = "higher") or less is an improvement."""
    if difference.one_repeat:
        return ONE_REPEAT
    if difference.low is None or difference.high is None or better is None:
        return NOT_JUDGED
    if not difference.excludes_zero:
        return UNDECIDED
    return PAYS if (difference.low > 0) == (better == "higher") else LOSES


@dataclass(frozen=True)
class Speedup:
    """A metric of one point relative to another one: 1.2 is 20% more.

    ratio      of the means over the repeats that both measured
    low, high  its 95% interval: that of the difference, relative to the mean of `before`, so that it excludes 1 where
               that interval excludes 0. None without an interval, as with one repeat
    repeats    of the side with fewer
    """

    ratio: float
    low: float | None
    high: float | None
    verdict: str
    repeats: int

    @property
    def precision(self) -> float | None:
        """Half the length of the interval."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def __str__(self) -> str:
        """For a table: "1.83 (1.77-1.89)", or "1.83 (one repeat)" where the verdict is no more than that."""
        return f"{self.ratio:.2f} ({self.interval_text})"

    @property
    def interval_text(self) -> str:
        """The interval, or why there is none."""
        if self.verdict == ONE_REPEAT or self.low is None or self.high is None:
            return self.verdict
        return f"{self.low:.2f}-{self.high:.2f}"


def speedup_from(difference: Interval, base: float, own: float, repeats: int, better: Better | None) -> Speedup:
    """Of the means of both and the interval of their difference."""
    low, high = (None if end is None else 1 + end / base for end in (difference.low, difference.high))
    return Speedup(own / base, low, high, verdict_of(difference, better), repeats)


def speedup_of(metric: Metric, before: Replicates, after: Replicates) -> Speedup | None:
    """`metric` of `after` relative to `before`, with the interval and the verdict that `compare` has for both. None
    where it was not measured, or is 0 before."""
    old, new = in_common(before, after)
    base, own = old.mean(metric.key), new.mean(metric.key)
    if not base or own is None:
        return None
    repeats = min(len(old.records), len(new.records))
    return speedup_from(interval(metric, before, after), base, own, repeats, metric.better)
