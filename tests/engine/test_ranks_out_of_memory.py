"""A rank that runs out of memory: one error that names it, the launch and what works; what has finished is kept."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from crossed import slow_but
from targets import Targets
from thread_ranks import thread_group

from specbatch import Completion, Engine, SamplingParams
from specbatch.engine.device.prefill import PrefillStep
from specbatch.engine.device.score_step import ScoreStep
from specbatch.engine.device.step import DecodeStep
from specbatch.engine.setup import builder
from specbatch.errors import FailedError, ShortOfMemoryError
from specbatch.runtime.loader import Loader

SHORT, LONG = (SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (2, 24))
PROMPTS = [[3 + (5 * index + place) % 24 for place in range(3 + 4 * index)] for index in range(4)]


@contextmanager
def short_of_memory(rank: int, owner: Any, name: str, *, calls: int = 0) -> Iterator[None]:
    """On a rank, a method runs out of memory after so many calls, in the middle of a launch."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if (threading.current_thread() is threading.main_thread()) == (rank == 0):
            calls -= 1
            if calls < 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        return method(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


def ranks(targets: Targets, drafter: str, **how: Any) -> Engine:
    return targets.engine("llama", drafter, tensor_parallel=2, **how)


LAUNCHES = [(rank, launch, drafter, schedule) for rank in (0, 1) for launch in ("prefill", "decode")
            for drafter in ("none", "ngram", "eagle3") for schedule in ("v1", "v2")]  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "launch", "drafter", "schedule"),
    slow_but([(0, "decode", "ngram", "v1"), (1, "prefill", "eagle3", "v2")], LAUNCHES),
)
def test_the_error_names_rank_launch_and_settings(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, rank: int, launch: str, drafter: str, schedule: str
) -> None:
    thread_group(monkeypatch)
    engine, kept = ranks(targets, drafter, schedule=schedule, prefill_chunk=16), list[Completion]()
    expected = [item.token_ids for item in engine.generate(PROMPTS, LONG)]
    engine.forget_prefixes()
    pages = engine.caps["kv_pages"]
    step, calls = (PrefillStep, 1) if launch == "prefill" else (DecodeStep, 4)
    what = {"prefill": "a prefill pass of 16 tokens", "decode": "a decode step of 3 requests"}[launch]
    half = {"prefill": "prefill_chunk=8", "decode": "max_running=1"}[launch]
    fault = short_of_memory(rank, step, "__call__", calls=calls)
    with fault, pytest.raises(ShortOfMemoryError) as caught:
        engine.generate(PROMPTS, [SHORT, LONG, LONG, LONG], on_completion=kept.append)
    text = str(caught.value)
    assert text.startswith(f"out of memory: {what} on rank {rank} does not fit beside weights ")
    assert text.endswith(f"; use a lower memory_fraction (0.8 now), or {half} with kv_pages={pages}")
    name, value = half.split("=")
    assert caught.value.smaller == {name: int(value), "kv_pages": pages}
    # v1 runs a decode step between both passes, which ends the first request.
    assert [item.token_ids for item in kept] == [expected[0][:2]] * (launch == "decode" or schedule == "v1")
    words = rf"rank {rank} failed: .*out of memory.*; a new engine starts new processes"
    with pytest.raises(FailedError, match=re.compile(words, re.IGNORECASE)):
        engine.generate(PROMPTS, SHORT)
    engine.close()
    # With these settings a new engine goes on.
    again = ranks(targets, drafter, schedule=schedule, **{"prefill_chunk": 16} | caught.value.smaller)
    assert [item.token_ids for item in again.generate(PROMPTS, LONG)] == expected


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_scoring_names_them_too(targets: Targets, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    thread_group(monkeypatch)
    engine = ranks(targets, "none")
    message = rf"^out of memory: a prefill pass of 36 tokens on rank {rank} does not fit .* or prefill_chunk=18 with "
    with short_of_memory(rank, ScoreStep, "__call__"), pytest.raises(ShortOfMemoryError, match=message):
        engine.score([(prompt, [4]) for prompt in PROMPTS])


BUILDING = {
    "loading the weights": (Loader, "model", r"a smaller model or dtype, or a higher tensor_parallel \(2 now\)"),
    "allocating the KV cache": (Loader, "target", r"use a lower memory_fraction \(0.8 now\) or kv_pages \(48\)"),
    "building the engine": (
        builder,
        "_scheduler",
        r"use a lower memory_fraction \(0.8 now\), kv_pages \(48\), max_run",
    ),
    "warming up and recording graphs": (builder, "record_graphs", r"use a lower memory_fraction \(0.8 now\), max_run"),
}


@pytest.mark.parametrize(
    ("rank", "doing"),
    slow_but([(0, "warming up and recording graphs"), (1, "loading the weights")], itertools.product((0, 1), BUILDING)),
)
def test_a_rank_that_cannot_be_built(targets: Targets, monkeypatch: pytest.MonkeyPatch, rank: int, doing: str) -> None:
    thread_group(monkeypatch)
    owner, name, works = BUILDING[doing]
    message = rf"^out of memory while {doing} on rank {rank}: .* were planned for \(weights .*\); .*{works}"
    with short_of_memory(rank, owner, name), pytest.raises(ShortOfMemoryError, match=message):
        ranks(targets, "none")
    assert len(ranks(targets, "none").generate([[3, 4]], SHORT)[0].token_ids) == 2
