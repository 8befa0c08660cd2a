"""Rotary embedding against rotations of complex numbers in float64."""

from __future__ import annotations

import pytest
import torch

from specbatch.kernels.elementwise.rope import apply_rope_ref, rope_table

ROWS = [1, 2, 5, 63, 64, 65]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def frequencies(dim: int, theta: float = 10000.0) -> torch.Tensor:
    return (1 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)).float()


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def rotate(x: torch.Tensor, positions: torch.Tensor, inverse: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Channel i and channel i + dim / 2 form a complex number, rotated by position * inverse[i]."""
    first, second = x.double().chunk(2, -1)
    angle = positions.double()[:, None, None] * inverse.double()
    turned = torch.complex(first, second) * torch.polar(torch.full_like(angle, scale), angle)
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [2, 8, 24, 64])
@pytest.mark.parametrize("rows", ROWS)
def test_heads_rotate_by_position(rows: int, dim: int, dtype: torch.dtype) -> None:
    cos, sin = (item.to(dtype) for item in rope_table(frequencies(dim), 200, 1.0))
    x = numbers(rows, 3, dim).to(dtype)
    positions = torch.randperm(200, generator=torch.Generator().manual_seed(rows))[:rows]
    y = apply_rope_ref(x, cos[positions][:, None], sin[positions][:, None])
    assert y.shape == x.shape
    assert y.dtype == dtype
    # An angle of position 200 is itself off by 200 roundings of float32.
    atol = TOLERANCE[dtype] + 200 * 2**-23
    torch.testing.assert_close(y.double(), rotate(x, positions, frequencies(dim)), rtol=0, atol=atol)


def test_cos_sin_table() -> None:
    inverse = frequencies(16)
    cos, sin = rope_table(inverse, 4096, 1.25)
    assert cos.shape == sin.shape == (4096, 16)
    assert cos.dtype == sin.dtype == torch.float32
    angle = torch.outer(torch.arange(4096.0, dtype=torch.float64), inverse.double())
    torch.testing.assert_close(cos.double(), 1.25 * angle.cos().repeat(1, 2), rtol=0, atol=4096 * 2**-23)
    signs = torch.tensor([-1.0] * 8 + [1.0] * 8)
    torch.testing.assert_close(sin.double(), 1.25 * angle.sin().repeat(1, 2) * signs, rtol=0, atol=4096 * 2**-23)


def test_scale_multiplies_the_rotation() -> None:
    inverse = frequencies(8)
    cos, sin = rope_table(inverse, 10, 1.5)
    x, positions = numbers(10, 2, 8), torch.arange(10)
    y = apply_rope_ref(x, cos[:, None], sin[:, None])
    torch.testing.assert_close(y.double(), rotate(x, positions, inverse, 1.5), rtol=0, atol=1e-5)


def test_position_0_is_the_identity() -> None:
    cos, sin = rope_table(frequencies(8), 1, 1.0)
    x = numbers(3, 2, 8)
    assert torch.equal(apply_rope_ref(x, cos[:, None], sin[:, None]), x)


def test_scores_depend_on_relative_position_only() -> None:
    cos, sin = rope_table(frequencies(16), 120, 1.0)
    q, k = numbers(2, 1, 1, 16)
    near, far = (
        apply_rope_ref(q, cos[a : a + 1, None], sin[a : a + 1, None]).flatten()
        @ apply_rope_ref(k, cos[b : b + 1, None], sin[b : b + 1, None]).flatten()
        for a, b in ((9, 2), (109, 102))
    )
    assert near.item() == pytest.approx(far.item(), abs=1e-4)


def test_strided_inputs() -> None:
    cos, sin = rope_table(frequencies(8), 5, 1.0)
    x = numbers(5, 7, 8)[:, 1:4]
    here = apply_rope_ref(x, cos[:, None], sin[:, None])
    assert torch.equal(here, apply_rope_ref(x.contiguous(), cos[:, None], sin[:, None]))
