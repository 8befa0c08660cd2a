"""What one model remembers of its sequences: keys and values in pages, and the states of recurrent layers."""

from __future__ import annotations

import math

import numpy as np
import torch

from specbatch.kernels import dispatch
from specbatch.kernels.attention.prefill_backends import PrefillAttention
from specbatch.kernels.sampling.tree import move_rows_ref
from specbatch.memory.recurrent_state import RecurrentStates
from specbatch.models.config import ModelConfig


def bytes_per_page(config: ModelConfig, layers: int, page_size: int, dtype: torch.dtype) -> int:
    """K and V of all layers for one page."""
    return 2 * layers * page_size * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVCache:
    """K and V per layer, each [pages + 1, page_size, kv_heads, head_dim]; page 0 belongs to padding rows.

    The layers' `k` and `v` are views of `keys` and `values` [layers, pages + 1, ...], for who writes to all layers.
    Every model of an engine (target, draft) has its own, with the same page numbers: one page table serves all.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: int,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        attention: PrefillAttention,
        states: RecurrentStates | None = None,
    ) -> None:
        """layers: those that attend, which may be none; attention: who computes prompts' attention over this cache;
        states: of the layers that are recurrent."""
        shape = (layers, pages + 1, page_size, config.num_kv_heads, config.head_dim)
        self.page_size = page_size
        self.group = config.num_heads // config.num_kv_heads  # query heads that share a KV head
        self.dtype = dtype
        self.attention = attention
        self.states = states
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)
        self.k = self.keys.unbind()
        self.v = self.values.unbind()

    def begin(self, rows: torch.Tensor) -> None:
        """A prompt pass over device rows [S] comes."""
        if self.states is not None:
            self.states.begin(rows)

    def commit(
        self,
        page_table: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        accepted: torch.Tensor,
        path: torch.Tensor | None,
    ) -> None:
        """Of the verify just made behind lengths [B] on device rows [B], keep the root and accepted [B] drafts. Of a
        tree, those are the nodes of path int64 [B, N]; what they left at lengths + path goes to its place behind the
        root, in all layers."""
        if self.states is not None:
            self.states.commit(rows, accepted, path)
        if path is None or not self.k:
            return
        if dispatch.runs_kernels(rows):
            from specbatch.kernels.sampling.tree_triton import move_rows

            move_rows(self.keys, self.values, page_table, rows, lengths, path, accepted)
        else:
            move_rows_ref(self.keys, self.values, page_table, rows, lengths, path, accepted)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not empty: masked keys are multiplied by a zero weight, and 0 * NaN is NaN. On a CPU they come from the
    system, which takes memory for a page only once it is written to; torch.zeros would touch them all."""
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
