"""Computes the numbers of a run (`specbatch.records.metrics`) from its requests and counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from specbatch.core.acceptance import Acceptance
from specbatch.core.completion import Completion
from specbatch.records.metrics import METRICS
from specbatch.records.run_totals import Requests, RunTotals
from specbatch.records.steps import Steps


def summarize(
    completions: Iterable[Completion], duration_s: float, concurrency: int | None = None
) -> dict[str, float | None]:
    """All metrics of the finished requests over a window of `duration_s` seconds. Incomplete requests are ignored."""
    return request_metrics(totals_of(completions), duration_s, concurrency)


def request_metrics(totals: RunTotals, duration_s: float, concurrency: int | None = None) -> dict[str, float | None]:
    """All metrics that follow from the requests of a window of `duration_s` seconds."""
    run = Requests(totals, duration_s, concurrency)
    return {key: metric.of_requests(run) for key, metric in METRICS.items() if metric.of_requests is not None}


def step_metrics(
    counters: Mapping[str, Any], concurrency: int | None, accept_length: float | None, *, replicas: int = 1
) -> dict[str, float | None]:
    """All metrics of host and device, from the counters of a run. Those of a full batch are of the iterations that ran
    `concurrency` requests, or on several replicas the share of one."""
    run = Steps(counters, concurrency, accept_length, replicas)
    return {key: metric.of_steps(run) for key, metric in METRICS.items() if metric.of_steps is not None}


def totals_of(completions: Iterable[Completion]) -> RunTotals:
    """The totals of some requests."""
    totals = RunTotals()
    for item in completions:
        totals.add(item)
    return totals


def peak_throughput(tokens: Mapping[int, int], duration_s: float) -> float | None:
    """Tokens per second of the busiest second. tokens: output tokens by second of the window.

    The last second lasts to the end of the window, so that the peak is at least the mean. None for windows shorter than
    2 s, which have one second to compare, and without tokens.
    """
    seconds = int(duration_s)
    if seconds < 2 or not any(tokens.values()):
        return None
    last = seconds - 1
    rates = [float(count) for second, count in tokens.items() if second < last]
    rates.append(sum(count for second, count in tokens.items() if second >= last) / (duration_s - last))
    return max(rates)


def most_at_once(spans: Iterable[tuple[float, float]]) -> int | None:
    """How many of these requests, as (submission, end), were unfinished at the same time; None without any."""
    events = sorted(event for start, end in spans for event in ((start, 1), (end, -1)))  # at a time, ends come first
    return max(accumulate(change for _, change in events), default=None)


def error_counts(completions: Iterable[Completion]) -> dict[str, int]:
    """How many requests failed with each error."""
    return dict(totals_of(completions).errors)


def total_acceptance(completions: Iterable[Completion]) -> Acceptance:
    """Acceptance counters of all verifies. Incomplete requests are ignored."""
    return totals_of(completions).acceptance


def emitted_histogram(completions: Iterable[Completion]) -> list[int]:
    """How many verifies emitted 0, 1, 2, ... tokens (index = tokens, bonus included) in complete requests."""
    return totals_of(completions).emitted_histogram
