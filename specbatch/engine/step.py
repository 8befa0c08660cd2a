"""The device program of one iteration: draft -> verify -> accept -> commit.

It reads and writes device tensors only, never branches on a device value and never waits: v1, v2 and the baseline run
it alike.
"""

from __future__ import annotations

import torch

from specbatch.core.step_input import StepInput
from specbatch.drafters.base import Drafter
from specbatch.drafters.verification import accept_and_commit, logprobs_of
from specbatch.kernels.gemm.fp8_activations import use_fp8_activations
from specbatch.memory.kv_cache import KVCache
from specbatch.models.decoder import Decoder


class DecodeStep:
    """One verify of `rows` = drafted tokens + 1 query rows for each running request."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        drafter: Drafter,
        simulate: float | None = None,
        *,
        float8: bool = False,
    ) -> None:
        """float8: see `use_fp8_activations`."""
        self._model = model
        self._cache = cache
        self._drafter = drafter
        self._simulate = simulate  # a mean accept length, for benchmarks
        self._float8 = float8

    def __call__(self, step: StepInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Advance the rows of `step` by what they accept.

        Returns int64 [B, N + 3]: N tokens, then accepted, drafted and sound; and float32 [B, N] logprobs or None.
        """
        with use_fp8_activations(self._float8):
            return self._run(step)

    def shorten(self, step: StepInput) -> None:
        """Before an iteration that drafts fewer than the one before: see `Drafter.shorten`."""
        with use_fp8_activations(self._float8):
            self._drafter.shorten(step)

    def _run(self, step: StepInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, lengths = step.batch, step.lengths
        proposal = self._drafter.propose(step)
        rows = proposal.tokens.shape[1] + 1
        tokens, positions = batch.stage(step.slots, lengths, proposal.tokens, proposal.ancestors)

        metadata = step.decode_metadata(lengths, rows, proposal.ancestors)
        features = self._model.forward(tokens, positions, metadata.bind(self._cache))
        logits = self._model.logits(features.last).unflatten(0, (-1, rows))

        places = positions.view(-1, rows)
        packed, path = accept_and_commit(logits, proposal, batch, step.slots, places, step.sampling, self._simulate)
        accepted = packed[:, rows]
        self._cache.commit(batch.page_table, step.slots, lengths, accepted, path)
        self._drafter.update(step, features, accepted, path)
        if not step.sampling.flags.logprobs:
            return packed, None
        if path is not None:
            logits = logits.gather(1, path[:, :, None].expand_as(logits))
        return packed, logprobs_of(logits, packed[:, :rows])
