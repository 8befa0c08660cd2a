"""SwiGLU GEMM of many rows: results, and which operands it takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specbatch.kernels.dispatch import use_deterministic
from specbatch.kernels.elementwise.norm import rms_norm_ref
from specbatch.kernels.gemm import gated_gemm_triton
from specbatch.kernels.gemm.gated_gemm_triton import gated_gemm, takes
from specbatch.kernels.gemm.linear import Linear, Norm


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 8, 64), (129, 264, 128), (300, 128, 192)])
def test_matches_reference(rows: int, n: int, k: int, device: torch.device) -> None:
    """Parts of a tile in every direction, several tiles of a program, and NaN in memory next to the operands."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, weight = torch.randn(rows + 1, k, device=device).to(dtype), torch.randn(2 * n, k, device=device).to(dtype)
    x[rows:] = torch.nan
    gate, up = (x[:rows].double() @ weight.double().t()).chunk(2, -1)
    expected = F.silu(gate) * up
    y = gated_gemm(x[:rows], weight)
    assert (y.dtype, y.shape) == (dtype, (rows, n))
    assert (y.double() - expected).norm() <= (4e-3 if dtype == torch.bfloat16 else 1e-6) * expected.norm()


def test_a_program_computes_several_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_gemm_triton, "MULTIPROCESSORS", 2)
    test_matches_reference(300, 264, 64, device)


def test_takes_many_aligned_rows_that_fill_the_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_gemm_triton, "_has_tma", lambda device: True)

    def half(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=torch.bfloat16)

    def takes_rows(rows: int, n: int = 12288, k: int = 64, bias: torch.Tensor | None = None) -> bool:
        return takes(half(rows, k), half(2 * n, k), bias)

    assert takes_rows(512)
    assert takes_rows(1024)
    assert not takes_rows(2048), "cuBLAS is faster"
    assert not takes_rows(512, n=2048), "half of the device is idle"
    assert not takes_rows(512, k=72), "a step is cut"
    assert not takes_rows(512, bias=half(1)), "there is no bias"
    assert not takes(half(512, 64).float(), half(2 * 12288, 64).float(), None), "float32"
    assert not takes(half(512, 128)[:, :64], half(2 * 12288, 64), None), "rows are apart"


@pytest.mark.gpu
def test_layers_use_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not gated_gemm_triton._has_tma(device):
        pytest.skip("needs a Hopper GPU")
    weight = torch.randn(2 * 12288, 256, device=device).bfloat16() / 16
    norm = Norm(torch.rand(256, device=device).bfloat16() + 0.5, 1e-6)
    x = torch.randn(512, 256, device=device).bfloat16()
    gate, up = (rms_norm_ref(x, *norm).double() @ weight.double().t()).chunk(2, -1)
    expected, calls = F.silu(gate) * up, []
    real = gated_gemm_triton.gated_gemm
    monkeypatch.setattr(gated_gemm_triton, "gated_gemm", lambda *args: calls.append(1) or real(*args))
    y = Linear(weight).gated(x, norm)
    assert (y.double() - expected).norm() <= 8e-3 * expected.norm()
    assert len(calls) == 1
    with use_deterministic():
        Linear(weight).gated(x, norm)
    assert len(calls) == 1
