"""Sampling of tokens from filtered distributions."""

from __future__ import annotations

import torch


def sample_ref(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample an index per row by inversion of the cumulative sum: weights [..., V] >= 0, which need
    not sum to 1, and random numbers `uniforms` [...] in [0, 1) -> int64 [...].

    An index of weight 0 is never sampled, though a parallel sum need not be monotone to the last bit.
    """
    sums = weights.double().cumsum(-1)
    return ((sums > uniforms[..., None] * sums[..., -1:]) & (weights > 0)).int().argmax(-1)
