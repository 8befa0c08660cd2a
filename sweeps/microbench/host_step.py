"""Host time of a decode step by number of requests, over a device that computes nothing.

A device whose steps take less time than this runs dry. All of an engine runs but the models: scheduling, launches,
results, completions, garbage collection. Times are those of the thread, in which other processes hardly count.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, quantiles
from typing import Annotated, cast

import torch
import typer

from specbatch import Engine, EngineConfig, SamplingParams
from specbatch.core.step_input import StepInput
from specbatch.engine.device.prefill import Prefilled, PrefillStep, PrefillWork
from specbatch.engine.device.step import DecodeStep
from specbatch.runtime.cuda_graphs import Result
from specbatch.sweeps.microbench.runner import Row, Table, counts


@dataclass
class _Times:
    """When each decode step of `size` requests was launched; None for a prefill pass or a smaller step."""

    size: int
    found: list[float | None] = field(default_factory=list)

    def between(self) -> list[float]:
        return [after - before for before, after in pairwise(self.found) if before is not None and after is not None]


@dataclass
class _NoDecodeStep:
    times: _Times

    def admit(self, slots: list[int]) -> None:
        pass

    def __call__(self, step: StepInput) -> Result:
        count = len(step.slots)
        self.times.found.append(time.thread_time() if count == self.times.size else None)
        return Result(torch.tensor([7, 0, 0, 1]).expand(count, 4))  # token, accepted, drafted, flags


@dataclass
class _NoPrefillStep:
    times: _Times

    def __call__(self, work: PrefillWork) -> Prefilled:
        self.times.found.append(None)
        return Prefilled(Result(torch.tensor([7, 1]).expand(len(work.ending), 2)) if work.ending else None)


SETS = {"max_model_len": ("prompt_tokens", "new_tokens"), "max_running": ("requests",)}


def tables(
    requests: Annotated[str, typer.Option(help="Numbers of requests.")] = "256,512,1024",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 128,
    new_tokens: Annotated[int, typer.Option(min=16)] = 256,
) -> Iterator[Table]:
    rows = (_row(size, prompt_tokens, new_tokens) for size in counts("requests", requests))
    yield Table(rows, f"Host time of a step, {prompt_tokens} tokens in and {new_tokens} out")


def _row(size: int, prompt_tokens: int, new_tokens: int) -> Row:
    config = EngineConfig(
        model="toy",
        load_format="dummy",
        device="cpu",
        max_running=size,
        max_model_len=prompt_tokens + new_tokens,
        prefill_chunk=size * prompt_tokens,
    )
    times = _Times(size)
    with Engine(config) as engine:
        worker = engine.parts.worker
        worker.decode_step, worker.prefill_step = (
            cast(DecodeStep, _NoDecodeStep(times)),
            cast(PrefillStep, _NoPrefillStep(times)),
        )
        worker.caches = []  # a CPU clears pages, which a GPU does not
        prompts = [[3 + (index + place) % 20 for place in range(prompt_tokens)] for index in range(2 * size)]
        engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True), concurrency=size)
    steps = sorted(1e6 * seconds for seconds in times.between())
    middle = median(steps)
    return {
        "requests": size,
        "median (us)": f"{middle:.0f}",
        "per request (us)": f"{middle / size:.2f}",
        "p99 (us)": f"{quantiles(steps, n=100)[-1]:.0f}",
        "longest (us)": f"{steps[-1]:.0f}",
    }
