"""95% confidence intervals of the difference between two points, over repeats or over prompts.

Over prompts: the jackknife of a ratio of sums with Student's t (Tukey 1958), prompt by prompt if the rows pair, else
with as many degrees of freedom as the side with fewer prompts; of a median the percentile bootstrap (Efron and
Tibshirani, "An Introduction to the Bootstrap", 1993). With 10 prompts they exclude the truth in 2 to 6% of comparisons.
They do not cover variation between runs.

Over repeats: Welch's t interval of the difference of two means. If both points were measured in the same rounds of one
run (A B B A), it is the t interval of the mean difference within a round, which cancels what the machine did to both.
The interval of a ratio over repeats is the same one of logarithms. Where rounds were added until an interval was narrow
(`until_precise`), it is a confidence sequence (`specbatch.records.estimates`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.core.completion import INCOMPLETE
from specbatch.records.estimates import CONFIDENCE, Estimate
from specbatch.records.metric import Metric
from specbatch.records.run_record import RunRecord
from specbatch.records.runs import Replicates

RESAMPLES = 2_000
SEED = 0
MOST_FIRST = 0.75  # of the pairs of runs, in which one side may come first
LEAST_PROMPTS = 10  # of fewer an interval is too inaccurate
_SHAPE = ("draft_tokens", "draft_steps", "draft_topk")  # of a draft; "draft_shape" in the caps has the defaults, too
_DRAFTING = (
    "algorithm",
    "ngram_min",
    "ngram_max",
    "corpus",
    "corpus_min",
    "verify_budget",
)  # which positions it drafts
_DECIMALS = 12  # of logarithms, which rounding errors do not reach
_ELEMENTS = 1 << 22  # of a batch of resamples, to bound memory

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """The interval of after - before, in the record's unit. Without ends, `over` is the reason.

    over         what was resampled or repeated
    interleaved  False for times of a single run, or of runs of which one side came first (`were_interleaved`): the
                 difference may then come from the machine, which was warmer or busier
    one_repeat   a time of a single run on one of the sides: if there is an interval it is over prompts, and does not
                 cover the variation between runs
    estimate     what the interval follows from; None for a median
    """

    low: float | None
    high: float | None
    over: str
    interleaved: bool = True
    one_repeat: bool = False
    estimate: Estimate | None = None

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
    if not counts_alike(metric, before.records[0], after.records[0]):
        return Interval(None, None, f"rates of other drafts ({metric.formula.partition(' / ')[2]})")
    one_repeat = metric.is_time and min(len(before.records), len(after.records)) < 2
    if metric.is_time and not one_repeat:
        values = ([record.metrics[metric.key] or 0.0 for record in point.records] for point in (before, after))
        found = over_runs(*values, paired=before.rounds == after.rounds, anytime=were_added(before, after))
        return replace(found, interleaved=were_interleaved(before.records, after.records))
    if metric.per_request is None:
        return Interval(None, None, "needs two runs per side", one_repeat=one_repeat)
    samples = [sample(metric.per_request, point.records) for point in (before, after)]
    if samples[0] is None or samples[1] is None:
        return Interval(None, None, "no numbers of single requests", one_repeat=one_repeat)
    found = over_prompts(samples[0], samples[1], median=metric.is_median)
    return replace(found, interleaved=not metric.is_time, one_repeat=one_repeat)


def counts_alike(metric: Metric, before: RunRecord, after: RunRecord) -> bool:
    """Whether the denominators of `metric` are of the same drafts. n-gram lookup drafts only where it finds something,
    and a longer draft has more tokens that are rarely accepted: a lower rate of one is no loss."""
    if not metric.counts_only:
        return True
    asked = [record.config["speculation"] for record in (before, after)]
    if metric.counts_only == "drafted":
        return bool(asked[0]["algorithm"] == asked[1]["algorithm"])
    shapes = [record.caps.get("draft_shape") for record in (before, after)]
    names = _DRAFTING if all(shapes) else (*_DRAFTING, *_SHAPE)
    same = all(asked[0].get(name) == asked[1].get(name) for name in names)
    return same and shapes[0] == shapes[1] and not (before.chooses_draft_length or after.chooses_draft_length)


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


def over_runs(before: list[float], after: list[float], *, paired: bool = False, anytime: bool = False) -> Interval:
    """Of the difference of the means, from at least two runs per side. paired: run by run; anytime: runs were added
    until the interval was narrow."""
    old, new = np.array(before), np.array(after)
    over = f"{len(old)} runs, paired by round" if paired else f"{len(old)} and {len(new)} runs"
    found = _of_mean(new - old) if paired else _welch(_of_mean(old), _of_mean(new))
    return _interval(replace(found, anytime=anytime), over)


def over_logs(before: list[float], after: list[float], *, paired: bool = False, anytime: bool = False) -> Interval:
    """Of the mean of log(after / before), from at least two runs per side of positive values. paired: of the ratios run
    by run, which cancels what changed both by the same factor. anytime: as for `over_runs`."""
    if not paired:
        return over_runs([math.log(value) for value in before], [math.log(value) for value in after], anytime=anytime)
    logs = [math.log(new / old) for old, new in zip(before, after, strict=True)]
    found = _of_mean(np.round(logs, _DECIMALS))  # equal ratios have no variance
    return _interval(replace(found, anytime=anytime), f"{len(logs)} runs, paired by round")


def of_ratios(values: list[float], *, anytime: bool = False) -> tuple[float | None, float | None, float | None]:
    """The geometric mean of positive ratios of several runs, and the interval that follows from their logarithms;
    without ends for one run."""
    if not values:
        return None, None, None
    logs = [math.log(value) for value in values]
    middle = math.exp(sum(logs) / len(logs))
    ends = replace(_of_mean(np.array(logs)), anytime=anytime).ends() if len(logs) > 1 else None
    return (middle, None, None) if ends is None else (middle, math.exp(ends[0]), math.exp(ends[1]))


def were_added(*points: Replicates) -> bool:
    """Whether rounds were added to a point until its interval was narrow (--until-precise)."""
    return any(record.workload.get("until_precise") for point in points for record in point.records)


def _of_mean(values: Floats) -> Estimate:
    spread = float(values.std(ddof=1)) if np.ptp(values) else 0.0  # equal values have no variance but for rounding
    return Estimate(float(values.mean()), spread / math.sqrt(len(values)), len(values) - 1)


def _welch(old: Estimate, new: Estimate) -> Estimate:
    """Of the difference of two independent means, with the degrees of freedom of Welch and Satterthwaite."""
    parts = [old.error**2, new.error**2]
    if not sum(parts):
        return Estimate(new.value - old.value, 0.0, old.freedom + new.freedom)
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / old.freedom + parts[1] ** 2 / new.freedom)
    return Estimate(new.value - old.value, math.sqrt(sum(parts)), freedom)


def _interval(found: Estimate, over: str) -> Interval:
    ends = found.ends()
    if ends is None:
        return Interval(None, None, f"{over}: --until-precise needs three", estimate=found)
    return Interval(*ends, over, estimate=found)


def over_prompts(before: Sample, after: Sample, *, median: bool = False) -> Interval:
    """Of the ratio of sums, or of the median of ratios."""
    paired = before.indices is not None and before.indices == after.indices
    sizes = len(before.top), len(after.top)
    if min(sizes) < LEAST_PROMPTS:
        return Interval(None, None, f"fewer than {LEAST_PROMPTS} prompts")
    known = min(int(np.count_nonzero(side.bottom)) for side in (before, after))
    if known < LEAST_PROMPTS:
        return Interval(None, None, "too few prompts have it")
    over = f"{sizes[0]} prompts, paired" if paired else f"{sizes[0]} and {sizes[1]} prompts, unpaired"
    if median:
        return Interval(*_bootstrap_of_medians(before, after, paired=paired), over)
    old, new = (_pseudo_values(side) for side in (before, after))
    value = float(after.top.sum() / after.bottom.sum() - before.top.sum() / before.bottom.sum())
    error = _of_mean(new - old).error if paired else math.hypot(_of_mean(old).error, _of_mean(new).error)
    return _interval(Estimate(value, error, known - 1), over)


def _pseudo_values(side: Sample) -> Floats:
    """Of the jackknife: their mean is the ratio of sums, nearly, and their variance that of the ratio of one prompt."""
    top, bottom, count = side.top.sum(), side.bottom.sum(), len(side.top)
    return np.asarray(count * top / bottom - (count - 1) * (top - side.top) / (bottom - side.bottom))


def _bootstrap_of_medians(before: Sample, after: Sample, *, paired: bool) -> tuple[float, float]:
    """The percentiles of the difference of the medians."""
    from scipy import stats

    with np.errstate(all="ignore"):
        old, new = (side.top / side.bottom for side in (before, after))

    def difference(first: Any, second: Any = None, *, axis: int = -1) -> Floats:
        second = first if second is None else second
        return np.asarray(np.nanmedian(new[second], axis=axis) - np.nanmedian(old[first], axis=axis))

    drawn = (np.arange(len(old)),) if paired else (np.arange(len(old)), np.arange(len(new)))
    with warnings.catch_warnings(action="ignore"):  # equal medians
        found = stats.bootstrap(
            drawn,
            difference,
            n_resamples=RESAMPLES,
            batch=max(1, _ELEMENTS // max(len(old), len(new))),
            vectorized=True,
            axis=-1,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=np.random.default_rng(SEED),
        ).confidence_interval
    return float(found.low), float(found.high)


def were_interleaved(before: list[RunRecord], after: list[RunRecord]) -> bool:
    """Whether neither side came first in more than three of four pairs of runs, as in A B A B. With more, what changes
    on the machine over time would look like a difference."""
    pairs = [(old.created, new.created) for old in before for new in after]
    first = sum((old < new) + (old == new) / 2 for old, new in pairs)
    return MOST_FIRST * len(pairs) >= max(first, len(pairs) - first)


def sample(fields: tuple[str, str | None], records: list[RunRecord]) -> Sample | None:
    """The fields of each prompt from the rows of `records`; None where rows lack them. Aborted requests are ignored.
    Turns of a conversation depend on each other: of two fields, a conversation is one prompt."""
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
    if bottom is not None and all("turn" in row for row in rows):
        return _of_conversations(pairs, records)
    indices = [[row["index"] for row in record.requests] for record in records]
    known = sorted(indices[0])
    if len(set(known)) < len(known) or any(sorted(found) != known for found in indices):
        return Sample(pairs[:, 0], pairs[:, 1], None)
    order = np.argsort([index for found in indices for index in found], kind="stable")
    sums = pairs[order].reshape(len(known), len(records), 2).sum(1)
    return Sample(sums[:, 0], sums[:, 1], tuple(known))


def _of_conversations(pairs: np.ndarray, records: list[RunRecord]) -> Sample:
    """Sums over the turns of each conversation of all records. pairs: [rows of all records, 2]."""
    places = [[row["index"] % record.workload["prompts"] for row in record.requests] for record in records]
    known, where = np.unique([place for found in places for place in found], return_inverse=True)
    sums = np.zeros((len(known), 2))
    np.add.at(sums, where, pairs)
    is_whole = all(set(found) == set(known) for found in places)
    return Sample(sums[:, 0], sums[:, 1], tuple(known.tolist()) if is_whole else None)
