"""GEMMs of one row match float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from crossed import crossed
from fused_gemm import EPS, matches, normalised, numbers
from watched_calls import Watch

from specbatch.kernels.gemm.dense import one_row_triton, skinny_gemm_triton
from specbatch.kernels.gemm.dense.one_row_triton import OneRowTile, one_row_tile_for, takes_one_row
from specbatch.kernels.gemm.dense.skinny_gemm_triton import skinny_gated, skinny_linear
from specbatch.kernels.gemm.linear import Linear, Norm

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}  # ||y - expected|| / ||expected||
SHAPES = [(131, 72), (8, 8), (64, 1024), (70, 1032), (3, 2056), (1, 576), (24, 12288)]  # N, K
TILES = [OneRowTile(2, 1), OneRowTile(4, 2), OneRowTile(8, 4), OneRowTile(16, 8)]
check = partial(matches, TOLERANCE)


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The interpreter computes these kernels in both types: they multiply no matrices."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def calls(watch: Watch) -> list[int]:
    """Numbers of columns of the weights that the kernel was given."""
    return watch(skinny_gemm_triton, "one_row_gemm", before=lambda x, *_, **__: x.shape[1])


@pytest.mark.parametrize(("n", "k", "squared", "dtype"), crossed(SHAPES, [False, True], TOLERANCE), ids=str)
def test_linear_matches_reference(
    n: int, k: int, squared: bool, dtype: torch.dtype, device: torch.device, calls: list[int]
) -> None:
    kind = {"dtype": dtype, "device": device}
    x, weight = numbers(1, k, seed=1, **kind), numbers(n, k, seed=2, **kind) / k**0.5
    norm, bias, residual = 1 + 0.3 * numbers(k, seed=3, **kind), *(numbers(n, seed=i, **kind) for i in (4, 5))
    plain = x.double() @ weight.double().t()
    full = normalised(x, norm) @ weight.double().t() + bias.double()
    plain, full = (part.relu().square() if squared else part for part in (plain, full))
    check(skinny_linear(x, weight, squared=squared), plain, dtype)
    y = skinny_linear(x, weight, bias, norm=(norm, EPS), residual=residual[None], squared=squared)
    check(y, full + residual.double(), dtype)
    assert calls == [k, k]


@pytest.mark.parametrize(("n", "k", "dtype"), crossed([(131, 72), (70, 1032), (1, 576)], TOLERANCE), ids=str)
def test_gated_matches_reference(n: int, k: int, dtype: torch.dtype, device: torch.device, calls: list[int]) -> None:
    kind = {"dtype": dtype, "device": device}
    x, weight = numbers(1, k, seed=1, **kind), numbers(2 * n, k, seed=2, **kind) / k**0.5
    norm, bias = 1 + 0.3 * numbers(k, seed=3, **kind), numbers(2 * n, seed=4, **kind)
    for h, given in (
        (x.double() @ weight.double().t(), {}),
        (normalised(x, norm) @ weight.double().t() + bias.double(), {"bias": bias, "norm": (norm, EPS)}),
    ):
        check(skinny_gated(x, weight, **given), F.silu(h[:, :n]) * h[:, n:], dtype)
    assert calls == [k, k]


@pytest.mark.parametrize(("tile", "dtype"), crossed(TILES, TOLERANCE), ids=str)
def test_tiles_agree(tile: OneRowTile, dtype: torch.dtype, device: torch.device) -> None:
    kind = {"dtype": dtype, "device": device}
    x, weight, norm = (
        numbers(1, 584, seed=1, **kind),
        numbers(74, 584, seed=2, **kind) / 24,
        numbers(584, seed=3, **kind),
    )
    h = normalised(x, norm) @ weight.double().t()
    check(skinny_linear(x, weight, norm=(norm, EPS), tile=tile), h, dtype)
    gated = skinny_gated(x, weight, norm=(norm, EPS), tile=tile)
    check(gated, F.silu(h[:, :37]) * h[:, 37:], dtype)


def test_norm_in_float32(dtype: torch.dtype, device: torch.device) -> None:
    kind = {"dtype": dtype, "device": device}
    x, weight = numbers(1, 1096, seed=1, **kind), numbers(20, 1096, seed=2, **kind) / 33
    norm = 1 + 0.3 * numbers(1096, seed=3, dtype=torch.float32, device=device)
    y = skinny_linear(x, weight, norm=(norm, EPS))
    check(y, normalised(x, norm) @ weight.double().t(), dtype)


def test_large_activations_do_not_overflow(dtype: torch.dtype, device: torch.device) -> None:
    kind = {"dtype": dtype, "device": device}
    x, weight, norm = numbers(1, 64, seed=1, **kind), numbers(24, 64, seed=2, **kind) / 8, numbers(64, seed=3, **kind)
    x[0, 7], norm[7] = 2e4, 4.0
    check(skinny_linear(x, weight, norm=(norm, EPS)), normalised(x, norm) @ weight.double().t(), dtype)


def test_nan_propagates_through_relu_squared(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.ones(1, 16, dtype=dtype, device=device), torch.ones(5, 16, dtype=dtype, device=device)
    x[0, 3] = torch.nan
    assert skinny_linear(x, weight, squared=True).isnan().all()


def test_parts_of_other_tensors(dtype: torch.dtype, device: torch.device, calls: list[int]) -> None:
    """x and the residual are pieces of a row, the weight rows of another one; what lies at an odd place is left to
    the kernel of more rows."""
    row = numbers(1, 300, seed=1, dtype=dtype, device=device)
    weight = numbers(40, 64, seed=2, dtype=dtype, device=device)[9:33] / 8
    for start in (40, 42):
        x, residual = row[:, start : start + 64], row[:, 121:145]
        y = skinny_linear(x, weight, residual=residual)
        check(y, x.double() @ weight.double().t() + residual.double(), dtype)
    assert calls == [64, 64]
    assert not takes_one_row(row[:, 41:105], weight)


def test_calls_of_one_row_have_the_same_bits(dtype: torch.dtype, device: torch.device) -> None:
    kind = {"dtype": dtype, "device": device}
    x, weight = numbers(1, 320, seed=1, **kind), numbers(96, 320, seed=2, **kind)
    first = skinny_linear(x, weight)
    assert torch.equal(skinny_linear(x.clone(), weight), first)
    assert torch.equal(skinny_linear(x, weight[17:].contiguous()), first[:, 17:])


def test_choice(device: torch.device) -> None:
    """One row in 16 bits, unless results are rounded as the library's are or a tile is given."""
    x, weight = (torch.zeros(size, device=device, dtype=torch.bfloat16) for size in ((2, 64), (8, 64)))
    assert takes_one_row(x[:1], weight)
    assert not takes_one_row(x, weight)
    assert not takes_one_row(x[:1].float(), weight.float())
    wide = torch.zeros(1, one_row_triton.MOST_K + 8, device=device, dtype=torch.bfloat16)
    assert not takes_one_row(wide, wide)


