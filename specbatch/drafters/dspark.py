"""DSpark drafting: a block is filled in one pass as by DFLASH, then its tokens are chosen one after the other."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specbatch.core.draft_states import DraftStates
from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.base import DraftPlan
from specbatch.drafters.choose import choose_in_turn, takes_argmax
from specbatch.drafters.dflash import Block, DFlashDrafter, DFlashTree, block_plan
from specbatch.drafters.tree import expand_given, likeliest
from specbatch.kernels.sampling.argmax_topk import Scores
from specbatch.memory.kv_cache import KVCache
from specbatch.models.heads.dspark import DSpark, DSparkConfig, SequentialDraft, published_shape

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.weights import Checkpoint, Log


class DSparkDrafter(DFlashDrafter):
    """A DFLASH draft whose Markov head adds to the logits of each row a bias that depends on the token before it. The
    distribution of a draft is therefore the one given the drafts before it."""

    def __init__(self, model: SequentialDraft, cache: KVCache, count: int) -> None:
        super().__init__(model, cache, count)
        self._heads = model

    def _choose(self, step: StepInput, hidden: torch.Tensor, roots: torch.Tensor) -> Proposal:
        model, markov, count = self._heads, self._heads.markov, step.num_drafts
        is_greedy = takes_argmax(step)
        rows, base, state = self._begin(step, hidden, count)

        def scores(place: int, embedded: torch.Tensor) -> Scores:
            nonlocal state
            own, state = markov.own_logits(base[place], embedded, rows[place], state)
            return model.joined(own, greedy=is_greedy)

        return choose_in_turn(
            scores,
            step,
            roots,
            markov.embedding,
            ids=model.ids,
            vocabulary=model.config.vocab_size,
            confidence=partial(model.confidence, rows) if step.needs_confidence and model.has_confidence else None,
        )

    def _begin(
        self, step: StepInput, hidden: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of the rows that draft, by place: hidden states [count, B, H], and logits without bias [count, B, Vd] of this
        rank's tokens. And the state before the first."""
        rows = self._drafting(hidden, count).transpose(0, 1).contiguous()
        return rows, self._heads.own_logits(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]), None


class DSparkTree(DFlashTree, DSparkDrafter):
    """Drafts a tree whose nodes have as children the most likely tokens of the next row given the node's token; with a
    recurrent Markov head, given all tokens on the way to it."""

    def _expand(
        self, step: StepInput, hidden: torch.Tensor, roots: torch.Tensor, states: DraftStates | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model, markov, topk = self._heads, self._heads.markov, self._shape.topk
        rows, base, state = self._begin(step, hidden, self._shape.steps)

        def children(depth: int, tokens: torch.Tensor, origin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal state
            batch, width = tokens.shape
            if state is not None:  # [B * nodes before, rank]: each node continues from that of its parent
                state = state.unflatten(0, (batch, -1))
                state = state.gather(1, origin[:, :, None].expand(-1, -1, state.shape[2])).flatten(0, 1)
            embedded = F.embedding(tokens.flatten(), markov.embedding)
            own, read = (part[depth].repeat_interleave(width, 0) for part in (base, rows))
            own, state = markov.own_logits(own, embedded, read, state)
            logits = model.joined(own, greedy=False)
            assert isinstance(logits, torch.Tensor)
            return likeliest(logits.unflatten(0, (batch, width)), topk, model.ids, states)

        return expand_given(roots, self._shape, children, states)


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is a published checkpoint, or with load_format "dummy" random weights: draft="dummy" has the shape of
    published drafts. Raises SpecbatchError if the draft does not fit the target.
    """
    return block_plan(target, config, log, Block(DSparkConfig, DSpark, DSparkDrafter, published_shape, DSparkTree))
