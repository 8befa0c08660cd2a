"""The record of a data-parallel engine: requests as its user sees them, and the counters of all replicas."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from specbatch.core.request import Completion
from specbatch.engine.scoring import Tally
from specbatch.records.run_record import RunRecord
from specbatch.records.run_totals import RunTotals
from specbatch.records.summarize import device_metrics, full_batch_metrics

_OF_REQUESTS = {"acceptance", "emitted_histogram", "errors", "scoring"}  # counters of requests, which the window has


class MergedWindow:
    """The measured window: opens with the first submission and ends with the last completion.

    tally      of what was scored
    replaced   replicas that had been replaced when it opened
    """

    def __init__(self, *, rows: bool, replaced: int) -> None:
        """rows: whether to keep the numbers of each request."""
        self.tally = Tally()
        self.replaced = replaced
        self._totals = RunTotals()
        self._rows: list[dict[str, Any]] | None = [] if rows else None
        self._opened: float | None = None
        self._closed: float | None = None

    def open(self, now: float) -> None:
        """Start the clock, unless it runs."""
        if self._opened is None:
            self._opened = now

    def add(self, completion: Completion) -> None:
        self._closed = time.perf_counter()
        self._totals.add(completion)
        if self._rows is not None:
            self._rows.append(completion.as_row())

    def record(
        self,
        config: dict[str, Any],
        caps: dict[str, Any],
        concurrency: int | None,
        workload: dict[str, Any],
        parts: list[RunRecord],
    ) -> RunRecord:
        """The record of the window. parts: of the replicas."""
        seconds = 0.0
        if self._opened is not None:
            seconds = (time.perf_counter() if self._closed is None else self._closed) - self._opened
        metrics = self._totals.metrics(seconds, concurrency)
        counters = _sums({name: part.counters[name] for name in part.counters.keys() - _OF_REQUESTS} for part in parts)
        counters["emitted_histogram"] = list(self._totals.emitted_histogram)
        counters["acceptance"] = self._totals.acceptance.as_counters()
        if self._totals.errors:
            counters["errors"] = dict(self._totals.errors)
        metrics |= device_metrics(counters)
        replicas = config["data_parallel"]
        metrics |= full_batch_metrics(counters, concurrency, metrics["accept_length"], replicas=replicas)
        requests = list(self._rows or ())
        if self.tally.rows:
            counters["scoring"] = self.tally.numbers()
            if self._closed is None:  # nothing was generated
                metrics, requests = counters["scoring"], list(self.tally.rows)
        return RunRecord(config, caps, metrics, counters, requests, workload, hardware=_hardware(parts))


def _hardware(parts: list[RunRecord]) -> dict[str, Any]:
    """That of the first replica, with the names of all kinds of GPUs."""
    found = dict(parts[0].hardware)
    if gpus := dict.fromkeys(str(part.hardware["gpu"]) for part in parts if "gpu" in part.hardware):
        found["gpu"] = " and ".join(gpus)
    return found


def _sums(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of all numbers, by their places in the counters."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = value if name not in found else _sum(found[name], value)
    return found


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        return _sums((one, other))
    if isinstance(one, list):
        return [value + more for value, more in zip(one, other, strict=True)]
    return one + other
