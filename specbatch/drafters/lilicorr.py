"""LiLiCorr drafting: a block is filled in one pass as by DFLASH, then a path through its likeliest tokens is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specbatch.core.attention_metadata import PrefillMetadata
from specbatch.core.device_batch import DeviceBatch
from specbatch.core.draft_states import DraftStates
from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.base import DraftPlan
from specbatch.drafters.choose import DraftChain
from specbatch.drafters.dflash import Block, DFlashDrafter, DFlashTree, block_plan
from specbatch.drafters.dflash2 import likeliest_candidates
from specbatch.drafters.tree import expand_given
from specbatch.memory.kv_cache import KVCache
from specbatch.models.decoder import Features
from specbatch.models.heads.dflash2 import spread
from specbatch.models.heads.lilicorr import LiLiCorr, LiLiCorrConfig, published_shape

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.weights import Checkpoint, Log


class LiLiCorrDrafter(DFlashDrafter):
    """A DFLASH draft whose head scores each of the most likely tokens of a row after each of those of the row before.
    The distribution of a draft is the one over these candidates, given the draft before it. The head also reads the
    target's features at the newest verified position, which are kept for each slot of the batch."""

    def __init__(self, model: LiLiCorr, cache: KVCache, count: int) -> None:
        super().__init__(model, cache, count)
        self._network = model
        self._anchors = torch.empty(0)

    def reserve(self, slots: int) -> None:
        like = self._network.block.embedding
        self._anchors = torch.zeros(slots, like.shape[1], dtype=like.dtype, device=like.device)

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        super().prefill(batch, metadata, features)
        self._keep(metadata.slots[metadata.last], features, metadata.last)

    def update(self, step: StepInput, features: Features, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        super().update(step, features, accepted, path)
        assert features.aux is not None
        first = torch.arange(len(accepted), device=accepted.device) * (len(features.aux) // len(accepted))
        self._keep(step.slots, features, first + accepted)

    def _keep(self, slots: torch.Tensor, features: Features, rows: torch.Tensor) -> None:
        """Keep the features of `rows` int64 [n] for `slots` int64 [n]."""
        assert features.aux is not None
        self._anchors[slots] = self._network.anchors(features.aux[rows])

    def _choose(self, step: StepInput, hidden: torch.Tensor, roots: torch.Tensor) -> Proposal:
        vocabulary = self._network.config.vocab_size
        candidates, scores = self._lattice(step, hidden)
        chain = DraftChain(step, ids=None, vocabulary=vocabulary)
        before = torch.zeros_like(roots)[:, None]
        for place in range(step.num_drafts):
            known = candidates[:, place]
            tokens = chain.choose(spread(_after(scores[:, place], before)[:, 0], known, vocabulary))
            before = _places(known, tokens[:, None])
        return chain.proposal()

    def _lattice(self, step: StepInput, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`LiLiCorr.lattice` of the whole block, as each score depends on all candidates, also where fewer rows
        draft."""
        count = self._rows - 1
        logits = self._scores(hidden, count, greedy=False)
        assert isinstance(logits, torch.Tensor)
        return self._network.lattice(logits, self._drafting(hidden, count), self._anchors[step.slots])


class LiLiCorrTree(DFlashTree, LiLiCorrDrafter):
    """Drafts a tree whose nodes have as children the candidates of the next row that score best after the node's
    token."""

    def _expand(
        self, step: StepInput, hidden: torch.Tensor, roots: torch.Tensor, states: DraftStates | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        candidates, scores = self._lattice(step, hidden)

        def children(depth: int, tokens: torch.Tensor, origin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            before = _places(candidates[:, depth - 1], tokens) if depth else torch.zeros_like(tokens)
            return likeliest_candidates(
                _after(scores[:, depth], before), candidates[:, depth], self._shape.topk, states
            )

        return expand_given(roots, self._shape, children, states)


def _places(candidates: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Where tokens int64 [B, W] are among candidates int64 [B, K]: int64 [B, W]; 0 for others, as a grammar may force
    one."""
    return (candidates[:, None] == tokens[..., None]).int().argmax(-1)


def _after(scores: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Of scores [B, K, K], those after the candidates `before` int64 [B, W]: [B, W, K]."""
    return scores.gather(1, before[..., None].expand(-1, -1, scores.shape[2]))


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is a published checkpoint, or with load_format "dummy" random weights: draft="dummy" has the shape of
    published drafts. Raises SpecbatchError if the draft does not fit the target.
    """
    parts = Block(LiLiCorrConfig, LiLiCorr, LiLiCorrDrafter, published_shape, LiLiCorrTree)
    return block_plan(target, config, log, parts)
