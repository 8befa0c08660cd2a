"""Penalties and logit bias with every drafter, some on two ranks: tokens are those that the target chooses one at a
time."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from crossed import crossed
from lossless import LONGER, Case, fits, target_logits
from naive_choice import chosen
from stand_ins import fake_graphs, late_results, random_draft_lengths
from targets import SPECULATIONS, Letters, Targets
from thread_ranks import thread_group

from specbatch import Completion, SamplingParams

_WORDS = ("TU", "UV", "c`", "`a", "WTW", "I")
_HOW: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.8, "presence_penalty": -0.6},
    {},
    {"logit_bias": {5: 4.0, 7: -100, 20: 2.5}, "presence_penalty": 2},
    {"repetition_penalty": 0.7, "logit_bias": {30: 1}, "bad_words": _WORDS},
    {"frequency_penalty": -0.4, "min_tokens": 4, "stop_token_ids": (9, 11)},
)
GREEDY = [SamplingParams(max_new_tokens=LONGER, ignore_eos=True, logprobs=True, **how) for how in _HOW]
SAMPLED = [
    SamplingParams(max_new_tokens=LONGER, ignore_eos=True, temperature=0.9, seed=seed, **how)
    for seed, how in enumerate(_HOW)
]
# No drafts, a tree in another vocabulary, and chains of chosen lengths and budgets; slow: every drafter.
_QUICK = ("none", "model-other-tree", "eagle3-budget-auto", "mtp-layers-auto")
_SCHEDULES, _MEMORY = ("v1", "v2", "v2-late"), ("roomy", "tight", "no-cache")


def _cases() -> list[Any]:
    pairs = [(drafter, target) for target in ("llama", "qwen3.5") for drafter in SPECULATIONS if fits(drafter, target)]
    chosen = [
        Case(drafter, _SCHEDULES[place % 3], ("eager", "both")[place % 2], _MEMORY[place // 3 % 3], target)
        for place, (drafter, target) in enumerate(pairs)
    ]
    return [
        pytest.param(
            case,
            ranks := 2 if place % 4 == 1 and not case.has_budget and fits(case.drafter, case.target, 2) else 1,
            id=f"{case} {ranks}",
            marks=() if case.target == "llama" and case.drafter in _QUICK else pytest.mark.slow,
        )
        for place, case in enumerate(chosen)
    ]


@pytest.mark.parametrize(("case", "ranks"), _cases())
def test_tokens_are_those_of_one_at_a_time(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, case: Case, ranks: int
) -> None:
    thread_group(monkeypatch)
    fake_graphs(monkeypatch)
    if case.schedule == "v2-late":
        late_results(monkeypatch)
    if case.is_auto:
        random_draft_lengths(monkeypatch)
    settings = case.settings() | {"tensor_parallel": ranks}
    engine = targets.engine(case.target, case.drafter, case.schedule[:2], dtype="float32", **settings)
    prompts = targets.prompts(case.target)
    done = engine.generate(prompts, GREEDY)
    for one, params, logits in zip(done, GREEDY, target_logits(case, targets, done), strict=True):
        history = list(one.prompt_token_ids)
        for token, row in zip(one.token_ids, logits, strict=True):
            ends = params.stop_token_ids if len(history) - len(one.prompt_token_ids) < params.min_tokens else ()
            assert token == chosen(row, history, len(one.prompt_token_ids), params, ends)
            history.append(token)
    changed = [one.token_ids != plain for one, plain in zip(done, _plain(targets, case.target), strict=True)]
    assert sum(changed) >= 3
    assert not changed[2]
    if case.keeps_seeds:
        assert [one.token_ids for one in engine.generate(prompts, SAMPLED)] == _sampled(targets, case.target)


# Tokens per verify where all drafts of a chain, or those on one path of a tree, are accepted.
_CHAINS = ("model", "eagle", "eagle3", "peagle", "mtp", "mtp-layers", "dflash", "dspark", "domino", "uno", "xpress")
_TREES = ("eagle-tree", "mtp-tree", "dflash-tree", "dspark-tree", "xpress-tree")
_ALL = dict.fromkeys((*_CHAINS, "model-recurrent", *_TREES), 4) | {"model-tree": 6}


@pytest.mark.parametrize(("drafter", "temperature"), crossed(_ALL, [0, 1]))
def test_drafts_know_what_is_added_to_logits(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, drafter: str, temperature: float
) -> None:
    """Whatever models and heads predict: with a bias that decides on each token all drafts are accepted."""
    fake_graphs(monkeypatch)
    case = Case(drafter, "v2", "both", "roomy", "llama")
    engine = targets.engine("llama", drafter, "v2", dtype="float32", **case.settings())
    params = SamplingParams(
        max_new_tokens=13, ignore_eos=True, logit_bias={5: 100, 6: 100}, bad_words=("F",), temperature=temperature
    )
    for one in engine.generate(targets.prompts("llama")[:2], params):
        assert set(one.token_ids) == {Letters().encode("E")[0]}
        assert one.metrics.accept_length == _ALL[drafter]


@cache
def _plain(targets: Targets, name: str) -> list[list[int]]:
    engine = targets.engine(name, "none", "v1", dtype="float32")
    params = SamplingParams(max_new_tokens=LONGER, ignore_eos=True)
    return _tokens(engine.generate(targets.prompts(name), params))


@cache
def _sampled(targets: Targets, name: str) -> list[list[int]]:
    engine = targets.engine(name, "none", "v1", dtype="float32", max_running=1, prefix_cache=False)
    pairs = zip(targets.prompts(name), SAMPLED, strict=True)
    return [tokens for prompt, params in pairs for tokens in _tokens(engine.generate([prompt], [params]))]


def _tokens(done: list[Completion]) -> list[list[int]]:
    return [item.token_ids for item in done]
