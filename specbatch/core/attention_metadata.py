"""Attention metadata of one forward pass: which tokens it computes, and where their keys, values and states are.

It is built once per pass. `bind` joins it to a model's cache; the result is what the layers call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from specbatch.core.async_copy import upload
from specbatch.core.embedded_prompt import EmbeddingOverrides
from specbatch.kernels import dispatch
from specbatch.kernels.attention.paged_attention import (
    attention_bias,
    attention_mask,
    paged_attention_ref,
    write_kv_ref,
)
from specbatch.kernels.attention.qkv import QKVLayout, split_qkv_rope, split_qkv_rope_ref
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.recurrent.state_replay import StateReplay
from specbatch.memory.kv_cache import KVCache
from specbatch.memory.page_pool import pages_for


class RecurrentOp(Protocol):
    """The part of a recurrent layer that reads and writes its state: named tensors, indexed by slot."""

    def prompt(self, projected: torch.Tensor, state: dict[str, torch.Tensor], spans: RaggedBatch) -> torch.Tensor:
        """A prefill pass over projected [T, width]: [T, mixed]. Writes the state after the last token of each span."""
        ...

    def verify(self, projected: torch.Tensor, state: dict[str, torch.Tensor], replay: StateReplay) -> torch.Tensor:
        """A verify; the state stays what it was before the pass (see `kernels.recurrent`)."""
        ...


class AttentionContext(Protocol):
    """What layers call in a forward pass over T tokens to reach the cache."""

    def attend(self, layer: int, qkv: torch.Tensor, heads: QKVLayout, positions: torch.Tensor) -> torch.Tensor:
        """Split qkv [T, (heads + 2 kv_heads) * head_dim], rotate to `positions` [T], store keys and values, attend ->
        [T, heads * head_dim]. layer: index among the attention layers."""
        ...

    def recur(self, layer: int, projected: torch.Tensor, mixer: RecurrentOp) -> torch.Tensor:
        """Run a recurrent layer on projected [T, width] -> [T, mixed]. layer: index among the recurrent layers."""
        ...


def positions_from(start: torch.Tensor, count: int) -> torch.Tensor:
    """start [B] -> `count` consecutive positions from each: int64 [B, count]."""
    return start[:, None] + torch.arange(count, device=start.device)


class Mask(NamedTuple):
    """Which keys the queries of a decode pass see in one layer: all keys from before the pass, and of the pass itself
    those up to their own, or all if not `causal`. With a `window`, only keys less than that many positions back."""

    causal: bool = True
    window: int | None = None


class DecodeMetadata:
    """A decode or verify pass: `num_queries` tokens for each of B sequences (1 is plain decoding).

    page_table   int64 [R, P], of all slots
    slots        int64 [B]: the slot of each sequence
    lengths      int64 [B]: KV length before the pass. Query i is stored at key lengths + i, which in a chain is its
                 position too
    bound        no KV is longer than this after the pass (None: as long as the page table allows)
    ancestors    int64 [B, num_queries], for a tree: bit j of a query's word is set if it sees key lengths + j
    first_node   a tree may be computed in several passes: so many of its nodes are in the cache already, and query i is
                 stored at key lengths + first_node + i
    masks        one per layer, where a chain is not plainly causal

    Rejected tokens are computed too; later passes overwrite their keys and values before anything reads them.
    """

    def __init__(
        self,
        page_table: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        num_queries: int,
        page_size: int,
        bound: int | None = None,
        ancestors: torch.Tensor | None = None,
        first_node: int = 0,
        masks: tuple[Mask, ...] | None = None,
    ) -> None:
        self.page_table = page_table
        self.slots = slots
        self.lengths = lengths
        self.num_queries = num_queries
        self.page_size = page_size
        self.bound = page_table.shape[1] * page_size if bound is None else bound
        self.ancestors = ancestors
        self.first_node = first_node
        self.masks = masks

    def mask(self, layer: int) -> Mask:
        return Mask() if self.masks is None else self.masks[layer]

    def bind(self, cache: KVCache) -> AttentionContext:
        return _DecodeKernels(self, cache) if dispatch.runs_kernels(self.lengths) else _DecodeRef(self, cache)


@dataclass(frozen=True)
class _DecodeKernels:
    metadata: DecodeMetadata
    cache: KVCache

    def attend(self, layer: int, qkv: torch.Tensor, heads: QKVLayout, positions: torch.Tensor) -> torch.Tensor:
        from specbatch.kernels.attention.verify_attention_triton import verify_attention

        metadata, k_cache, v_cache = self.metadata, self.cache.k[layer], self.cache.v[layer]
        sequences = (metadata.page_table, metadata.slots, metadata.lengths, metadata.num_queries)
        if metadata.ancestors is None:  # positions follow from the lengths
            causal, window = metadata.mask(layer)
            return verify_attention(qkv, heads, k_cache, v_cache, *sequences, causal=causal, window=window)
        ancestors, first = metadata.ancestors, metadata.first_node
        return verify_attention(
            qkv, heads, k_cache, v_cache, *sequences, positions=positions, ancestors=ancestors, first=first
        )

    def recur(self, layer: int, projected: torch.Tensor, mixer: RecurrentOp) -> torch.Tensor:
        return _verify_recurrent(self.metadata, self.cache, layer, projected, mixer)


class _DecodeRef:
    def __init__(self, metadata: DecodeMetadata, cache: KVCache) -> None:
        size, count = metadata.page_size, metadata.num_queries
        self._table = metadata.page_table[metadata.slots, : pages_for(metadata.bound, size)]
        keys = positions_from(metadata.lengths + metadata.first_node, count)
        self._kv_slots = (self._table.gather(1, keys // size) * size + keys % size).flatten()
        most = self._table.shape[1] * size

        def bias(mask: Mask) -> torch.Tensor:
            tree = (metadata.ancestors, metadata.first_node)
            seen = attention_mask(metadata.lengths, count, most, *tree, causal=mask.causal, window=mask.window)
            return attention_bias(seen, cache.group, cache.dtype)

        self._biases = {mask: bias(mask) for mask in set(metadata.masks or (Mask(),))}
        self._metadata = metadata
        self._cache = cache

    def attend(self, layer: int, qkv: torch.Tensor, heads: QKVLayout, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = split_qkv_rope_ref(qkv, heads, positions)
        k_cache, v_cache = self._cache.k[layer], self._cache.v[layer]
        write_kv_ref(k, v, k_cache, v_cache, self._kv_slots)
        queries, bias = q.unflatten(0, (-1, self._metadata.num_queries)), self._biases[self._metadata.mask(layer)]
        return paged_attention_ref(queries, k_cache, v_cache, self._table, bias).flatten(0, 1).flatten(1)

    def recur(self, layer: int, projected: torch.Tensor, mixer: RecurrentOp) -> torch.Tensor:
        return _verify_recurrent(self._metadata, self._cache, layer, projected, mixer)


def _verify_recurrent(
    metadata: DecodeMetadata, cache: KVCache, layer: int, projected: torch.Tensor, mixer: RecurrentOp
) -> torch.Tensor:
    assert cache.states is not None
    return mixer.verify(projected, cache.states.layers[layer], cache.states.replay(metadata.slots, metadata.ancestors))


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
    for slot, start, end in ((chunk.slot, chunk.start, chunk.end) for chunk in chunks):
        while start < end:
            count = min(left, end - start)
            part.append(PromptChunk(slot, start, start + count))
            start, left = start + count, left - count
            if not left:
                yield part
                part, left = [], most
    if part:
        yield part


class PrefillMetadata:
    """A prefill pass: prompt chunks of several sequences, concatenated to T tokens. The host knows their bounds.

    spans      the chunks as a ragged batch
    positions  int64 [T]
    slots      int64 [T]: the slot of each token's sequence
    kv_slots   int64 [T]: where its key and value go, page * page_size + offset
    last       int64 [chunks]: index among the T of each chunk's last token
    """

    def __init__(self, page_table: torch.Tensor, chunks: list[PromptChunk], page_size: int) -> None:
        """page_table: int64 [R, P], of all slots."""
        starts, ends = [chunk.start for chunk in chunks], [chunk.end for chunk in chunks]
        self.spans = RaggedBatch(starts, ends, [chunk.slot for chunk in chunks], page_table, page_size)
        counts = self.spans.counts
        shift = np.subtract(self.spans.starts, self.spans.offsets[:-1])  # from a token's index to its position
        positions = np.arange(self.spans.offsets[-1]) + np.repeat(shift, counts)
        # Kernels take the positions: in the first row they begin at an aligned address for any T, so that no pass makes
        # Triton compile a kernel again.
        self.positions, self.slots = upload(
            np.stack([positions, np.repeat(self.spans.rows, counts)]), page_table.device
        )
        self.kv_slots = page_table[self.slots, self.positions // page_size] * page_size + self.positions % page_size
        self.last = self.spans.table[3, 1:] - 1
        self._embedded = [pair for pair in zip(chunks, self.spans.offsets, strict=False) if pair[0].embeddings]

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


@dataclass(frozen=True)
class _PrefillContext:
    metadata: PrefillMetadata
    cache: KVCache

    def attend(self, layer: int, qkv: torch.Tensor, heads: QKVLayout, positions: torch.Tensor) -> torch.Tensor:
        # All keys first: a sequence may read a page that another one of this very pass fills.
        cache, kv_slots = self.cache, self.metadata.kv_slots
        q, k, v = split_qkv_rope(qkv, heads, positions, kv_slots, cache.k[layer], cache.v[layer])
        return cache.attention(q, k, v, cache.k[layer], cache.v[layer], self.metadata.spans).flatten(1)

    def recur(self, layer: int, projected: torch.Tensor, mixer: RecurrentOp) -> torch.Tensor:
        assert self.cache.states is not None
        return mixer.prompt(projected, self.cache.states.layers[layer], self.metadata.spans)
