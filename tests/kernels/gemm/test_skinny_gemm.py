"""Skinny GEMMs match float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from crossed import crossed, slow_but
from fused_gemm import EPS, matches, normalised, numbers

from specbatch.kernels.gemm.dense.skinny_gemm_configs import Tile, puts_weight_first, tile_for
from specbatch.kernels.gemm.dense.skinny_gemm_triton import is_skinny, skinny_gated, skinny_gemm, skinny_linear
from specbatch.kernels.gemm.split_k_triton import COUNTERS, WORKSPACE, workspace

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}  # ||y - expected|| / ||expected||
SHAPES = [(131, 72), (8, 8), (64, 256), (72, 1096), (200, 512)]  # N, K
check = partial(matches, TOLERANCE)


@pytest.mark.parametrize("full", [False, True], ids=["plain", "norm-bias-residual"])
@pytest.mark.parametrize(("n", "k", "rows"), crossed(SHAPES, [1, 5, 17, 65]))
def test_skinny_linear_matches_reference(
    rows: int, n: int, k: int, full: bool, dtype: torch.dtype, device: torch.device
) -> None:
    kind = {"dtype": dtype, "device": device}
    x, weight = numbers(rows, k, seed=1, **kind), numbers(n, k, seed=2, **kind) / k**0.5
    if not full:
        check(skinny_linear(x, weight), x.double() @ weight.double().t(), dtype)
        return
    norm, bias = 1 + 0.3 * numbers(k, seed=3, **kind), numbers(n, seed=4, **kind)
    residual = numbers(rows, n, seed=5, **kind)
    y = skinny_linear(x, weight, bias, norm=(norm, EPS), residual=residual)
    check(y, normalised(x, norm) @ weight.double().t() + bias.double() + residual.double(), dtype)


@pytest.mark.parametrize("full", [False, True], ids=["plain", "norm-bias"])
@pytest.mark.parametrize(("n", "k", "rows"), crossed(SHAPES, [1, 20, 33]))
def test_skinny_gated_matches_reference(
    rows: int, n: int, k: int, full: bool, dtype: torch.dtype, device: torch.device
) -> None:
    kind = {"dtype": dtype, "device": device}
    x, weight = numbers(rows, k, seed=1, **kind), numbers(2 * n, k, seed=2, **kind) / k**0.5
    norm = 1 + 0.3 * numbers(k, seed=3, **kind) if full else None
    bias = numbers(2 * n, seed=4, **kind) if full else None
    given = None if norm is None else (norm, EPS)
    h = normalised(x, norm) @ weight.double().t() + (0 if bias is None else bias.double())
    check(skinny_gated(x, weight, bias, norm=given), F.silu(h[:, :n]) * h[:, n:], dtype)


@pytest.mark.parametrize("full", [False, True], ids=["plain", "norm-bias-residual"])
@pytest.mark.parametrize(("n", "k"), [(131, 72), (64, 1096)])
def test_skinny_relu_squared_matches_reference(
    n: int, k: int, full: bool, dtype: torch.dtype, device: torch.device
) -> None:
    kind = {"dtype": dtype, "device": device}
    x, weight = numbers(5, k, seed=1, **kind), numbers(n, k, seed=2, **kind) / k**0.5
    x[3, 2] = torch.nan  # must propagate
    norm, bias, residual = (
        1 + numbers(k, seed=3, **kind),
        *(numbers(*size, seed=4, **kind) for size in ((n,), (5, n))),
    )
    h = normalised(x, norm if full else None) @ weight.double().t() + (bias.double() if full else 0)
    given = {"bias": bias, "norm": (norm, EPS), "residual": residual} if full else {}
    y, expected = skinny_linear(x, weight, squared=True, **given), F.relu(h).square() + (residual if full else 0)
    assert y[3].isnan().all()
    check(y.nan_to_num(), expected.nan_to_num(), dtype)


@pytest.mark.parametrize(
    ("splits", "gated", "rows"),
    slow_but(
        [(1, False, 3), (1, True, 19), (2, True, 3), (3, False, 19), (3, True, 3), (5, True, 19), (5, False, 3)],
        itertools.product((1, 2, 3, 5), (False, True), (3, 19)),
    ),
)
def test_split_k_matches_reference(rows: int, splits: int, gated: bool, device: torch.device) -> None:
    """Every split of K gives the same result, whatever the workspace held, and leaves the arrival counters at zero."""
    kind = {"dtype": torch.float32, "device": device}
    x, weight, norm = (
        numbers(rows, 328, seed=1, **kind),
        numbers(80, 328, seed=2, **kind) / 18,
        numbers(328, seed=3, **kind),
    )
    partial, counters = workspace(device)
    partial.fill_(float("nan"))
    y = skinny_gemm(x, weight, None, (norm, EPS), None, gated=gated, tile=Tile(16, 64, splits, 4, 3))
    h = normalised(x, norm) @ weight.double().t()
    check(y, F.silu(h[:, :40]) * h[:, 40:] if gated else h, torch.float32)
    assert not counters.any()


@pytest.mark.parametrize("gemm", [skinny_linear, skinny_gated])
def test_large_activations_do_not_overflow(
    gemm: Callable[..., torch.Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Some models have channels in the thousands before the norm; the largest float16 is 65504."""
    kind = {"dtype": dtype, "device": device}
    x, weight, norm = numbers(3, 64, seed=1, **kind), numbers(24, 64, seed=2, **kind) / 8, numbers(64, seed=3, **kind)
    x[1, 7], norm[7] = 2e4, 4.0
    h = normalised(x, norm) @ weight.double().t()
    expected = F.silu(h[:, :12]) * h[:, 12:] if gemm is skinny_gated else h
    check(gemm(x, weight, norm=(norm, EPS)), expected, dtype)


