"""A DFlash 2 draft with its paged context matches a float64 reference: each draft's distribution is the one over its
candidates, given the drafts before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_drafts import BASE, HIDDEN, LAYERS, VOCABULARY, Run, check_greedy_chain, random_draft
from crossed import crossed, slow_but

from specbatch.drafters.dflash2 import DFlash2Drafter
from specbatch.models.heads.dflash2 import DFlash2, DFlash2Config

OWN = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
DFLASH2: dict[str, Any] = BASE | {
    "architectures": ["DFlash2DraftModel"], "dflash_config": BASE["dflash_config"] | OWN,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 7}
KINDS: dict[str, dict[str, Any]] = {
    "published": {**SLIDING, "is_causal": False},
    "wide": {"dflash_config": DFLASH2["dflash_config"] | {"conv_kernel_size": 4, "conv_group_size": 24}},
    "all tokens": {"dflash_config": DFLASH2["dflash_config"] | {"selector_top_k": VOCABULARY}},
}


@pytest.fixture
def start(bench: Any, tiny: Any, reference: Any) -> Callable[..., Run]:
    class Selected(Run):
        config, network, drafter = DFlash2Config, DFlash2, DFlash2Drafter

    Selected.reference = reference

    def run(kind: str, *how: Any) -> Run:
        return Selected(bench, tiny, DFLASH2 | KINDS[kind], *how)

    return run


@pytest.mark.parametrize(("kind", "count", "chunk"), crossed(KINDS, [5, 2, 1], [1000, 4]))
def test_distributions_match_reference(start: Any, kind: str, count: int, chunk: int) -> None:
    assert start(kind, count, chunk).worst() < 5e-5


@pytest.mark.parametrize("kind", slow_but(["published"], KINDS))
def test_greedy_drafts_are_argmax_given_those_before(start: Any, kind: str) -> None:
    check_greedy_chain(start(kind, 5, 7), 1e-3)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_reference_matches_the_authors_package(tiny: Any, reference: Any, kind: str, tmp_path: Path) -> None:
    """pip install --no-deps dflash"""
    authors = pytest.importorskip("dflash.model")
    if not hasattr(authors, "DFlash2DraftModel"):
        pytest.skip("this version of dflash has no DFlash 2")
    raw, target = DFLASH2 | KINDS[kind], tiny(VOCABULARY, layers=LAYERS)
    tensors = random_draft(DFlash2Config.from_dict(raw))
    theirs = authors.DFlash2DraftModel(authors.Qwen3Config(**raw)).eval()
    theirs.load_state_dict({f"{name}.weight" if name.endswith("codebook") else name: x for name, x in tensors.items()})
    features = torch.randn(9, 2 * HIDDEN, generator=torch.Generator().manual_seed(3))
    block = target.embedding[[3, *[11] * 5]]
    hidden = theirs(
        target_hidden=features[None], noise_embedding=block[None], position_ids=torch.arange(15)[None]
    )[:, 1:]  # fmt: skip
    by_reference = reference(raw, tensors, target)
    torch.testing.assert_close(hidden[0].double(), by_reference.hidden(features, 3, 5)[1:], rtol=1e-5, atol=2e-5)
    logits = target.logits(hidden[0])[None]
    drafts, tokens, chances = theirs.candidate_selector.select(hidden, logits, torch.tensor([3]), 1.0)
    ours = by_reference.logits(features, 3, 5, drafts[0].tolist()).softmax(-1)
    torch.testing.assert_close(ours.gather(1, tokens[0]), chances[0].double(), rtol=1e-4, atol=2e-5)
