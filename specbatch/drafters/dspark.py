"""DSpark drafting: a block is filled in one pass as by DFLASH, then its tokens are chosen one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specbatch.core.step_input import StepInput
from specbatch.drafters.base import DraftPlan
from specbatch.drafters.choose import choose_in_turn
from specbatch.drafters.dflash import Block, DFlashDrafter, block_plan
from specbatch.kernels.sampling.argmax_topk import Scores
from specbatch.memory.kv_cache import KVCache
from specbatch.models.dspark import DSpark, DSparkConfig, published_shape

if TYPE_CHECKING:
    from specbatch.config import EngineConfig
    from specbatch.weights import Checkpoint, Log


class DSparkDrafter(DFlashDrafter):
    """A DFLASH draft whose Markov head adds to the logits of each row a bias that depends on the token before it. The
    distribution of a draft is therefore the one given the drafts before it."""

    def __init__(self, model: DSpark, cache: KVCache, count: int) -> None:
        super().__init__(model, cache, count)
        self._heads = model

    def _choose(
        self, step: StepInput, hidden: torch.Tensor, roots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        model, markov, count = self._heads, self._heads.markov, step.num_drafts
        is_greedy = not step.sampling.flags.sampled
        rows = hidden[:, self._first_row :][:, :count].transpose(0, 1).contiguous()
        base = model.own_logits(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])  # [count, B, V]
        state: torch.Tensor | None = None

        def scores(place: int, embedded: torch.Tensor) -> Scores:
            nonlocal state
            own, state = markov.own_logits(base[place], embedded, rows[place], state)
            return model.joined(own, greedy=is_greedy)

        vocabulary = model.config.vocab_size
        return choose_in_turn(scores, step, roots, markov.embedding, ids=model.ids, vocabulary=vocabulary)


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is a published checkpoint, or with load_format "dummy" random weights: draft="dummy" has the shape of
    published drafts. Raises SpecbatchError if the draft does not fit the target.
    """
    return block_plan(target, config, log, Block(DSparkConfig, DSpark, DSparkDrafter, published_shape))
