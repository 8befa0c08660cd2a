"""Attention metadata of one forward pass: which tokens it computes, and where their keys, values and states are.

It is built once per pass. `bind` joins it to a model's cache; the result is what the layers call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch

from specbatch.core.embedded_prompt import EmbeddingOverrides
from specbatch.kernels.attention.latent.latent_attention import latent_decode_attention, latent_prefill
from specbatch.kernels.attention.prefill.prompt_inputs import prompt_inputs
from specbatch.kernels.attention.qkv import split_qkv_rope
from specbatch.kernels.attention.queries import (
    AttentionInputs,
    DecodeAttention,
    DecodeQueries,
    LatentLayout,
    Mask,
    PrefillInputs,
    PromptInputs,
    QKVLayout,
)
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.attention.verify.verify_attention import decode_attention
from specbatch.kernels.common.upload import upload
from specbatch.kernels.recurrent.state_replay import StateReplay
from specbatch.memory.kv_cache import KVCache


class RecurrentOp(Protocol):
    """The part of a recurrent layer that reads and writes its state: named tensors, indexed by slot."""

    def prompt(
        self,
        projected: torch.Tensor,
        state: dict[str, torch.Tensor],
        spans: RaggedBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A prefill pass over projected [T, width]: [T, mixed], in `out` if given. Writes the state after the last
        token of each span."""
        ...

    def verify(self, projected: torch.Tensor, state: dict[str, torch.Tensor], replay: StateReplay) -> torch.Tensor:
        """A verify; the state stays what it was before the pass (see `kernels.recurrent`)."""
        ...


class AttentionContext(Protocol):
    """What layers call in a forward pass over T tokens to reach the cache."""

    def attend(self, layer: int, qkv: torch.Tensor, heads: QKVLayout, positions: torch.Tensor) -> torch.Tensor:
        """Split qkv [T, (heads + 2 kv_heads) * head_dim], rotate to `positions` [T], store keys and values, attend ->
        [T, heads * head_dim]. layer: index of its keys and values among those of all layers; with shared ones, qkv is
        [T, heads * head_dim] and nothing is stored."""
        ...

    def recur(self, layer: int, projected: torch.Tensor, mixer: RecurrentOp) -> torch.Tensor:
        """Run a recurrent layer on projected [T, width] -> [T, mixed]. layer: index among the recurrent layers."""
        ...


def positions_from(start: torch.Tensor, count: int) -> torch.Tensor:
    """start [B] -> `count` consecutive positions from each: int64 [B, count]."""
    return start[:, None] + torch.arange(count, device=start.device)


@dataclass(frozen=True)
class DecodeMetadata(DecodeQueries):
    """A decode or verify pass. masks: one per layer, for draft blocks, whose tokens may see later ones; None: all
    layers are causal, each with its own window.

    Rejected tokens are computed too; later passes overwrite their keys and values before anything reads them.
    """

    masks: tuple[Mask, ...] | None = None

    def bind(self, cache: KVCache) -> AttentionContext:
        if cache.has_latents:
            return BoundDecode(self, cache, latent_decode_attention(self))
        return BoundDecode(self, cache, decode_attention(self, self.masks or (Mask(),)))


@dataclass(frozen=True)
class BoundDecode:
    metadata: DecodeMetadata
    cache: KVCache
    attention: DecodeAttention

    def attend(self, layer: int, qkv: torch.Tensor, heads: QKVLayout, positions: torch.Tensor) -> torch.Tensor:
        cache, masks = self.cache, self.metadata.masks
        mask = Mask(window=heads.window) if masks is None else masks[layer]
        return self.attention(AttentionInputs(qkv, heads, positions, *cache.layers[layer]), mask)

    def recur(self, layer: int, projected: torch.Tensor, mixer: RecurrentOp) -> torch.Tensor:
        metadata, states, packed = self.metadata, self.cache.states, self.metadata.packed
        assert states is not None
        rows = projected if packed is None else packed.spread(projected)
        mixed = mixer.verify(rows, states.layers[layer], states.replay(metadata.slots, metadata.ancestors))
        return mixed if packed is None else packed.pack(mixed)


@dataclass(frozen=True)
class PromptChunk:
    """Tokens at positions start..end-1 of the sequence in `slot`, computed in one prefill pass. embeddings: those given
    for the sequence, see `EmbeddedPrompt`."""

    slot: int
    start: int
    end: int
    embeddings: Mapping[int, torch.Tensor] = field(default_factory=dict)


def split_into_passes(chunks: list[PromptChunk], most: int) -> Iterator[list[PromptChunk]]:
    """Group chunks into passes of up to `most` tokens; a chunk that does not fit into what is left is cut."""
    part: list[PromptChunk] = []
    left = most
    for chunk in chunks:
        start, end = chunk.start, chunk.end
        while start < end:
            count = min(left, end - start)
            part.append(replace(chunk, start=start, end=start + count))
            start, left = start + count, left - count
            if not left:
                yield part
                part, left = [], most
    if part:
        yield part


