"""RMSNorm against float64, and its cast order in half precision."""

from __future__ import annotations

import pytest
import torch

from specbatch.kernels.elementwise.norm import rms_norm_ref

ROWS = [1, 2, 5, 63, 64, 65]
HALF = [torch.bfloat16, torch.float16]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def truth(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its root mean square, not yet multiplied by the weight."""
    x64 = x.double()
    return x64 / (x64.pow(2).mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("width", [1, 7, 64, 576])
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm_matches_reference(rows: int, width: int) -> None:
    x, weight = numbers(rows, width, seed=rows), numbers(width, seed=1) + 1
    y = rms_norm_ref(x, weight, 1e-5)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), truth(x, 1e-5) * weight.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e-2, 1.0, 1e4])
def test_epsilon_is_added_to_the_mean_square(scale: float, eps: float) -> None:
    x, weight = numbers(3, 48) * scale, numbers(48, seed=1)
    torch.testing.assert_close(
        rms_norm_ref(x, weight, eps).double(), truth(x, eps) * weight.double(), rtol=1e-5, atol=1e-9
    )


def test_heads_are_normalised_independently() -> None:
    qkv, weight = numbers(5, 9, 24), numbers(24, seed=1)
    sliced = qkv[:, 2:6]  # the heads of a fused projection
    y = rms_norm_ref(sliced, weight, 1e-6)
    assert y.shape == (5, 4, 24)
    torch.testing.assert_close(y.double(), truth(sliced, 1e-6) * weight.double(), rtol=1e-5, atol=1e-6)
    rows = numbers(6, 5, seed=2).t()  # a transposed view
    torch.testing.assert_close(rms_norm_ref(rows, weight[:6], 1e-6), rms_norm_ref(rows.contiguous(), weight[:6], 1e-6))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", ROWS)
def test_half_precision_is_cast_before_the_weight(rows: int, dtype: torch.dtype) -> None:
    x, weight = (numbers(rows, 128, seed=rows) * 3).to(dtype), (numbers(128, seed=1) + 1).to(dtype)
    y = rms_norm_ref(x, weight, 1e-5)
    assert y.dtype == dtype
    normal = truth(x, 1e-5)
    early = normal.to(dtype) * weight
    late = (normal * weight.double()).to(dtype)  # the other flavour: one rounding less
    # Float32 may round a value the other way than float64 does, but rarely.
    assert (y != early).double().mean() < 0.01
    assert (y != late).double().mean() > 0.1


@pytest.mark.parametrize("dtype", HALF)
def test_squares_do_not_overflow_half_precision(dtype: torch.dtype) -> None:
    x = torch.full((2, 64), 6e4).to(dtype)
    assert torch.equal(rms_norm_ref(x, torch.ones(64, dtype=dtype), 1e-5), torch.ones(2, 64, dtype=dtype))
