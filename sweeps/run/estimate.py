"""What a sweep would run and about how long it would take, with nothing loaded: `specbatch sweep --dry-run`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from tabulate import tabulate

from specbatch.config import EngineConfig
from specbatch.engine.builder import memory_plan, prepare
from specbatch.memory.planner import MemoryPlan, MemoryShare, size_text
from specbatch.records.sweep_plan import Point, points
from specbatch.sweeps.machine.limits import cpu_speeds, measure_machine
from specbatch.sweeps.run.runner import SweepOptions, fitted, of_lengths

if TYPE_CHECKING:
    from pathlib import Path

_HEADS = ("configuration", "", "concurrency", "repeat", "prompts", "new tokens", "about s")


def dry_run(configs: Mapping[str, EngineConfig], options: SweepOptions, folder: Path | None) -> str:
    """A line for each point that is not finished in `folder`, and the memory that each engine would get.

    Seconds: all weights are read in every step and multiplied with every prompt token, at the speeds that the device
    has now; drafts are never accepted, so where they are it takes less. Refused: engines that do not fit.
    """
    prepared = {name: prepare(config, lambda line: None) for name, config in fitted(configs, options).items()}
    plans: dict[str, MemoryPlan] = {}
    for name, one in prepared.items():
        with of_lengths(one.config, options.workload):
            plans[name] = memory_plan(one, MemoryShare(0, len(configs)))
    first = next(iter(prepared.values()))
    read, rate = _speeds(first.device)
    left = [point for point in points(configs, options) if folder is None or not point.is_finished(folder)]
    rows, total = [], 0.0
    for point in left:
        prompts = options.workload.count(point.concurrency)
        tokens = sum(wanted.max_new_tokens for wanted in options.workload.params(prompts))
        seconds = _seconds(
            point, plans[point.configuration], options, tokens / prompts, read, rate * first.dtype.itemsize / 2
        )
        total += seconds
        config = configs[point.configuration]
        what = f"{config.speculation}; {config.graphs}"
        rows.append((point.configuration, what, point.concurrency, point.repeat, prompts, tokens, seconds))
    table = tabulate(rows, headers=_HEADS, tablefmt="github", floatfmt=".1f")
    lines = "\n".join(_memory(plans))
    start = "loading, recording graphs and warming up not counted; less where drafts are accepted"
    return f"{table}\n\n{lines}\n{len(left)} points, about {total:.0f} s ({start})\n"


def _memory(plans: Mapping[str, MemoryPlan]) -> Iterator[str]:
    for name, plan in plans.items():
        weights = f"{size_text(plan.weights + plan.draft_weights)} of weights"
        yield f"* {name}: {size_text(plan.available)}, {weights}, {plan.kv_pages} KV pages"


def _seconds(point: Point, plan: MemoryPlan, options: SweepOptions, output: float, read: float, rate: float) -> float:
    """output: tokens of an answer, on average. rate: bytes of weights that a second multiplies with one token."""
    workload = options.workload
    prompts = workload.count(point.concurrency)
    waves = -(-prompts // point.concurrency)
    steps = waves * output * (plan.weights + plan.draft_weights) / read
    length = sum(workload.input_range) / 2 if workload.input_range else output
    return steps + prompts * length * plan.weights / rate


def _speeds(device: torch.device) -> tuple[float, float]:
    """Bytes and operations a second."""
    found = measure_machine(device)
    if found["read_bytes_s"] and found["gemm_flop_s"]:
        return found["read_bytes_s"], found["gemm_flop_s"]
    return cpu_speeds()
