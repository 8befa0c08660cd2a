"""Prefill: prompt chunks through target and drafter, and the first token of prompts that are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from specbatch.core.attention_metadata import PrefillMetadata, PromptChunk, split_into_passes
from specbatch.core.device_batch import DeviceBatch
from specbatch.core.logit_adjustments import History, adjusted_logits
from specbatch.core.sampling import SamplingFlags
from specbatch.drafters.base import Drafter
from specbatch.engine.device.acceptance import are_finite, with_logprobs
from specbatch.engine.device.host_masks import MaskUpload, with_masks
from specbatch.engine.device.score_step import target_logprobs
from specbatch.kernels.common.upload import upload
from specbatch.kernels.gemm.quantized.fp8_activations import use_fp8_activations
from specbatch.kernels.sampling.rng import TARGET
from specbatch.memory.recurrent_state import RecurrentStates
from specbatch.models.decoder import Decoder
from specbatch.runtime.cuda_graphs import Result
from specbatch.runtime.prefill_forward import Forward


@dataclass(frozen=True)
class PrefillWork:
    """One prefill pass, as plain data.

    ending  indices of the chunks that complete their prompts
    loads   (cached state, slot): recurrent states that requests start from
    saves   (slot, cached state): recurrent states to store after the pass
    flags   of the requests whose prompts are complete
    scored  (token of the pass, the token after it), ascending: prompt tokens whose log-probabilities are asked for
    drafts  whether the drafter runs, too; else it catches up before it drafts for these requests
    masks   of requests with a grammar on the host, whose prompts are complete; None if there are none
    """

    chunks: list[PromptChunk]
    ending: list[int]
    loads: list[tuple[int, int]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)
    flags: SamplingFlags = field(default_factory=SamplingFlags)
    scored: list[tuple[int, int]] = field(default_factory=list)
    drafts: bool = True
    masks: MaskUpload | None = None


class Prefilled(NamedTuple):
    """What a pass returns.

    first            of prompts that are now complete: int64 [B, 2] of first token and finite, and what
                     `PrefillWork.flags` ask for; None if there are none
    prompt_logprobs  float32 [S] for `PrefillWork.scored`; None if there are none
    """

    first: Result | None = None
    prompt_logprobs: torch.Tensor | None = None


@dataclass
class PrefillStep:
    """Runs prefill passes over the same model, drafter and batch as `DecodeStep`.

    needs_all_hidden  see `DraftPlan`
    workspace         bytes that the logits of `PrefillWork.scored` may take
    states            of the recurrent layers of target and draft model
    reads_features    whether the drafter catches up with the target's features; see `DraftPlan.catch_up`
    fp8               see `use_fp8_activations`
    on_logits         gets the logits [B, V] after complete prompts
    """

    batch: DeviceBatch
    model: Decoder
    forward: Forward
    drafter: Drafter
    page_size: int
    needs_all_hidden: bool
    workspace: int
    states: Sequence[RecurrentStates] = ()
    reads_features: bool = False
    fp8: bool = False
    on_logits: Callable[[torch.Tensor], None] | None = None

    def __call__(self, work: PrefillWork) -> Prefilled:
        """Compute the chunks. The first tokens of complete prompts are in the batch already."""
        for states in self.states:
            states.load(work.loads)
        result = self._run(work.chunks, work.ending, work.flags, work.scored, drafts=work.drafts, masks=work.masks)
        for states in self.states:
            states.save(work.saves)
        return result

    def catch_up(self, chunks: list[PromptChunk], most: int) -> None:
        """Update the draft state for tokens that were computed without it, up to `most` tokens a pass. Where it needs
        the target's features, the target runs again, and writes the same keys and values."""
        for part in split_into_passes(chunks, most):
            with use_fp8_activations(self.fp8):
                metadata = PrefillMetadata(self.batch.page_table, part, self.page_size, self.batch.tokens)
                if self.reads_features:
                    features = self.forward(metadata, None if self.needs_all_hidden else [])
                    self.drafter.prefill(self.batch, metadata, features)
                else:
                    self.drafter.catch_up(self.batch, metadata)

    def warm_up(self, count: int, prefix: int = 0, ends: int = 1) -> None:
        """Run `count` tokens of the padding slot, so that kernels are compiled for such a pass: after a prefix as far
        as the batch holds both, or else in several chunks. `ends`: as if so many prompts were complete after it."""
        most = self.batch.width - 1
        first = min(count, most)
        start = min(prefix, most - first)
        more = [PromptChunk(0, 0, min(most, count - done)) for done in range(first, count, most)]
        self._run([PromptChunk(0, start, start + first), *more], [0] * ends, SamplingFlags())
        self.batch.lengths[0] = 1  # as it was

    def _run(
        self,
        chunks: list[PromptChunk],
        ending: list[int],
        flags: SamplingFlags,
        scored: Sequence[tuple[int, int]] = (),
        *,
        drafts: bool = True,
        masks: MaskUpload | None = None,
    ) -> Prefilled:
        batch = self.batch
        metadata = PrefillMetadata(batch.page_table, chunks, self.page_size, batch.tokens)
        last = [metadata.spans.offsets[index + 1] - 1 for index in ending]
        read = [*last, *(token for token, _ in scored)]
        with use_fp8_activations(self.fp8):
            features = self.forward(metadata, None if self.needs_all_hidden else read)
            if drafts:
                self.drafter.prefill(batch, metadata, features)
        _, lengths, slots, _ = metadata.spans.table[:, :-1]
        batch.lengths[slots] = lengths
        hidden = features.last[upload(read, batch.device)] if self.needs_all_hidden else features.last
        first = self._sample(hidden[: len(ending)], chunks, ending, metadata, flags, masks) if ending else None
        if not scored:
            return Prefilled(first)
        targets = [(row, token) for row, (_, token) in enumerate(scored)]
        found = [part for part, _ in target_logprobs(self.model, hidden[len(ending) :], targets, self.workspace)]
        return Prefilled(first, torch.cat(found))

    def _sample(
        self,
        hidden: torch.Tensor,
        chunks: list[PromptChunk],
        ending: list[int],
        metadata: PrefillMetadata,
        flags: SamplingFlags,
        masks: MaskUpload | None,
    ) -> Result:
        """The first tokens of complete prompts from their last hidden states [B, H]. ending: the indices of their
        chunks."""
        batch = self.batch
        _, lengths, slots, _ = metadata.spans.table[:, upload(ending, batch.device)]
        sampling = with_masks(batch.sampling(slots, flags), masks)
        logits = self.model.logits(hidden)[:, None]
        if self.on_logits is not None:
            self.on_logits(logits[:, 0])
        chosen_from, constraint = logits, None
        if sampling.adjustments is not None:
            constraint = sampling.adjustments.constraint
            known = batch.tokens[slots, : max(chunks[index].end for index in ending)]
            states = None if constraint is None else constraint.states[:, None]
            chosen_from = adjusted_logits(logits, sampling.adjustments, History(known, lengths), states)
        with sampling.end_tokens_masked(chosen_from, lengths[:, None]):
            first = sampling.sample(chosen_from, lengths[:, None], TARGET)
            finite = are_finite(chosen_from, first, sampling)
        batch.tokens[slots, lengths] = first[:, 0]
        if constraint is not None:
            batch.set_states(slots, constraint.after(constraint.states[:, None], first[:, :1])[:, 0])
        return with_logprobs(torch.stack([first[:, 0], finite.long()], 1), logits, first, flags)
