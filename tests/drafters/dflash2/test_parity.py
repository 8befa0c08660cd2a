"""A DFlash 2 draft with its paged context matches a float64 reference: each draft's distribution is the one over its
candidates, given the drafts before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from block_drafts import BASE, HIDDEN, LAYERS, VOCABULARY, Reference, Run, check_greedy_chain, random_draft
from crossed import crossed

from specbatch.drafters.dflash2 import DFlash2Drafter
from specbatch.models.dflash2 import DFlash2, DFlash2Config

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


class Reference2(Reference):
    def convolved(self, x: torch.Tensor, read: torch.Tensor, name: str, side: int) -> torch.Tensor:
        """Row by row and channel by channel."""
        size, group = self.config["conv_kernel_size"], self.config["conv_group_size"]
        base = self.tensors[f"{name}.base_kernel"][side]
        kernels = self.project(read, f"{name}.kernel_projection").view(len(x), 2, size, -1)[:, side]
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for back in range(min(size, row + 1)):
                out[row] += (base[back] + kernels[row, back].repeat_interleave(group)) * x[row - back]
        return out

    def logits(self, features: torch.Tensor, anchor: int, count: int, drafts: Sequence[int]) -> torch.Tensor:
        hidden = self.hidden(features, anchor, count)[1:]
        logits = self.target.logits(hidden.float()).double()[: len(drafts)]
        before, after = (self.tensors[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
        for row, previous in enumerate([anchor, *drafts[:-1]]):
            best = logits[row].topk(self.config["selector_top_k"]).indices
            others = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, best, False)
            weights = self.tensors["candidate_selector.hidden_projection.weight"] @ hidden[row]
            logits[row] += after @ (before[previous] * weights)
            logits[row, others] = -math.inf
        return logits


class Selected(Run):
    reference, config, network, drafter = Reference2, DFlash2Config, DFlash2, DFlash2Drafter


@pytest.fixture
def start(bench: Any, tiny: Any) -> Callable[..., Run]:
    def run(kind: str, *how: Any) -> Run:
        return Selected(bench, tiny, DFLASH2 | KINDS[kind], *how)

    return run


@pytest.mark.parametrize(("kind", "count", "chunk"), crossed(KINDS, [5, 2, 1], [1000, 4]))
def test_distributions_match_reference(start: Any, kind: str, count: int, chunk: int) -> None:
    assert start(kind, count, chunk).worst() < 5e-5


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_drafts_are_argmax_given_those_before(start: Any, kind: str) -> None:
    check_greedy_chain(start(kind, 5, 7), 1e-3)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_reference_matches_the_authors_package(tiny: Any, kind: str, tmp_path: Path) -> None:
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
    reference = Reference2(raw, tensors, target)
    torch.testing.assert_close(hidden[0].double(), reference.hidden(features, 3, 5)[1:], rtol=1e-5, atol=2e-5)
    logits = target.logits(hidden[0])[None]
    drafts, tokens, chances = theirs.candidate_selector.select(hidden, logits, torch.tensor([3]), 1.0)
    ours = reference.logits(features, 3, 5, drafts[0].tolist()).softmax(-1)
    torch.testing.assert_close(ours.gather(1, tokens[0]), chances[0].double(), rtol=1e-4, atol=2e-5)
