"""Rotary position embedding, half-split ("neox") layout."""

from __future__ import annotations

import torch

from specbatch.kernels.common.rowwise import multiply_add


def rope_table(
    inverse_frequencies: torch.Tensor, length: int, scale: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each float32 [length, rotary_dim], for positions 0..length-1.

    inverse_frequencies: float32 [rotary_dim / 2]; `scale` multiplies both (the attention factor of yarn), or one of
    each pair of channels does, float32 [rotary_dim / 2]. The sign of rotate-half is folded into the first half of sin.
    Su et al., "RoFormer" (2021).
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def apply_rope_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, head_dim] by cos, sin [T, 1, head_dim] of its tokens' positions (from `rope_table`)."""
    return multiply_add(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
