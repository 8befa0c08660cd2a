"""Running totals of a run: sums and latency samples of its requests, in memory that does not grow with the run."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np

from specbatch.core.acceptance import Acceptance
from specbatch.core.request import Completion
from specbatch.records.metrics import DISTRIBUTIONS, least_values, percentile_name

EXACT_TIMES = 1 << 18  # values of a time that are kept one by one
_STEP = math.log(1.001)  # width of a bucket, for more values than that
_BLOCK = 1 << 15  # values that are sorted into buckets at a time
_LEAST = 1e-9  # seconds; shorter times share a bucket


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
        self.count += len(values)
        self._sum += sum(values)
        self._largest = max(self._largest, *values) if values else self._largest
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

    def metrics(self, name: str) -> dict[str, float | None]:
        """Mean, percentiles and maximum under the names of `DISTRIBUTIONS[name]`; None where nothing was measured, and
        for percentiles of too few values."""
        found: dict[str, float | None] = {f"mean_{name}_s": self._sum / self.count if self.count else None}
        for percent in DISTRIBUTIONS[name].percentiles:
            enough = self.count >= least_values(percent)
            found[f"{percentile_name(percent)}_{name}_s"] = self.percentile(percent) if enough else None
        return found | {f"max_{name}_s": self._largest if self.count else None}


def _ratio(sums: Counter[str], part: str, whole: str) -> float | None:
    return sums[part] / sums[whole] if sums[whole] else None


class RunTotals:
    """What the metrics of a run need to know about its requests. Incomplete requests count as errors only.

    emitted_histogram   verifies that emitted 0, 1, 2, ... tokens (index = tokens, bonus included)
    errors              how many requests failed with each error
    """

    def __init__(self) -> None:
        self.requests = 0
        self.acceptance = Acceptance()
        self.emitted_histogram: list[int] = []
        self.errors: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._times = {name: TimeSample() for name in DISTRIBUTIONS}

    def add(self, completion: Completion) -> None:
        if completion.error is not None:
            self.errors[completion.error] += 1
        if not completion.is_complete:
            return
        row = completion.metrics
        self.requests += 1
        self._sums.update(
            output=row.output_tokens,
            verifies=row.verify_steps,
            emitted=row.emitted,
            drafted=row.drafted,
            accepted=row.accepted,
            budget_rows=row.budget_rows,
            corpus_verifies=row.corpus_verifies,
            corpus_emitted=row.corpus_emitted,
            corpus_drafted=row.corpus_drafted,
            corpus_accepted=row.corpus_accepted,
            retractions=row.retractions,
        )
        if not completion.sample:  # the samples of a prompt share it
            self._sums.update(input=row.prompt_tokens, cached=row.cached_tokens)
        self.acceptance += row.acceptance
        self.emitted_histogram += [0] * (len(row.emitted_histogram) - len(self.emitted_histogram))
        for place, count in enumerate(row.emitted_histogram):
            self.emitted_histogram[place] += count
        self._times["itl"].extend(row.itl_s)
        for name in ("ttft", "queue", "tpot", "e2e"):
            value: float | None = getattr(row, f"{name}_s")
            if value is not None:
                self._times[name].extend((value,))

    def metrics(self, duration_s: float, concurrency: int | None = None) -> dict[str, float | None]:
        """All metrics of the requests over a window of `duration_s` seconds."""
        sums = self._sums
        first_drafts, first_right = self.acceptance.first
        window = duration_s if duration_s > 0 else None

        def rate(amount: float) -> float | None:
            return amount / window if window else None

        numbers: dict[str, float | None] = {
            "requests": self.requests,
            "duration_s": duration_s,
            "input_tokens": sums["input"],
            "cached_tokens": sums["cached"],
            "output_tokens": sums["output"],
            "request_throughput": rate(self.requests),
            "input_throughput": rate(sums["input"]),
            "output_throughput": rate(sums["output"]),
            "total_throughput": rate(sums["input"] + sums["output"]),
            "per_user_throughput": sums["output"] / window / concurrency if window and concurrency else None,
            "accept_length": sums["emitted"] / sums["verifies"] if sums["verifies"] else None,
            "accept_rate": sums["accepted"] / sums["drafted"] if sums["drafted"] else None,
            "first_draft_accept_rate": first_right / first_drafts if first_drafts else None,
            "verify_steps": sums["verifies"],
            "drafted_tokens": sums["drafted"],
            "accepted_tokens": sums["accepted"],
            "rows_per_verify": _ratio(sums, "budget_rows", "verifies") if sums["budget_rows"] else None,
            "corpus_share": _ratio(sums, "corpus_drafted", "drafted") if sums["corpus_verifies"] else None,
            "corpus_accept_length": _ratio(sums, "corpus_emitted", "corpus_verifies"),
            "corpus_accept_rate": _ratio(sums, "corpus_accepted", "corpus_drafted"),
            "retractions": sums["retractions"],
        }
        for name in ("ttft", "queue", "tpot", "itl", "e2e"):
            numbers |= self._times[name].metrics(name)
        return numbers
