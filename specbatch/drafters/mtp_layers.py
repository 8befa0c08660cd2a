"""MTP drafting with a layer per depth: layer d of the head makes draft d, from the output of the layer before it.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2; `MultiModuleMTPSpeculator` of vLLM (#48892);
`MtpModel` of transformers. Layer d = 0, 1, ... has keys and values of its own. Its pair at position i is the output of
layer d - 1 there (of the target, for d = 0) and the token t_{i+1+d}. The last d pairs of layer d before a root contain
drafts, which a verify may reject, so the next step computes these pairs again: all layers run over one window, which
begins that many positions earlier.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from specbatch.core.attention_metadata import PrefillMetadata, positions_from
from specbatch.core.device_batch import DeviceBatch
from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.base import no_drafts
from specbatch.drafters.choose import DraftChain
from specbatch.drafters.feature_head import FeatureChain
from specbatch.drafters.head_prefill import attention_of
from specbatch.kernels.attention.qkv import write_keys
from specbatch.kernels.attention.queries import AttentionInputs
from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.elementwise.gather_rows import gather_rows
from specbatch.models.decoder import Features
from specbatch.models.heads.draft_head import DraftHead
from specbatch.models.heads.mtp import MtpHead


class LayerChain(FeatureChain):
    """Drafts a chain of up to `head.depths` tokens, one layer each.

    Per device row it buffers the features of a verify and up to depths - 1 before them; `ready` counts both.
    """

    head: MtpHead

    def __init__(self, head: DraftHead, *how: Any) -> None:
        super().__init__(head, *how)
        assert isinstance(head, MtpHead)
        assert self._shape.steps <= head.depths

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        depths, taken = self.head.depths, self.head.take(features)
        # Tokens after the prompt are not known yet; their pairs are buffered, too, and written again.
        ahead = positions_from(metadata.positions + 1, depths).clamp(max=batch.width - 1)
        self._prefill(batch.tokens[metadata.slots[:, None], ahead].unbind(1), taken, metadata)
        starts, ends, rows, _ = metadata.spans.table[:, :-1]
        count = (ends - starts).clamp(max=depths)
        continues = (starts > 0) & (batch.lengths[rows] == starts)  # after an earlier chunk of this request
        buffered = torch.where(continues, self._ready[rows], 0)
        self._buffer(rows, buffered.minimum(depths - count), taken, metadata.last + 1 - count, count)

    def propose(self, step: StepInput) -> Proposal:
        chain = self.begin_chain(step)
        self._run_layers(step, step.num_drafts + self.head.depths, chain, step.num_drafts)
        return chain.proposal() if step.num_drafts else no_drafts(step)

    def update(self, step: StepInput, features: Features, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        rows, taken = step.slots, self.head.take(features)
        queries = len(taken) // len(rows)
        first = torch.arange(len(rows), device=rows.device) * queries
        self._buffer(rows, self._ready[rows].clamp(max=self.head.depths - 1), taken, first, accepted + 1)

    def shorten(self, step: StepInput) -> None:
        rows, none = step.slots, torch.zeros_like(step.slots)
        self._run_layers(step, self._waiting.shape[1], self.begin_chain(step), 0)
        kept = self._ready[rows].clamp(max=self.head.depths)
        self._buffer(rows, kept, self._waiting[0], none, none)

    def _buffer(
        self, rows: torch.Tensor, kept: torch.Tensor, features: torch.Tensor, first: torch.Tensor, count: torch.Tensor
    ) -> None:
        """Keep the newest `kept` [B] features of rows [B], and after them buffer `count` [B] of features [T, H] from
        index `first` [B] on. What follows these in the buffer is made of leftovers."""
        place = torch.arange(self._waiting.shape[1], device=rows.device)
        is_kept = place < kept[:, None]
        old = (self._ready[rows] - kept)[:, None] + place
        new = (first - kept)[:, None] + place
        self._waiting[rows] = torch.where(
            is_kept[:, :, None],
            self._waiting[rows[:, None], old.clamp(max=len(place) - 1)],
            features[new.clamp(min=0, max=len(features) - 1)],
        )
        # Several rows may be the padding row at once, which stays at length 1.
        self._ready[rows] = torch.where(rows > 0, kept + count, 1)

    def _run_layers(self, step: StepInput, most: int, chain: DraftChain, count: int) -> None:
        """Run all layers over up to `most` buffered pairs per row, and choose a draft by each of the first `count`. The
        other layers only write keys and values."""
        head, cache, batch = self.head, self.cache, step.batch
        due, ready = self._due(step, most), self._ready[step.slots, None]
        # The ignored rows may be beyond the bound of the step.
        bound = min(step.bound + most, batch.page_table.shape[1] * step.page_size)
        metadata = replace(step.decode_metadata(due.start, most), bound=bound)
        attend = attention_of(head, cache, metadata, due.positions)
        assert attend is not None
        # The tokens after each position of the window: those up to the root, then drafts as they are chosen.
        known = positions_from(due.start + 1, most + head.depths - 1).clamp(max=batch.width - 1)
        tokens = batch.tokens[step.slots[:, None], known]
        embedded, hidden = due.embedded, due.hidden
        for depth in range(head.depths):
            if depth:
                embedded = head.embed(tokens[:, depth : depth + most].flatten())
            x, qkv = head.start(depth, embedded, hidden)
            is_last = depth + 1 == head.depths
            if is_last and depth >= count:
                slots = kv_slots(batch.page_table, step.slots.repeat_interleave(most), due.positions, step.page_size)
                inputs = AttentionInputs(qkv, head.heads_of(depth), due.positions, *cache.layers[depth])
                write_keys(inputs, slots)
                break
            attended = attend(depth, qkv, head.heads_of(depth))
            if is_last:
                x, attended = gather_rows(x, attended, due.newest)
            hidden = head.finish(depth, x, attended)
            if depth < count:
                newest = hidden if is_last else hidden[due.newest]
                draft = chain.choose(self.scores(newest, step))
                if not is_last:
                    tokens.scatter_(1, ready + depth, draft[:, None])
