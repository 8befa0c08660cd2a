"""The device program of one iteration: draft -> verify -> accept -> commit.

It reads and writes device tensors only, never branches on a device value and never waits: v1, v2 and the baseline run
it alike.
"""

from __future__ import annotations

import torch

from specbatch.drafters.base import Drafter, Step
from specbatch.memory.kv_cache import KVCache
from specbatch.models.llama import Llama
from specbatch.verification import verify


class Iteration:
    """One verify of `rows` = drafted tokens + 1 query rows for each running request."""

    def __init__(self, model: Llama, cache: KVCache, drafter: Drafter) -> None:
        self._model = model
        self._cache = cache
        self._drafter = drafter

    def __call__(self, step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Advance the rows of `step` by what they accept.

        Returns int64 [B, N + 3]: N tokens, then accepted, drafted and sound; and float32 [B, N] logprobs or None.
        """
        batch, lengths = step.batch, step.lengths
        root = batch.tokens[step.rows, lengths][:, None]
        proposal = self._drafter.propose(step)
        tokens = torch.cat([root, proposal.tokens], 1)
        rows = tokens.shape[1]

        shape = step.verify(lengths, rows)
        hidden = self._model.forward(tokens.flatten(), shape.positions, shape.on(self._cache))
        logits = self._model.logits(hidden).unflatten(0, (-1, rows))

        predicted = lengths[:, None] + torch.arange(1, rows + 1, device=lengths.device)
        verdict = verify(logits, proposal, predicted, step.sampling)

        # All N tokens are written; those beyond the new length are overwritten before anything looks at them.
        batch.tokens[step.rows[:, None], predicted] = verdict.tokens
        # Row 0 is for padding and stays as it is.
        batch.lengths[step.rows] = torch.where(step.rows > 0, lengths + verdict.accepted + 1, lengths)
        self._drafter.absorb(step, hidden, verdict.accepted)
        facts = torch.stack([verdict.accepted, proposal.drafted, verdict.sound.long()], 1)
        return torch.cat([verdict.tokens, facts], 1), verdict.logprobs
