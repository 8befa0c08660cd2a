"""STANDALONE: a second, smaller model of the same vocabulary drafts a chain token by token."""

from __future__ import annotations

import torch

from specbatch.batch import DeviceBatch
from specbatch.context import Prefill, Verify
from specbatch.drafters.base import NoDraft, Step
from specbatch.kernels.sampling import DRAFT, draw_ref
from specbatch.memory.kv_cache import KVCache
from specbatch.models.llama import Llama
from specbatch.verification import Proposal


class Standalone(NoDraft):
    """The draft has its own KV cache under the target's page numbers.

    A verify that accepts every draft leaves the last of them without draft KV. The first pass of each iteration
    therefore runs two rows, the newest committed token and the root: what is there already is written again.
    """

    def __init__(self, model: Llama, cache: KVCache, count: int, vocabulary: int) -> None:
        self._model = model
        self._cache = cache
        self._count = count
        self._vocabulary = vocabulary  # of the target; the draft's may be padded further

    def prefill(self, batch: DeviceBatch, shape: Prefill, hidden: torch.Tensor) -> None:
        tokens = batch.tokens[shape.rows, shape.positions]
        self._model.forward(tokens, shape.positions, shape.on(self._cache))

    def propose(self, step: Step) -> Proposal:
        pair = step.lengths[:, None] + torch.arange(-1, 1, device=step.lengths.device)
        tokens = step.batch.tokens[step.rows[:, None], pair]
        start = step.lengths - 1
        drafts, laws = [], []
        for _ in range(self._count):
            shape = Verify(step.page_table, start, tokens.shape[1], step.page_size)
            hidden = self._model.forward(tokens.flatten(), shape.positions, shape.on(self._cache))
            newest = hidden.view(len(step.rows), tokens.shape[1], -1)[:, -1]
            logits = self._fit(self._model.logits(newest))
            start = start + tokens.shape[1]
            if step.sampling.sampled:
                law = step.sampling.probabilities(logits[:, None])
                tokens = draw_ref(law, step.sampling.coins(start[:, None], DRAFT))
                laws.append(law)
            else:
                tokens = logits.argmax(-1, keepdim=True)
            drafts.append(tokens)
        return Proposal(
            torch.cat(drafts, 1),
            torch.full_like(step.lengths, self._count),
            torch.cat(laws, 1) if laws else None,
        )

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Give the draft's logits [B, Vd] the target's width: tokens it does not know have probability 0."""
        missing = self._vocabulary - logits.shape[-1]
        if missing <= 0:
            return logits[:, : self._vocabulary]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
