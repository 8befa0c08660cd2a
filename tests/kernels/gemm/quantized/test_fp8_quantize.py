"""FP8 quantization of activations matches a search for the nearest FP8 value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from watched_calls import Watch

from specbatch.kernels.elementwise import elementwise_triton
from specbatch.kernels.gemm.quantized import fp8_activations, fp8_quantize_triton
from specbatch.kernels.gemm.quantized.fp8_activations import FP8Activations, use_fp8_activations
from specbatch.kernels.gemm.quantized.fp8_quantize import (
    quantize_fp8,
    quantize_fp8_ref,
    rms_norm_fp8_ref,
    silu_and_mul_fp8_ref,
)

DTYPES = [torch.float16, torch.bfloat16]
BITS = torch.arange(256, dtype=torch.uint8)
GRID = BITS[(BITS & 127) != 127].view(torch.float8_e4m3fn)  # all numbers, both zeros among them


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The nearest FP8 values of float64 numbers up to 448; ties round to even."""
    grid = GRID.double().unique()
    even = (grid.to(torch.float8_e4m3fn).view(torch.uint8) & 1) == 0
    apart = (x[..., None] - grid).abs()
    best = apart.amin(-1, keepdim=True)
    return grid[((apart == best) * (1 + even)).argmax(-1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 128), (5, 300)])
