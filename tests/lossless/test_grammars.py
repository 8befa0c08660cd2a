"""Grammars with every drafter: tokens are those that the target chooses one at a time."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

import pytest
from lossless import LONGER, Case, fits, target_logits
from naive_choice import allowed_tokens, chosen
from on_host import match_on_host
from stand_ins import fake_graphs, late_results, random_draft_lengths
from targets import SPECULATIONS, Targets
from watched_calls import Watch

from specbatch import Completion, SamplingParams
from specbatch.core.step_input import Proposal, StepInput
from specbatch.engine.device.step import DecodeStep

# Letters are @ to d; B is the end token, and most tokens are followed by the next of their four.
_HOW: tuple[dict[str, Any], ...] = (
    {"regex": r"[@-d]{2}(?:[D-GL-Oab]|[TX]{1,2}|_)*"},
    {"regex": r"(?:[@-S]{2}[T-d]|[T-d])+", "repetition_penalty": 1.3},
    {},
    {"regex": r"[@-d]{3}(?:[^TU]|TU)*", "frequency_penalty": 1.0, "bad_words": ("TU", "c`", "I")},
    {"regex": r"(?:D|H|L|P|T|X|\\|`)[@-d]{1,4}(?:EF)?", "logit_bias": {2: 3.0}},
    {"regex": r"[@-d]{3}[W-Z]?", "min_tokens": 6, "bad_words": ("W",)},
)
GREEDY = [SamplingParams(max_new_tokens=LONGER, logprobs=True, **how) for how in _HOW]
SAMPLED = [SamplingParams(max_new_tokens=LONGER, temperature=0.9, seed=seed, **how) for seed, how in enumerate(_HOW)]
_QUICK = {"model": True, "eagle-tree": False, "dflash2": True}  # drafter: whether matching is on the host
_SCHEDULES, _MEMORY = ("v2", "v1", "v2-late"), ("roomy", "tight", "no-cache")


def _cases() -> list[Any]:
    pairs = [(drafter, target) for target in ("llama", "qwen3.5") for drafter in SPECULATIONS if fits(drafter, target)]
    chosen = [
        Case(drafter, _SCHEDULES[place % 3], ("both", "eager")[place % 2], _MEMORY[place // 3 % 3], target)
        for place, (drafter, target) in enumerate(pairs)
    ]
    return [
        pytest.param(
            case,
            on_host,
            id=f"{case} {'host' if on_host else 'device'}",
            marks=() if case.target == "llama" and _QUICK.get(case.drafter) is on_host else pytest.mark.slow,
        )
        for case in chosen
        for on_host in (False, True)
    ]


@pytest.mark.parametrize(("case", "on_host"), _cases())
def test_tokens_are_those_of_one_at_a_time(
    targets: Targets, watch: Watch, monkeypatch: pytest.MonkeyPatch, case: Case, on_host: bool
) -> None:
    if on_host:
        match_on_host(monkeypatch)
    fake_graphs(monkeypatch)
    if case.schedule == "v2-late":
        late_results(monkeypatch)
    if case.is_auto:
        random_draft_lengths(monkeypatch)
    proposals = watch_proposals(watch)
    engine = targets.engine(case.target, case.drafter, case.schedule[:2], dtype="float32", **case.settings())
    prompts = targets.prompts(case.target)
    done = engine.generate(prompts, GREEDY)
    for one, params, logits in zip(done, GREEDY, target_logits(case, targets, done), strict=True):
        history, prompt = list(one.prompt_token_ids), len(one.prompt_token_ids)
        for token, row in zip(one.token_ids, logits, strict=True):
            ends = (2,) if len(history) - prompt < params.min_tokens else ()
            assert token == chosen(row, history, prompt, params, ends)
            history.append(token)
        _check_match(one, params)
    if case.drafter != "none":
        assert engine.record().metrics["drafted_tokens"]
        check_drafts(case, proposals, done)
    sampled = engine.generate(prompts, SAMPLED)
    for one, params in zip(sampled, SAMPLED, strict=True):
        _check_match(one, params)
    if case.keeps_seeds:
        assert [one.token_ids for one in sampled] == _sampled(targets, case.target)


class Proposed(NamedTuple):
    """One request: its tokens up to the root, its drafts as far as they count, and of each the place of the draft
    before it, -1 for the root."""

    tokens: list[int]
    drafts: list[int]
    parents: list[int]


def watch_proposals(watch: Watch) -> list[Proposed]:
    found: list[Proposed] = []

    def note(proposal: Proposal, decode_step: DecodeStep, step: StepInput) -> None:
        for row, slot in enumerate(step.slots.tolist()):
            if slot:
                drafts = proposal.tokens[row, : int(proposal.drafted[row])].tolist()
                parents = list(range(-1, len(drafts) - 1))
                if proposal.ancestors is not None:
                    words = proposal.ancestors[row].tolist()
                    parents = [(words[node] & ~(1 << node)).bit_length() - 2 for node in range(1, len(drafts) + 1)]
                tokens = step.batch.tokens[slot, : int(step.lengths[row]) + 1].tolist()
                found.append(Proposed(tokens, drafts, parents))

    watch(DecodeStep, "propose", after=note)
    return found


def check_drafts(case: Case, proposals: list[Proposed], done: list[Completion]) -> None:
    """Drafts may follow those before them. Others are in trees where fewer tokens may follow than children are drafted,
    are chosen from few candidates by a selector, and are found by a tree of n-grams."""
    if case.drafter == "ngram-tree" or case.drafter.startswith("dflash2"):
        return
    topk = SPECULATIONS[case.drafter].get("draft_topk", 1)
    checked = 0
    for tokens, drafts, parents in proposals:
        for one, params in zip(done, GREEDY, strict=True):
            prompt = one.prompt_token_ids
            if params.regex is None or tokens[: len(prompt)] != prompt:
                continue
            for place, draft in enumerate(drafts):
                before, node = list[int](), parents[place]
                while node >= 0:
                    before, node = [drafts[node], *before], parents[node]
                answer = tokens[len(prompt) :] + before
                if 2 not in answer and (can_follow := allowed_tokens(answer, params)):
                    assert draft in can_follow or len(can_follow) < topk, (answer, draft)
                    checked += 1
    assert checked >= 2


def _check_match(one: Completion, params: SamplingParams) -> None:
    if params.regex is not None:
        assert one.finish_reason in ("stop", "length")
        assert one.finish_reason == "length" or re.fullmatch(params.regex, one.text.removesuffix("B"))


@cache
def _sampled(targets: Targets, name: str) -> list[list[int]]:
    engine = targets.engine(name, "none", "v1", dtype="float32", max_running=1, prefix_cache=False)
    pairs = zip(targets.prompts(name), SAMPLED, strict=True)
    return [one.token_ids for prompt, params in pairs for one in engine.generate([prompt], [params])]
