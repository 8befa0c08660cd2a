"""GEMMs with a fused RMSNorm against float64."""

from __future__ import annotations

from collections.abc import Mapping

import torch

EPS = 1e-5


def numbers(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def normalised(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """The rows in float64, with RMSNorm if a weight is given."""
    x64 = x.double()
    if weight is None:
        return x64
    return x64 * torch.rsqrt(x64.square().mean(1, keepdim=True) + EPS) * weight.double()


def matches(
    tolerances: Mapping[torch.dtype, float], y: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype
) -> None:
    """tolerances: by type, of ||y - expected|| / ||expected||."""
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert y.shape == expected.shape
    assert (y.double() - expected).norm() <= tolerances[dtype] * expected.norm()