class PrefillMetadata:
    """A prefill pass: prompt chunks of several sequences, concatenated to T tokens. The host knows their bounds.

    spans  the chunks as a ragged batch
    count  T

    Everything else is computed on first use, because each operation delays the first token.
    """

    def __init__(
        self, page_table: torch.Tensor, chunks: list[PromptChunk], page_size: int, tokens: torch.Tensor | None = None
    ) -> None:
        """page_table int64 [R, P], of all slots; tokens int64 [R, W], theirs; None if the forward pass is given
        the tokens."""
        starts, ends = [chunk.start for chunk in chunks], [chunk.end for chunk in chunks]
        self.spans = RaggedBatch(starts, ends, [chunk.slot for chunk in chunks], page_table, page_size)
        self.count = self.spans.offsets[-1]
        self._tokens = tokens
        self._embedded = [pair for pair in zip(chunks, self.spans.offsets, strict=False) if pair[0].embeddings]

    @property
    def has_tokens(self) -> bool:
        return self._tokens is not None

    def inputs_to(self, out: PromptInputs) -> None:
        """Fill `out` [N], N >= T."""
        prompt_inputs(self.spans.table, self.spans.page_table, self.spans.page_size, self._tokens, out)

    @cached_property
    def _inputs(self) -> PromptInputs:
        found = PromptInputs.empty(self.count, self.spans.page_table.device)
        self.inputs_to(found)
        return found

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [T]."""
        assert self.has_tokens, "this metadata has no tokens"
        return self._inputs.tokens

    @property
    def positions(self) -> torch.Tensor:
        """int64 [T]."""
        return self._inputs.positions

    @property
    def slots(self) -> torch.Tensor:
        """int64 [T]: the slot of each token's sequence."""
        return self._inputs.slots

    @property
    def kv_slots(self) -> torch.Tensor:
        """int64 [T]: where its key and value go, page * page_size + offset."""
        return self._inputs.kv_slots

    @cached_property
    def last(self) -> torch.Tensor:
        """int64 [chunks]: index among the T of each chunk's last token."""
        return self.spans.table[3, 1:] - 1

    def embedding_overrides(self, embedding: torch.Tensor, ahead: int = 0) -> EmbeddingOverrides | None:
        """The given embeddings of the pass's tokens, or of those `ahead` positions later, which replace their rows of
        `embedding` [V, width]; None if there are none, or none of that width."""
        places: list[int] = []
        rows: list[torch.Tensor] = []
        for chunk, offset in self._embedded:
            begin, end = chunk.start + ahead, chunk.end + ahead
            for start, values in chunk.embeddings.items():
                first, last = max(begin, start), min(end, start + len(values))
                if first < last and values.shape[1] == embedding.shape[1]:
                    places += range(offset + first - begin, offset + last - begin)
                    rows.append(values[first - start : last - start].to(embedding, non_blocking=True))
        return EmbeddingOverrides(upload(places, embedding.device), torch.cat(rows)) if rows else None

    def bind(self, cache: KVCache) -> AttentionContext:
        return _PrefillContext(self, cache)

    def bind_rows(self, rows: torch.Tensor, cache: KVCache) -> RowsContext | None:
        """The context of the tokens `rows` int64 [n], each as a sequence of its own whose keys are in the cache; None
        for more tokens than chunks, of which several would read the same keys."""
        if len(rows) > len(self.spans.counts):
            return None
        return RowsContext(self, rows, cache)


@dataclass(frozen=True)
class RowsContext:
    """Tokens `rows` int64 [n] of a prefill pass, in the layers that end it: the last one that stores keys, and those
    after it, which attend to stored keys only."""

    prompt: PrefillMetadata
    rows: torch.Tensor
    cache: KVCache

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [n]."""
        return self.prompt.positions[self.rows]

    @cached_property
    def context(self) -> AttentionContext:
        """For layers that attend to stored keys only; made where there is one."""
        spans, slots = self.prompt.spans, self.prompt.slots[self.rows]
        queries = DecodeMetadata(spans.page_table, slots, self.positions, 1, spans.page_size, max(spans.ends))
        return queries.bind(self.cache)

    def attend(self, layer: int, qkv: torch.Tensor, heads: QKVLayout, *, stored: bool) -> torch.Tensor:
        """As `AttentionContext.attend` of all tokens, of which the n rows are returned. stored: whether the keys and
        values of qkv [T, width] are in the cache."""
        if not stored:
            inputs = AttentionInputs(qkv, heads, self.prompt.positions, *self.cache.layers[layer])
            split_qkv_rope(inputs, self.prompt.kv_slots)
        q = qkv[:, : heads.count * heads.dim][self.rows]
        shared = replace(heads, shared=True, k_offset=None)
        return self.context.attend(layer, q, shared, self.positions) if len(q) else q


@dataclass(frozen=True)
class _PrefillContext:
    metadata: PrefillMetadata
    cache: KVCache

    def attend(self, layer: int, qkv: torch.Tensor, heads: QKVLayout, positions: torch.Tensor) -> torch.Tensor:
        # All keys first: a sequence may read a page that another one of this very pass fills.
        kv_slots, spans = self.metadata.kv_slots, self.metadata.spans
        k_cache, v_cache, *scales = self.cache.layers[layer]
        inputs = AttentionInputs(qkv, heads, positions, k_cache, v_cache, *scales)
        if isinstance(heads, LatentLayout):
            return latent_prefill(inputs, kv_slots, spans)
        q, *new = split_qkv_rope(inputs, kv_slots)
        k, v = new if not heads.shared else (None, None)
        prompt = PrefillInputs(q, k, v, k_cache, v_cache, spans, heads.window or 0, None, heads.sinks, *scales)
        return self.cache.attention(prompt).flatten(1)

    def recur(self, layer: int, projected: torch.Tensor, mixer: RecurrentOp) -> torch.Tensor:
        assert self.cache.states is not None
        return mixer.prompt(projected, self.cache.states.layers[layer], self.metadata.spans)
