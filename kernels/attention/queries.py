"""Arguments of attention: layouts of projected rows, masks, and the tokens of decode and prefill passes.

References, Triton kernels and what chooses between them all import these types, and none of them is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.common.packed_rows import PackedRows
from specbatch.kernels.common.sizes import cdiv

LOG2E = 1.4426950408889634  # kernels compute exp(x) as exp2(x * LOG2E)


@dataclass(frozen=True)
class QKVLayout:
    """How a row of qkv splits: `count` query heads, `kv` key heads and `kv` value heads of `dim` each.

    q_norm, k_norm: RMSNorm weights [dim] with `eps`, or both None; cos, sin: tables [positions, dim] of `rope_table`,
    in the model's type. window: a query sees that many keys, itself included; None is all. sinks: float32 [count], the
    logit of each query head's attention sink, which is in the softmax's denominator and has no value (Xiao et al.,
    2023; gpt-oss); None is none. k_offset: float32 [kv, dim], subtracted from rotated keys before they are stored and
    used: that changes all scores of a query alike, and so no softmax without a sink; None is 0. shared: rows have query
    heads only. The keys and values are those of an earlier layer,
    which has written them to the cache, also those of this pass; k_norm is not used.
    """

    count: int
    kv: int
    dim: int
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor
    window: int | None = None
    sinks: torch.Tensor | None = None
    k_offset: torch.Tensor | None = None
    shared: bool = False

    @property
    def own_kv(self) -> int:
        """Key heads in a row of qkv, and as many value heads."""
        return 0 if self.shared else self.kv


@dataclass(frozen=True, kw_only=True)
class LatentLayout(QKVLayout):
    """How a row of projected inputs splits: `count` queries and one key of `dim` numbers each, which are `rank` of the
    latent and then those that rope rotates, by cos and sin [positions, dim - rank].

    scale: of the scores. interleaved: rope pairs channels 2i and 2i + 1, not i and i + half; they stay where they are.
    """

    rank: int
    scale: float
    interleaved: bool

    @property
    def width(self) -> int:
        """Of a row."""
        return (self.count + 1) * self.dim


@dataclass(frozen=True)
class ContextKVLayout:
    """How a row of the stacked GEMM output splits: layer by layer `kv` key heads, then `kv` value heads of `dim` each.

    k_norms: RMSNorm weights [layers, dim] with `eps`; cos, sin: tables [positions, dim] of `rope_table`.
    """

    kv: int
    dim: int
    k_norms: torch.Tensor
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor


class AttentionInputs(NamedTuple):
    """What attention of T tokens reads in one layer, and the caches that it writes new keys and values to.

    projected         the output of the qkv GEMM, [T, (count + 2 kv) * dim]; of a `LatentLayout` [T, (count + 1) * dim]
    heads             how its rows split
    positions         int64 [T]
    k_cache, v_cache  of the layer: [pages, page_size, kv, dim] both; of a `LatentLayout` [pages, page_size, 1, dim -
                      rank] and [pages, page_size, 1, rank]. In the model's type or float8_e4m3fn
    k_scale, v_scale  float32 [kv], of latents [1]: the caches hold keys and values divided by these; None is 1. See
                      `stored_kv`
    """

    projected: torch.Tensor
    heads: QKVLayout
    positions: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def is_cuda(self) -> bool:
        return self.projected.is_cuda


class PromptInputs(NamedTuple):
    """int64 [N] each: tokens, positions in their sequences, the slots of these, and KV slots. Padding rows hold 0
    throughout, so their keys go to the padding page."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_slots: torch.Tensor

    @classmethod
    def empty(cls, count: int, device: torch.device) -> PromptInputs:
        """Uninitialized. Parts start at aligned addresses whatever the count, so no pass compiles a kernel again."""
        whole = cdiv(count, 16) * 16
        return cls(*torch.empty(len(cls._fields), whole, dtype=torch.int64, device=device)[:, :count])

    def first(self, count: int) -> PromptInputs:
        """The inputs of the first `count` rows."""
        return PromptInputs(*(part[:count] for part in self))


class PrefillInputs(NamedTuple):
    """What prefill attention of one layer reads: the query rows of `spans`, whose keys and values lie in the caches.

    q             [T, count, dim]
    k_new, v_new  [T, kv, dim] (views will do): the keys and values of the pass itself, rounded as the caches hold
                  them, so that it does not matter which are read; or None
    caches        [pages, page_size, kv, dim]
    window        a query sees that many keys, itself included; 0 is all
    out           memory for the result, used if the backend can
    sinks         float32 [count]: see `QKVLayout`
    scales        float32 [kv], of the caches: see `AttentionInputs`
    """

    q: torch.Tensor
    k_new: torch.Tensor | None
    v_new: torch.Tensor | None
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    spans: RaggedBatch
    window: int = 0
    out: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class Mask(NamedTuple):
    """Which keys the queries of a decode pass see in one layer: all keys from before the pass, and of the pass itself
    those up to their own, or all if not `causal`. With a `window`, only keys less than that many positions back; in a
    tree a node's position is its depth."""

    causal: bool = True
    window: int | None = None


class SharedPrefixes(NamedTuple):
    """Prefixes that sequences of a decode pass share page by page: the pages are full, and the pass writes none of
    them. Tensors of fixed sizes, so that a CUDA graph holds for any division into groups.

    lengths  int32 [B]: keys of the prefix that each sequence shares, a multiple of the page size; 0: none
    members  int32 [M]: sequences, those of a group side by side
    groups   int32 [3, G]: the first of each group in `members`, how many they are, and the keys of their prefix. G is a
             power of two; where there are fewer groups, counts are 0
    """

    lengths: torch.Tensor
    members: torch.Tensor
    groups: torch.Tensor


@dataclass(frozen=True)
class DecodeQueries:
    """The tokens of a decode or verify pass, `num_queries` for each of B sequences (1 is plain decoding).

    page_table   int64 [R, P], of all slots
    slots        int64 [B]: the slot of each sequence, 0 for padding
    lengths      int64 [B]: KV length before the pass. Query i is stored at key lengths + i, which in a chain is its
                 position too. Keys beyond the P pages are not stored
    bound        no KV is longer than this after the pass (None: as long as the page table allows)
    ancestors    int64 [B, num_queries], for a tree: bit j of a query's word is set if it sees key lengths + j
    first_node   a tree may be computed in several passes: so many of its nodes are in the cache already, and query i is
                 stored at key lengths + first_node + i
    packed       of a verify with chains of different lengths, the rows that it has: at most `num_queries` for each
                 sequence, R in all; None: all. The cache holds no valid keys for the other queries
    prefixes     that sequences share, whose keys are then read once for each group of them; None: none. Layers with a
                 window read them for each sequence
    """

    page_table: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    num_queries: int
    page_size: int
    bound: int | None = None
    ancestors: torch.Tensor | None = None
    first_node: int = 0
    packed: PackedRows | None = None
    prefixes: SharedPrefixes | None = None


# Attention of a decode pass in one layer: [T, count * dim], of latents [T, count * rank]. Of packed rows T is R.
DecodeAttention = Callable[[AttentionInputs, Mask], torch.Tensor]
