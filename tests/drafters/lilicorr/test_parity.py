"""A LiLiCorr draft with its paged context matches a float64 reference: each draft's distribution is the one over its
candidates, given the draft before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from block_drafts import BASE, Run, check_greedy_chain
from crossed import crossed, slow_but

from specbatch.drafters.lilicorr import LiLiCorrDrafter
from specbatch.models.heads.lilicorr import LiLiCorr, LiLiCorrConfig

OWN = {
    "lilicorr_candidate_topk": 8, "lilicorr_hidden_size": 16, "lilicorr_num_layers": 2, "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 1.5, "lilicorr_factor_dim": 6, "lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 3.0,
}  # fmt: skip
LILICORR: dict[str, Any] = BASE | {
    "architectures": ["LiLiCorrDraftModel"], "dflash_config": BASE["dflash_config"] | OWN,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "published": {},
    "convolutions": {"conv_kernel_size": 2, "conv_group_size": 4},
    "as wide as the draft": {"lilicorr_hidden_size": 0, "lilicorr_num_layers": 1},
    "one candidate": {"lilicorr_candidate_topk": 1},
}


@pytest.fixture
def start(bench: Any, tiny: Any, reference: Any) -> Callable[..., Run]:
    class Correlated(Run):
        config, network, drafter = LiLiCorrConfig, LiLiCorr, LiLiCorrDrafter

    Correlated.reference = reference

    def run(kind: str, *how: Any) -> Run:
        return Correlated(bench, tiny, LILICORR | {"dflash_config": LILICORR["dflash_config"] | KINDS[kind]}, *how)

    return run


@pytest.mark.parametrize(("kind", "count", "chunk"), crossed(KINDS, [5, 2, 1], [1000, 4]))
def test_distributions_match_reference(start: Any, kind: str, count: int, chunk: int) -> None:
    assert start(kind, count, chunk).worst() < 5e-5


@pytest.mark.parametrize("kind", slow_but(["published"], [kind for kind in KINDS if kind != "one candidate"]))
def test_greedy_drafts_are_argmax_given_those_before(start: Any, kind: str) -> None:
    check_greedy_chain(start(kind, 5, 7), 1e-3)
