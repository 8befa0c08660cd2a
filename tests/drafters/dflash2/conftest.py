"""A float64 reference of DFlash 2."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from block_drafts import Reference, convolved_by_rows


class DFlash2Reference(Reference):
    def convolved(self, x: torch.Tensor, read: torch.Tensor, name: str, side: int) -> torch.Tensor:
        return convolved_by_rows(self, x, read, name, side)

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
