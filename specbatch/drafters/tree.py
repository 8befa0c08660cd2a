"""Trees of drafts by best-first expansion, as in EAGLE-2 (Li et al. 2024, "EAGLE-2: Faster Inference of Language Models
with Dynamic Draft Trees"): whoever drafts says what may follow a node, and this decides which nodes there are.

Every step gives each of `topk` beams its `topk` likeliest children. The beams of the next step are the best of them by
the probability of the whole text from the root on, and at the end the best of all candidates are kept. A parent is
never less likely than its child and comes first among equals, so whatever is kept has its ancestors.

Children are not drawn, so each is a one-hot proposal: `verification` needs no probabilities. A chain is no case of
this: with one child per node there is nothing to choose from, and drafters follow the likeliest token, or draw it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from specbatch.draft_shape import DraftShape
from specbatch.kernels.drafting import tree_draft
from specbatch.kernels.drafting.tree_draft import Candidates
from specbatch.kernels.sampling.argmax_topk import topk_logprobs


class Beams(NamedTuple):
    """Nodes to run next, K per sequence, `depth` below the root.

    tokens int64 [B, K]; origin int64 [B, K]: the row of the pass before that each is a child of; ancestors int64
    [B, K]: which of the nodes run so far it sees, itself included. Their bits are counted from the root's on, which is
    bit 0: those of this pass are `first`, `first` + 1, ...
    """

    tokens: torch.Tensor
    origin: torch.Tensor
    ancestors: torch.Tensor
    depth: int
    first: int


Run = Callable[[Beams], torch.Tensor]


def expand(
    logits: torch.Tensor, shape: DraftShape, run: Run, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tree of shape.tokens nodes: tokens int64 [B, C] and words of ancestors int64 [B, C + 1], the root's first.

    logits [B, V] are those behind the root; `run` gives those behind each beam, [B, K, V], steps - 1 times. ids int64
    [V]: the token that each column stands for, None if they are the same.
    """
    steps, topk, count = shape
    candidates = Candidates.room(len(logits), topk + (steps - 1) * topk * topk, logits.device)
    level = tree_draft.expand(candidates, *topk_logprobs(logits[:, None], topk, ids), None, start=0, first=1)
    start, first = topk, 1
    for depth in range(1, steps):
        behind = run(Beams(level.tokens, level.origin, level.ancestors, depth, first))
        first += topk
        level = tree_draft.expand(candidates, *topk_logprobs(behind, topk, ids), level, start, first)
        start += topk * topk
    return tree_draft.prune(candidates, count, steps)
