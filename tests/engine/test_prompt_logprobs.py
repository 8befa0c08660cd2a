"""Log-probabilities of prompt tokens against float64 logits, in chunks, from graphs, after retractions and cached
prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lossless import fake_graphs
from targets import Targets

from specbatch import Completion, Graphs, SamplingParams
from specbatch.core.embedded_prompt import EmbeddedPrompt
from specbatch.errors import SpecbatchError

ASKED = SamplingParams(max_new_tokens=9, prompt_logprobs=True, ignore_eos=True)


def expected(targets: Targets, name: str, prompts: list[list[int]]) -> list[list[Any]]:
    found = []
    for prompt, logits in zip(prompts, targets.logits(name, prompts), strict=True):
        after = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        found.append([None, *(pytest.approx(value, abs=1e-4) for value in after.tolist())])
    return found


def answers(done: list[Completion]) -> list[list[int]]:
    return [item.token_ids for item in done]


@pytest.mark.parametrize(
    ("target", "drafter", "settings"),
    [
        ("llama", "none", {"prefill_chunk": 3, "schedule": "v1"}),
        ("llama", "eagle3", {"prefill_chunk": 5}),
        ("llama", "eagle", {"graphs": Graphs("off", "piecewise")}),
        ("llama", "none", {"graphs": Graphs("off", "piecewise"), "prefill_chunk": 16}),
        ("llama", "none", {"kv_pages": 12, "prefix_cache": False}),
        ("llama", "ngram", {"prefix_cache": False}),
        ("qwen3.5", "mtp", {"prefill_chunk": 7}),
    ],
)
def test_they_are_those_of_the_model(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, target: str, drafter: str, settings: dict[str, Any]
) -> None:
    fake_graphs(monkeypatch)
    engine = targets.engine(target, drafter, **settings)
    prompts = targets.prompts(target)
    wanted = expected(targets, target, prompts)
    done = engine.generate(prompts, ASKED)
    assert [item.prompt_logprobs for item in done] == wanted
    assert answers(done) == targets.greedy(target, 9)
    assert bool(engine.record().metrics["retractions"]) == ("kv_pages" in settings)
    # Beside requests that did not ask, whose prefixes are cached now.
    mixed = [ASKED, SamplingParams(max_new_tokens=2), ASKED, SamplingParams(max_new_tokens=2), ASKED, ASKED]
    again = engine.generate(prompts, mixed)
    shown = [item.prompt_logprobs for item in again]
    assert shown == [row if params is ASKED else None for row, params in zip(wanted, mixed, strict=True)]
    if target == "llama" and settings.keys().isdisjoint({"prefix_cache", "kv_pages"}):
        assert [bool(item.metrics.cached_tokens) for item in again[:3]] == [False, True, False]


def test_they_agree_with_scores_in_parts_and_come_with_the_first_sample(targets: Targets) -> None:
    engine = targets.engine("llama", "ngram")
    prompts = targets.prompts("llama")
    engine.parts.worker.prefill_step.workspace = 1  # one row of logits at a time
    done = engine.generate(prompts, SamplingParams(max_new_tokens=3, prompt_logprobs=True, n=2, temperature=1.0))
    assert [item.prompt_logprobs is None for item in done] == [False, True] * len(prompts)
    scores = engine.score([(prompt[:1], prompt[1:]) for prompt in prompts])
    for item, score in zip(done[::2], scores, strict=True):
        assert item.prompt_logprobs is not None
        assert sum(value for value in item.prompt_logprobs if value is not None) == pytest.approx(score.logprob)


def test_prompt_of_one_token_has_none(targets: Targets) -> None:
    [done] = targets.engine("llama").generate([[5]], ASKED)
    assert done.prompt_logprobs == [None]


def test_embeddings_in_place_of_tokens_are_refused(targets: Targets) -> None:
    engine = targets.engine("llama")
    prompt = EmbeddedPrompt([5, 6, 7], {1: torch.zeros(1, targets.checkpoint("llama").config.hidden_size)})
    with pytest.raises(SpecbatchError, match="prompt_logprobs=True: prompt 0 has embeddings in place of tokens"):
        engine.generate([prompt], ASKED)
