"""XPress drafting: a block is filled in one pass as by DFLASH, then a few passes of a refiner choose all of its tokens.

A sampled draft has the distribution of the last pass, which depends on tokens of the pass before it. Each of those
depends only on the random numbers of the rows up to its own, and a draft is drawn with a number of its own row in every
pass. Given the drafts before it, a draft is therefore a sample of its distribution, also where more passes would change
it: rejection sampling is exact after any number of passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.base import DraftPlan
from specbatch.drafters.choose import choose_at_once, guess, takes_argmax
from specbatch.drafters.dflash import Block, block_plan
from specbatch.drafters.dspark import DSparkDrafter, DSparkTree
from specbatch.kernels.sampling.argmax_topk import Scores
from specbatch.memory.kv_cache import KVCache
from specbatch.models.heads.xpress import XPress, XPressConfig, published_shape

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.weights import Checkpoint, Log


class XPressDrafter(DSparkDrafter):
    """A DFLASH draft whose refiner adds to the logits of each row a bias that depends on the tokens before it. Where
    logits are adjusted, as by a grammar, the tokens are chosen one after the other."""

    def __init__(self, model: XPress, cache: KVCache, count: int) -> None:
        super().__init__(model, cache, count)
        self._network = model

    def _choose(self, step: StepInput, hidden: torch.Tensor, roots: torch.Tensor) -> Proposal:
        if step.sampling.adjustments is not None:
            return super()._choose(step, hidden, roots)
        model, refiner, count = self._network, self._network.refiner, step.num_drafts
        is_greedy, shape = takes_argmax(step), (len(hidden), count)
        base = model.own_logits(self._drafting(hidden, count).flatten(0, 1))
        fixed = refiner.fixed(hidden)[:, : count + 1]
        known = torch.stack([_before(step), roots], 1)

        def scores(own: torch.Tensor) -> Scores:
            found: Scores = model.joined(own, greedy=is_greedy).unflatten(0, shape)
            return found

        def refined(tokens: torch.Tensor) -> Scores:
            x = model.places(fixed, torch.cat([known, tokens[:, :-1]], 1))
            return scores(refiner.refined(base.clone(), refiner.latents(x, 1).flatten(0, 1)))

        tokens = guess(scores(base), step)
        for _ in range(min(model.passes, count) - 1):
            tokens = guess(refined(tokens), step)
        return choose_at_once(refined(tokens), step, ids=None, vocabulary=model.config.vocab_size)

    def _begin(
        self, step: StepInput, hidden: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        _rows, base, _state = super()._begin(step, hidden, count)
        fixed = self._network.refiner.fixed(hidden).transpose(0, 1)
        anchor = self._network.places(fixed[0], _before(step))
        return fixed[1 : count + 1].contiguous(), base, anchor


class XPressTree(DSparkTree, XPressDrafter):
    """Drafts a tree whose nodes have as children the most likely tokens of the next row given all tokens on the way to
    the node: the refiner runs once per level."""


def _before(step: StepInput) -> torch.Tensor:
    """The token before each root, int64 [B]."""
    return step.batch.tokens[step.slots, step.lengths - 1]


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is a published checkpoint, or with load_format "dummy" random weights: draft="dummy" has the shape of
    published drafts. Raises SpecbatchError if the draft does not fit the target.
    """
    return block_plan(target, config, log, Block(XPressConfig, XPress, XPressDrafter, published_shape, XPressTree))
