"""A Domino draft with its paged context matches a float64 reference: each draft's distribution is the one given the
drafts before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from block_drafts import BASE, Run, check_greedy_chain
from crossed import crossed

from specbatch.drafters.dspark import DSparkDrafter
from specbatch.models.heads.domino import Domino, DominoConfig

OWN = {
    "projector_type": "domino", "pure_draft_prefix_len": 1, "gru_hidden_dim": 9, "emb_dim": 7, "shift_label": True,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "published": {"block_size": 5},
    "after the anchor": {"shift_label": False},
    "corrected from the first draft": {"block_size": 5, "pure_draft_prefix_len": 0},
}


@pytest.fixture
def start(bench: Any, tiny: Any, reference: Any) -> Callable[..., Run]:
    class Corrected(Run):
        config, network, drafter = DominoConfig, Domino, DSparkDrafter

    Corrected.reference = reference

    def run(kind: str, *how: Any) -> Run:
        return Corrected(bench, tiny, BASE | {"dflash_config": BASE["dflash_config"] | OWN | KINDS[kind]}, *how)

    return run


@pytest.mark.parametrize(("kind", "count", "chunk"), crossed(KINDS, [5, 2, 1], [1000, 4]))
def test_distributions_match_reference(start: Any, kind: str, count: int, chunk: int) -> None:
    assert start(kind, count, chunk).worst() < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_drafts_are_argmax_given_those_before(start: Any, kind: str) -> None:
    check_greedy_chain(start(kind, 5, 7), 1e-4)
