"""Registry entries of the numbers that follow from the counters of an engine's steps: device, host, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

from specbatch.records.metric import Metric
from specbatch.records.steps import Steps


def _count(key: str, title: str, definition: str, formula: str, of_steps: Callable[[Steps], int | None]) -> Metric:
    return Metric(key, title, "", definition, formula, decimals=0, is_time=False, of_steps=of_steps)


def _replays(kind: str, title: str, definition: str) -> Metric:
    return _count(f"{kind}_replays", title, definition, "count", lambda run: run.graphs.get(kind, {}).get("replays"))


OF_STEPS = (
    Metric(
        "step_time_s",
        "mean step time",
        "ms",
        "From one iteration to the next, where no prefill ran between them. Without a CUDA device it is the host's "
        "time per iteration.",
        "device step + gap to the next; on a CPU iteration_s / iterations",
        better="lower",
        decimals=2,
        of_steps=lambda run: run.time_s,
        compare=5,
    ),
    Metric(
        "device_step_s",
        "device step time",
        "ms",
        "Time on the device's clock from the start to the end of an iteration. Not measured without a CUDA device.",
        "device_s / device_steps",
        better="lower",
        decimals=2,
        of_steps=lambda run: run.mean("device_s", "device_steps"),
    ),
    Metric(
        "device_idle_share",
        "device idle",
        "%",
        "Share of the time that the device waits between iterations and prefill passes while there are requests. If "
        "the device was already idle, the time of the launch call is not counted as idle. Not measured without a CUDA "
        "device.",
        "gaps / (gaps + iterations + prefill passes)",
        better="lower",
        of_steps=lambda run: run.idle_share,
        sweep=9,
        compare=8,
    ),
    Metric(
        "launch_lead_s",
        "launch lead",
        "ms",
        "How far the host is ahead of the device: from the end of a launch until the result of the iteration before "
        "it. 0 if the previous result had already arrived (a late launch). Not defined after a prefill. Not measured "
        "where nothing overlaps (v1).",
        "mean over iterations of (previous result - end of launch)",
        decimals=2,
        is_signed=True,
        of_steps=lambda run: run.mean("launch_lead_s", "overlapped"),
        sweep=8,
    ),
    Metric(
        "late_launch_share",
        "late launches",
        "%",
        "Share of the launches that ended after the result of the iteration before them.",
        "late launches / launches with a lead",
        better="lower",
        of_steps=lambda run: run.mean("late_launches", "overlapped"),
    ),
    Metric(
        "host_waits_per_step",
        "host waits per step",
        "",
        "How often the host waits for a result while no other work is launched: 1 in v1, about 0 in v2.",
        "host waits / device steps",
        better="lower",
        decimals=2,
        of_steps=lambda run: run.mean("host_waits", "device_steps"),
        sweep=8,
        compare=8,
    ),
    Metric(
        "graph_coverage",
        "graph coverage",
        "%",
        "Share of the iterations and prefill passes that were replayed from CUDA graphs, of those for which graphs "
        "were requested.",
        "replays / (replays + eager fallbacks)",
        better="higher",
        decimals=0,
        of_steps=lambda run: run.graph_coverage,
        sweep=9,
        compare=8,
    ),
    Metric(
        "host_step_s",
        "host time per step",
        "ms",
        "Host time of an iteration: launching it and waiting for a result.",
        "iteration_s / iterations",
        better="lower",
        decimals=2,
        of_steps=lambda run: run.mean("iteration_s", "iterations"),
    ),
    _replays("decode", "decode replays", "Iterations that were replayed from a CUDA graph."),
    _replays("target_prefill", "prefill replays", "Prefill passes of the target replayed from graphs."),
    _replays("draft_prefill", "draft prefill replays", "Prefill passes of the draft model replayed from graphs."),
    _count(
        "graph_fallbacks",
        "fallbacks",
        "Passes that ran eagerly though graphs were requested.",
        "count",
        lambda run: run.of_graphs(lambda graph: sum(graph["fallbacks"].values())),
    ),
    _count(
        "graph_padding",
        "padded",
        "Rows that were added to reach the size of a graph.",
        "sum over replays",
        lambda run: run.of_graphs(lambda graph: graph["padded"]),
    ),
    _count(
        "full_batch_steps",
        "full-batch steps",
        "Iterations that ran as many requests as the concurrency.",
        "count",
        lambda run: run.full[0],
    ),
    Metric(
        "step_s",
        "full-batch step",
        "ms",
        "Mean time of the iterations (draft, verify, accept, commit) that ran as many requests as the concurrency. Not "
        "measured with fewer than 20 of them.",
        "seconds of these iterations, gaps without a prefill included / their number",
        better="lower",
        decimals=2,
        of_steps=lambda run: run.full[1],
        compare=4,
    ),
    Metric(
        "decode_throughput",
        "decode tok/s",
        "tok/s",
        "Tokens per second of a full batch, excluding prefill and the tail of the run.",
        "concurrency x accept length / full-batch step",
        better="higher",
        decimals=0,
        of_steps=lambda run: run.full_throughput,
    ),
)
