"""Engines on one copy of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specbatch import Engine, EngineConfig, SamplingParams, SpecbatchError, Speculation
from specbatch.engine.setup import memory_plan
from specbatch.engine.setup.prepare import prepare
from specbatch.memory.planner import EXCLUSIVE, MemoryShare

TOY = {"model": "toy", "load_format": "dummy", "device": "cpu", "page_size": 4, "max_running": 4}
PROMPTS = [[1, 2, 3, 4], [5, 6], [7] * 9]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


def build(
    weights_of: Engine | None = None,
    log: Callable[[str], None] | None = None,
    share: MemoryShare = EXCLUSIVE,
    **changes: Any,
) -> Engine:
    config = EngineConfig(**TOY | {"max_model_len": 64} | changes)
    return Engine(config, weights_of=weights_of, log=log, share=share)


def tokens(engine: Engine) -> list[list[int]]:
    return [item.token_ids for item in engine.generate(PROMPTS, PARAMS)]


def test_engines_that_share_weights_give_the_same_tokens():
    with build() as first, build(first, max_model_len=200, speculation=Speculation("ngram", "v1")) as second:
        assert tokens(second) == tokens(first)
        assert second.parts.model.embedding is first.parts.model.embedding
        assert all(
            ours.mixer.qkv is theirs.mixer.qkv
            for ours, theirs in zip(second.parts.model.layers, first.parts.model.layers, strict=True)
        )


def test_a_longer_request_than_in_the_first_engine_works():
    long = [list(range(1, 151))]
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    with build() as first, build(first, max_model_len=200) as shared, build(max_model_len=200) as own:
        assert shared.generate(long, params)[0].token_ids == own.generate(long, params)[0].token_ids


def test_shared_weights_take_no_memory_in_the_plan():
    lines: list[str] = []
    with build() as first, build(first, log=lines.append) as second:
        assert first.plan.weights > 0
        assert second.plan.weights == second.caps["weights_bytes"] == 0
        assert second.plan.available - second.plan.workspace > second.plan.kv
    assert any("weights shared" in line for line in lines)


def test_the_first_engine_may_close_first():
    first = build()
    expected = tokens(first)
    with build(first) as second:
        first.close()
        assert tokens(second) == expected
        with build(second) as third:
            assert tokens(third) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "weights_of='seed=1': the weights are those of seed=0"),
        ({"model": "smollm2-135m"}, "weights_of='model=smollm2-135m': the weights are those of model='toy'"),
        ({"dtype": "bfloat16"}, "weights_of='bfloat16 on cpu': the weights are float32 on cpu"),
    ],
)
def test_other_weights_are_refused(changes, message):
    with build() as first, pytest.raises(SpecbatchError, match=message):
        build(first, **changes)


def test_a_closed_engine_is_refused():
    first = build()
    first.close()
    with pytest.raises(SpecbatchError, match="weights_of='a closed engine'"):
        build(first)


SPECULATING = [
    Speculation("ngram", "v2"),
    Speculation("eagle3", "v2", draft="dummy"),
    Speculation("standalone", "v1", draft="self:skip=1", draft_steps=2, draft_topk=2, draft_tokens=4),
]


def test_engines_that_run_in_turn_use_one_kv_pool() -> None:
    """In few pages, so that each engine writes to those of the others."""
    with build(prefix_cache=False) as alone:
        expected = tokens(alone)
    shares = [MemoryShare(index, 4, pages=24) for index in range(4)]
    with build(prefix_cache=False, share=shares[0]) as first:
        others = [
            build(first, prefix_cache=False, speculation=speculation, share=share)
            for speculation, share in zip(SPECULATING, shares[1:], strict=True)
        ]
        for _ in range(2):
            for engine in (first, *others):
                assert engine.plan.kv_pages == 24
                assert engine.parts.worker.decode_step.cache.keys is first.parts.worker.decode_step.cache.keys
                assert tokens(engine) == expected
        assert [engine.plan.own_kv > 0 for engine in others] == [False, True, True], "drafts have pools of their own"


def test_a_pool_of_all_leaves_room_for_each(use_memory: Callable[[int], None]) -> None:
    """As the engines are built, with what is left of the memory."""
    free = 900 << 20
    use_memory(free)
    settings = TOY | {"max_running": 1024, "prefix_cache": False, "memory_fraction": 0.9}
    asked = [Speculation(), *SPECULATING]
    prepared = [prepare(EngineConfig(**settings, speculation=one), lambda line: None) for one in asked]
    pages = memory_plan.pages_of_shared_pool(prepared)
    assert pages is not None
    alone = memory_plan.memory_plan(prepared[0], MemoryShare(0, len(asked))).kv_pages
    assert pages > 1.5 * alone, "more than an equal share"
    for index, one in enumerate(prepared):
        plan = memory_plan.memory_plan(one, MemoryShare(index, len(asked), pages=pages), is_shared=index > 0)
        assert plan.kv_pages == pages
        free -= plan.weights + plan.fixed + plan.own_kv
        use_memory(free)
    assert free >= 0.1 * (900 << 20) - 1
    with_cache = prepare(EngineConfig(**settings | {"prefix_cache": True}), lambda line: None)
    other_pages = prepare(EngineConfig(**settings | {"page_size": 8}), lambda line: None)
    for more in (with_cache, other_pages):
        assert memory_plan.pages_of_shared_pool([*prepared, more]) is None
    use_memory(1 << 20)
    assert memory_plan.pages_of_shared_pool(prepared) is None, "refused when they are built"
