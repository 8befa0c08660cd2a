"""The device program of one iteration: draft -> verify -> accept -> commit.

It reads and writes device tensors only, never branches on a device value and never waits: v1, v2 and the baseline run
it alike.
"""

from __future__ import annotations

import torch

from specbatch.drafters.base import Drafter, Step
from specbatch.memory.kv_cache import KVCache
from specbatch.models.llama import Llama
from specbatch.verification import logprobs_of, settle


class Iteration:
    """One verify of `rows` = drafted tokens + 1 query rows for each running request."""

    def __init__(self, model: Llama, cache: KVCache, drafter: Drafter, simulate: float | None = None) -> None:
        self._model = model
        self._cache = cache
        self._drafter = drafter
        self._simulate = simulate  # a mean accept length, for benchmarks

    def __call__(self, step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Advance the rows of `step` by what they accept.

        Returns int64 [B, N + 3]: N tokens, then accepted, drafted and sound; and float32 [B, N] logprobs or None.
        """
        batch, lengths = step.batch, step.lengths
        proposal = self._drafter.propose(step)
        rows = proposal.tokens.shape[1] + 1
        tokens, positions = batch.stage(step.rows, lengths, proposal.tokens)

        shape = step.verify(lengths, rows)
        features = self._model.forward(tokens, positions, shape.on(self._cache))
        logits = self._model.logits(features.last).unflatten(0, (-1, rows))

        packed = settle(logits, proposal, batch, step.rows, lengths, step.sampling, self._simulate)
        self._drafter.absorb(step, features, packed[:, rows])
        return packed, logprobs_of(logits, packed[:, :rows]) if step.sampling.needs.logprobs else None
