"""Linear layers with few and many rows match float64."""

from __future__ import annotations

import pytest
import torch

from specbatch.kernels.gemm import linear
from specbatch.kernels.gemm.linear import Linear, Norm

ROWS = [1, 2, 5, 15, 16, 17, 63, 64, 65]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    y = Linear(weight, bias)(x)
    assert y.shape == (x.shape[0], weight.shape[0])
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    expected = x.double() @ weight.double().t()
    if bias is not None:
        expected = expected + bias.double()
    bound = TOLERANCE[x.dtype] * expected.abs().max().item()
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_linear_matches_reference(rows: int, biased: bool, dtype: torch.dtype) -> None:
    x, weight = numbers(rows, 37, seed=rows).to(dtype), numbers(53, 37, seed=1).to(dtype)
    check(x, weight, numbers(53, seed=2).to(dtype) if biased else None)


@pytest.mark.parametrize("rows", ROWS)
def test_strided_inputs(rows: int) -> None:
    weight, bias = numbers(53, 37, seed=1), numbers(53, seed=2)
    check(numbers(rows, 90, seed=rows)[:, 20:57], weight, bias)  # a slice of a fused projection
    check(numbers(2 * rows, 37, seed=rows)[::2], weight, bias)
    check(numbers(rows, 37, seed=rows), numbers(80, 37, seed=1)[9:62], bias)  # rows of a fused weight


def test_rows_of_a_transposed_matrix_are_refused_on_every_device() -> None:
    with pytest.raises(AssertionError, match="must be adjacent"):
        Linear(numbers(53, 37, seed=1))(numbers(37, 5, seed=5).t())


@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (1, 9), (9, 1), (64, 64)])
@pytest.mark.parametrize("rows", [1, 2, 65])
def test_small_matrices(rows: int, inner: int, outer: int) -> None:
    check(numbers(rows, inner, seed=3), numbers(outer, inner, seed=4), numbers(outer, seed=5))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 17])
def test_relu_squared(rows: int, biased: bool) -> None:
    x, weight, bias = numbers(rows, 37, seed=3), numbers(53, 37, seed=4), numbers(53, seed=5) if biased else None
    norm = Norm(numbers(37, seed=6), 1e-3)
    h64 = x.double()
    h64 = h64 * torch.rsqrt(h64.square().mean(1, keepdim=True) + norm.eps) * norm.weight.double()
    h = h64 @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(Linear(weight, bias).squared(x, norm).double(), h.relu().square(), rtol=1e-5, atol=1e-4)


def test_operands_are_not_modified() -> None:
    x, weight, bias = numbers(1, 8, seed=0), numbers(6, 8, seed=1), numbers(6, seed=2)
    before = [item.clone() for item in (x, weight, bias)]
    Linear(weight, bias)(x).add_(1)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, weight, bias), strict=True))


def test_blocked_layout_does_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = numbers(3, 37, seed=0), numbers(1801, 37, seed=1), numbers(1801, seed=2)
    blocked = Linear(weight, bias)(x)
    monkeypatch.setattr(linear, "is_blocked", lambda dtype, device: False)
    check(x, weight, bias)
    torch.testing.assert_close(Linear(weight, bias)(x), blocked, rtol=0, atol=1e-5)
    assert Linear(weight).shape == weight.shape


def test_rows_do_not_depend_on_batch() -> None:
    """Up to rounding; lossless decoding depends on it."""
    layer, x = Linear(numbers(250, 300, seed=1)), numbers(65, 300, seed=2)
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in (2, 5, 16, 33, 65):
        torch.testing.assert_close(layer(x[:rows]), alone[:rows], rtol=0, atol=5e-5)


@pytest.mark.skipif(not linear.is_blocked(torch.float32, torch.device("cpu")), reason="oneDNN is missing")
def test_few_numbers_of_rows_reach_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps a compiled kernel for each."""
    seen: set[int] = set()

    def gemm(x: torch.Tensor, *_: object) -> torch.Tensor:
        seen.add(len(x))
        return x

    layer = Linear(numbers(300, 300, seed=1))
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", gemm)
    for rows in range(1, 2049):
        assert len(layer(torch.empty(rows, 300))) == rows
        assert rows <= max(seen) < 1.25 * rows or rows <= 8
    assert len(seen) == 40
