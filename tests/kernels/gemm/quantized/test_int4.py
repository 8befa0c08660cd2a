"""GEMMs with INT4 weights match float64."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
import torch.nn.functional as F
from crossed import crossed
from hypothesis import given
from hypothesis import strategies as st

from specbatch.kernels.common.block_sizes import INT4_GROUPS
from specbatch.kernels.gemm.quantized import int4_triton
from specbatch.kernels.gemm.quantized.int4 import Int4Tiles, Int4Weight, int4_tiles, pack_int4, with_short_scales
from specbatch.kernels.gemm.quantized.int4_few_rows_triton import Int4FewRowsTile
from specbatch.kernels.gemm.quantized.int4_triton import int4_linear
from specbatch.kernels.gemm.quantized.weight import quantized_linear_ref

TILES = [Int4FewRowsTile(64, 1, 1, 4), Int4FewRowsTile(128, 3, 2, 3), Int4FewRowsTile(128, 2, 1, 4)]
SCALES = {torch.float32: torch.float16, torch.bfloat16: torch.bfloat16, torch.float16: torch.float16}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}  # ||y - expected|| / ||expected||


def random_scales(*shape: int) -> torch.Tensor:
    """Half of them are negative, as those of symmetric weights of auto-round."""
    return (torch.rand(shape) / 60 + 1e-3) * torch.randint(0, 2, shape).mul(2).sub(1)


def random_weight(
    n: int, k: int, group: int, dtype: torch.dtype, device: torch.device
) -> tuple[Int4Tiles, torch.Tensor]:
    """A weight for x of a type, and its values in float64, one by one."""
    values, zeros = torch.randint(0, 16, (n, k)), torch.randint(0, 16, (n, k // group))
    scales = random_scales(n, k // group).to(SCALES[dtype])
    meant = torch.zeros(n, k, dtype=torch.float64)
    for j in range(k):
        meant[:, j] = (values[:, j] - zeros[:, j // group]) * scales[:, j // group].double()
    packed = pack_int4(values.byte())
    return int4_tiles(Int4Weight(packed.to(device), scales.to(device), zeros.byte().to(device))), meant.to(device)


@given(
    tiles=st.integers(1, 5),
    unit=st.sampled_from([1, 2, 8, 64, 128]),
    chunks=st.integers(1, 5),
    group=st.sampled_from(INT4_GROUPS),
    experts=st.sampled_from([(), (3,)]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_tiles_hold_the_weight(
    tiles: int, unit: int, chunks: int, group: int, experts: tuple[int, ...], dtype: torch.dtype
) -> None:
    out, inputs = tiles * unit, chunks * group
    values, zeros = torch.randint(0, 16, (*experts, out, inputs)), torch.randint(0, 16, (*experts, out, chunks))
    weight = Int4Weight(pack_int4(values.byte()), random_scales(*zeros.shape).to(dtype), zeros.byte())
    found = int4_tiles(weight)
    assert found.shape == weight.shape
    assert found.group == group
    assert out % found.unit == 0 == inputs % found.chunk
    for part, expected in zip(astuple(found.rows()), astuple(weight), strict=True):
        assert part.dtype == expected.dtype
        assert torch.equal(part, expected)
    if experts:
        assert torch.equal(found.of(1).dequantize(torch.float32), weight.of(1).dequantize(torch.float32))


def test_a_tile_is_contiguous() -> None:
    """Of 128 outputs and inputs 8 KiB, and their 512 bytes of scales and zero points."""
    values, zeros = torch.arange(4).view(2, 2).repeat_interleave(128, 0).repeat_interleave(128, 1), torch.ones(256, 2)
    weight = Int4Weight(pack_int4(values.byte()), zeros.half() * torch.arange(1, 3), zeros.byte())
    words, scales = int4_tiles(weight).words()
    for tile, part in enumerate(words.view(4, 2048)):
        assert (part == tile * 0x11111111).all()
    one, two = 0x80013C00 - (1 << 32), 0x80014000 - (1 << 32)
    assert torch.equal(scales.view(4, 128), torch.tensor([[one], [two], [one], [two]]).int().expand(4, 128))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_get_the_type_of_activations(dtype: torch.dtype, stored: torch.dtype) -> None:
    """BF16 scales change a weight by 1/256 of it at most, and FP16 scales by 1/2048."""
    scales = random_scales(8, 4).to(stored)
    weight = Int4Weight(pack_int4(torch.randint(0, 16, (8, 128)).byte()), scales, torch.full((8, 4), 8).byte())
    found = with_short_scales(weight, dtype)
    halves = stored if stored.itemsize == 2 else torch.float16
    assert found.scales.dtype == (halves if dtype == torch.float32 else dtype)
    exact, bound = weight.dequantize(torch.float64), 1 / 256 if found.scales.dtype == torch.bfloat16 else 1 / 2048
    assert ((found.dequantize(torch.float64) - exact).abs() <= bound * exact.abs()).all()


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
    weight, meant = random_weight(n, k, group, dtype, device)
    assert weight.shape == (n, k)
    x, bias = torch.randn(rows, k + 16).to(device, dtype)[:, 8 : 8 + k], torch.randn(n).to(device, dtype)
    residual = torch.randn(rows, n + 5).to(device, dtype)[:, 3 : 3 + n]
    expected = x.double() @ meant.t()
    check(quantized_linear_ref(x, weight), expected, dtype)
    check(int4_linear(x, weight), expected, dtype)
    expected += bias.double() + residual.double()
    check(quantized_linear_ref(x, weight, bias, residual), expected, dtype)
    out = torch.full((rows, n + 4), 7.0, device=device, dtype=dtype)
    int4_linear(x, weight, bias, residual, out[:, 2 : n + 2])
    check(out[:, 2 : n + 2], expected, dtype)
    assert (out[:, :2] == 7).all()
    assert (out[:, n + 2 :] == 7).all()


@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize(("rows", "tile"), [(1, None), (40, None), (300, None), *((16, tile) for tile in TILES)])
def test_every_value_and_zero_point_is_exact(
    rows: int, tile: Int4FewRowsTile | None, scale: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Each is the only term of its sum."""
    values, zeros = torch.arange(256)[:, None] % 16, torch.arange(256)[:, None] // 16
    parts = pack_int4(values.byte().expand(256, 32)), torch.full((256, 1), scale).to(SCALES[dtype]), zeros.byte()
    weight = int4_tiles(Int4Weight(*(part.to(device) for part in parts)))
    column = torch.arange(rows, device=device) * 7 % 32
    y = int4_linear(F.one_hot(column, 32).to(dtype), weight, tile=tile)
    assert torch.equal(y.float(), (values - zeros).mul(scale).t().expand(rows, 256).to(device))


