"""Kernels of a prefill pass of a model with random weights: launches per pass, time of each, and share of the pass.

See `kernel_times` for what is measured. Two runs have different numbers of passes, one after the other. The first
kernel of a pass also adds what the GPU waits for the host. The time of a pass is measured in other runs, without the
profiler.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Annotated

import torch
import typer

from specbatch import Engine, EngineConfig, Graphs, SamplingParams
from specbatch.sweeps.microbench.kernel_times import by_time, per_step, profiled
from specbatch.sweeps.microbench.runner import Row, Table
from specbatch.sweeps.workload.workloads import Workload

SHORT, LONG, REPEATS = 2, 6, 3  # passes of the two runs; pairs of runs without the profiler


def tables(
    model: Annotated[str, typer.Option(help="A named shape, or a folder with a config.json.")] = "qwen3-8b",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Prompts of a pass.")] = 16,
    most: Annotated[int, typer.Option(min=1, help="Kernels to show, those that add most first.")] = 30,
) -> Iterator[Table]:
    config = EngineConfig(
        model=model, load_format="dummy", max_running=LONG * batch, max_model_len=tokens + 1, prefix_cache=False,
        prefill_chunk=tokens * batch, graphs=Graphs(decode="off", prefill="piecewise"),
    )  # fmt: skip
    with Engine(config) as engine:
        yield Table(_rows(engine, tokens, batch, most), f"A prefill pass of {model}, {batch} x {tokens} tokens")


def _rows(engine: Engine, tokens: int, batch: int, most: int) -> Iterator[Row]:
    workload = Workload(dataset="random", input_len=tokens, output_len=1, prompts_per_concurrency=1)
    prompts = workload.prompts(engine.tokenizer, LONG * batch)

    def run(passes: int) -> float:
        """The passes that it took."""
        engine.reset_record()
        count = passes * batch
        engine.generate(prompts[:count], SamplingParams(max_new_tokens=1, ignore_eos=True), concurrency=count)
        return float(engine.record(concurrency=count).counters["prefill_passes"])

    def seconds(passes: int) -> tuple[float, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        done = run(passes)
        torch.cuda.synchronize()
        return done, time.perf_counter() - start

    run(LONG)
    short_passes, short = profiled(partial(run, SHORT))
    long_passes, long = profiled(partial(run, LONG))
    yield from by_time(per_step(long, short, long_passes - short_passes), most)
    found = []
    for _ in range(REPEATS):
        (few, less), (many, more) = seconds(SHORT), seconds(LONG)
        found.append((more - less) / (many - few))
    yield {"kernel": "pass", "us": f"{1e6 * median(found):.1f}"}
