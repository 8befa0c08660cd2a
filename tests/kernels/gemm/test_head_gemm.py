"""GEMMs of heads match float64, and in deterministic mode the bits of a token do not depend on the tokens beside it."""

from __future__ import annotations

import pytest
import torch
from crossed import crossed

from specbatch.kernels.dispatch import use_deterministic
from specbatch.kernels.gemm.head_gemm import head_gemm
from specbatch.kernels.gemm.head_gemm_triton import HeadTile
from specbatch.kernels.gemm.head_gemm_triton import head_gemm as kernel

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}  # ||y - expected|| / ||expected||
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def operands(
    tokens: int, heads: int, k: int, n: int, dtype: torch.dtype, device: torch.device, *, is_turned: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views as a model has them: a part of each head of x, and a part of the rows of a weight, turned or not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, heads, k + 3, generator=generator).to(device, dtype)[..., :k]
    if is_turned:
        return x, torch.randn(heads, n + 5, k, generator=generator).to(device, dtype)[:, 5:].transpose(1, 2)
    return x, torch.randn(heads, k + 5, n, generator=generator).to(device, dtype)[:, :k]


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "k", "n"), [(1, 3, 12, 24), (37, 2, 70, 130), (18, 1, 64, 8)])
def test_matches_float64(
    tokens: int, heads: int, k: int, n: int, is_turned: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = operands(tokens, heads, k, n, dtype, device, is_turned=is_turned)
    expected = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    with use_deterministic():
        found = head_gemm(x, weight)
    for y in (head_gemm(x, weight), found, kernel(x, weight)):
        assert (y.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize(
    ("dtype", "is_turned"), crossed([torch.float32, torch.float16, torch.bfloat16], [False, True]), ids=str
)
def test_bits_do_not_depend_on_the_tokens_beside(dtype: torch.dtype, is_turned: bool, device: torch.device) -> None:
    """With the sizes of 16 heads of DeepSeek-V2-Lite, of which a CPU has four."""
    k, n = (512, 128) if is_turned else (128, 512)
    x, weight = operands(300, 4 if device.type == "cpu" else 16, k, n, dtype, device, is_turned=is_turned)
    with use_deterministic():
        every = head_gemm(x, weight)
        for rows in (1, 2, 16, 17, 33, 257):
            for some in (slice(0, rows), slice(300 - rows, 300)):
                assert torch.equal(head_gemm(x[some], weight), every[some]), f"{rows} tokens"
    if device.type == "cuda" and dtype != torch.float32:
        for tile in (HeadTile(16, 32, 4, 2), HeadTile(64, 128, 8, 3)):
            assert torch.equal(kernel(x, weight, tile), every)
