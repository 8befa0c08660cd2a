"""What the Python API refuses, by setting and value, before any work; and that the engine goes on afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specbatch import Engine, EngineConfig, SamplingParams
from specbatch.errors import SpecbatchError

PROMPTS = [[1, 2, 3], [4]]
# what is built | its arguments | what must be said
SETTINGS: list[tuple[type, dict[str, Any], str]] = [
    (SamplingParams, {"max_new_tokens": 5.5}, "max_new_tokens=5.5: use a whole number"),
    (SamplingParams, {"max_new_tokens": True}, "max_new_tokens=True:"),
    (SamplingParams, {"max_new_tokens": None}, "max_new_tokens=None:"),
    (SamplingParams, {"max_new_tokens": 0}, "max_new_tokens=0: use at least 1"),
    (SamplingParams, {"temperature": "hot"}, "temperature='hot': use a number"),
    (SamplingParams, {"temperature": float("nan")}, "temperature=nan:"),
    (SamplingParams, {"top_k": 1.5}, "top_k=1.5:"),
    (SamplingParams, {"seed": "x"}, "seed='x':"),
    (EngineConfig, {"model": 5}, "model=5:"),
    (EngineConfig, {"device": None}, "device=None:"),
    (EngineConfig, {"seed": None}, "seed=None:"),
    (EngineConfig, {"speculation": {"algorithm": "ngram"}}, "speculation={'algorithm': 'ngram'}:"),
]
# prompts | other arguments of generate | what must be said
CALLS: list[tuple[Any, dict[str, Any], str]] = [
    ("hello", {}, "prompts='hello': give a list"),
    ([[]], {}, "it has no tokens"),
    ([1, 2], {}, "prompt 0=1: give a string or a list of token ids"),
    ([None], {}, "prompt 0=None:"),
    ([[1], [1.5]], {}, "prompt 1=[1.5]:"),
    ([["a"]], {}, "prompt 0=['a']:"),
    ([[-1]], {"params": SamplingParams(max_new_tokens=4)}, "token ids go from 0"),
    (PROMPTS, {"params": [SamplingParams()]}, "params=1:"),
    (PROMPTS, {"params": [SamplingParams(), None]}, "params=None:"),
    (PROMPTS, {"concurrency": 0}, "concurrency=0:"),
    (PROMPTS, {"concurrency": "x"}, "concurrency='x':"),
]


@pytest.mark.parametrize(("kind", "settings", "says"), SETTINGS, ids=[row[2] for row in SETTINGS])
def test_settings(kind: type, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecbatchError) as refused:
        kind(**settings)
    assert says in str(refused.value)


@pytest.mark.parametrize(("prompts", "arguments", "says"), CALLS, ids=[row[2] for row in CALLS])
def test_calls(toy_engine: Callable[..., Engine], prompts: Any, arguments: dict[str, Any], says: str) -> None:
    with toy_engine() as engine, pytest.raises(SpecbatchError) as refused:
        engine.generate(prompts, **arguments)
    assert says in str(refused.value)


def test_a_stream_that_was_opened_early_does_not_mix_with_another(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    prompts = [list(prompt) for prompt in toy.prompts()[:2]]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    with toy_engine() as engine:
        first, second = (engine.stream([prompt], params) for prompt in prompts)
        next(first)
        with pytest.raises(SpecbatchError, match="busy"):
            next(second)
        (completion,) = [event.completion for event in first if event.completion]
        assert completion.token_ids == list(toy.greedy(toy.prompts()[0])[:6])


def test_a_closed_engine_says_so(toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine()
    engine.close()
    with pytest.raises(SpecbatchError, match="closed"):
        engine.generate(PROMPTS)
