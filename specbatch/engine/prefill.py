"""Prompt processing: chunks of prompts through target and drafter, and the first token of those that end."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specbatch.core.async_copy import upload
from specbatch.core.attention_metadata import PrefillMetadata, PromptChunk, split_into_passes
from specbatch.core.device_batch import DeviceBatch, SamplingFlags
from specbatch.drafters.base import Drafter
from specbatch.drafters.verification import are_finite, logprobs_of
from specbatch.engine.scheduler import PrefillPlan
from specbatch.kernels.gemm.fp8_activations import use_fp8_activations
from specbatch.kernels.sampling.rng import TARGET
from specbatch.memory.recurrent_state import RecurrentStates
from specbatch.models.decoder import Decoder
from specbatch.runtime.cuda_graphs import Result
from specbatch.runtime.prefill_forward import Forward


class PromptPass:
    """Runs planned chunks; knows the same model and drafter as the iteration."""

    def __init__(
        self,
        model: Decoder,
        forward: Forward,
        page_size: int,
        drafter: Drafter,
        *,
        needs_all_hidden: bool,
        states: RecurrentStates | None = None,
        float8: bool = False,
    ) -> None:
        """every: the drafter wants the last features of all tokens; states: of the model's recurrent layers; float8:
        see `use_fp8_activations`."""
        self._model = model
        self._forward = forward
        self._page_size = page_size
        self._drafter = drafter
        self._needs_all_hidden = needs_all_hidden
        self._states = states
        self._float8 = float8
        self.watch: Callable[[torch.Tensor], None] | None = None  # is shown logits [B, V] behind prompts

    def warm(self, batch: DeviceBatch, count: int, prefix: int = 0, ends: int = 1) -> None:
        """Run `count` tokens of the padding row behind a prefix, both as far as a row holds them, so that whatever is
        compiled for such a pass is there. It is as if so many prompts ended in it."""
        most = batch.width - 1
        count = min(count, most)
        start = min(prefix, most - count)
        self._run(batch, [PromptChunk(0, start, start + count)], [0] * ends, SamplingFlags())
        batch.lengths[0] = 1  # as it was

    def __call__(self, batch: DeviceBatch, plan: PrefillPlan) -> Result | None:
        """Compute the chunks of a plan. For those that complete a prompt: int64 [B, 2] of first token and sound, and
        float32 [B, 1] logprobs or None; the tokens are in place on the device. None when no prompt is complete."""
        chunks = plan.chunks
        spans = [PromptChunk(chunk.slot, chunk.start, chunk.end, chunk.request.embeddings) for chunk in chunks]
        ending = [index for index, chunk in enumerate(chunks) if chunk.last]
        if self._states is not None:
            self._states.load(plan.loads)
        result = self._run(batch, spans, ending, SamplingFlags.of(chunks[i].request for i in ending))
        if self._states is not None:
            self._states.save(plan.saves)
        return result

    def catch_up(self, batch: DeviceBatch, spans: list[PromptChunk], chunk: int) -> None:
        """Let the drafter take in positions that iterations without drafts have committed, up to `chunk` a pass."""
        for part in split_into_passes(spans, chunk):
            with use_fp8_activations(self._float8):
                self._drafter.catch_up(batch, PrefillMetadata(batch.page_table, part, self._page_size))

    def _run(
        self, batch: DeviceBatch, spans: list[PromptChunk], ending: list[int], flags: SamplingFlags
    ) -> Result | None:
        """ending: the spans whose prompts are then complete."""
        metadata = PrefillMetadata(batch.page_table, spans, self._page_size)
        ends = upload(ending, batch.device)
        last = metadata.last[ends]
        tokens = batch.tokens[metadata.slots, metadata.positions]
        with use_fp8_activations(self._float8):
            features = self._forward(tokens, metadata, None if self._needs_all_hidden else last)
            self._drafter.prefill(batch, metadata, features)
        if not ending:
            return None
        _, lengths, rows, _ = metadata.spans.table[:, ends]
        sampling = batch.sampling(rows, flags)
        logits = self._model.logits(features.last[last] if self._needs_all_hidden else features.last)[:, None]
        if self.watch is not None:
            self.watch(logits[:, 0])
        first = sampling.choose(logits, lengths[:, None], TARGET)
        batch.tokens[rows, lengths] = first[:, 0]
        batch.lengths[rows] = lengths
        sound = are_finite(logits, first, sampling)
        logprobs = logprobs_of(logits, first) if flags.logprobs else None
        return torch.stack([first[:, 0], sound.long()], 1), logprobs
