"""The attention context of packed rows (`kernels.common.packed_rows`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbatch.core.attention_metadata import AttentionContext, RecurrentOp
from specbatch.kernels.attention.qkv import QKVLayout
from specbatch.kernels.common.packed_rows import PackedRows


@dataclass(frozen=True)
class PackedContext:
    """The attention context of packed rows.

    whole      that of the rectangle
    positions  int64 [B * N], of its places
    """

    whole: AttentionContext
    packed: PackedRows
    positions: torch.Tensor

    def attend(self, layer: int, qkv: torch.Tensor, heads: QKVLayout, positions: torch.Tensor) -> torch.Tensor:
        return self.packed.pack(self.whole.attend(layer, self.packed.spread(qkv), heads, self.positions))

    def recur(self, layer: int, projected: torch.Tensor, mixer: RecurrentOp) -> torch.Tensor:
        return self.packed.pack(self.whole.recur(layer, self.packed.spread(projected), mixer))
