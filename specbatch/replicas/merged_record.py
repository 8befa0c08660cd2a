"""The record of a data-parallel engine: requests as its user sees them, and the counters of all replicas."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from specbatch.core.request import Completion, RequestMetrics
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
        self._rows: list[Completion] | None = [] if rows else None  # without tokens and text
        self._tokens: Counter[int] = Counter()  # output tokens by second of the window
        self._opened: float | None = None
        self._closed: float | None = None

    def open(self, now: float) -> None:
        """Start the clock, unless it runs."""
        if self._opened is None:
            self._opened = now

    def add(self, completion: Completion, arrived: float) -> None:
        """arrived: when its prompt did."""
        self._closed = time.perf_counter()
        self._totals.add(completion)
        self._count_tokens(completion.metrics, arrived)
        if self._rows is not None:
            numbers = replace(completion, prompt_token_ids=[], token_ids=[], text="", logprobs=None, top_logprobs=None)
            self._rows.append(numbers)

    def _count_tokens(self, metrics: RequestMetrics, arrived: float) -> None:
        if metrics.ttft_s is None:
            return
        assert self._opened is not None
        seconds = np.cumsum([max(0.0, arrived - self._opened) + metrics.ttft_s, *metrics.itl_s]).astype(np.int64)
        for second, count in enumerate(np.bincount(seconds - seconds[0]), int(seconds[0])):
            self._tokens[second] += int(count)

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
        metrics["peak_output_throughput"] = float(max(self._tokens.values(), default=0)) or None
        counters = _sums({name: part.counters[name] for name in part.counters.keys() - _OF_REQUESTS} for part in parts)
        counters["emitted_histogram"] = list(self._totals.emitted_histogram)
        counters["acceptance"] = self._totals.acceptance.as_counters()
        if self._totals.errors:
            counters["errors"] = dict(self._totals.errors)
        metrics |= device_metrics(counters)
        replicas = config["data_parallel"]
        metrics |= full_batch_metrics(counters, concurrency, metrics["accept_length"], replicas=replicas)
        requests = [item.as_row() for item in self._rows or ()]
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
