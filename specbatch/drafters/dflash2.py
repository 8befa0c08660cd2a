"""DFlash 2 drafting: a block is filled in one pass, then a selector chooses its tokens one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specbatch.core.draft_states import DraftStates
from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.base import DraftPlan
from specbatch.drafters.choose import choose_in_turn
from specbatch.drafters.dflash import Block, DFlashDrafter, DFlashTree, block_plan
from specbatch.drafters.tree import expand_given
from specbatch.kernels.sampling.argmax_topk import topk_logprobs
from specbatch.memory.kv_cache import KVCache
from specbatch.models.heads.dflash2 import DFlash2, DFlash2Config, published_shape

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.weights import Checkpoint, Log


class DFlash2Drafter(DFlashDrafter):
    """A DFLASH draft whose selector chooses each token from the most likely ones of its row, given the token before it.
    The distribution of a draft is therefore the one over these candidates, given the drafts before it."""

    def __init__(self, model: DFlash2, cache: KVCache, count: int) -> None:
        super().__init__(model, cache, count)
        self._selector = model

    def _choose(self, step: StepInput, hidden: torch.Tensor, roots: torch.Tensor) -> Proposal:
        model, candidates = self._selector, self._candidates(hidden, step.num_drafts)

        def scores(place: int, embedded: torch.Tensor) -> torch.Tensor:
            tokens, known, weights = (part[:, place] for part in candidates)
            return model.scores(tokens, known, weights, embedded)

        return choose_in_turn(scores, step, roots, model.predecessors, ids=None, vocabulary=model.config.vocab_size)

    def _candidates(self, hidden: torch.Tensor, count: int) -> list[torch.Tensor]:
        """`DFlash2.candidates` of the rows that draft, each [B, count, ...]."""
        logits = self._scores(hidden, count, greedy=False)
        assert isinstance(logits, torch.Tensor)
        found = self._selector.candidates(logits.flatten(0, 1), self._drafting(hidden, count).flatten(0, 1))
        return [part.unflatten(0, logits.shape[:2]) for part in found]


class DFlash2Tree(DFlashTree, DFlash2Drafter):
    """Drafts a tree whose nodes have as children the candidates of the next row that are most likely after the node's
    token."""

    def _expand(
        self, step: StepInput, hidden: torch.Tensor, roots: torch.Tensor, states: DraftStates | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model, (steps, topk, _) = self._selector, self._shape
        candidates = self._candidates(hidden, steps)

        def children(depth: int, tokens: torch.Tensor, origin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            known, scores, weights = (part[:, depth] for part in candidates)
            embedded = F.embedding(tokens, model.predecessors)
            return likeliest_candidates(model.candidate_scores(known, scores, weights, embedded), known, topk, states)

        return expand_given(roots, self._shape, children, states)


def likeliest_candidates(
    scores: torch.Tensor, candidates: torch.Tensor, topk: int, states: DraftStates | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `tree.likeliest`, of nodes whose children are candidates int64 [B, K] with scores float32 [B, W, K]."""
    if states is not None:
        states.mask(scores, candidates)
    found, places = topk_logprobs(scores, topk)
    return found, candidates[:, None].expand(-1, scores.shape[1], -1).gather(2, places)


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is a published checkpoint, or with load_format "dummy" random weights: draft="dummy" has the shape of
    published drafts. Raises SpecbatchError if the draft does not fit the target.
    """
    return block_plan(target, config, log, Block(DFlash2Config, DFlash2, DFlash2Drafter, published_shape, DFlash2Tree))
