"""Kernels of a decode step of a model with random weights: launches per step, time of each, and share of the step.

See `kernel_times` for what is measured. Two runs have the same prompts and different lengths, so that prefill does not
count. Times of steps are measured in other runs, without the profiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import typer

from specbatch import Engine, EngineConfig, Graphs, SamplingParams, Speculation
from specbatch.records.steps import steps_at
from specbatch.sweeps.microbench.kernel_times import by_time, per_step, profiled
from specbatch.sweeps.microbench.runner import Row, Table
from specbatch.sweeps.workload.workloads import Workload

SHORT, LONG, REPEATS = 8, 72, 3  # new tokens of the two runs; runs without the profiler


def tables(
    model: Annotated[str, typer.Option(help="A named shape, or a folder with a config.json.")] = "qwen3-8b",
    algorithm: Annotated[str, typer.Option(help="What drafts; none: no speculation.")] = "none",
    draft: Annotated[str | None, typer.Option(help="As in `generate`; dummy: a head with random weights.")] = None,
    draft_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    accept_length: Annotated[float | None, typer.Option(help="Simulated, in tokens per verify.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    kv_dtype: Annotated[str, typer.Option(help="As in `generate`.")] = "auto",
    most: Annotated[int, typer.Option(min=1, help="Kernels to show, those that add most first.")] = 30,
) -> Iterator[Table]:
    drafts: dict[str, Any] = {"draft": draft, "draft_tokens": draft_tokens, "simulate_accept_length": accept_length}
    if algorithm == "none" and any(value is not None for value in drafts.values()):
        raise typer.BadParameter("--draft, --draft-tokens and --accept-length need --algorithm")
    speculation = Speculation() if algorithm == "none" else Speculation(algorithm, "v2", **drafts)
    config = EngineConfig(
        model=model, load_format="dummy", max_running=batch, max_model_len=context + 2 * LONG, prefix_cache=False,
        prefill_chunk=8192, kv_dtype=kv_dtype, speculation=speculation,
        graphs=Graphs(decode="whole", prefill="piecewise"),
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

    run(LONG)
    short_steps, short = profiled(partial(run, SHORT))
    long_steps, long = profiled(partial(run, LONG))
    yield from by_time(per_step(long, short, long_steps - short_steps), most)
    for _ in range(REPEATS):
        run(LONG)
        _, seconds = steps_at(engine.record(concurrency=batch).counters, batch)
        assert seconds is not None, "no step has all requests"
        yield {"kernel": "step", "us": f"{1e6 * seconds:.1f}"}
