"""Training of P-EAGLE heads: an EAGLE-3 head that makes all drafts in one pass, in vLLM's layout (parallel drafting).

Hui et al., "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training" (arXiv 2602.01469); vllm-project/speculators and
NeMo Automodel. Step k > 0 of a place reads the embedding of the mask token and fc(mask_hidden), both learned, in place
of a token and the output of step k - 1; as in `training.chain` it attends to the pairs up to its place and to its own
steps. The paper keeps a share 0.7 ** k of the places at step k, to save memory. Here all are computed, and step k has
the loss weight 0.7 ** k. Of the embedding, only the mask token's row is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from specbatch.training.chain import Memory
from specbatch.training.data import Example, frequent, unused_token
from specbatch.training.eagle3 import Eagle3Head, sizes_of
from specbatch.training.recipe import Recipe
from specbatch.training.target import Target

MASK_EMBEDDING = "mask_embedding"


class PEagleHead(Eagle3Head):
    decay = 0.7

    def __init__(self, target: Target, kept: torch.Tensor, *, mask_token: int, seed: int, **sizes: Any) -> None:
        """mask_token: a token that no text contains; the others as for `Eagle3Head`."""
        super().__init__(target, kept, seed=seed, **sizes)
        self._mask_token, self._embedding = mask_token, target.embedding
        generator = torch.Generator().manual_seed(seed + 1)
        size = float(target.embedding.float().square().mean().sqrt())
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features, generator=generator))
        self.mask_embedding = nn.Parameter(torch.randn(self.fc.out_features, generator=generator) * size)
        self.to(target.device)

    def advance(self, embedded: torch.Tensor, hidden: torch.Tensor, memory: Memory) -> torch.Tensor:
        if memory.steps:
            embedded = self.mask_embedding.to(embedded.dtype).expand_as(embedded)
            hidden = self.fc(self.mask_hidden).expand_as(hidden)
        return super().advance(embedded, hidden, memory)

    def config(self) -> dict[str, Any]:
        return super().config() | {"parallel_drafting": True, "ptd_token_id": self._mask_token}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The file holds the target's embedding with the row of the mask token."""
        named = super().tensors()
        embedding = self._embedding.clone()
        embedding[self._mask_token] = named.pop(MASK_EMBEDDING).detach().to(embedding)
        return named | {"embed_tokens.weight": embedding}


def untrained_head(recipe: Recipe, target: Target, train: Sequence[Example], spare_tokens: int) -> PEagleHead:
    """A head whose draft vocabulary is the most frequent tokens of `train`; see `trainer.make_head`."""
    total = target.config.vocab_size
    return PEagleHead(
        target,
        frequent(train, recipe.vocabulary(total), total),
        mask_token=unused_token(train, total, spare_tokens),
        **sizes_of(recipe, target),
    )
