"""FP8 GEMMs of cuBLASLt: memory of activations, what they are used for, and results; on a CPU with a stand-in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dtypes import HALVES
from watched_calls import Watch

from specbatch.kernels.dispatch import use_deterministic
from specbatch.kernels.gemm.quantized import fp8_cublas, fp8_linear_triton
from specbatch.kernels.gemm.quantized.fp8_activations import FP8Activations, empty_fp8
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Linear, FP8Weight
from specbatch.kernels.gemm.quantized.fp8_quantize import quantize_fp8
from specbatch.kernels.gemm.quantized.weight import quantized_linear_ref

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}  # ||y - expected|| / ||expected||


def scaled_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor,
    scales: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`torch._scaled_mm` with blocks of 1 x 128 and 128 x 128, whose layouts it checks as torch and cuBLASLt do."""
    (rows, k), n = x.shape, weight.shape[1]
    assert (x.stride(), weight.stride()) == ((k, 1), (1, k))
    assert (x_scales.shape, x_scales.stride()) == ((rows, k // 128), (1, rows))
    assert (scales.t().shape, scales.t().stride()) == ((n // 128, k // 128), (k // 128, 1))
    assert x_scales.dtype == scales.dtype == torch.float32
    assert rows % 4 == 0, "cuBLASLt: CUBLAS_STATUS_NOT_SUPPORTED"
    assert k // 128 % 4 == 0, "newer versions of torch ask for padded rows of scales"
    wide = scales.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
    y = (x.float() * x_scales.repeat_interleave(128, 1)) @ (weight.t().float() * wide).t()
    return y.to(out_dtype) if out is None else out.copy_(y)


@pytest.fixture(autouse=True)
def supported(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_cublas, "SMALL_WEIGHT", 512 * 512 - 1)
    if device.type == "cuda":
        if not fp8_cublas.is_supported(device):
            pytest.skip("cuBLASLt has FP8 with block scales on Hopper alone, since CUDA 12.9")
    else:
        monkeypatch.setattr(fp8_cublas, "is_supported", lambda device: True)
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


def random_weight(n: int, k: int, device: torch.device) -> FP8Weight:
    values = (torch.randn(n, k) * 60).to(torch.float8_e4m3fn).to(device)
    return FP8Weight(values, torch.rand(n // 128, k // 128, device=device) / 60 + 1e-3)


def activations(rows: int, k: int, dtype: torch.dtype, device: torch.device) -> FP8Activations:
    """Random; NaN in the memory past the last row."""
    x = quantize_fp8((torch.randn(rows, k) * torch.rand(rows, 1) * 9).to(device, dtype))
    whole = -(-rows // 4) * 4
    x.values.as_strided((whole, k), (k, 1))[rows:] = torch.nan
    x.scales.as_strided((whole, k // 128), (1, whole))[rows:] = torch.nan
    return x


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), [(33, 640, 512), (66, 512, 1024), (128, 640, 512), (131, 512, 512)])
def test_many_rows_match_reference(
    rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, watch: Watch
) -> None:
    weight, x = random_weight(n, k, device), activations(rows, k, dtype, device)
    calls = watch(torch, "_scaled_mm", before=lambda *_, **__: 1)
    expected = x.dequantize().double() @ weight.dequantize(torch.float64).t()

    def check(y: torch.Tensor, expected: torch.Tensor) -> None:
        assert (y.dtype, y.shape) == (dtype, (rows, n))
        assert (y.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()

    check(fp8_linear_triton.fp8_linear(x, weight), expected)
    out, wide = torch.empty(rows, n, device=device, dtype=dtype), torch.zeros(rows, n + 8, device=device, dtype=dtype)
    assert fp8_linear_triton.fp8_linear(x, weight, out=out) is out
    check(out, expected)
    apart = wide[:, 3 : n + 3]
    assert fp8_linear_triton.fp8_linear(x, weight, out=apart) is apart
    check(apart, expected)
    assert not wide[:, :3].any()
    assert not wide[:, n + 3 :].any()
    residual = torch.randn(rows, n).to(device, dtype)
    added = expected + residual.double()
    before = residual.clone()
    for target in (out, apart):
        assert fp8_linear_triton.fp8_linear(x, weight, residual=residual, out=target) is target
        check(target, added)
        assert torch.equal(residual, before), "only without `out` its memory is used"
    check(fp8_linear_triton.fp8_linear(x, weight, residual=residual), added)
    assert len(calls) == 6
    bias = torch.ones(n, device=device, dtype=dtype)
    if device.type == "cuda":
        check(fp8_linear_triton.fp8_linear(x, weight, bias), expected + 1)
    assert len(calls) == 6, "with a bias, our kernel runs"


def test_takes_many_rows_of_aligned_blocks_only(device: torch.device) -> None:
    def takes(rows: int, n: int = 640, k: int = 512, scales: torch.Tensor | None = None) -> bool:
        blocks = torch.empty(-(-n // 128), -(-k // 128), device=device) if scales is None else scales
        values = torch.empty(n, k, device=device, dtype=torch.float8_e4m3fn)
        return fp8_cublas.takes(empty_fp8(rows, k, torch.bfloat16, device), FP8Weight(values, blocks))

    assert takes(33)
    assert takes(1000)
    assert not takes(32), "few"
    assert not takes(512, n=384), "small"
    assert takes(513, n=384)
    assert not takes(128, n=640 + 64), "a block of scales is cut"
    assert not takes(128, k=640), "rows of scales are not aligned"
    assert not takes(128, scales=torch.empty(640, 1, device=device)), "a scale per output"
    assert not takes(128, scales=torch.empty(5, 4, device=device, dtype=torch.bfloat16)), "scales of another type"
    with use_deterministic():
        assert not takes(1000)
    rows = empty_fp8(300, 512, torch.bfloat16, device)
    part = FP8Activations(rows.values[:150], rows.scales[:150], rows.dtype)
    weight = random_weight(640, 512, device)
    assert fp8_cublas.takes(rows, weight)
    assert not fp8_cublas.takes(part, weight), "rows of other activations"
    rows = empty_fp8(67, 512, torch.bfloat16, device)
    part = FP8Activations(rows.values[1:], rows.scales[1:], rows.dtype)
    assert not fp8_cublas.takes(part, weight), "there is no memory after the last row"


def test_layers_keep_block_scales_in_float32(device: torch.device, force_kernels: Callable[[bool], None]) -> None:
    force_kernels(True)
    stored = random_weight(640, 512, device)
    short = FP8Weight(stored.values, stored.scales.bfloat16())
    x = activations(68, 512, torch.bfloat16, device)
    expected = quantized_linear_ref(x, short).double()
    layer = FP8Linear(short)
    assert fp8_cublas.takes(x, layer._scaled)
    y = fp8_linear_triton.fp8_linear(x, layer._scaled)
    assert (y.double() - expected).norm() <= 8e-3 * expected.norm()
