"""Keys and values of an FP8 cache: scales, saturation, and their way to float16."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.stored_kv import from_stored, gather_stored, to_stored
from specbatch.kernels.attention.stored_kv_triton import fp8_pairs, power_of_two

FP8 = torch.float8_e4m3fn


def test_what_is_too_large_is_saturated_and_nan_stays() -> None:
    x = torch.tensor([[1e5, -449.0, 448.0, torch.inf, torch.nan, 0.3]])[None]
    stored = to_stored(x, FP8)
    assert stored.float().flatten().tolist()[:4] == [448.0, -448.0, 448.0, 448.0]
    assert stored.float().isnan().flatten().tolist() == [False] * 4 + [True, False]
    assert to_stored(x.bfloat16(), FP8).float()[..., :4].equal(stored.float()[..., :4])
    assert to_stored(x, torch.float32) is x


def test_scales_are_of_kv_heads() -> None:
    x, scale = torch.randn(7, 3, 16), torch.tensor([0.5, 3.0, 1e-3])
    back = from_stored(to_stored(x, FP8, scale), torch.float32, scale)
    torch.testing.assert_close(back[:, :2], x[:, :2], rtol=2**-4, atol=2**-8)
    assert back[:, 2].abs().max() <= 0.448 + 1e-6
    index = torch.tensor([5, 0, 5])
    assert gather_stored(to_stored(x, FP8, scale), index, torch.float32, scale).equal(back[index])


@triton.jit
def _unpack(pairs, first, second, N: tl.constexpr, kind: tl.constexpr):
    place = tl.arange(0, N)
    one, two = fp8_pairs(tl.load(pairs + place), kind)
    tl.store(first + place, one)
    tl.store(second + place, two)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_pairs_are_unpacked_exactly(device: torch.device, dtype: torch.dtype) -> None:
    """All values: normal, subnormal, zeros and NaN, first and second of a pair. The interpreter's cast to float32 knows
    no NaN."""
    code = torch.arange(256, dtype=torch.uint8)
    code = code.where(code & 127 != 127, 0) if device.type == "cpu" and dtype == torch.float32 else code
    values = torch.stack([code, code.flip(0)], 1).to(device)
    first, second = (torch.empty(256, dtype=dtype, device=device) for _ in range(2))
    kind = tl.float16 if dtype == torch.float16 else tl.float32
    _unpack[(1,)](values.view(torch.int16).flatten(), first, second, N=256, kind=kind)
    expected = values.view(FP8).to(dtype)
    torch.testing.assert_close(torch.stack([first, second], 1), expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _powers(x, power, inverse, N: tl.constexpr):
    place = tl.arange(0, N)
    one, two = power_of_two(tl.load(x + place))
    tl.store(power + place, one)
    tl.store(inverse + place, two)


def test_powers_of_two(device: torch.device) -> None:
    x = torch.tensor([0.0, 1e-45, 1e-30, 0.7, 1.0, 1.99, 65504.0, 3e38], device=device)
    power, inverse = torch.empty_like(x), torch.empty_like(x)
    _powers[(1,)](x, power, inverse, N=8)
    assert (power * inverse).tolist() == [1.0] * 8
    assert (x * inverse)[2:].tolist() == [float(y) for y in (x / 2.0 ** x.log2().floor().clamp(max=126))[2:]]
    assert ((x * inverse) < 4.0).all()
