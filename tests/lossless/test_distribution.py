"""Sampled tokens of whole engines follow the target's filtered distribution with every drafter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chi_square import p_value
from crossed import first_quick
from lossless import settings_of
from naive_choice import adjusted, allowed_tokens, completing
from stand_ins import steep_step_times
from targets import Targets

from specbatch import Engine, SamplingParams
from specbatch.drafters import xpress
from specbatch.engine.schedule import draft_length, verify_rows
from specbatch.models.heads.xpress import published_shape

REQUESTS, TOKENS, TOP_K, TEMPERATURE = 800, 3, 3, 1.5

# Sampled chains are verified by rejection sampling, token by token or as a block, trees by the target's own samples.
CASES = [
    ("llama", "model"),
    ("llama", "model-block"),
    ("llama", "model-budget"),
    ("llama", "model-other"),
    ("qwen3.5", "mtp"),
    ("lfm2", "model-tree"),
    ("nemotron-h", "eagle"),
    ("qwen3-moe", "eagle3"),
    ("llama", "dflash"),
    ("llama", "dflash2"),
    ("llama", "dspark"),
    ("llama", "dspark-budget"),
    ("llama", "domino"),
    ("llama", "lilicorr"),
    ("llama", "uno"),
    ("llama", "xpress"),
    ("qwen3.5", "mtp-budget"),
    ("llama", "dspark-block-auto"),
    ("qwen3-next", "eagle-tree"),
    ("llama", "ngram"),
    ("llama", "ngram-tree"),
    ("llama", "model-corpus-auto"),
    ("llama", "none"),
]


# The second token of most texts is not one of the three most likely, and no answer ends early.
REGEX = "[@-d][H-KO-Sa-d][@-d][@-d]+"
CONSTRAINED = [
    (target, drafter, {"regex": REGEX})
    for target, drafter in [
        ("llama", "model"), ("llama", "dspark"), ("llama", "model-block"), ("qwen3.5", "mtp"), ("llama", "eagle-tree"),
        ("llama", "dflash2"), ("lfm2", "model-tree"), ("llama", "model-budget"), ("llama", "dflash"),
        ("llama", "peagle"), ("llama", "ngram"), ("qwen3.5", "mtp-layers"), ("llama", "model-corpus-auto"),
        ("llama", "xpress"), ("llama", "lilicorr"), ("llama", "domino"),
        ("llama", "uno"), ("llama", "model-other"),
    ]
]  # fmt: skip
# Drafts are chosen from logits that are adjusted, too.
_HOW = {
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.5,
    "logit_bias": dict.fromkeys(range(0, 36, 3), 2.5),
    "bad_words": ("F", "O", "X", "`c"),
}
ADJUSTED = [
    (target, drafter, _HOW | how)
    for target, drafter, how in [
        ("llama", "model", {}), ("llama", "eagle3", {}), ("qwen3.5", "mtp", {"regex": REGEX}), ("llama", "dflash2", {}),
        ("llama", "model-block", {"regex": REGEX}), ("llama", "dflash", {}), ("llama", "eagle-tree", {}),
        ("llama", "dspark", {}), ("llama", "model-budget", {}), ("llama", "xpress", {}),
        ("llama", "lilicorr", {}), ("llama", "domino", {}), ("llama", "model-other", {}),
    ]
]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "drafter", "how"),
    [*first_quick(1, [(*case, {}) for case in CASES]), *first_quick(1, CONSTRAINED), *first_quick(1, ADJUSTED)],
)
def test_sampled_tokens_follow_the_target_distribution(
    targets: Targets, target: str, drafter: str, how: dict[str, Any]
) -> None:
    check_distribution(targets, target, drafter, how)


def test_a_refiner_may_stop_before_its_choices_settle(targets: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three drafts, one pass of XPress settles the first."""
    monkeypatch.setattr(xpress, "published_shape", lambda target: published_shape(target) | {"xpress_num_passes": 1})
    check_distribution(targets, "llama", "xpress", {})


@pytest.mark.parametrize("drafter", first_quick(1, ["dspark-budget-auto", "model-budget-auto", "mtp-budget-auto"]))
def test_budgets_that_are_chosen_keep_the_distribution(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """They follow from the drafts of the steps before, and often change."""
    steep_step_times(monkeypatch)
    monkeypatch.setattr(verify_rows, "NEWEST", 1.0)
    monkeypatch.setattr(draft_length, "MARGIN", 1.0)
    engine = check_distribution(targets, "qwen3.5" if "mtp" in drafter else "llama", drafter, {}, running=40)
    steps = engine.record().counters["verify_budgets"]["40"]
    assert len([count for count in steps.values() if count > 0.05 * sum(steps.values())]) > 1


def check_distribution(targets: Targets, target: str, drafter: str, how: dict[str, Any], running: int = 400) -> Engine:
    engine = targets.engine(target, drafter, max_running=running, **settings_of(target, drafter))
    prompt = targets.prompts(target)[4]
    params = [
        SamplingParams(
            temperature=TEMPERATURE,
            top_k=TOP_K,
            seed=seed,
            max_new_tokens=TOKENS,
            ignore_eos="regex" not in how,
            **how,
        )
        for seed in range(REQUESTS)
    ]
    done = engine.generate([prompt] * REQUESTS, params)
    if drafter in ("model", "model-block", "mtp", "model-tree", "eagle", "eagle-tree"):
        metrics = engine.record().metrics
        assert 0.05 < metrics["accepted_tokens"] / metrics["drafted_tokens"] < 0.99, "both outcomes must occur"

    expected = distribution(targets, target, prompt, params[0])
    counts = dict.fromkeys(expected, 0)
    for item in done:
        counts[tuple(item.token_ids)] += 1
    assert p_value(list(counts.values()), [REQUESTS * chance for chance in expected.values()]) > 1e-4
    return engine


def distribution(
    targets: Targets, target: str, prompt: list[int], params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """The probability of each text of `TOKENS` tokens after the prompt."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        logits = targets.logits(target, [[*prompt, *text] for text in texts])
        longer = {}
        for (text, chance), rows in zip(texts.items(), logits, strict=True):
            allowed = sorted(allowed_tokens(list(text), params) - {*completing(list(text), params)})
            values = torch.tensor(adjusted(rows[-1], [*prompt, *text], len(prompt), params))
            best = torch.full_like(values, -torch.inf).index_copy(0, torch.tensor(allowed), values[allowed]).topk(TOP_K)
            for token, share in zip(
                best.indices.tolist(), (best.values / TEMPERATURE).softmax(0).tolist(), strict=True
            ):
                longer[(*text, token)] = chance * share
        texts = longer
    return texts
