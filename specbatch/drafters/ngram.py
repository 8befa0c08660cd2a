"""NGRAM drafting (prompt lookup): drafts what followed an earlier occurrence of the last few tokens. No draft model.

Trees merge the continuations of several occurrences at their common prefixes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbatch.config.draft_shape import DraftShape
from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.base import DraftPlan, NoDraft, no_drafts
from specbatch.drafters.choose import allowed_drafts
from specbatch.kernels.drafting.ngram import merge_into_tree, ngram_match

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.weights import Checkpoint, Log


class NGram(NoDraft):
    """Looks up suffixes of `longest` to `shortest` tokens in the request's own prompt and output."""

    def __init__(self, shape: DraftShape, shortest: int, longest: int) -> None:
        """shape: `topk` occurrences are followed for `steps` tokens."""
        self._shape = shape
        self._shortest = shortest
        self._longest = longest

    def propose(self, step: StepInput) -> Proposal:
        batch, (steps, texts, count) = step.batch, self._shape
        if texts == 1:
            steps = count = step.num_drafts
        if not count:
            return no_drafts(step)
        sizes = self._longest, self._shortest, steps, texts
        tokens, found = ngram_match(batch.tokens, step.slots, step.lengths, *sizes, step.bound)
        if texts == 1:
            return Proposal(*allowed_drafts(step, tokens[:, 0], found[:, 0] * count))
        tokens, ancestors, drafted = merge_into_tree(tokens, found, count)
        return Proposal(tokens, drafted, ancestors=ancestors)


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """It needs no memory: the tokens are already on the device."""
    asked = config.speculation
    return DraftPlan(lambda *_: NGram(asked.shape, asked.ngram_min, asked.ngram_max), target.config)
