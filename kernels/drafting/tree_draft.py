"""Operations on draft trees: expand one level by the most likely paths, and prune to the best nodes.

Candidates of a sequence are numbered in the order in which they were found, from 1: number 0 is the root. Among equals
the older one comes first. A parent is never less likely than its child and older, so it comes first too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbatch.kernels.dispatch import op
from specbatch.kernels.sampling.tree_verify import ancestor_words, node_bits


class Candidates(NamedTuple):
    """All P of a tree, level by level: logarithms of the probability of their texts float32 [B, P], tokens int64 [B,
    P], and the numbers of their parents int64 [B, P]."""

    scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor

    @property
    def is_cuda(self) -> bool:
        return self.tokens.is_cuda

    @classmethod
    def room(cls, batch: int, count: int, device: torch.device) -> Candidates:
        tokens = torch.empty(batch, count, dtype=torch.int64, device=device)
        return cls(torch.empty(batch, count, device=device), tokens, torch.empty_like(tokens))


class Level(NamedTuple):
    """The K nodes that are run next, [B, K] each: tokens int64; origin int64, the row of the pass before that each is a
    child of; ancestors int64, words of the nodes run so far, itself included; scores float32; numbers int64."""

    tokens: torch.Tensor
    origin: torch.Tensor
    ancestors: torch.Tensor
    scores: torch.Tensor
    numbers: torch.Tensor


def expand_ref(
    candidates: Candidates, scores: torch.Tensor, tokens: torch.Tensor, above: Level | None, start: int, first: int
) -> Level:
    """The level below `above` (None: the root alone): its best K by the probability of the whole text.

    scores float32 [B, W, K] and tokens int64 [B, W, K]: children of each of the W nodes above, given their parent. They
    become candidates `start`, `start` + 1, ... counted from 0. The nodes of the new level are `first` and on.
    """
    batch, width, topk = scores.shape
    if above is None:
        numbers, ancestors = tokens.new_zeros(batch, 1), tokens.new_ones(batch, 1)
    else:
        numbers, ancestors, scores = above.numbers, above.ancestors, scores + above.scores[:, :, None]
    scores, tokens = scores.flatten(1), tokens.flatten(1)
    parents = numbers.repeat_interleave(topk, 1)
    for all_of, new in zip(candidates, (scores, tokens, parents), strict=True):
        all_of[:, start : start + width * topk] = new
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    origin = best // topk
    bits = node_bits(first + topk, scores.device)[first:]
    return Level(
        tokens=tokens.gather(1, best),
        origin=origin,
        ancestors=ancestors.gather(1, origin) | bits,
        scores=scores.gather(1, best),
        numbers=best + start + 1,
    )


def prune_ref(candidates: Candidates, count: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `count` candidates, the best first: tokens int64 [B, count] and words of ancestors int64 [B, count + 1],
    the root's first. None is further than `depth` below the root."""
    scores, tokens, parents = candidates
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    numbers = torch.arange(1, count + 1, device=kept.device).expand_as(kept)
    node = tokens.new_zeros(tokens.shape[0], tokens.shape[1] + 1).scatter_(1, kept + 1, numbers)
    return tokens.gather(1, kept), ancestor_words(node.gather(1, parents.gather(1, kept)), depth)


expand = op(expand_ref, "specbatch.kernels.drafting.tree_draft_triton:expand")
prune = op(prune_ref, "specbatch.kernels.drafting.tree_draft_triton:prune")
