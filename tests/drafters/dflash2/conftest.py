"""A float64 reference of DFlash 2."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from block_drafts import Reference


class DFlash2Reference(Reference):
    def convolved(self, x: torch.Tensor, read: torch.Tensor, name: str, side: int) -> torch.Tensor:
        """Row by row and channel by channel."""
        size, group = self.config["conv_kernel_size"], self.config["conv_group_size"]
        base = self.tensors[f"{name}.base_kernel"][side]
        kernels = self.project(read, f"{name}.kernel_projection").view(len(x), 2, size, -1)[:, side]
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for back in range(min(size, row + 1)):
                out[row] += (base[back] + kernels[row, back].repeat_interleave(group)) * x[row - back]
        return out

    def logits(self, features: torch.Tensor, anchor: int, count: int, drafts: Sequence[int]) -> torch.Tensor:
        hidden = self.hidden(features, anchor, count)[1:]
        logits = self.target.logits(hidden.float()).double()[: len(drafts)]
        before, after = (self.tensors[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
        for row, previous in enumerate([anchor, *drafts[:-1]]):
            best = logits[row].topk(self.config["selector_top_k"]).indices
            others = torch.ones(logits.shape[1], dtype=torch.bool).index_fill(0, best, False)
            weights = self.tensors["candidate_selector.hidden_projection.weight"] @ hidden[row]
            logits[row] += after @ (before[previous] * weights)
            logits[row, others] = -math.inf
        return logits


@pytest.fixture
def reference() -> type[DFlash2Reference]:
    return DFlash2Reference
