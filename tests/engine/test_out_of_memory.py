"""A launch that runs out of memory: the batch shrinks, all tokens stay the same, and one request that does not fit
fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from crossed import first_quick, slow_but
from released import check_released
from targets import Targets

from specbatch import Completion, SamplingParams
from specbatch.config.speculation import Speculation
from specbatch.engine.engine import Engine
from specbatch.errors import ShortOfMemoryError
from specbatch.runtime.device import is_out_of_memory

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


def fail_above(worker: Any, name: str, size: Callable[..., int], limit: int, *, after: bool = False) -> list[int]:
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


def tokens_of(work: Any) -> int:
    return sum(chunk.end - chunk.start for chunk in work.chunks)


def fail_prefill(engine: Engine, limit: int, *, after: bool = False) -> list[int]:
    return fail_above(engine.parts.worker, "prefill", tokens_of, limit, after=after)


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


@pytest.mark.parametrize(
    ("limit", "sizes"),
    first_quick(
        2,
        [
            (270, [560, 280]),
            (30, [560, 280, 256, 128, 64, 32]),
            (3, [560, 280, 256, 128, 64, 32, 16, 8, 4]),
        ],
    ),
)
def test_shorter_passes_give_the_same_tokens(
    toy: Any, toy_engine: Callable[..., Engine], limit: int, sizes: list[int]
) -> None:
    prompts = [list(prompt) * 20 for prompt in toy.prompts()[:12]]
    prompts = [prompt[:90] for prompt in prompts]
    expected = toy_engine().generate(prompts, PARAMS)
    lines: list[str] = []
    engine = toy_engine(log=lines.append)
    failed = fail_prefill(engine, limit, after=True)
    found = engine.generate(prompts, PARAMS)
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    assert failed == sizes
    assert engine.caps["prefill_chunk"] == {270: 256, 30: 16, 3: 2}[limit]
    assert engine.caps["max_running"] == 8
    assert any(line.startswith("prefill_chunk: 280 (lowered from 2048: a prefill pass of 560 tok") for line in lines)
    check_released(engine)


@pytest.mark.parametrize(("name", "what"), [("decode", "a decode step of 1 request"), ("prefill", "a .* of 1 token")])
def test_one_request_that_does_not_fit_fails(toy: Any, toy_engine: Callable[..., Engine], name: str, what: str) -> None:
    """In one line, which names what is left to try; what has finished is kept, and the engine can be used again."""
    prompts, kept, engine = [list(prompt) for prompt in toy.prompts()[:3]], list[Completion](), toy_engine()
    short, launch = replace(PARAMS, max_new_tokens=1), getattr(engine.parts.worker, name)
    first = engine.generate(prompts[:1], PARAMS)
    (fail_decode if name == "decode" else fail_prefill)(engine, 0)
    works = rf"out of memory: {what} does not fit beside weights .*; use a lower memory_fraction \(.*\) or kv_pages \("
    with pytest.raises(ShortOfMemoryError, match=works) as caught:
        engine.generate(prompts, [short, PARAMS, PARAMS], on_completion=kept.append)
    assert "\n" not in str(caught.value)
    assert [item.index for item in kept] == [0] * (name == "decode")
    check_released(engine)
    setattr(engine.parts.worker, name, launch)
    assert engine.generate(prompts[:1], PARAMS)[0].token_ids == first[0].token_ids


def test_other_errors_than_that_of_the_allocator(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not is_out_of_memory(ValueError("CUDA error: out of memory"))


def test_scoring_takes_shorter_passes(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    pairs = [(list(prompt) * 6, [3 + index, 4]) for index, prompt in enumerate(toy.prompts()[:6])]
    expected, lines, seen = toy_engine().score(pairs), list[str](), list[int]()
    engine = toy_engine(log=lines.append)
    failed = fail_above(engine.parts.worker, "score", tokens_of, 9, after=True)
    found = engine.score(pairs, on_score=lambda index, likelihood: seen.append(index))
    assert sorted(seen) == list(range(6))
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert failed == sorted(failed, reverse=True)
    assert engine.caps["prefill_chunk"] <= 9
    said = f"prefill_chunk: {engine.caps['prefill_chunk']} (lowered from "
    assert any(line.startswith(said) and line.endswith("ran out of memory)") for line in lines)
    engine = toy_engine()
    fail_above(engine.parts.worker, "score", tokens_of, 0)
    with pytest.raises(ShortOfMemoryError, match="out of memory: a prefill pass of 1 token does not fit"):
        engine.score(pairs)


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
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    expected = targets.engine(target, drafter).generate(prompts, params)
    engine = targets.engine(target, drafter)
    worker, calls = engine.parts.worker, 0

    def failing(launch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            result = launch(*args)
            if calls in (5, 12) and engine._runner.launch.can_shrink(worker):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")
            return result

        return call

    for name in ("decode", "prefill"):
        setattr(worker, name, failing(getattr(worker, name)))
    found = engine.generate(prompts, params)
    assert engine.caps["max_running"] < 4
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    check_released(engine)
