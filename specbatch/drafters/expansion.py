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
from specbatch.kernels.tree import ancestors_of, bits_of


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


def expand(logits: torch.Tensor, shape: DraftShape, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """A tree of shape.tokens nodes: tokens int64 [B, C] and words of ancestors int64 [B, C + 1], the root's first.

    logits [B, V] are those behind the root; `run` gives those behind each beam, [B, K, V], steps - 1 times.
    """
    steps, topk, count = shape
    bits = bits_of(shape.draft_slots, logits.device)
    scores, tokens = _children(logits[:, None], topk)
    scores, tokens = scores[:, 0], tokens[:, 0]
    origin = torch.zeros_like(tokens)
    words = torch.ones_like(tokens[:, :1])
    # Of all candidates, level by level; the root stands before them as candidate 0.
    all_scores, all_tokens, all_parents = [scores], [tokens], [origin]
    seats, size = origin + torch.arange(1, topk + 1, device=logits.device), 1 + topk
    for depth in range(1, steps):
        first = 1 + (depth - 1) * topk
        words = words.gather(1, origin) | bits[first : first + topk]
        more, children = _children(run(Beams(tokens, origin, words, depth, first)), topk)
        more, children = (more + scores[:, :, None]).flatten(1), children.flatten(1)
        all_scores.append(more)
        all_tokens.append(children)
        all_parents.append(seats.repeat_interleave(topk, 1))
        if depth < steps - 1:
            scores, best = more.topk(topk)
            tokens, origin = children.gather(1, best), best // topk
            seats = best + size
            size += topk * topk
    return _keep(torch.cat(all_scores, 1), torch.cat(all_tokens, 1), torch.cat(all_parents, 1), count, steps)


def _children(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens behind logits [B, K, V] and the logarithms of their probabilities: [B, K, topk] each."""
    wide = logits.float()
    values, tokens = wide.topk(topk)
    # A draft that is no number is worth nothing; the target finds that out by itself.
    return (values - wide.logsumexp(-1, keepdim=True)).nan_to_num(-torch.inf, neginf=-torch.inf), tokens


def _keep(
    scores: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, count: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `count` of candidates [B, P], the best first: among equals the older one, so that parents come before
    children. parents int64 [B, P]: of each, where the root is 0 and candidates follow."""
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    numbers = torch.arange(1, count + 1, device=kept.device).expand_as(kept)
    node = tokens.new_zeros(tokens.shape[0], tokens.shape[1] + 1).scatter_(1, kept + 1, numbers)
    return tokens.gather(1, kept), ancestors_of(node.gather(1, parents.gather(1, kept)), depth)
