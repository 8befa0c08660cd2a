"""Tree expansion and pruning kernels match the torch references, which tests/drafters checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from specbatch.config.draft_shape import DraftShape
from specbatch.drafters.tree import Beams, expand
from specbatch.kernels.drafting import tree_draft, tree_draft_triton
from specbatch.kernels.drafting.tree_draft import Candidates, Level

SHAPES = [
    DraftShape(1, 3, 2),
    DraftShape(3, 2, 9),
    DraftShape(5, 4, 15),
    DraftShape(2, 12, 63),
    DraftShape(22, 3, 63),  # as deep as it goes
]


def children(batch: int, width: int, topk: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in steps of a quarter, so that many are tied, and some of -inf."""
    generator = torch.Generator().manual_seed(seed)
    scores = -(torch.rand(batch, width, topk, generator=generator) * 8).round() / 4
    scores[torch.rand(scores.shape, generator=generator) < 0.1] = -torch.inf
    tokens = torch.randint(0, 1 << 40, scores.shape, generator=generator)
    return scores.sort(2, descending=True).values.to(device), tokens.to(device)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_expand_and_prune_match_reference(shape: DraftShape, batch: int, device: torch.device) -> None:
    steps, topk, count = shape
    total = topk + (steps - 1) * topk * topk
    theirs, ours = (Candidates.room(batch, total, device) for _ in range(2))
    level: Level | None = None
    start, first = 0, 1
    for depth in range(steps):
        new = children(batch, topk if depth else 1, topk, 10 * depth + batch, device)
        wanted = tree_draft.expand_ref(theirs, *new, level, start, first)
        found = tree_draft_triton.expand(ours, *new, level, start, first)
        if depth < steps - 1:  # nodes after the last level have no mask
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one, other)
        level = wanted
        start, first = start + new[0][0].numel(), first + topk
    assert start == total
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    for depth in (steps, steps + 3):
        found = tree_draft_triton.prune(ours, count, depth)
        for one, other in zip(found, tree_draft.prune_ref(theirs, count, depth), strict=True):
            assert torch.equal(one, other)


def test_whole_tree_by_kernels_matches_reference(device: torch.device, force_kernels: Callable[[bool], None]) -> None:
    table = torch.randn(4, 2, 3, 40, generator=torch.Generator().manual_seed(2)).mul(2).round().to(device)
    ids = (torch.arange(40, device=device) * 7 + 5).flip(0)

    def run(beams: Beams) -> torch.Tensor:
        assert beams.tokens.shape == (2, 3)
        return table[beams.depth] + beams.tokens[:, :, None] % 3 + beams.origin[:, :, None]

    force_kernels(False)
    wanted = expand(table[0, :, 0], DraftShape(4, 3, 11), run, ids)
    force_kernels(True)
    found = expand(table[0, :, 0], DraftShape(4, 3, 11), run, ids)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert bool(torch.isin(found[0], ids).all())