@pytest.mark.parametrize(
    ("tile", "rows", "n", "k", "group"),
    crossed(
        TILES,
        [
            (1, 130, 512, 128),
            (4, 16, 192, 64),
            (16, 64, 128, 128),
            (17, 72, 96, 32),
            (3, 40, 256, 64),
            (20, 24, 256, 32),
            (2, 256, 576, 64),
            (19, 136, 480, 32),
            (5, 33, 384, 128),
        ],
    ),
)
def test_few_rows_match_reference(
    tile: Int4FewRowsTile, rows: int, n: int, k: int, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    """512 columns are four steps."""
    weight, meant = random_weight(n, k, group, dtype, device)
    x, bias = torch.randn(rows, k + 16).to(device, dtype)[:, 8 : 8 + k], torch.randn(n).to(device, dtype)
    residual = torch.randn(rows, n + 5).to(device, dtype)[:, 3 : 3 + n]
    expected = x.double() @ meant.t()
    check(int4_linear(x, weight, tile=tile), expected, dtype)
    out = torch.full((rows, n + 4), 7.0, device=device, dtype=dtype)
    int4_linear(x, weight, bias, residual, out[:, 2 : n + 2], tile)
    check(out[:, 2 : n + 2], expected + bias.double() + residual.double(), dtype)
    assert (out[:, :2] == 7).all()
    assert (out[:, n + 2 :] == 7).all()


@pytest.mark.parametrize(
    ("rows", "n", "k", "expected"),
    [
        (16, 6144, 4096, Int4FewRowsTile(64, 4, 1, 5)),
        (16, 4096, 4096, Int4FewRowsTile(64, 6, 1, 5)),
        (16, 24576, 4096, Int4FewRowsTile(128, 1, 2, 3)),
        (16, 4096, 12288, Int4FewRowsTile(128, 8, 2, 3)),
        (1, 57344, 8192, Int4FewRowsTile(128, 1, 2, 3)),
        (16, 8192, 28672, Int4FewRowsTile(128, 4, 2, 3)),
        (17, 6144, 4096, Int4FewRowsTile(64, 4, 1, 5)),
        (32, 24576, 4096, Int4FewRowsTile(64, 1, 1, 5)),
        (32, 4096, 12288, Int4FewRowsTile(64, 6, 1, 5)),
        (64, 24576, 4096, int4_triton.Tile(64, 64, 1, 4, 3)),
        (64, 4096, 12288, int4_triton.Tile(64, 64, 4, 4, 4)),
        (128, 4096, 4096, int4_triton.Tile(128, 64, 2, 4, 3)),
        (128, 4096, 12288, int4_triton.Tile(128, 64, 4, 4, 3)),
    ],
)
def test_tiles_are_those_measured(rows: int, n: int, k: int, expected: Int4FewRowsTile | int4_triton.Tile) -> None:
    assert int4_triton.tile_for(rows, n, k, 2) == expected


def test_few_rows_are_those_of_half_precision() -> None:
    for rows, n, item in ((33, 4096, 2), (16, 4096, 4)):
        assert isinstance(int4_triton.tile_for(rows, n, 4096, item), int4_triton.Tile)
    assert isinstance(int4_triton.tile_for(32, 57344, 4096, 2), Int4FewRowsTile)


@pytest.mark.parametrize("group", INT4_GROUPS)
def test_dequantized_weight_is_that_of_the_reference(group: int, dtype: torch.dtype, device: torch.device) -> None:
    weight, _ = random_weight(40, 3 * group, group, dtype, device)
    assert torch.equal(int4_triton.dequantize(weight, dtype), weight.dequantize(dtype))


def test_no_rows_give_no_results(device: torch.device) -> None:
    weight, _ = random_weight(40, 128, 32, torch.float32, device)
    assert int4_linear(torch.empty(0, 128, device=device), weight).shape == (0, 40)


@pytest.mark.parametrize("wrong", [{"x": (3, 256)}, {"bias": (41,)}, {"residual": (2, 40)}])
def test_shapes_that_do_not_match_are_refused(wrong: dict[str, tuple[int, ...]], device: torch.device) -> None:
    weight, _ = random_weight(40, 128, 32, torch.float32, device)
    given = {name: torch.zeros(shape, device=device) for name, shape in ({"x": (3, 128)} | wrong).items()}
    with pytest.raises(AssertionError):
        int4_linear(given["x"], weight, given.get("bias"), given.get("residual"))


def test_groups_smaller_than_those_of_the_kernels_are_refused() -> None:
    with pytest.raises(AssertionError, match="groups have 16 inputs"):
        random_weight(40, 128, 16, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_groups_of_a_cpu_have_the_same_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values, zeros = (
        torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator) for shape in ((24, 128), (24, 4))
    )
    weight = Int4Weight(pack_int4(values), torch.randn(24, 4, generator=generator).to(dtype), zeros)
    found = weight.grouped().dequantize(torch.float32)
    torch.testing.assert_close(
        found, weight.dequantize(torch.float32), rtol=1e-6, atol=0 if dtype.itemsize == 2 else 1e-6
    )