def test_values_round_to_nearest(rows: int, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, width) * torch.logspace(-3, 2, width)).to(dtype)
    values, scales, kind = quantize_fp8_ref(x)
    assert (values.dtype, scales.dtype, kind) == (torch.float8_e4m3fn, torch.float32, dtype)
    assert scales.shape == (rows, -(-width // 128))
    for first in range(0, width, 128):
        block, scale = x[:, first : first + 128].double(), scales[:, first // 128, None].double()
        assert torch.allclose(scale[:, 0], block.abs().amax(1) / 448, rtol=1e-6)
        largest = block.abs().amax(1).float()
        inverse = torch.full_like(largest, 448) / largest
        wanted = block * inverse[:, None].double()  # rounded to float32 at the same point
        assert torch.equal(values[:, first : first + 128].double(), nearest(wanted.float().double()))


def test_ties_round_to_even() -> None:
    x = torch.tensor([[448.0, 17.0, 19.0, -17.0, 2**-10, 3 * 2**-10]])
    assert quantize_fp8_ref(x.half()).values.tolist() == [[448.0, 16.0, 20.0, -16.0, 0.0, 2**-8]]


def exact(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """FP8 values times a power of two per block, whose largest is 448: nothing has to be rounded, which the
    interpreter does wrongly."""
    blocks = GRID.float()[torch.randint(0, len(GRID), (rows, -(-width // 128), 128))]
    blocks[..., 0] = 448
    blocks *= 2.0 ** torch.randint(-6, 4, (*blocks.shape[:2], 1))
    return blocks.flatten(1)[:, :width].to(dtype)


def same(ours: FP8Activations, wanted: FP8Activations) -> None:
    assert ours.dtype == wanted.dtype
    assert ours.values.is_contiguous()
    assert torch.equal(ours.values.float(), wanted.values.float())
    assert torch.equal(ours.scales, wanted.scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 128), (17, 300), (40, 136), (2, 1)])
def test_kernel_matches_reference(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Also for strided rows."""
    x = exact(rows, width, dtype) if device.type == "cpu" else torch.randn(rows, width).to(dtype) * 3
    apart = torch.full((rows, width + 9), torch.nan, dtype=dtype)
    apart[:, 5 : 5 + width] = x
    for given in (x.to(device), apart.to(device)[:, 5 : 5 + width]):
        same(fp8_quantize_triton.quantize_fp8(given), quantize_fp8_ref(given))


def test_fp8_values_are_exact(device: torch.device) -> None:
    x = torch.cat([GRID, GRID[:2]]).view(2, 128).half().to(device)
    x[:, 5] = 448
    for found in (quantize_fp8_ref(x), fp8_quantize_triton.quantize_fp8(x)):
        assert torch.equal(found.values.half(), x)
        assert (found.scales == 1).all()


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_propagate(value: float, device: torch.device) -> None:
    x = exact(4, 300, torch.float16).to(device)
    x[2, 131] = value
    x[1] = 0
    for found in (quantize_fp8_ref(x), fp8_quantize_triton.quantize_fp8(x)):
        bad = ~found.scales.isfinite().cpu()
        assert bad.nonzero().tolist() == [[2, 1]]
        assert not found.dequantize()[2, 131].isfinite()
        assert not found.dequantize()[1].any()
        assert torch.equal(found.dequantize()[[0, 3]].half(), x[[0, 3]])


def test_tiny_values_do_not_overflow_the_scale(device: torch.device) -> None:
    x = torch.full((2, 130), 2.0**-24, dtype=torch.float16, device=device)
    x[1] = 0
    for found in (quantize_fp8_ref(x), fp8_quantize_triton.quantize_fp8(x)):
        assert torch.equal(found.dequantize().half(), x)
        assert (found.scales > 0).all()
    if device.type == "cuda":
        tiny = torch.full((1, 128), 2.0**-126, dtype=torch.bfloat16, device=device)
        same(fp8_quantize_triton.quantize_fp8(tiny), quantize_fp8_ref(tiny))
        assert not fp8_quantize_triton.quantize_fp8(tiny).dequantize().any()


def test_fp8_activations_setting() -> None:
    half, single = torch.zeros(1, 1, dtype=torch.float16), torch.zeros(1, 1)
    assert not fp8_activations.quantizes(half)
    with use_fp8_activations(True):
        assert fp8_activations.quantizes(half)
        assert not fp8_activations.quantizes(single)
        with use_fp8_activations(False):
            assert not fp8_activations.quantizes(half)
        assert fp8_activations.quantizes(half)
    with pytest.raises(ZeroDivisionError), use_fp8_activations(True):
        _ = 1 / 0
    assert not fp8_activations.quantizes(half)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (40, 300), (3, 576), (5, 5120), (33, 256)])
def test_kernels_that_quantize_what_they_compute_have_the_bits_of_two(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """In the interpreter all of them cast to FP8 in the same wrong way."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter cannot store bfloat16")
    x = (torch.randn(rows, 2 * width) * torch.logspace(-2, 1, 2 * width)).to(device, dtype)
    weight = torch.rand(width, device=device).to(dtype) + 0.5
    wanted = fp8_quantize_triton.quantize_fp8(elementwise_triton.silu_and_mul(x))
    same(fp8_quantize_triton.silu_and_mul_fp8(x), wanted)
    x = x[:, :width].contiguous()
    wanted = fp8_quantize_triton.quantize_fp8(elementwise_triton.rms_norm(x, weight, 1e-3))
    same(fp8_quantize_triton.rms_norm_fp8(x, weight, 1e-3), wanted)
    same(fp8_quantize_triton.quantize_fp8(x, before_gemm=True), fp8_quantize_triton.quantize_fp8(x))


def test_nan_propagates_through_fused_quantization(device: torch.device) -> None:
    x = torch.randn(3, 512).half().to(device)
    x[1, 300] = torch.nan
    for found in (silu_and_mul_fp8_ref(x), fp8_quantize_triton.silu_and_mul_fp8(x)):
        assert found.scales.isnan().nonzero().tolist() == [[1, 0]]
    weight = torch.ones(512, dtype=torch.float16, device=device)
    for found in (rms_norm_fp8_ref(x, weight, 1e-3), fp8_quantize_triton.rms_norm_fp8(x, weight, 1e-3)):
        assert found.scales.isnan().any(1).tolist() == [False, True, False]


def test_quantize_fp8_dispatches_to_kernels(
    device: torch.device, watch: Watch, force_kernels: Callable[[bool], None]
) -> None:
    seen = watch(fp8_quantize_triton, "quantize_fp8", before=len)
    force_kernels(True)
    quantize_fp8(torch.zeros(3, 5, device=device))
    force_kernels(False)
    assert quantize_fp8(torch.zeros(3, 5, device=device)).values.shape == (3, 5)
    assert seen == [3]
