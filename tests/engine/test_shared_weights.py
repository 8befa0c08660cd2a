"""Engines on one copy of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specbatch import Engine, EngineConfig, SamplingParams, SpecbatchError, Speculation

TOY = {"model": "toy", "load_format": "dummy", "device": "cpu", "page_size": 4, "max_running": 4}
PROMPTS = [[1, 2, 3, 4], [5, 6], [7] * 9]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


def build(weights_of: Engine | None = None, log: Callable[[str], None] | None = None, **changes: Any) -> Engine:
    return Engine(EngineConfig(**TOY | {"max_model_len": 64} | changes), weights_of=weights_of, log=log)


def tokens(engine: Engine) -> list[list[int]]:
    return [item.token_ids for item in engine.generate(PROMPTS, PARAMS)]


def test_engines_that_share_weights_give_the_same_tokens():
    with build() as first, build(first, max_model_len=200, speculation=Speculation("ngram", "v1")) as second:
        assert tokens(second) == tokens(first)
        assert second._model.embedding is first._model.embedding
        assert all(
            ours.mixer.qkv is theirs.mixer.qkv
            for ours, theirs in zip(second._model.layers, first._model.layers, strict=True)
        )


def test_a_longer_request_than_the_lenders_works():
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


def test_the_lender_may_close_first():
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


def test_a_closed_lender_is_refused():
    first = build()
    first.close()
    with pytest.raises(SpecbatchError, match="weights_of='a closed engine'"):
        build(first)
