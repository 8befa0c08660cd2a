"""Draft trees as in EAGLE-2: a loop over levels, which calls the drafter and `kernels.drafting.tree_draft`.

Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees". The drafter computes logits,
and this module selects the nodes. In every step each of `topk` beams gets its `topk` most likely children. The beams
of the next step are the best of these by the probability of the path from the root, and at the end the best of all
candidates are kept. A parent is never less likely than its child and precedes it among equals, so the ancestors of
every kept node are kept, too.

Children are not sampled, so each is a one-hot proposal, and `verification` needs no probabilities. Chains do not use
this module: they follow the most likely token, or sample it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from specbatch.config.draft_shape import DraftShape
from specbatch.core.draft_states import DraftStates
from specbatch.kernels.drafting import tree_draft
from specbatch.kernels.drafting.tree_draft import Candidates
from specbatch.kernels.sampling.argmax_topk import topk_logprobs


class Beams(NamedTuple):
    """Nodes to run next, K per sequence, `depth` levels below the root.

    tokens     int64 [B, K]
    origin     int64 [B, K]: the row of the previous pass that is the node's parent
    ancestors  int64 [B, K]: bit mask of the nodes run so far that the node attends to, including itself. Bit 0 is the
               root; the nodes of this pass have bits `first`, `first` + 1, ...
    """

    tokens: torch.Tensor
    origin: torch.Tensor
    ancestors: torch.Tensor
    depth: int
    first: int


Run = Callable[[Beams], torch.Tensor]
Children = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def expand_block(scores: torch.Tensor, tokens: torch.Tensor, shape: DraftShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Build a tree as `expand_given` does, where the children of a node depend on its depth alone, as in a block whose
    tokens are independent.

    scores float32 [B, steps, K] and tokens int64 [B, steps, K]: the most likely tokens of each depth, K = shape.topk,
    and the logarithms of their probabilities. The kept nodes are the texts with the largest products, unless more than
    K nodes of one depth have children among these.
    """
    topk = shape.topk
    # [steps, B, K, K]: the same children for each of K nodes.
    below = [part.transpose(0, 1)[:, :, None].expand(-1, -1, topk, -1).contiguous() for part in (scores, tokens)]
    first = scores[:, :1].contiguous(), tokens[:, :1].contiguous()

    def children(depth: int, _: torch.Tensor, __: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (below[0][depth], below[1][depth]) if depth else first

    return expand_given(tokens[:, 0, 0], shape, children)


def expand_rows(
    roots: torch.Tensor, logits: torch.Tensor, shape: DraftShape, ids: torch.Tensor | None, states: DraftStates | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Build a tree as `expand_given` does from logits [B, steps, V] of each depth. ids: see `expand`; states: at the
    roots, for which a node's children depend on the texts to it, too."""
    topk = shape.topk
    if states is None:
        return expand_block(*topk_logprobs(logits, topk, ids), shape)

    def children(depth: int, tokens: torch.Tensor, origin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return likeliest(logits[:, depth, None].repeat(1, tokens.shape[1], 1), topk, ids, states)

    return expand_given(roots, shape, children, states)


def expand_given(
    roots: torch.Tensor, shape: DraftShape, children: Children, states: DraftStates | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Build a tree as `expand` does from nodes that the drafter does not run, so that there may be any number of them.

    roots int64 [B]. `children` is called once per depth from 0 with the depth, and of the W nodes there (the root, then
    the K = shape.topk beams) the tokens int64 [B, W] and the parents' rows in the call before, int64 [B, W]. It returns
    the most likely children of each node: logarithms of their probabilities float32 and tokens int64 [B, W, K]. states:
    at the roots; they are those of the W nodes when `children` is called.
    """
    steps, topk, count = shape
    candidates = Candidates.room(len(roots), topk + (steps - 1) * topk * topk, roots.device)
    found = children(0, roots[:, None], torch.zeros_like(roots[:, None]))
    level = tree_draft.expand(candidates, *found, None, start=0, first=1)
    for depth in range(1, steps):
        if states is not None:
            states.follow(level.tokens, level.origin)
        found = children(depth, level.tokens, level.origin)
        # Words of ancestors among the nodes run so far are of no use here; the same bits serve every depth.
        level = tree_draft.expand(candidates, *found, level, topk + (depth - 1) * topk * topk, first=1)
    return tree_draft.prune(candidates, count, steps)


def likeliest(
    logits: torch.Tensor, topk: int, ids: torch.Tensor | None, states: DraftStates | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely children of nodes with logits [B, W, V], which are adjusted in place, and the logarithms of
    their probabilities."""
    return topk_logprobs(logits if states is None else states.mask(logits, ids), topk, ids)


def expand(
    logits: torch.Tensor,
    shape: DraftShape,
    run: Run,
    ids: torch.Tensor | None = None,
    states: DraftStates | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Build a tree of C = shape.tokens nodes: tokens int64 [B, C] and ancestor masks int64 [B, C + 1], the root's
    first.

    logits [B, V]: the predictions at the root; `run` returns those at each beam, [B, K, V], and is called steps - 1
    times. ids int64 [V]: the token id of each column; None if they are equal. states: at the roots; None if nothing is
    adjusted.
    """
    steps, topk, count = shape
    candidates = Candidates.room(len(logits), topk + (steps - 1) * topk * topk, logits.device)
    level = tree_draft.expand(candidates, *likeliest(logits[:, None], topk, ids, states), None, start=0, first=1)
    start, first = topk, 1
    for depth in range(1, steps):
        children = run(Beams(level.tokens, level.origin, level.ancestors, depth, first))
        if states is not None:
            states.follow(level.tokens, level.origin)
        first += topk
        level = tree_draft.expand(candidates, *likeliest(children, topk, ids, states), level, start, first)
        start += topk * topk
    return tree_draft.prune(candidates, count, steps)
