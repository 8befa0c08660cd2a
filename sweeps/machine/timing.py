"""Timing of callables: device events on CUDA, the host's clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

Call = Callable[[], object]


def median_seconds(run: Call, device: torch.device, repeats: int = 20) -> float:
    """Median time of `run` after three warm-up runs."""
    return median(interleaved_seconds({"": run}, device, repeats)[""])


def interleaved_seconds(
    runs: Mapping[str, Call], device: torch.device, repeats: int, *, warm_ups: int = 3, pause_s: float = 0.0
) -> dict[str, list[float]]:
    """Times of each callable over `repeats` rounds A B C C B A, after rounds that warm up.

    pause_s: idle seconds before each run, so that a GPU at its power limit gets its clock back.
    """
    timed = _on_device if device.type == "cuda" else _on_host
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round in range(warm_ups + repeats):
        for name, run in list(runs.items())[:: -1 if round % 2 else 1]:
            time.sleep(pause_s)
            seconds[name].append(timed(run))
    return {name: values[warm_ups:] for name, values in seconds.items()}


def captured(run: Call) -> Call:
    """What `run` launches, as the replay of a CUDA graph."""
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _on_device(run: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _on_host(run: Call) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
