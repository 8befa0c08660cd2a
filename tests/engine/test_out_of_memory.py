"""A launch that runs out of memory: the batch shrinks, all tokens stay the same, and one request that does not fit
fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from crossed import slow_but
from released import check_released
from targets import Targets

from specbatch import SamplingParams, SpecbatchError
from specbatch.config.engine_config import Speculation
from specbatch.engine.engine import Engine

SPECULATIONS = {
    "none": Speculation(),
    "v1": Speculation(schedule="v1"),
    "ngram": Speculation("ngram"),
    "self": Speculation("standalone", draft="self:skip=1"),
}
CASES = [
    *((target, "ngram") for target in ("qwen3-next", "nemotron-h", "lfm2", "deepseek-v3", "gpt-oss")),
    *(("llama", drafter) for drafter in ("model-auto", "eagle-tree", "eagle3-corpus-budget", "dflash-auto", "dspark")),
    *(("qwen3.5", "mtp"), ("gemma3", "none"), ("qwen3.5", "model-recurrent")),
]
PARAMS = SamplingParams(max_new_tokens=12, temperature=0.8, ignore_eos=True, logprobs=True)


def fail_above(worker: Any, name: str, size: Callable[..., int], limit: int, *, after: bool) -> list[int]:
    """Let calls of a worker's method fail whose size is above a limit, before or after they have run."""
    launch, failed = getattr(worker, name), list[int]()

    def call(*args: Any) -> Any:
        result = launch(*args) if after or size(*args) <= limit else None
        if size(*args) > limit:
            failed.append(size(*args))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")
        return result

    setattr(worker, name, call)
    return failed


def fail_decode(engine: Engine, limit: int, *, after: bool = False) -> list[int]:
    return fail_above(engine.parts.worker, "decode", lambda slots, *_: len(slots), limit, after=after)


def fail_prefill(engine: Engine, limit: int, *, after: bool = False) -> list[int]:
    def tokens(work: Any) -> int:
        return sum(chunk.end - chunk.start for chunk in work.chunks)

    return fail_above(engine.parts.worker, "prefill", tokens, limit, after=after)


@pytest.mark.parametrize(("name", "after"), [("none", False), ("v1", True), ("ngram", True), ("self", False)])
def test_a_smaller_batch_gives_the_same_tokens(
    toy: Any, toy_engine: Callable[..., Engine], name: str, after: bool
) -> None:
    prompts, lines = [list(prompt) for prompt in toy.prompts()[:9]], list[str]()
    # Which tokens a seed samples depends on how drafts of a model are cut into steps, as with any retraction.
    params = replace(PARAMS, temperature=0.0) if name == "self" else PARAMS
    expected = toy_engine(speculation=SPECULATIONS[name]).generate(prompts, params)
    engine = toy_engine(speculation=SPECULATIONS[name], log=lines.append)
    failed = fail_decode(engine, 2, after=after)
    found = engine.generate(prompts, params)
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    assert failed  # halved until it fits
    assert engine.caps["max_running"] == 2 == engine.record().caps["max_running"]
    assert "lowered from" in engine.caps["reasons"]["max_running"]
    said = [line for line in lines if line.startswith("max_running: ")]
    assert len(said) == len(failed)
    assert f"a decode step of {failed[0]} requests ran out of memory" in said[0]
    assert sum(item.metrics.retractions for item in found) >= failed[0]
    check_released(engine)
    assert [item.token_ids for item in engine.generate(prompts[:3], params)] == [
        item.token_ids for item in expected[:3]
    ]


def test_shorter_passes_give_the_same_tokens(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    prompts = [list(prompt) * 20 for prompt in toy.prompts()[:12]]
    prompts = [prompt[:90] for prompt in prompts]
    expected = toy_engine().generate(prompts, PARAMS)
    lines: list[str] = []
    engine = toy_engine(log=lines.append)
    failed = fail_prefill(engine, 270, after=True)
    found = engine.generate(prompts, PARAMS)
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    assert failed
    assert failed == [560, 280]
    assert engine.caps["prefill_chunk"] == 256
    assert engine.caps["max_running"] == 8
    assert any(line.startswith("prefill_chunk: 280 (lowered from 2048: a prefill pass of 560 tok") for line in lines)
    check_released(engine)


def test_one_request_that_does_not_fit_fails(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    prompts = [list(prompt) for prompt in toy.prompts()[:3]]
    engine = toy_engine()
    fail_decode(engine, 0)
    message = r"out of memory while running prompts: .* max_running \(8\) or prefill_chunk \(2048\)"
    with pytest.raises(SpecbatchError, match=message):
        engine.generate(prompts, PARAMS)
    engine = toy_engine()
    fail_prefill(engine, 0)
    with pytest.raises(SpecbatchError, match="out of memory while running prompts"):
        engine.generate(prompts, PARAMS)


def test_samples_and_prompt_logprobs_survive(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    prompts = [list(prompt) for prompt in toy.prompts()[:6]]
    params = SamplingParams(max_new_tokens=12, temperature=0.8, ignore_eos=True, n=2, prompt_logprobs=True)
    expected, engine = toy_engine().generate(prompts, params), toy_engine()
    assert not fail_decode(engine, 3)
    for one, other in zip(engine.generate(prompts, params), expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=1e-4)


@pytest.mark.parametrize(("target", "drafter"), slow_but([("qwen3.5", "mtp"), ("gemma3", "none")], CASES))
def test_all_kinds_of_state_are_computed_again(targets: Targets, target: str, drafter: str) -> None:
    """Recurrent states, windows, features of heads, the corpus, draft lengths."""
    prompts = [[3 + (5 * index + place) % 24 for place in range(3 + 4 * index % 15)] for index in range(9)]
    prompts += [[*prompts[5], 5, 6], prompts[5]]
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    expected = targets.engine(target, drafter).generate(prompts, params)
    engine = targets.engine(target, drafter)
    worker, calls = engine.parts.worker, 0

    def failing(launch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            result = launch(*args)
            if calls in (5, 12) and engine._runner.launch.can_shrink:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")
            return result

        return call

    for name in ("decode", "prefill"):
        setattr(worker, name, failing(getattr(worker, name)))
    found = engine.generate(prompts, params)
    assert engine.caps["max_running"] < 4
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    check_released(engine)
