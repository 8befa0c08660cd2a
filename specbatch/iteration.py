"""The device program of one iteration: draft -> verify -> accept -> commit.

It reads and writes device tensors only, never branches on a device value and never waits: v1, v2 and the baseline run
it alike.
"""

from __future__ import annotations

import torch

from specbatch.context import Verify
from specbatch.drafters.base import Drafter, Step
from specbatch.memory.kv_cache import KVCache
from specbatch.models.llama import Llama
from specbatch.verification import verify


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
        root = batch.tokens[step.rows, lengths][:, None]
        proposal = self._drafter.propose(step)
        tokens = torch.cat([root, proposal.tokens], 1)
        rows = tokens.shape[1]

        shape = Verify(step.page_table, lengths, rows, step.page_size)
        hidden = self._model.forward(tokens.flatten(), shape.positions, shape.on(self._cache))
        logits = self._model.logits(hidden).unflatten(0, (-1, rows))

        predicted = lengths[:, None] + torch.arange(1, rows + 1, device=lengths.device)
        verdict = verify(logits, proposal, predicted, step.sampling, self._simulate)

        # All N tokens are written; those beyond the new length are overwritten before anything looks at them.
        batch.tokens[step.rows[:, None], predicted] = verdict.tokens
        batch.lengths[step.rows] = lengths + verdict.accepted + 1
        self._drafter.absorb(step, hidden, verdict.accepted)
        facts = torch.stack([verdict.accepted, proposal.drafted, verdict.sound.long()], 1)
        return torch.cat([verdict.tokens, facts], 1), verdict.logprobs
