"""Where layers find their cache or state: the shapes of one forward pass, made once and used by every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from specbatch.core.async_copy import upload
from specbatch.core.embedded_prompt import Given
from specbatch.kernels import dispatch
from specbatch.kernels.attention.paged_attention import attention_bias, paged_attention_ref, visible, write_kv_ref
from specbatch.kernels.attention.qkv import Heads, split_heads, split_heads_ref
from specbatch.kernels.attention.ragged_batch import Spans
from specbatch.memory.kv_cache import KVCache
from specbatch.memory.page_pool import pages_for

if TYPE_CHECKING:
    from specbatch.models.layers import Recurrent


class Context(Protocol):
    """What a layer asks of a forward pass over T tokens."""

    def attend(self, layer: int, qkv: torch.Tensor, heads: Heads, positions: torch.Tensor) -> torch.Tensor:
        """Split qkv [T, (heads + 2 kv_heads) * head_dim], rotate to `positions` [T], store keys and values, attend ->
        [T, heads * head_dim]. layer: which one of those that attend."""
        ...

    def recur(self, layer: int, projected: torch.Tensor, mixer: Recurrent) -> torch.Tensor:
        """What comes out of a recurrent layer's state for projected [T, width]: [T, mixed]. layer: which one of those
        that are recurrent."""
        ...


def chain(lengths: torch.Tensor, rows: int) -> torch.Tensor:
    """Places of `rows` tokens behind lengths [B]: int64 [B, rows]."""
    return lengths[:, None] + torch.arange(rows, device=lengths.device)


class Mask(NamedTuple):
    """What the rows of a pass see in one layer: all keys before the pass, and of its own rows those up to themselves,
    or all if not `causal`. With a `window` only keys less than so many positions behind them."""

    causal: bool = True
    window: int | None = None


class Verify:
    """A few rows per sequence: decoding is a verify with one row.

    page_table int64 [R, P] of all device rows, of which slots int64 [B] names the sequences'; lengths int64 [B]: KV
    length before the pass; `rows` per sequence: row i at key lengths + i, in a chain its position too. No KV is longer
    than `bound` after it (None: than the page table). Rejected rows are computed and never looked at again.

    ancestors int64 [B, rows]: a tree, whose rows see of the keys from lengths on those with a bit in their word (bit j:
    key lengths + j). A tree may be computed in several passes: `first` of its nodes are then in the cache, and row i
    stands at key lengths + first + i. masks: one for each layer, where rows without ancestors are no plain chain.
    """

    def __init__(
        self,
        page_table: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        rows: int,
        page_size: int,
        bound: int | None = None,
        ancestors: torch.Tensor | None = None,
        first: int = 0,
        masks: tuple[Mask, ...] | None = None,
    ) -> None:
        self.page_table = page_table
        self.slots = slots
        self.lengths = lengths
        self.rows = rows
        self.page_size = page_size
        self.bound = page_table.shape[1] * page_size if bound is None else bound
        self.ancestors = ancestors
        self.first = first
        self.masks = masks

    def mask(self, layer: int) -> Mask:
        return Mask() if self.masks is None else self.masks[layer]

    def on(self, cache: KVCache) -> Context:
        return _VerifyKernel(self, cache) if dispatch.runs_kernels(self.lengths) else _VerifyRef(self, cache)


@dataclass(frozen=True)
class _VerifyKernel:
    shape: Verify
    cache: KVCache

    def attend(self, layer: int, qkv: torch.Tensor, heads: Heads, positions: torch.Tensor) -> torch.Tensor:
        from specbatch.kernels.attention.verify_attention import verify_attention

        shape, k_cache, v_cache = self.shape, self.cache.k[layer], self.cache.v[layer]
        where = (shape.page_table, shape.slots, shape.lengths, shape.rows)
        if shape.ancestors is None:  # positions follow from the lengths
            causal, window = shape.mask(layer)
            return verify_attention(qkv, heads, k_cache, v_cache, *where, causal=causal, window=window)
        return verify_attention(
            qkv, heads, k_cache, v_cache, *where, positions=positions, ancestors=shape.ancestors, first=shape.first
        )

    def recur(self, layer: int, projected: torch.Tensor, mixer: Recurrent) -> torch.Tensor:
        return _verify_state(self.shape, self.cache, layer, projected, mixer)


class _VerifyRef:
    def __init__(self, shape: Verify, cache: KVCache) -> None:
        size = shape.page_size
        self._table = shape.page_table[shape.slots, : pages_for(shape.bound, size)]
        places = chain(shape.lengths + shape.first, shape.rows)
        self._places = (self._table.gather(1, places // size) * size + places % size).flatten()
        keys = self._table.shape[1] * size

        def bias(mask: Mask) -> torch.Tensor:
            seen = visible(
                shape.lengths, shape.rows, keys, shape.ancestors, shape.first, causal=mask.causal, window=mask.window
            )
            return attention_bias(seen, cache.group, cache.dtype)

        self._biases = {mask: bias(mask) for mask in set(shape.masks or (Mask(),))}
        self._shape = shape
        self._cache = cache

    def attend(self, layer: int, qkv: torch.Tensor, heads: Heads, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = split_heads_ref(qkv, heads, positions)
        k_cache, v_cache = self._cache.k[layer], self._cache.v[layer]
        write_kv_ref(k, v, k_cache, v_cache, self._places)
        rows, bias = q.unflatten(0, (-1, self._shape.rows)), self._biases[self._shape.mask(layer)]
        return paged_attention_ref(rows, k_cache, v_cache, self._table, bias).flatten(0, 1).flatten(1)

    def recur(self, layer: int, projected: torch.Tensor, mixer: Recurrent) -> torch.Tensor:
        return _verify_state(self._shape, self._cache, layer, projected, mixer)


def _verify_state(shape: Verify, cache: KVCache, layer: int, projected: torch.Tensor, mixer: Recurrent) -> torch.Tensor:
    assert cache.states is not None
    return mixer.verify(projected, cache.states.layers[layer], cache.states.fold(shape.slots, shape.ancestors))


@dataclass(frozen=True)
class Span:
    """One sequence's part of a prefill: tokens at positions start..end-1, on device row `slot`. embeddings: of the
    sequence, see `EmbeddedPrompt`."""

    slot: int
    start: int
    end: int
    embeddings: Mapping[int, torch.Tensor] = field(default_factory=dict)


def in_passes(spans: list[Span], most: int) -> Iterator[list[Span]]:
    """Spans in prompt passes of up to `most` tokens; one that is longer than what is left is cut."""
    part: list[Span] = []
    left = most
    for slot, start, end in ((span.slot, span.start, span.end) for span in spans):
        while start < end:
            count = min(left, end - start)
            part.append(Span(slot, start, start + count))
            start, left = start + count, left - count
            if not left:
                yield part
                part, left = [], most
    if part:
        yield part


class Prefill:
    """Prompt chunks of several sequences, one behind the other. Their bounds are known to the host."""

    def __init__(self, page_table: torch.Tensor, spans: list[Span], page_size: int) -> None:
        """page_table int64 [R, P]: of all device rows, one of which each span names."""
        self.spans = Spans(
            [span.start for span in spans],
            [span.end for span in spans],
            [span.slot for span in spans],
            page_table,
            page_size,
        )
        counts = self.spans.counts
        shift = np.subtract(self.spans.starts, self.spans.offsets[:-1])  # from a token's place here to its position
        positions = np.arange(self.spans.offsets[-1]) + np.repeat(shift, counts)
        # Of each of the T tokens. Kernels take the positions: as the first row they begin where memory is aligned for
        # any T, and no pass makes Triton compile a kernel again.
        self.positions, self.rows = upload(np.stack([positions, np.repeat(self.spans.rows, counts)]), page_table.device)
        self.slots = page_table[self.rows, self.positions // page_size] * page_size + self.positions % page_size
        self.last = self.spans.table[3, 1:] - 1  # where each span's last token is among the T
        self._embedded = [pair for pair in zip(spans, self.spans.offsets, strict=False) if pair[0].embeddings]

    def given(self, embedding: torch.Tensor, ahead: int = 0) -> Given | None:
        """What the tokens of the pass, or those `ahead` of them, have in place of their rows of `embedding` [V, width];
        None if nothing, or nothing of that width."""
        places: list[int] = []
        rows: list[torch.Tensor] = []
        for span, offset in self._embedded:
            begin, end = span.start + ahead, span.end + ahead
            for start, values in span.embeddings.items():
                first, last = max(begin, start), min(end, start + len(values))
                if first < last and values.shape[1] == embedding.shape[1]:
                    places += range(offset + first - begin, offset + last - begin)
                    rows.append(values[first - start : last - start].to(embedding, non_blocking=True))
        return Given(upload(places, embedding.device), torch.cat(rows)) if rows else None

    def on(self, cache: KVCache) -> Context:
        return _PrefillOn(self, cache)


@dataclass(frozen=True)
class _PrefillOn:
    shape: Prefill
    cache: KVCache

    def attend(self, layer: int, qkv: torch.Tensor, heads: Heads, positions: torch.Tensor) -> torch.Tensor:
        # All keys first: a sequence may read a page that another one of this very pass fills.
        q, k, v = split_heads(qkv, heads, positions, self.shape.slots, self.cache.k[layer], self.cache.v[layer])
        cache = self.cache
        return cache.attention(q, k, v, cache.k[layer], cache.v[layer], self.shape.spans).flatten(1)

    def recur(self, layer: int, projected: torch.Tensor, mixer: Recurrent) -> torch.Tensor:
        assert self.cache.states is not None
        return mixer.prompt(projected, self.cache.states.layers[layer], self.shape.spans)
