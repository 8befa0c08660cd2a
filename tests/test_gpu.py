"""The engine on a CUDA device, eager: the same tokens as naive decoding, and a v2 loop that never waits by accident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specbatch.config import Speculation
from specbatch.request import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

SPECULATIONS = {
    "none": Speculation(),
    "ngram": Speculation("ngram", draft_tokens=3, ngram_min=1),
    "self": Speculation("standalone", draft="self:skip=1"),
    "other": Speculation("standalone", draft="toy-2", draft_tokens=2),
}


def with_schedule(speculation: Speculation, schedule: str) -> Speculation:
    return Speculation(**{**speculation.__dict__, "schedule": schedule})


@pytest.mark.parametrize("pool", [None, 60], ids=["roomy", "tight"])
@pytest.mark.parametrize("schedule", ["v1", "v2"])
@pytest.mark.parametrize("name", SPECULATIONS)
def test_greedy_tokens_are_those_of_naive_decoding(
    toy: Any, toy_engine: Callable[..., Any], name: str, schedule: str, pool: int | None
) -> None:
    speculation = with_schedule(SPECULATIONS[name], schedule)
    prompts = [list(prompt) for prompt in toy.prompts()]
    engine = toy_engine(device="cuda", dtype="float32", speculation=speculation, kv_pages=pool)
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=40, ignore_eos=True))
    assert [tuple(item.token_ids) for item in completions] == [toy.greedy(tuple(prompt)) for prompt in prompts]
    if pool:
        assert engine.record().metrics["retractions"]


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", SPECULATIONS)
def test_v2_waits_for_nothing_but_its_tickets(
    toy: Any, toy_engine: Callable[..., Any], name: str, temperature: float
) -> None:
    engine = toy_engine(device="cuda", dtype="float32", speculation=with_schedule(SPECULATIONS[name], "v2"))
    prompts = [list(prompt) for prompt in toy.prompts()]
    params = SamplingParams(temperature=temperature, top_p=0.9, max_new_tokens=24, logprobs=True)
    expected = [item.token_ids for item in engine.generate(prompts, params)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [item.token_ids for item in engine.generate(prompts, params)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again == expected


def test_seeds_give_the_tokens_of_the_cpu(toy: Any, toy_engine: Callable[..., Any]) -> None:
    prompts = [list(prompt) for prompt in toy.prompts()]
    params = SamplingParams(temperature=0.7, max_new_tokens=12, seed=5)
    tokens = [
        [item.token_ids for item in toy_engine(device=device, dtype="float32").generate(prompts, params)]
        for device in ("cpu", "cuda")
    ]
    same = sum(a == b for a, b in zip(*tokens, strict=True))
    assert same >= len(prompts) - 2  # a coin within rounding of a threshold may fall either way
