"""Running totals of a run: sums and latency samples of its requests, in memory that does not grow with the run."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, fields

import numpy as np

from specbatch.core.acceptance import Acceptance
from specbatch.core.completion import Completion, RequestMetrics

EXACT_TIMES = 1 << 18  # values of a time that are kept one by one
_STEP = math.log(1.001)  # width of a bucket, for more values than that
_BLOCK = 1 << 15  # values that are sorted into buckets at a time
_LEAST = 1e-9  # seconds; shorter times share a bucket
_COUNTS = [item.name for item in fields(RequestMetrics) if isinstance(item.default, int)]
_TIMES = [item.name for item in fields(RequestMetrics) if item.name.endswith("_s")]
_OF_PROMPTS = {"prompt_tokens", "embedded_tokens", "cached_tokens"}  # which the samples of a prompt share


def least_values(percent: int) -> int:
    """How many values a percentile needs, so that at least one is expected above it: 100 for p99."""
    return 1 if percent <= 50 else math.ceil(100 / (100 - percent))


def percentile_name(percent: int) -> str:
    return "median" if percent == 50 else f"p{percent}"


class TimeSample:
    """Times in seconds, with their mean, maximum and percentiles.

    The first `EXACT_TIMES` values are kept. With more, they are counted in buckets that are 0.1% wide, so that memory
    stays bounded: percentiles are then right to 0.1%.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._largest = 0.0
        self._values = array("d")
        self._buckets: Counter[int] = Counter()

    def extend(self, values: Sequence[float]) -> None:
        if not values:
            return
        self.count += len(values)
        found = np.asarray(values, np.float64)
        self._sum += float(found.sum())
        self._largest = max(self._largest, float(found.max()))
        self._values.extend(values)
        if self.count > EXACT_TIMES and len(self._values) > _BLOCK:
            self._sort_in()

    def _sort_in(self) -> None:
        """Count the values that are not in a bucket yet."""
        places = np.rint(np.log(np.maximum(self._values, _LEAST)) / _STEP).astype(np.int64)
        for place, count in zip(*np.unique(places, return_counts=True), strict=True):
            self._buckets[int(place)] += int(count)
        self._values = array("d")

    def percentile(self, percent: float) -> float:
        """Linear interpolation between order statistics (numpy's default). There must be a value."""
        if self.count <= EXACT_TIMES:
            return float(np.percentile(self._values, percent))
        self._sort_in()
        place = round((self.count - 1) * percent / 100)
        for bucket in sorted(self._buckets):
            place -= self._buckets[bucket]
            if place < 0:
                break
        return math.exp(bucket * _STEP)

    def part(self, name: str) -> float | None:
        """The "mean", "median", "p90", ... or "max"; None without values, and for a percentile of too few."""
        if not self.count:
            return None
        if name in ("mean", "max"):
            return self._sum / self.count if name == "mean" else self._largest
        percent = 50 if name == "median" else int(name[1:])
        return self.percentile(percent) if self.count >= least_values(percent) else None


class RunTotals:
    """What the metrics of a run need to know about its requests. Incomplete requests count as errors only.

    sums                of each count in `RequestMetrics`, by name
    times               of each time in `RequestMetrics`, by name
    emitted_histogram   verifies that emitted 0, 1, 2, ... tokens (index = tokens, bonus included)
    errors              how many requests failed with each error
    """

    def __init__(self) -> None:
        self.requests = 0
        self.sums: Counter[str] = Counter()
        self.times: Mapping[str, TimeSample] = {name: TimeSample() for name in _TIMES}
        self.acceptance = Acceptance()
        self.emitted_histogram: list[int] = []
        self.errors: Counter[str] = Counter()

    def add(self, completion: Completion) -> None:
        if completion.error is not None:
            self.errors[completion.error] += 1
        if not completion.is_complete:
            return
        row = completion.metrics
        self.requests += 1
        for name in _COUNTS:
            if not (completion.sample and name in _OF_PROMPTS):
                self.sums[name] += getattr(row, name)
        self.acceptance += row.acceptance
        self.emitted_histogram += [0] * (len(row.emitted_histogram) - len(self.emitted_histogram))
        for place, count in enumerate(row.emitted_histogram):
            self.emitted_histogram[place] += count
        for name, sample in self.times.items():
            value: float | MutableSequence[float] | None = getattr(row, name)
            if value is not None:
                sample.extend((value,) if isinstance(value, (int, float)) else value)


@dataclass(frozen=True)
class Requests:
    """The finished requests of a window of `duration_s` seconds, at most `concurrency` at a time (None: unknown)."""

    totals: RunTotals
    duration_s: float
    concurrency: int | None = None

    @property
    def sums(self) -> Counter[str]:
        return self.totals.sums

    @property
    def times(self) -> Mapping[str, TimeSample]:
        return self.totals.times

    def rate(self, amount: float) -> float | None:
        """Per second."""
        return amount / self.duration_s if self.duration_s > 0 else None

    def per_user(self, amount: float) -> float | None:
        """Per second and concurrent request."""
        return amount / self.duration_s / self.concurrency if self.duration_s > 0 and self.concurrency else None

    def mean(self, name: str) -> float:
        """Of a count, over the requests."""
        return self.sums[name] / max(self.totals.requests, 1)

    def ratio(self, top: str, bottom: str) -> float | None:
        """Of two sums; None if the lower one is 0."""
        return self.sums[top] / self.sums[bottom] if self.sums[bottom] else None