@pytest.mark.parametrize("rows", [4, 18])
def test_strided_inputs(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    buffer = numbers(rows, 200, seed=1, dtype=dtype, device=device)
    weight = numbers(24, 64, seed=2, dtype=dtype, device=device) / 8
    x, residual = buffer[:, 40:104], buffer[:, 120:144]
    check(skinny_linear(x, weight, residual=residual), x.double() @ weight.double().t() + residual.double(), dtype)


@pytest.mark.parametrize("batches", [(16, 2, 7), (32, 17, 23)], ids=str)
def test_rows_do_not_depend_on_batch(
    batches: tuple[int, ...], dtype: torch.dtype, device: torch.device, assert_same: Callable[..., None]
) -> None:
    """Among those that share a kernel: 2 to 16, and 17 to 32."""
    (most, *fewer), kind = batches, {"dtype": dtype, "device": device}
    x, weight, norm = numbers(most, 320, seed=1, **kind), numbers(96, 320, seed=2, **kind), numbers(320, seed=3, **kind)
    together = skinny_gated(x, weight, norm=(norm, EPS))
    for rows in fewer:
        assert_same(skinny_gated(x[:rows], weight, norm=(norm, EPS)), together[:rows])
    shuffled = skinny_gated(x.flip(0), weight, norm=(norm, EPS)).flip(0)
    assert_same(shuffled, together)


def test_unsupported_shapes_are_refused(device: torch.device) -> None:
    x, weight = torch.zeros(129, 16, device=device), torch.zeros(8, 16, device=device)
    with pytest.raises(AssertionError, match="129 rows"):
        skinny_linear(x, weight)
    with pytest.raises(AssertionError, match="x has 8 columns, the weight 16"):
        skinny_linear(x[:1, :8], weight)
    with pytest.raises(AssertionError, match="contiguous"):
        skinny_linear(x[:1], torch.zeros(16, 8, device=device).t())


def test_is_skinny(device: torch.device) -> None:
    weight = torch.zeros(8, 16, device=device, dtype=torch.bfloat16)
    on_device = device.type == "cuda"
    assert is_skinny(1, weight) is on_device
    assert is_skinny(32, weight) is on_device
    assert not is_skinny(33, weight)
    assert not is_skinny(1, weight.float())
    assert not is_skinny(1, weight[:, :12].contiguous())
    head = torch.zeros(65544, 8, device=device, dtype=torch.bfloat16)
    assert is_skinny(16, head) is on_device
    assert not is_skinny(17, head)


@pytest.mark.parametrize(
    ("n", "k", "gated", "splits"),
    [
        (6144, 4096, False, 4),
        (12288, 4096, True, 1),
        (4096, 12288, False, 6),
        (2048, 1536, False, 6),
        (8960, 1536, True, 1),
        (1536, 8960, False, 8),
        (4864, 896, True, 3),
        (65536, 8192, False, 1),
        (64, 128, False, 1),
    ],
)
def test_tile_of_32_rows(n: int, k: int, gated: bool, splits: int) -> None:
    """64 rows of the weight for an instruction; what programs leave for each other fits in the workspace."""
    tile = tile_for(n, k, 32, gated, 2)
    assert (tile.n, tile.warps, tile.splits) == (64, 4, splits)
    tiles = -(-n // tile.n)
    assert splits == 1 or (tiles <= COUNTERS and tiles * splits * 32 * (64 * (1 + gated) + 1) <= WORKSPACE)
    assert puts_weight_first(32)
    assert not puts_weight_first(16)
