"""Computes the numbers of a run (`specbatch.records.metrics`) from its requests and counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from specbatch.core.acceptance import Acceptance
from specbatch.core.request import Completion
from specbatch.records.run_record import RunRecord
from specbatch.records.run_totals import RunTotals

MIN_FULL_STEPS = 20  # iterations at full batch whose mean is a step time


def summarize(
    completions: Iterable[Completion], duration_s: float, concurrency: int | None = None
) -> dict[str, float | None]:
    """All metrics of the finished requests over a window of `duration_s` seconds. Incomplete requests are ignored."""
    return totals_of(completions).metrics(duration_s, concurrency)


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


def device_metrics(counters: dict[str, Any]) -> dict[str, float | None]:
    """Metrics of host and device from the counters of a run."""
    steps, gaps, busy = counters["device_steps"], counters["device_gaps"], counters["device_s"]
    # Gaps are measured for some of the steps; the others are assumed to have the same mean.
    idle = counters["device_idle_s"] / gaps * steps if gaps else None
    graphs = counters["graphs"].values()
    replays = sum(item["replays"] for item in graphs)
    # "off" is not a fallback: no graph was requested.
    passes = replays + sum(count for item in graphs for why, count in item["fallbacks"].items() if why != "off")
    overlapped = counters["overlapped"]
    return {
        "device_step_s": busy / steps if steps else None,
        "step_time_s": _step_time(counters),
        "device_idle_share": idle / (idle + busy) if idle is not None else None,
        "launch_lead_s": counters["launch_lead_s"] / overlapped if overlapped else None,
        "late_launch_share": counters["late_launches"] / overlapped if overlapped else None,
        "host_waits_per_step": counters["host_waits"] / steps if steps else None,
        "graph_coverage": replays / passes if passes else None,
        "host_step_s": counters["iteration_s"] / iterations if (iterations := counters["iterations"]) else None,
    } | _graph_counts(counters["graphs"])


def _graph_counts(graphs: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Replays by kind, fallbacks and padding of the graphs that were requested; None where none were."""
    requested = {name: graph for name, graph in graphs.items() if "off" not in graph["fallbacks"]}
    found: dict[str, float | None] = {
        f"{kind}_replays": requested[kind]["replays"] if kind in requested else None
        for kind in ("decode", "target_prefill", "draft_prefill")
    }
    fallbacks = sum(sum(graph["fallbacks"].values()) for graph in requested.values())
    padding = sum(graph["padded"] for graph in requested.values())
    return found | {
        "graph_fallbacks": fallbacks if requested else None,
        "graph_padding": padding if requested else None,
    }


def full_batch_metrics(
    counters: dict[str, Any], concurrency: int | None, accept_length: float | None, *, replicas: int = 1
) -> dict[str, float | None]:
    """Metrics of the iterations that ran `concurrency` requests, or on several replicas the share of one."""
    count, seconds = steps_at(counters, -(-concurrency // replicas)) if concurrency else (0, None)
    step_s = seconds if count >= MIN_FULL_STEPS else None
    speed = concurrency * accept_length / step_s if concurrency and accept_length and step_s else None
    return {"full_batch_steps": count if concurrency else None, "step_s": step_s, "decode_throughput": speed}


def _step_time(counters: dict[str, Any]) -> float | None:
    steps, gaps, iterations = counters["device_steps"], counters["device_gaps"], counters["iterations"]
    if steps:
        return float(counters["device_s"] / steps + (counters["device_idle_s"] / gaps if gaps else 0.0))
    return float(counters["iteration_s"] / iterations) if iterations else None


def steps_at(counters: dict[str, Any], rows: int) -> tuple[int, float | None]:
    """How many iterations ran exactly `rows` requests, and their mean step time in seconds (None without any)."""
    steps, seconds = counters["steps_by_rows"].get(str(rows), (0, 0.0))
    return int(steps), seconds / steps if steps else None


def error_counts(completions: Iterable[Completion]) -> dict[str, int]:
    """How many requests failed with each error."""
    return dict(totals_of(completions).errors)


def total_acceptance(completions: Iterable[Completion]) -> Acceptance:
    """Acceptance counters of all verifies. Incomplete requests are ignored."""
    return totals_of(completions).acceptance


def emitted_histogram(completions: Iterable[Completion]) -> list[int]:
    """How many verifies emitted 0, 1, 2, ... tokens (index = tokens, bonus included) in complete requests."""
    return totals_of(completions).emitted_histogram


def break_even(drafting: RunRecord, baseline: RunRecord) -> float | None:
    """The accept length that `drafting` needs to be as fast as `baseline`; None if a time is missing.

    It is the time of its steps over the time of as many baseline steps, each with the same number of requests. Batch
    sizes that one of the two runs never had are left out.
    """
    steps, others = (record.counters.get("steps_by_rows", {}) for record in (drafting, baseline))
    shared = [rows for rows in steps if rows in others]
    drafting_s = sum(steps[rows][1] for rows in shared)
    baseline_s = sum(steps[rows][0] * others[rows][1] / others[rows][0] for rows in shared)
    return drafting_s / baseline_s if drafting_s and baseline_s else None
