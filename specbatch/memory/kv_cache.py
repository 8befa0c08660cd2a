"""Paged KV cache of one model, with the states of its recurrent layers."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch

from specbatch.kernels.attention.prefill.prefill_backends import PrefillAttention
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.common.kv_slots import VerifiedRows
from specbatch.kernels.sampling.tree_verify import move_accepted_kv
from specbatch.memory.recurrent_state import RecurrentStates


class AttentionSizes(Protocol):
    """The sizes of a model that its KV cache depends on."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def cache_dims(self) -> tuple[int, int]: ...

    @property
    def has_latents(self) -> bool: ...


def bytes_per_page(config: AttentionSizes, layers: int, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page: keys and values of all layers."""
    return layers * page_size * config.num_kv_heads * sum(config.cache_dims) * dtype.itemsize


class KVCache:
    """Keys and values per layer, each [pages + 1, page_size, kv_heads, head_dim]; page 0 belongs to padding rows. With
    latent attention (see `latent_attention`), keys are the rotated parts of keys and values are latents.

    The layers' `k` and `v` are views of `keys` and `values` [layers, pages + 1, ...], which kernels that write to all
    layers use; `layers` has what `AttentionInputs` takes of each: k, v and their scales. Each model of an engine
    (target, draft) has its own cache with the same page numbers, so that one page table serves all of them.
    """

    def __init__(
        self,
        config: AttentionSizes,
        layers: int,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        attention: PrefillAttention,
        states: RecurrentStates | None = None,
        pool: KVCache | None = None,
    ) -> None:
        """layers: number of attention layers, possibly 0; attention: prefill attention backend over this cache;
        states: those of the recurrent layers; pool: of another engine that does not run at the same time, whose keys
        and values are used, in at least as many pages."""
        shape = (layers, pages + 1, page_size, config.num_kv_heads)
        self.page_size = page_size
        self.group = config.num_heads // config.num_kv_heads  # query heads that share a KV head
        self.dtype = dtype
        self.attention = attention
        self.states = states
        self.has_latents = config.has_latents
        if pool is None:
            self.keys, self.values = (_zeros((*shape, dim), dtype, device) for dim in config.cache_dims)
        else:
            assert pool.dtype == dtype, f"the pool is {pool.dtype}"
            assert pool.pages >= pages, f"the pool has {pool.pages} pages"
            self.keys, self.values = pool.keys, pool.values
        self.k = self.keys.unbind()
        self.v = self.values.unbind()
        self.set_scales(None, None)

    def set_scales(self, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
        """k, v float32 [layers, kv_heads] on the cache's device: keys and values are stored divided by these, see
        `stored_kv`; None: as they are. Before the cache is written or a graph recorded, which keeps their addresses."""
        shape = len(self.k), self.keys.shape[3]
        for scales in (k, v):
            assert scales is None or (scales.shape == shape and scales.dtype == torch.float32), f"not float32 {shape}"
        self.k_scales, self.v_scales = k, v
        none = (None,) * len(self.k)
        parts = (none if scales is None else scales.unbind() for scales in (k, v))
        self.layers = list(zip(self.k, self.v, *parts, strict=True))

    @property
    def pages(self) -> int:
        return self.keys.shape[1] - 1

    def clear(self, pages: list[int]) -> None:
        """Write zeros to pages that get a new owner, on a CPU: their former owner may have left NaN or infinite values,
        which attention by torch multiplies by a weight of 0. Triton kernels do not read masked keys."""
        if self.keys.device.type != "cpu" or not pages or not self.k:
            return
        index = torch.tensor(pages)
        for item in (self.keys, self.values):
            item.view(torch.uint8).index_fill_(1, index, 0)

    def begin(self, spans: RaggedBatch) -> None:
        """Prepare a prompt pass."""
        if self.states is not None:
            self.states.begin(spans.table[2, :-1])

    def commit(self, verified: VerifiedRows, path: torch.Tensor | None) -> None:
        """Commit the root and the accepted drafts of the last verify.

        path int64 [B, N]: the accepted nodes of a tree. Their keys and values move from lengths + path to the positions
        after the root, in all layers.
        """
        if self.states is not None:
            self.states.commit(verified.slots, verified.accepted, path)
        if path is not None and self.k:
            move_accepted_kv(self.keys, self.values, verified, path)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not uninitialized memory: masked keys are multiplied by a zero weight, and 0 * NaN is NaN. On a CPU numpy
    gets zero pages from the system, which commits memory on the first write; torch.zeros would touch all pages."""
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
