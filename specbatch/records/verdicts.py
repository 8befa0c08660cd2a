"""Verdicts: whether one configuration or run is better than another one, in the words that every table uses.

    pays        the 95% interval of the difference (of the ratio: of its logarithm) excludes zero on the better side
    loses       it excludes zero on the worse side
    undecided   it contains zero
    one repeat  a time of one run per side, which does not show how much it varies between runs
    not interleaved  it excludes zero, but the runs of one side came first (in more than three of four pairs): the
                difference may come from the machine
    not judged  there is no interval for another reason; `Interval.over` is that reason

`verdict_of` is the only place that decides, from an interval of `specbatch.records.intervals`. `sweep`, `bench`,
`report`, `compare` and `gate` call it, so they agree about the same folder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import fmean

from specbatch.records.estimates import Estimate
from specbatch.records.intervals import Interval, in_common, interval, over_logs, were_added, were_interleaved
from specbatch.records.metric import Better, Metric
from specbatch.records.runs import Replicates

PAYS, LOSES, UNDECIDED, ONE_REPEAT, NOT_JUDGED = "pays", "loses", "undecided", "one repeat", "not judged"
NOT_INTERLEAVED = "not interleaved"
_MOST = 700.0  # exp of more overflows


def verdict_of(difference: Interval, better: Better | None = "higher") -> str:
    """The verdict on a metric of which more (`better` = "higher") or less is an improvement."""
    if difference.one_repeat:
        return ONE_REPEAT
    if difference.low is None or difference.high is None or better is None:
        return NOT_JUDGED
    if not difference.excludes_zero:
        return UNDECIDED
    if not difference.interleaved:
        return NOT_INTERLEAVED
    return PAYS if (difference.low > 0) == (better == "higher") else LOSES


@dataclass(frozen=True)
class Speedup:
    """A metric of one point relative to another one: 1.2 is 20% more.

    ratio      of times and throughputs over several repeats that both measured: of the geometric means, which is the
               geometric mean of the ratios of each round. Of others: of the means
    low, high  its 95% interval, over repeats that of `over_logs`, exponentiated. Of others: that of the difference,
               relative to the mean of `before`. It excludes 1 where the verdict is PAYS or LOSES. None without an
               interval, as with one repeat
    repeats    of the side with fewer
    estimate   that the interval follows from, of the logarithm of the ratio; with `relative_to`, the mean of `before`,
               of the difference
    """

    ratio: float
    low: float | None
    high: float | None
    verdict: str
    repeats: int
    estimate: Estimate | None = field(default=None, compare=False)
    relative_to: float | None = field(default=None, compare=False)

    def on_its_scale(self, ratio: float) -> float:
        """A ratio on the scale of `estimate`."""
        return math.log(ratio) if self.relative_to is None else (ratio - 1) * self.relative_to

    @property
    def precision(self) -> float | None:
        """Half the length of the interval."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    @property
    def detectable(self) -> float | None:
        """The smallest gain that would have been shown, as a share (0.02: a ratio of 1.02): `Estimate.detectable`."""
        if self.estimate is None or not math.isfinite(least := self.estimate.detectable()):
            return None
        return _exp(least) - 1 if self.relative_to is None else least / self.relative_to

    def __str__(self) -> str:
        """For a table: "1.83 (1.77-1.89)", or "1.83 (one repeat)" where the verdict is no more than that."""
        return f"{self.ratio:.{self._decimals}f} ({self.interval_text})"

    @property
    def interval_text(self) -> str:
        """The interval, or why there is none."""
        if self.verdict == ONE_REPEAT or self.low is None or self.high is None:
            return self.verdict
        return f"{self.low:.{self._decimals}f}-{self.high:.{self._decimals}f}"

    @property
    def _decimals(self) -> int:
        """Two, or as many as show on which side of 1 the ends of the interval are, up to four."""
        ends = [end for end in (self.low, self.high) if end is not None]
        return next((n for n in (2, 3) if all((round(end, n) == 1) == (end == 1) for end in ends)), 4)


def speedup_over_runs(
    before: list[float],
    after: list[float],
    better: Better | None,
    *,
    paired: bool,
    interleaved: bool = True,
    anytime: bool = False,
) -> Speedup:
    """Of positive values, one per run. paired: run by run; interleaved, anytime: as for `Interval` and `over_logs`."""
    repeats = min(len(before), len(after))
    if repeats < 2:
        return Speedup(fmean(after) / fmean(before), None, None, ONE_REPEAT, repeats)
    logs = replace(over_logs(before, after, paired=paired, anytime=anytime), interleaved=interleaved)
    low, high = (None if end is None else _exp(end) for end in (logs.low, logs.high))
    ratio = math.exp(fmean(map(math.log, after)) - fmean(map(math.log, before)))
    return Speedup(ratio, low, high, verdict_of(logs, better), repeats, logs.estimate)


def speedup_of(
    metric: Metric, before: Replicates, after: Replicates, difference: Interval | None = None
) -> Speedup | None:
    """`metric` of `after` relative to `before`, with its interval and verdict. None where it was not measured, or is 0
    before. difference: its `interval`, if that is known."""
    old, new = in_common(before, after)
    base, own = old.mean(metric.key), new.mean(metric.key)
    if not base or own is None:
        return None
    repeats = min(len(old.records), len(new.records))
    past, now = ([record.metrics[metric.key] or 0.0 for record in point.records] for point in (old, new))
    if metric.is_time and repeats > 1 and min(*past, *now) > 0:
        return speedup_over_runs(
            past,
            now,
            metric.better,
            paired=old.rounds == new.rounds,
            interleaved=were_interleaved(old.records, new.records),
            anytime=were_added(old, new),
        )
    found = difference or interval(metric, before, after)
    low, high = (None if end is None else 1 + end / base for end in (found.low, found.high))
    return Speedup(own / base, low, high, verdict_of(found, metric.better), repeats, found.estimate, base)


def _exp(value: float) -> float:
    """Infinite instead of an error, for two runs that differ a lot."""
    return math.exp(value) if value < _MOST else math.inf
