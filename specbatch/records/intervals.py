"""95% confidence intervals of the difference between two points, over repeats or over prompts.

Over prompts: the percentile bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993). Prompts are
drawn with replacement, the same ones on both sides if the rows pair. It does not cover variation between runs. Over
repeats: Welch's t interval of the difference of two means. If both points were measured in the same rounds of one run
(A B A B), it is the t interval of the mean difference within a round, which cancels what the machine did to both. The
interval of a ratio over repeats is the same one of logarithms.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.core.request import INCOMPLETE
from specbatch.records.metrics import Metric
from specbatch.records.run_record import RunRecord
from specbatch.records.runs import Replicates

CONFIDENCE = 0.95
RESAMPLES = 2_000
SEED = 0
LEAST_PROMPTS = 10  # a bootstrap of fewer is too inaccurate
_DECIMALS = 12  # of logarithms, which rounding errors do not reach
_ELEMENTS = 1 << 22  # of a batch of resamples, to bound memory

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """The interval of after - before, in the record's unit. Without ends, `over` is the reason.

    over         what was resampled or repeated
    interleaved  False for times of a single run, or of all runs of one side after those of the other: the difference
                 may then come from the machine, which was warmer or busier
    one_repeat   a time of a single run on one of the sides: if there is an interval it is over prompts, and does not
                 cover the variation between runs
    """

    low: float | None
    high: float | None
    over: str
    interleaved: bool = True
    one_repeat: bool = False

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Sample:
    """Numerator and denominator of each prompt, summed over repeats: [prompts]. indices: of the prompts, None if the
    rows lack them."""

    top: Floats
    bottom: Floats
    indices: tuple[int, ...] | None


def interval(metric: Metric, before: Replicates, after: Replicates) -> Interval:
    """The interval of `metric`, over the repeats that both points measured in the same rounds, else over all."""
    before, after = in_common(before, after)
    if before.mean(metric.key) is None or after.mean(metric.key) is None:
        return Interval(None, None, "not measured")
    one_repeat = metric.is_time and min(len(before.records), len(after.records)) < 2
    if metric.is_time and not one_repeat:
        values = ([record.metrics[metric.key] or 0.0 for record in point.records] for point in (before, after))
        found = over_runs(*values, paired=before.rounds == after.rounds)
        return replace(found, interleaved=_interleaved(before, after))
    if metric.per_request is None:
        return Interval(None, None, "needs two runs per side", one_repeat=one_repeat)
    samples = [sample(metric.per_request, point.records) for point in (before, after)]
    if samples[0] is None or samples[1] is None:
        return Interval(None, None, "no numbers of single requests", one_repeat=one_repeat)
    found = over_prompts(samples[0], samples[1], median=metric.is_median)
    return replace(found, interleaved=not metric.is_time, one_repeat=one_repeat)


def in_common(before: Replicates, after: Replicates) -> tuple[Replicates, Replicates]:
    """The repeats that both points measured in the same rounds of one run, in one order; all where there are none."""
    places = [{round: place for place, round in enumerate(point.rounds)} for point in (before, after)]
    both = [round for round in places[0] if round in places[1] and round[-1] is not None]
    if not both:
        return before, after
    old, new = (
        Replicates([point.paths[at[round]] for round in both], [point.records[at[round]] for round in both])
        for point, at in zip((before, after), places, strict=True)
    )
    return old, new


def over_runs(before: list[float], after: list[float], *, paired: bool = False) -> Interval:
    """The t interval of the difference of the means, from at least two runs per side. paired: run by run."""
    from scipy import stats

    old, new = np.array(before), np.array(after)
    over = f"{len(old)} runs, paired by round" if paired else f"{len(old)} and {len(new)} runs"
    parts = [new - old] if paired else [old, new]
    if not any(np.ptp(part) for part in parts):  # without variance there is no t statistic
        delta = float(new.mean() - old.mean())
        return Interval(delta, delta, over)
    test = stats.ttest_rel(new, old) if paired else stats.ttest_ind(new, old, equal_var=False)
    ends = test.confidence_interval(CONFIDENCE)
    return Interval(float(ends.low), float(ends.high), over)


def over_logs(before: list[float], after: list[float], *, paired: bool = False) -> Interval:
    """The t interval of the mean of log(after / before), from at least two runs per side of positive values. paired: of
    the ratios run by run, which cancels what changed both by the same factor."""
    if not paired:
        return over_runs([math.log(value) for value in before], [math.log(value) for value in after])
    logs = [math.log(new / old) for old, new in zip(before, after, strict=True)]
    low, high = of_mean([round(value, _DECIMALS) for value in logs])  # equal ratios have no variance
    return Interval(low, high, f"{len(logs)} runs, paired by round")


def of_mean(values: list[float]) -> tuple[float | None, float | None]:
    """The t interval of the mean of several runs; without ends for one."""
    from scipy import stats

    if len(values) < 2:
        return None, None
    if not np.ptp(values):
        return values[0], values[0]
    found = stats.ttest_1samp(values, 0.0).confidence_interval(CONFIDENCE)
    return float(found.low), float(found.high)


def of_ratios(values: list[float]) -> tuple[float | None, float | None, float | None]:
    """The geometric mean of positive ratios of several runs, and the t interval of their logarithms; without ends for
    one run."""
    if not values:
        return None, None, None
    logs = [math.log(value) for value in values]
    low, high = (None if end is None else math.exp(end) for end in of_mean(logs))
    return math.exp(sum(logs) / len(logs)), low, high


def over_prompts(before: Sample, after: Sample, *, median: bool = False) -> Interval:
    """The bootstrap over prompts, of the ratio of sums or of the median of ratios."""
    from scipy import stats

    paired = before.indices is not None and before.indices == after.indices
    sizes = len(before.top), len(after.top)
    if min(sizes) < LEAST_PROMPTS:
        return Interval(None, None, f"fewer than {LEAST_PROMPTS} prompts")
    statistic = _median if median else _ratio

    def difference(old: Any, new: Any = None, *, axis: int = -1) -> Floats:
        new = old if new is None else new
        return statistic(after.top[new], after.bottom[new]) - statistic(before.top[old], before.bottom[old])

    drawn = (np.arange(sizes[0]),) if paired else tuple(np.arange(size) for size in sizes)
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):  # a resample without the number gives NaN
        found = stats.bootstrap(
            drawn,
            difference,
            n_resamples=RESAMPLES,
            batch=max(1, _ELEMENTS // max(sizes)),
            vectorized=True,
            axis=-1,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=np.random.default_rng(SEED),
        ).confidence_interval
    if not np.isfinite([found.low, found.high]).all():
        return Interval(None, None, "too few prompts have it")
    over = f"{sizes[0]} prompts, paired" if paired else f"{sizes[0]} and {sizes[1]} prompts, unpaired"
    return Interval(float(found.low), float(found.high), over)


def _interleaved(before: Replicates, after: Replicates) -> bool:
    old, new = ([record.created for record in point.records] for point in (before, after))
    return min(new) <= max(old) and min(old) <= max(new)


def sample(fields: tuple[str, str | None], records: list[RunRecord]) -> Sample | None:
    """The fields of each prompt from the rows of `records`; None where rows lack them. Aborted requests are ignored."""
    top, bottom = fields
    rows = [row for record in records for row in record.requests]
    if not rows or any(name is not None and name not in row for row in rows for name in fields):
        return None
    value: Callable[[dict[str, Any]], tuple[float, float]]
    if bottom is None:
        value = lambda row: (0.0, 0.0) if row[top] is None else (row[top], 1.0)  # noqa: E731
    else:
        value = lambda row: (row[top], row[bottom])  # noqa: E731
    pairs = np.array([(0.0, 0.0) if row["finish_reason"] in INCOMPLETE else value(row) for row in rows], float)
    indices = [[row["index"] for row in record.requests] for record in records]
    known = sorted(indices[0])
    if len(set(known)) < len(known) or any(sorted(found) != known for found in indices):
        return Sample(pairs[:, 0], pairs[:, 1], None)
    order = np.argsort([index for found in indices for index in found], kind="stable")
    sums = pairs[order].reshape(len(known), len(records), 2).sum(1)
    return Sample(sums[:, 0], sums[:, 1], tuple(known))


def _ratio(top: Floats, bottom: Floats) -> Floats:
    return np.asarray(top.sum(-1) / bottom.sum(-1))


def _median(top: Floats, bottom: Floats) -> Floats:
    return np.asarray(np.nanmedian(top / bottom, axis=-1))