@pytest.mark.parametrize(
    ("k", "gated", "expected"),
    [
        (4096, False, OneRowTile(4, 4)),
        (4096, True, OneRowTile(4, 4)),
        (12288, False, OneRowTile(2, 8)),
        (8192, True, OneRowTile(2, 4)),
        (25600, False, OneRowTile(1, 8)),
        (16384, True, OneRowTile(2, 8)),
        (1536, True, OneRowTile(4, 4)),
    ],
)
def test_tile_for(k: int, gated: bool, expected: OneRowTile) -> None:
    assert one_row_tile_for(k, gated) == expected


def test_deterministic_mode_has_its_own_kernels(device: torch.device, calls: list[int]) -> None:
    from specbatch.kernels.gemm.deterministic.fixed_order import fixed_order_gated, fixed_order_linear

    x, weight = (torch.ones(size, device=device, dtype=torch.float16) for size in ((1, 64), (8, 64)))
    assert (fixed_order_linear(x, weight) == 64).all()
    assert fixed_order_gated(x, weight).shape == (1, 4)
    assert not calls


def test_layer(dtype: torch.dtype, device: torch.device, calls: list[int], force_kernels: Any) -> None:
    """`Linear` multiplies one row by this kernel."""
    force_kernels(True)
    kind = {"dtype": dtype, "device": device}
    x, weight, norm = numbers(1, 64, seed=1, **kind), numbers(24, 64, seed=2, **kind) / 8, numbers(64, seed=3, **kind)
    h = normalised(x, norm) @ weight.double().t()
    layer, given = Linear(weight), Norm(norm, EPS)
    check(layer(x, norm=given), h, dtype)
    check(layer.gated(x, given), F.silu(h[:, :12]) * h[:, 12:], dtype)
    check(layer.squared(x, given), h.relu().square(), dtype)
    assert calls == [64, 64, 64]
