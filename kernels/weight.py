"""Weights as they are stored: in the type of the activations, or float8 with a scale for every 128 x 128 values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SIDE = 128  # of a block that shares a scale


@dataclass(frozen=True)
class Weight:
    """values [..., out, in]; scales None, or [..., ceil(out / 128), ceil(in / 128)] float32, bfloat16 or float16: what
    the checkpoints of DeepSeek-V3, Qwen3 and Qwen3.5 in FP8 call `weight_scale_inv`, which multiplies all the same."""

    values: torch.Tensor
    scales: torch.Tensor | None = None

    def of(self, expert: int) -> Weight:
        """One of a stack."""
        return Weight(self.values[expert], None if self.scales is None else self.scales[expert])

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in this type: values * scales, rounded once."""
        if self.scales is None:
            return self.values.to(dtype)
        out, inner = self.values.shape[-2:]
        scales = self.scales.float().repeat_interleave(SIDE, -2).repeat_interleave(SIDE, -1)
        return (self.values.float() * scales[..., :out, :inner]).to(dtype)
