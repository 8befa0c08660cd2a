"""An XPress draft with its paged context matches a float64 reference, after any number of passes of its refiner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_drafts import BASE, BLOCK, Run, check_greedy_chain
from crossed import crossed

from specbatch.drafters.xpress import XPressDrafter
from specbatch.models.heads.xpress import XPress, XPressConfig

XPRESS: dict[str, Any] = BASE | {
    "architectures": ["Qwen3XPressModel"], "xpress_rank": 8, "xpress_mlp_hidden": 10, "xpress_block_size": BLOCK,
    "xpress_num_passes": 5, "sample_from_anchor": False,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {"all tokens": {}, "likeliest": {"xpress_topc": 4}}


@pytest.fixture
def start(bench: Any, tiny: Any, reference: Any) -> Callable[..., Run]:
    class Refined(Run):
        config, network, drafter = XPressConfig, XPress, XPressDrafter

    Refined.reference = reference

    def run(changes: dict[str, Any], *how: Any) -> Run:
        return Refined(bench, tiny, XPRESS | changes, *how)

    return run


@pytest.mark.parametrize(("kind", "count", "chunk"), crossed(KINDS, [5, 2, 1], [1000, 4]))
def test_distributions_match_reference(start: Any, kind: str, count: int, chunk: int) -> None:
    """As many passes as drafts choose them one after the other."""
    assert start(KINDS[kind], count, chunk).worst() < 5e-5


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_drafts_are_argmax_given_those_before(start: Any, kind: str) -> None:
    check_greedy_chain(start(KINDS[kind], 5, 7), 1e-3)


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_few_passes_match_the_reference(start: Any, passes: int) -> None:
    run = start({"xpress_num_passes": passes}, 5, 1000)
    tokens = run.drafts.propose(run.here.step(5)).tokens
    settled = 0
    for own, text, found in zip(run.features, run.here.texts, tokens, strict=True):
        run.by_reference.predecessor = text[-2]
        how = (own[: len(text) - 1], text[-1], 5)
        assert torch.equal(found, run.by_reference.passes(*how, passes))
        settled += int(torch.equal(found, run.by_reference.passes(*how, 5)))
    assert passes == 3 or settled < len(tokens), "more passes must matter"
