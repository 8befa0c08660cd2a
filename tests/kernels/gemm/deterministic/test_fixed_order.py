"""GEMMs of deterministic mode match float64, and the bits of a row do not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from crossed import crossed
from fused_gemm import numbers
from watched_calls import Watch

from specbatch.kernels.elementwise.activations import silu_and_mul
from specbatch.kernels.gemm.dense import skinny_gemm_triton
from specbatch.kernels.gemm.deterministic import fixed_order
from specbatch.kernels.gemm.deterministic.fixed_order import fixed_order_gated, fixed_order_linear
from specbatch.kernels.gemm.deterministic.fixed_order_gemm_triton import Tile, fixed_order_gemm

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}  # ||y - expected|| / ||expected||
SHAPES = [(131, 72), (8, 8), (64, 256), (200, 1096)]  # N, K
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.parametrize(("n", "k", "rows", "skinny"), crossed(SHAPES, [1, 17, 40], [True, False]))
def test_matches_float64(
    skinny_up_to: Callable[[int], None],
    n: int,
    k: int,
    rows: int,
    skinny: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    skinny_up_to(rows if skinny else 0)
    kind = {"dtype": dtype, "device": device}
    x, weight = numbers(rows, k, seed=1, **kind), numbers(n, k, seed=2, **kind) / k**0.5
    bias, residual = numbers(n, seed=3, **kind), numbers(rows, n, seed=4, **kind)
    expected = x.double() @ weight.double().T
    for added in ((), (bias,), (bias, residual)):
        y = fixed_order_linear(x, weight, *added)
        wanted = expected + sum(part.double() for part in added)
        assert (y.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()
    out = numbers(rows, n + 3, seed=5, **kind)[:, :n]  # rows apart
    assert (fixed_order_gemm(x, weight, out=out).double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()
    if n % 2 == 0:
        gate, up = (expected + bias.double()).to(dtype).double().chunk(2, 1)
        y = fixed_order_gated(x, weight, bias)
        assert (y.double() - gate.sigmoid() * gate * up).norm() <= 2 * TOLERANCE[dtype] * y.double().norm()


def test_more_than_16_rows_leave_the_kernels_of_few(device: torch.device, force_kernels: Callable[..., None]) -> None:
    """Those of the default mode take up to 32, with the weight as the other operand."""
    force_kernels()
    x, weight = (torch.ones(size, device=device, dtype=torch.float16) for size in ((17, 24), (8, 24)))
    assert fixed_order.is_few(x[:16], weight)
    assert skinny_gemm_triton.is_skinny(17, weight)
    assert not fixed_order.is_few(x, weight)
    assert (fixed_order_linear(x, weight) == 24).all()
    assert fixed_order_gated(x, weight).shape == (17, 4)


def _divided(x: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor | None) -> torch.Tensor:
    halves = [a.float() @ b.float().T for a, b in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)]
    return (halves[0] + halves[1]).to(x.dtype)


@pytest.mark.parametrize("has_residual", [False, True])
def test_library_is_compared(device: torch.device, has_residual: bool) -> None:
    kind = {"dtype": torch.float32, "device": device}
    x, weight, residual = (numbers(*size, seed=1, **kind) for size in ((20, 256), (96, 256), (20, 96)))
    compare = partial(fixed_order.compare, results=10 * 20 * 96)
    arguments = x, weight, None, residual if has_residual else None
    assert compare(*arguments, lambda x, weight, bias, residual, out: fixed_order_gemm(x, weight, bias, residual))
    assert not compare(*arguments, _divided)
    zeros = x.new_zeros(20, 96)  # equal to those of this weight, but they show nothing of other weights
    assert not compare(x, torch.zeros_like(weight), None, None, lambda *_: zeros)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1024, 4096), (6144, 4096), (4096, 12288), (9000, 2048), (48, 40)])
@pytest.mark.gpu
@ON_GPU
def test_bits_do_not_depend_on_the_rows_beside(watch: Watch, n: int, k: int, dtype: torch.dtype) -> None:
    """With whichever of the three GEMMs is chosen, and with each of them."""
    kind = {"dtype": dtype, "device": torch.device("cuda")}
    x, weight = numbers(3000, k, seed=1, **kind), numbers(n, k, seed=2, **kind)
    x[:, ::7] *= 30  # exponents apart from each other
    bias, residual = numbers(n, seed=3, **kind), numbers(3000, n, seed=4, **kind)
    every, gated = fixed_order_gemm(x, weight, bias, residual), silu_and_mul(fixed_order_gemm(x, weight, bias))
    plain = fixed_order_gemm(x, weight)
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(0)).cuda()
    assert torch.equal(fixed_order_gemm(x[order], weight, bias, residual[order]), every[order])
    chosen = watch(fixed_order, "library", before=lambda *_: "library")
    for rows in (1, 2, 7, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 512, 1024):
        for some in (slice(0, rows), slice(3000 - rows, 3000)):
            found = fixed_order_linear(x[some], weight, bias, residual[some].clone())
            assert torch.equal(found, every[some]), f"{rows} rows"
            assert torch.equal(fixed_order_linear(x[some], weight), plain[some]), f"{rows} rows"
            added = fixed_order_linear(x[some], weight, None, residual[some].clone())
            assert torch.equal(added, fixed_order_gemm(x, weight, None, residual)[some]), f"{rows} rows"
            assert torch.equal(fixed_order_gated(x[some], weight, bias), gated[some]), f"{rows} rows"
        for tile in (Tile(16, 64, 128, 4, 4), Tile(64, 64, 64, 4, 4), Tile(128, 128, 64, 8, 3, 8)):
            assert torch.equal(fixed_order_gemm(x[:rows], weight, bias, residual[:rows], tile=tile), every[:rows])
    assert k < 1000 or chosen  # the library is of use somewhere


@pytest.mark.gpu
@ON_GPU
def test_library_that_divides_columns_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    x, weight = numbers(40, 4096, seed=1, **kind), numbers(512, 4096, seed=2, **kind)
    expected = fixed_order_gemm(x, weight)
    monkeypatch.setattr(fixed_order, "library", _divided)
    monkeypatch.setattr(fixed_order, "agreed", {})
    assert not torch.equal(_divided(x, weight), expected)
    assert torch.equal(fixed_order_linear(x, weight), expected)
