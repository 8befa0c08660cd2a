"""GEMMs with INT4 weights match float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from assembly import create_inline_asm

from specbatch.kernels.gemm import int4_triton
from specbatch.kernels.gemm.few_rows_triton import FewRowsTile
from specbatch.kernels.gemm.int4 import int4_linear_ref, pack_int4
from specbatch.kernels.gemm.int4_triton import int4_linear
from specbatch.kernels.gemm.weight import INT4_GROUPS, Weight

TILES = [FewRowsTile(64, 1, 4, 3, 8), FewRowsTile(128, 3, 4, 3, 0), FewRowsTile(64, 2, 4, 3, 2)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}  # ||y - expected|| / ||expected||


@pytest.fixture(autouse=True)
def interpreted_assembly(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cuda":
        monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.create_inline_asm", create_inline_asm)


def random_weight(n: int, k: int, group: int, device: torch.device) -> tuple[Weight, torch.Tensor]:
    """A weight, and its values in float64, one by one."""
    values, zeros = torch.randint(0, 16, (n, k)), torch.randint(0, 16, (n, k // group))
    scales = (torch.rand(n, k // group) / 60 + 1e-3).half()
    meant = torch.zeros(n, k, dtype=torch.float64)
    for j in range(k):
        meant[:, j] = (values[:, j] - zeros[:, j // group]) * scales[:, j // group].double()
    packed = pack_int4(values.byte())
    return Weight(packed.to(device), scales.to(device), zeros.byte().to(device)), meant.to(device)


def check(y: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert y.dtype == dtype
    assert y.shape == expected.shape
    assert (y.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize(
    ("rows", "n", "k", "group"),
    [
        (1, 130, 256, 128),
        (5, 40, 192, 64),
        (17, 72, 96, 32),
        (40, 130, 128, 128),
        (130, 16, 128, 64),
        (300, 33, 256, 128),
    ],
)
def test_int4_linear_matches_reference(
    rows: int, n: int, k: int, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    """300 rows are multiplied by the dequantized weight."""
    weight, meant = random_weight(n, k, group, device)
    assert weight.shape == (n, k)
    x, bias = torch.randn(rows, k + 16).to(device, dtype)[:, 8 : 8 + k], torch.randn(n).to(device, dtype)
    residual = torch.randn(rows, n + 5).to(device, dtype)[:, 3 : 3 + n]
    expected = x.double() @ meant.t()
    check(int4_linear_ref(x, weight), expected, dtype)
    check(int4_linear(x, weight), expected, dtype)
    expected += bias.double() + residual.double()
    check(int4_linear_ref(x, weight, bias, residual), expected, dtype)
    out = torch.full((rows, n + 4), 7.0, device=device, dtype=dtype)
    int4_linear(x, weight, bias, residual, out[:, 2 : n + 2])
    check(out[:, 2 : n + 2], expected, dtype)
    assert (out[:, :2] == 7).all()
    assert (out[:, n + 2 :] == 7).all()


@pytest.mark.parametrize(("rows", "tile"), [(1, None), (40, None), (300, None), *((16, tile) for tile in TILES)])
def test_every_value_and_zero_point_is_exact(
    rows: int, tile: FewRowsTile | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Each is the only term of its sum."""
    values, zeros = torch.arange(256)[:, None] % 16, torch.arange(256)[:, None] // 16
    weight = Weight(pack_int4(values.byte().expand(256, 32)), torch.ones(256, 1).half(), zeros.byte())
    weight = Weight(*(part.to(device) for part in (weight.values, weight.scales, weight.zeros)))  # type: ignore[union-attr]
    column = torch.arange(rows, device=device) * 7 % 32
    y = int4_linear(F.one_hot(column, 32).to(dtype), weight, tile=tile)
    assert torch.equal(y.float(), (values - zeros).float().t().expand(rows, 256).to(device))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("rows", "n", "k", "group"),
    [(1, 130, 512, 128), (4, 16, 192, 64), (16, 64, 128, 128), (17, 72, 96, 32), (3, 40, 256, 64), (20, 24, 256, 32)],
)
def test_few_rows_match_reference(
    tile: FewRowsTile, rows: int, n: int, k: int, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    """512 columns are four steps."""
    weight, meant = random_weight(n, k, group, device)
    x, bias = torch.randn(rows, k + 16).to(device, dtype)[:, 8 : 8 + k], torch.randn(n).to(device, dtype)
    residual = torch.randn(rows, n + 5).to(device, dtype)[:, 3 : 3 + n]
    expected = x.double() @ meant.t()
    check(int4_linear(x, weight, tile=tile), expected, dtype)
    out = torch.full((rows, n + 4), 7.0, device=device, dtype=dtype)
    int4_linear(x, weight, bias, residual, out[:, 2 : n + 2], tile)
    check(out[:, 2 : n + 2], expected + bias.double() + residual.double(), dtype)
    assert (out[:, :2] == 7).all()
    assert (out[:, n + 2 :] == 7).all()


def test_few_rows_are_those_of_half_precision() -> None:
    tile = int4_triton.tile_for(16, 4096, 4096, 2)
    assert isinstance(tile, FewRowsTile)
    assert (tile.outputs, tile.splits) == (64, 4)
    for rows, n, item in ((33, 4096, 2), (16, 4096, 4), (16, 57344, 2)):
        assert isinstance(int4_triton.tile_for(rows, n, 4096, item), int4_triton.Tile)
    assert isinstance(int4_triton.tile_for(32, 57344, 4096, 2), FewRowsTile)


@pytest.mark.parametrize("group", INT4_GROUPS)
def test_dequantized_weight_is_that_of_the_reference(group: int, dtype: torch.dtype, device: torch.device) -> None:
    weight, _ = random_weight(40, 3 * group, group, device)
    assert torch.equal(int4_triton.dequantize(weight, dtype), weight.dequantize(dtype))
