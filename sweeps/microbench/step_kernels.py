"""Kernels of a decode step of a model with random weights: launches per step, time of each, and share of the step.

The profiler times every kernel, also those of CUDA graphs. Two runs with the same prompts and different lengths are
profiled, and the difference is divided by that of their steps, so that prefill does not count. A kernel that waits for
the one before it (dependent launch) counts as running while it waits, so "us" adds up to more than the step. "added us"
adds up to the step: it is the time from the end of all earlier kernels to the end of this one, and includes the gap
between them. Times of steps are measured in other runs, without the profiler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch.profiler import ProfilerActivity, profile

from specbatch import Engine, EngineConfig, Graphs, SamplingParams, Speculation
from specbatch.records.summarize import steps_at
from specbatch.sweeps.microbench.runner import Row, Table
from specbatch.sweeps.run.workloads import Workload

SHORT, LONG, REPEATS = 8, 72, 3  # new tokens of the two runs; runs without the profiler


class Kernel(NamedTuple):
    launches: float = 0
    us: float = 0
    added: float = 0  # us

    def plus(self, other: Kernel, times: float = 1) -> Kernel:
        return Kernel(*(mine + times * more for mine, more in zip(self, other, strict=True)))


class Interval(NamedTuple):
    """When a kernel ran, in us."""

    name: str
    start: float
    end: float


def tables(
    model: Annotated[str, typer.Option(help="A named shape, or a folder with a config.json.")] = "qwen3-8b",
    algorithm: Annotated[str, typer.Option(help="What drafts; none: no speculation.")] = "none",
    draft: Annotated[str | None, typer.Option(help="As in `generate`; dummy: a head with random weights.")] = None,
    draft_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    accept_length: Annotated[float | None, typer.Option(help="Simulated, in tokens per verify.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    most: Annotated[int, typer.Option(min=1, help="Kernels to show, those that add most first.")] = 30,
) -> Iterator[Table]:
    drafts: dict[str, Any] = {"draft": draft, "draft_tokens": draft_tokens, "simulate_accept_length": accept_length}
    if algorithm == "none" and any(value is not None for value in drafts.values()):
        raise typer.BadParameter("--draft, --draft-tokens and --accept-length need --algorithm")
    speculation = Speculation() if algorithm == "none" else Speculation(algorithm, "v2", **drafts)
    config = EngineConfig(
        model=model, load_format="dummy", max_running=batch, max_model_len=context + 2 * LONG, prefix_cache=False,
        prefill_chunk=8192, speculation=speculation, graphs=Graphs(decode="whole", prefill="piecewise"),
    )  # fmt: skip
    with Engine(config) as engine:
        yield Table(_rows(engine, batch, context, most), f"A decode step of {model}, {batch} x {context} tokens")


def _rows(engine: Engine, batch: int, context: int, most: int) -> Iterator[Row]:
    workload = Workload(dataset="random", input_len=context, output_len=LONG, prompts_per_concurrency=1)
    prompts = workload.prompts(engine.tokenizer, batch)

    def run(new_tokens: int) -> float:
        """Its iterations."""
        engine.reset_record()
        engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True), concurrency=batch)
        return float(engine.record(concurrency=batch).counters["iterations"])

    def profiled(new_tokens: int) -> tuple[float, dict[str, Kernel]]:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            iterations = run(new_tokens)
            torch.cuda.synchronize()
        events = (event for event in found.events() if event.device_type.name == "CUDA")
        times = ((event.name, event.time_range) for event in events)
        return iterations, totals(Interval(name, time.start, time.end) for name, time in times)

    run(LONG)
    short_steps, short = profiled(SHORT)
    long_steps, long = profiled(LONG)
    yield from by_time(per_step(long, short, long_steps - short_steps), most)
    for _ in range(REPEATS):
        run(LONG)
        _, seconds = steps_at(engine.record(concurrency=batch).counters, batch)
        assert seconds is not None, "no step has all requests"
        yield {"kernel": "step", "us": f"{1e6 * seconds:.1f}"}


def totals(intervals: Iterable[Interval]) -> dict[str, Kernel]:
    """Of all launches of each kernel. The gap before the first one does not count."""
    found: dict[str, Kernel] = defaultdict(Kernel)
    last: float | None = None
    for name, start, end in sorted(intervals, key=lambda interval: interval.end):
        added = end - (start if last is None else last)
        found[name] = found[name].plus(Kernel(1, end - start, added))
        last = end
    return dict(found)


def per_step(long: Mapping[str, Kernel], short: Mapping[str, Kernel], steps: float) -> dict[str, Kernel]:
    """Of each kernel that the steps launched by which one run is longer than the other."""
    more = {name: kernel.plus(short.get(name, Kernel()), -1) for name, kernel in long.items()}
    return {name: Kernel().plus(kernel, 1 / steps) for name, kernel in more.items() if kernel.launches > 0}


def by_time(kernels: Mapping[str, Kernel], most: int) -> Iterator[Row]:
    """The kernels that add most, the sum of the others, and that of all."""
    ordered = sorted(kernels.items(), key=lambda item: -item[1].added)
    others = [kernel for _, kernel in ordered[most:]]
    shown = [(name[:60], kernel) for name, kernel in ordered[:most]]
    if others:
        shown.append((f"{len(others)} others", _sum(others)))
    total = _sum(kernels.values())
    for name, kernel in [*shown, ("all", total)]:
        yield {
            "kernel": name,
            "launches": f"{kernel.launches:.1f}",
            "us": f"{kernel.us:.1f}",
            "us each": f"{kernel.us / kernel.launches:.2f}" if kernel.launches else "-",
            "added us": f"{kernel.added:.1f}",
            "share (%)": f"{100 * kernel.added / total.added:.1f}" if total.added else "-",
        }


def _sum(kernels: Iterable[Kernel]) -> Kernel:
    return reduce(Kernel.plus, kernels, Kernel())
