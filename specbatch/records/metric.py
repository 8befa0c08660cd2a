"""An entry of the metric registry (`specbatch.records.metrics`): one number of a run, and how it is computed.

Records, CSV and JSON have it under `Metric.key`, times in seconds and shares from 0 to 1; tables and plots show it in
`Metric.unit`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, Protocol

import numpy as np

from specbatch.core.completion import INCOMPLETE
from specbatch.records.run_totals import Requests, least_values, percentile_name
from specbatch.records.steps import Steps

_SCALES = {"ms": 1e3, "%": 100.0, "GB per step": 1e-9, "GB/s": 1e-9, "TB/s": 1e-12, "TFLOP/s": 1e-12}
Better = Literal["higher", "lower"]


class HasMetrics(Protocol):
    """A run record, as far as metrics are read from it."""

    @property
    def metrics(self) -> Mapping[str, float | None]: ...


class HasRows(HasMetrics, Protocol):
    """A run record with the numbers of its requests."""

    @property
    def requests(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Metric:
    """One number of a run.

    key             its name in records, CSV and JSON
    title, unit     how tables call it
    definition      one sentence
    formula         how it is computed, in words
    better          which direction is an improvement; None: neither
    decimals        digits that tables show
    quantity        what the glossary calls it: "TTFT" of its mean, median and p99
    per_request     (numerator, denominator) fields of a request's row, whose sums over the requests divide to this
                    number; without a denominator the field is averaged over the requests that have it. None: no such
                    fields (a rate of the whole run, a percentile)
    is_median       the median over the requests of that field, not its mean
    part, field     mean, median, p90, ... or max of the values of `field` in the rows of requests; "" of other metrics
    is_time         depends on the clock, so that it varies between repeats; other metrics follow from the prompts
    is_signed       can be negative
    counts_only     what the denominator is limited to, so that it depends on the drafts: "drafts", or "drafted"
                    (verifies with drafts). Two runs whose drafts differ in that cannot be compared by it
    of_requests     computes it from the finished requests of a window
    of_steps        computes it from the counters of an engine's steps. A metric with neither is computed where it is
                    measured: by a client or a server, by `bench`, under objectives
    sweep           its place among the columns of the table of a sweep; None: it has no column there. Equal places are
                    in the order of the registry
    compare         the same of the lines of `compare`
    """

    key: str
    title: str
    unit: str
    definition: str
    formula: str
    better: Better | None = None
    decimals: int = 1
    quantity: str = ""
    per_request: tuple[str, str | None] | None = None
    is_median: bool = False
    is_time: bool = True
    is_signed: bool = False
    counts_only: Literal["", "drafts", "drafted"] = ""
    part: str = ""
    field: str = ""
    of_requests: Callable[[Requests], float | None] | None = None
    of_steps: Callable[[Steps], float | None] | None = None
    sweep: int | None = None
    compare: int | None = None

    @property
    def scale(self) -> float:
        """From the record's unit to `unit`."""
        return _SCALES.get(self.unit, 1.0)

    @property
    def heading(self) -> str:
        """Column heading: the title with its unit."""
        return self.title if not self.unit or self.title.endswith(self.unit) else f"{self.title} ({self.unit})"

    def read(self, record: HasMetrics) -> float | None:
        """The value in the record's unit; None where it was not measured."""
        return record.metrics.get(self.key)

    @property
    def percentile(self) -> int | None:
        """Which percentile of `field` it is; None for other metrics, and for the median, which has enough values where
        there is one."""
        return int(self.part[1:]) if re.fullmatch(r"p\d+", self.part) else None

    def over_repeats(self, records: Sequence[HasRows]) -> float | None:
        """The value over repeats in the record's unit; None if it was not measured.

        Mean, median, percentiles and maximum of a time are of the requests (or tokens) of all repeats together, so that
        they are in order; a percentile needs enough of them (`least_values`). Without the rows of the requests, those
        of several repeats have no median and no percentile. Of other metrics the mean over the repeats that measured
        it.
        """
        values = [value for record in records if (value := self.read(record)) is not None]
        if self.part == "max":
            return max(values, default=None)
        if self.part and (times := self._times(records)):
            if self.part == "mean":
                return fmean(times)
            percent = self.percentile or 50
            return float(np.percentile(times, percent)) if len(times) >= least_values(percent) else None
        if self.part not in ("", "mean") and len(records) > 1:
            return None
        return fmean(values) if values else None

    def of_all(self, records: Sequence[HasRows]) -> tuple[float | None, int]:
        """A percentile over the repeats of whatever values there are, fewer than it needs included, and how many there
        are."""
        times = self._times(records)
        return (float(np.percentile(times, self.percentile or 50)) if times else None), len(times)

    def _times(self, records: Sequence[HasRows]) -> list[float]:
        """The values of `field` in the rows; none if a record that measured them has lost them (`archive.DROPPED`)."""
        every: list[float] = []
        for record in records:
            rows = (row for row in record.requests if row.get("finish_reason") not in INCOMPLETE)
            found = [value for row in rows if (value := row.get(self.field)) is not None]
            own = [time for value in found for time in (value if isinstance(value, list) else (value,))]
            if not own and record.metrics.get(f"mean_{self.field}") is not None:
                return []
            every += own
        return every

    def text(self, value: float | None, decimals: int | None = None) -> str:
        """A value of a record in `unit`, as tables show it: "-" where nothing was measured."""
        if value is None or math.isnan(value):
            return "-"
        return f"{self.scale * value:.{self.decimals if decimals is None else decimals}f}"


@dataclass(frozen=True)
class Distribution:
    """A time per request or per token, of which a record holds mean, percentiles and maximum, in seconds.

    sweep, compare   as for `Metric`, by part
    """

    name: str
    quantity: str
    definition: str
    formula: str
    percentiles: tuple[int, ...]
    decimals: int = 1
    per_request: bool = True
    sweep: Mapping[str, int] = field(default_factory=dict)
    compare: Mapping[str, int] = field(default_factory=dict)

    @property
    def metrics(self) -> list[Metric]:
        parts = ["mean", *(percentile_name(percent) for percent in self.percentiles), "max"]
        return [self._metric(part) for part in parts]

    def _metric(self, part: str) -> Metric:
        of, averaged = f"{self.name}_s", self.per_request and part in ("mean", "median")
        return Metric(
            key=f"{part}_{of}",
            title=f"{part} {self.quantity}",
            unit="ms",
            definition=self.definition,
            formula=self.formula,
            better="lower",
            decimals=self.decimals,
            quantity=self.quantity,
            per_request=(of, None) if averaged else None,
            is_median=part == "median",
            part=part,
            field=of,
            of_requests=lambda run: run.times[of].part(part),
            sweep=self.sweep.get(part),
            compare=self.compare.get(part),
        )
