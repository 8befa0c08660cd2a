"""Linear layers with FP8 weights, scaled per block or per output, match float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from crossed import crossed
from dtypes import HALVES
from stand_ins import quantized_by_activations

from specbatch.kernels.dispatch import use_deterministic
from specbatch.kernels.elementwise.norm import rms_norm_ref
from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.gemm.quantized import fp8_linear as fp8_linear_module
from specbatch.kernels.gemm.quantized import fp8_linear_triton
from specbatch.kernels.gemm.quantized.few_rows_triton import even_splits
from specbatch.kernels.gemm.quantized.fp8_activations import FP8Activations, use_fp8_activations
from specbatch.kernels.gemm.quantized.fp8_few_rows_triton import FP8FewRowsTile
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Linear, FP8Weight
from specbatch.kernels.gemm.quantized.fp8_linear_triton import fp8_linear
from specbatch.kernels.gemm.quantized.fp8_quantize import quantize_fp8_ref, rms_norm_fp8_ref, silu_and_mul_fp8
from specbatch.kernels.gemm.quantized.w8a8_few_rows_triton import W8A8FewRowsTile
from specbatch.kernels.gemm.quantized.weight import ConcatLinear, Weight, quantized_linear_ref
from specbatch.kernels.gemm.split_k_triton import used_splits

TILES = [FP8FewRowsTile(64, 1, 4, 3, 8), FP8FewRowsTile(128, 3, 4, 3, 0)]
# A tensor core's error in a sum of 128 FP8 products, about 2^-13 of the largest, is below these FP16/BF16 bounds.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}  # ||y - expected|| / ||expected||


def random_weight(n: int, k: int, device: torch.device, scaled: str = "blocks") -> tuple[FP8Weight, torch.Tensor]:
    """A weight, and its values dequantized to float64."""
    values = (torch.randn(n, k) * 60).to(torch.float8_e4m3fn).to(device)
    if scaled == "outputs":
        scales = torch.rand(n, 1, device=device) / 60 + 1e-3
        return FP8Weight(values, scales), torch.einsum("nk,n->nk", values.double(), scales[:, 0].double())
    scales = torch.rand(-(-n // 128), -(-k // 128), device=device) / 60 + 1e-3
    dequantized = values.double()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            dequantized[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scales[i, j].double()
    return FP8Weight(values, scales), dequantized


def check(y: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert y.dtype == dtype
    assert y.shape == expected.shape
    assert (y.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize(
    ("rows", "n", "k", "scaled"),
    [
        *((*sizes, "blocks") for sizes in [(1, 130, 256), (5, 32, 300), (17, 70, 40), (40, 129, 136), (130, 16, 128)]),
        *((*sizes, "outputs") for sizes in [(5, 130, 300), (40, 129, 136), (130, 16, 128)]),
    ],
)
def test_fp8_linear_matches_reference(
    rows: int, n: int, k: int, scaled: str, dtype: torch.dtype, device: torch.device
) -> None:
    weight, dequantized = random_weight(n, k, device, scaled)
    x, bias = torch.randn(rows, k + 9).to(device, dtype)[:, 4 : 4 + k], torch.randn(n).to(device, dtype)
    residual = torch.randn(rows, n + 5).to(device, dtype)[:, 3 : 3 + n]
    expected = x.double() @ dequantized.t()
    check(quantized_linear_ref(x, weight), expected, dtype)
    check(fp8_linear(x, weight), expected, dtype)
    expected += bias.double() + residual.double()
    check(quantized_linear_ref(x, weight, bias, residual), expected, dtype)
    check(fp8_linear(x, weight, bias, residual), expected, dtype)


@pytest.mark.parametrize(("rows", "tile"), [(1, None), (40, None), (130, None), *((32, tile) for tile in TILES)])
def test_every_fp8_value_is_exact(
    rows: int, tile: FP8FewRowsTile | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Including subnormals and both zeros: each is the only term of its sum."""
    bits = torch.arange(256, dtype=torch.uint8)[(torch.arange(256) & 127) != 127].repeat(128)[: 128 * 250]
    values = bits.view(250, 128).to(device).view(torch.float8_e4m3fn)
    weight = FP8Weight(values, torch.ones(2, 1, device=device))
    column = torch.arange(rows, device=device) * 37 % 128
    x = F.one_hot(column, 128).to(dtype)
    assert torch.equal(fp8_linear(x, weight, tile=tile).float(), values.float().t()[column])


@pytest.mark.parametrize(
    ("rows", "n", "k", "scaled", "tile"),
    crossed([(1, 130, 512, "blocks"), (17, 72, 384, "blocks"), (16, 200, 256, "outputs")], TILES),
)
def test_few_rows_match_reference(
    tile: FP8FewRowsTile, rows: int, n: int, k: int, scaled: str, dtype: torch.dtype, device: torch.device
) -> None:
    weight, dequantized = random_weight(n, k, device, scaled)
    x, bias = torch.randn(rows, k + 16).to(device, dtype)[:, 8 : 8 + k], torch.randn(n).to(device, dtype)
    residual = torch.randn(rows, n + 5).to(device, dtype)[:, 3 : 3 + n]
    expected = x.double() @ dequantized.t()
    check(fp8_linear(x, weight, tile=tile), expected, dtype)
    out = torch.full((rows, n + 4), 7.0, device=device, dtype=dtype)
    fp8_linear(x, weight, bias, residual, out[:, 2 : n + 2], tile)
    check(out[:, 2 : n + 2], expected + bias.double() + residual.double(), dtype)
    assert (out[:, :2] == 7).all()
    assert (out[:, n + 2 :] == 7).all()


def test_no_rows_give_no_results(device: torch.device) -> None:
    weight, _ = random_weight(40, 128, device, "outputs")
    assert fp8_linear(torch.empty(0, 128, device=device), weight).shape == (0, 40)


def test_few_rows_are_those_of_half_precision() -> None:
    assert isinstance(fp8_linear_triton.tile_for(16, 4096, 4096, 2), FP8FewRowsTile)
    for rows, k, item in ((33, 4096, 2), (16, 4032, 2), (16, 4096, 4)):
        assert isinstance(fp8_linear_triton.tile_for(rows, 4096, k, item), fp8_linear_triton.Tile)


@pytest.mark.parametrize("kernels", [False, True])
def test_fp8_linear_module_matches_reference(
    kernels: bool, device: torch.device, force_kernels: Callable[[bool], None]
) -> None:
    force_kernels(kernels)
    weight, dequantized = random_weight(140, 48, device)
    layer = FP8Linear(weight)
    x, norm = torch.randn(3, 48, device=device), Norm(torch.rand(48, device=device) + 0.5, 1e-5)
    normal = F.rms_norm(x.double(), (48,), norm.weight.double(), norm.eps)
    expected = normal @ dequantized.t()
    assert layer.shape == (140, 48)
    check(layer(x, norm=norm), expected, torch.float32)
    check(layer.gated(x, norm), F.silu(expected[:, :70]) * expected[:, 70:], torch.float32)
    out, residual = torch.empty(3, 140, device=device), torch.randn(3, 140, device=device)
    assert layer(x, norm=norm, residual=residual, out=out) is out
    check(out, expected + residual.double(), torch.float32)
    expected = normal @ dequantized.t()
    check(layer.squared(x, norm), expected.relu().square(), torch.float32)
    apart = torch.zeros(3, 150, device=device)
    layer(x, norm=norm, out=apart[:, 5:145])
    check(apart[:, 5:145], expected, torch.float32)
    assert not apart[:, :5].any()
    assert not apart[:, 145:].any()


@pytest.mark.parametrize("kernels", [False, True])
def test_concat_linear_matches_reference(
    kernels: bool, device: torch.device, force_kernels: Callable[[bool], None]
) -> None:
    force_kernels(kernels and device.type == "cuda")
    weight, dequantized = random_weight(130, 48, device)
    other = torch.randn(6, 48, device=device)
    layer = ConcatLinear(weight.linear(), Weight(other).linear())
    assert layer.shape == (136, 48)
    x, norm = torch.randn(3, 48, device=device), Norm(torch.rand(48, device=device) + 0.5, 1e-5)
    expected = (
        F.rms_norm(x.double(), (48,), norm.weight.double(), norm.eps) @ torch.cat([dequantized, other.double()]).t()
    )
    check(layer(x, norm=norm), expected, torch.float32)
    out, residual = torch.empty(3, 136, device=device), torch.randn(3, 136, device=device)
    assert layer(x, norm=norm, out=out) is out
    check(out, expected, torch.float32)
    check(layer(x, norm=norm, residual=residual), expected + residual.double(), torch.float32)
    check(layer.gated(x, norm), F.silu(expected[:, :68]) * expected[:, 68:], torch.float32)


# FP8 activations


def random_rows(rows: int, k: int, dtype: torch.dtype, device: torch.device) -> FP8Activations:
    """The memory past the last row is NaN."""
    values, scales, _ = quantize_fp8_ref((torch.randn(rows + 3, k) * torch.rand(rows + 3, 1) * 9).to(dtype))
    values[rows:], scales[rows:] = torch.nan, torch.nan
    return FP8Activations(values.to(device)[:rows], scales.to(device)[:rows], dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("rows", "n", "k", "scaled"),
    [
        *((1, 130, 256, "blocks"), (5, 32, 300, "blocks"), (70, 129, 64, "blocks"), (40, 70, 136, "blocks")),
        *((130, 16, 128, "blocks"), (3, 40, 8, "blocks"), (5, 130, 300, "outputs"), (70, 129, 64, "outputs")),
    ],
)
def test_fp8_linear_with_fp8_activations_matches_reference(
    rows: int, n: int, k: int, scaled: str, dtype: torch.dtype, device: torch.device
) -> None:
    weight, dequantized = random_weight(n, k, device, scaled)
    x, bias = random_rows(rows, k, dtype, device), torch.randn(n).to(device, dtype)
    residual = torch.randn(rows, n + 5).to(device, dtype)[:, 3 : 3 + n]
    expected = x.dequantize().double() @ dequantized.t()
    check(quantized_linear_ref(x, weight), expected, dtype)
    check(fp8_linear(x, weight), expected, dtype)
    half = FP8Weight(weight.values, weight.scales.half())
    check(fp8_linear(x, half), x.dequantize().double() @ half.dequantize(torch.float64).t(), dtype)
    expected += bias.double() + residual.double()
    check(quantized_linear_ref(x, weight, bias, residual), expected, dtype)
    out = torch.full((rows, n + 4), 7.0, device=device, dtype=dtype)
    fp8_linear(x, weight, bias, residual, out[:, 2 : n + 2])
    check(out[:, 2 : n + 2], expected, dtype)
    assert (out[:, :2] == 7).all()
    assert (out[:, n + 2 :] == 7).all()


QUANTIZED_TILES = [
    W8A8FewRowsTile(64, 1, 4, 3, 8, early=False), W8A8FewRowsTile(128, 3, 4, 4, 0, early=True),
    W8A8FewRowsTile(64, 2, 4, 6, 16, early=True),
]  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("rows", "n", "k", "scaled", "tile"),
    crossed(
        [(1, 130, 512, "blocks"), (17, 72, 384, "blocks"), (16, 200, 256, "outputs"), (32, 40, 1152, "blocks")],
        QUANTIZED_TILES,
    ),
)
def test_few_quantized_rows_match_reference(
    tile: W8A8FewRowsTile, rows: int, n: int, k: int, scaled: str, dtype: torch.dtype, device: torch.device
) -> None:
    weight, dequantized = random_weight(n, k, device, scaled)
    x, bias = random_rows(rows, k, dtype, device), torch.randn(n).to(device, dtype)
    residual = torch.randn(rows, n + 5).to(device, dtype)[:, 3 : 3 + n]
    expected = x.dequantize().double() @ dequantized.t()
    check(fp8_linear(x, weight, tile=tile), expected, dtype)
    out = torch.full((rows, n + 4), 7.0, device=device, dtype=dtype)
    fp8_linear(x, weight, bias, residual, out[:, 2 : n + 2], tile)
    check(out[:, 2 : n + 2], expected + bias.double() + residual.double(), dtype)
    assert (out[:, :2] == 7).all()
    assert (out[:, n + 2 :] == 7).all()


@pytest.mark.parametrize("tile", [*QUANTIZED_TILES, None])
def test_few_quantized_rows_do_not_depend_on_their_number(
    tile: W8A8FewRowsTile | None, device: torch.device, assert_same: Callable[..., None]
) -> None:
    """Without a given tile: those of a wide weight, which differ."""
    n, k = (140, 512) if device.type == "cpu" else (8600, 4096)
    n, k = (n, k) if tile else (16400, k // 4)
    assert tile or fp8_linear_triton.tile_for(16, n, k, 1) != fp8_linear_triton.tile_for(32, n, k, 1)
    weight, _ = random_weight(n, k, device)
    x = random_rows(32, k, torch.float16, device)
    together = fp8_linear(x, weight, tile=tile)
    parts = [(3, 12), (15, 32), (0, 1), (7, 23)]
    for first, last in parts if tile or device.type != "cpu" else parts[:1]:
        part = FP8Activations(x.values[first:last], x.scales[first:last], torch.float16)
        assert_same(fp8_linear(part, weight, tile=tile), together[first:last])


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 2560)])
def test_splits_of_few_quantized_rows_depend_on_the_weight_alone(n: int, k: int) -> None:
    tiles = [fp8_linear_triton.tile_for(rows, n, k, 1) for rows in range(1, 33)]
    assert all(isinstance(tile, W8A8FewRowsTile) for tile in tiles)
    assert len({tile.splits for tile in tiles}) == 1
    shares = k // 128 / tiles[0].splits
    assert shares == int(shares) >= 4, "programs have equal shares, which are worth one"


def test_programs_have_equal_shares_where_that_is_possible() -> None:
    assert [even_splits(most, 32) for most in (1, 4, 6, 7, 9)] == [1, 4, 4, 4, 8]
    assert even_splits(6, 43) == 6
    assert [used_splits(6, splits) for splits in (1, 3, 4, 5, 6, 9)] == [1, 3, 3, 3, 6, 6]


def test_deterministic_mode_never_splits_rows_of_fp8() -> None:
    ordinary = fp8_linear_triton.tile_for(33, 4096, 4096, 1)
    assert isinstance(ordinary, fp8_linear_triton.Tile)
    assert isinstance(fp8_linear_triton.tile_for(16, 4096, 4032, 1), fp8_linear_triton.Tile)
    with use_deterministic():
        assert fp8_linear_triton.tile_for(16, 4096, 4096, 1) == ordinary


def test_scales_apply_per_block(device: torch.device) -> None:
    """In x and in the weight; averaging scales would give another number."""
    values = torch.ones(3, 300).to(device, torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0, 4.0]] * 2 + [[0.0, 0.0, 8.0]], device=device)
    weight = FP8Weight(torch.ones(130, 300).to(device, torch.float8_e4m3fn), torch.tensor([[1.0, 3, 5], [7, 11, 13]]))
    weight = FP8Weight(weight.values, weight.scales.to(device))
    y = fp8_linear(FP8Activations(values, scales.t().contiguous().t(), torch.float16), weight)
    first, second = 128 * 1 + 128 * 2 * 3 + 44 * 4 * 5, 128 * 7 + 128 * 2 * 11 + 44 * 4 * 13
    wanted = torch.tensor([[first] * 128 + [second] * 2] * 2 + [[44 * 8 * 5] * 128 + [44 * 8 * 13] * 2])
    assert torch.equal(y.cpu(), wanted.half())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("k", [1024, 1100])
def test_rows_do_not_depend_on_batch(
    k: int, dtype: torch.dtype, device: torch.device, assert_same: Callable[..., None]
) -> None:
    """For every tile size, in deterministic mode for any number of rows, else for those that are not few."""
    rows, n, k = (130, 140, k // 4) if device.type == "cpu" else (3000, 8600, k)
    weight, _ = random_weight(n, k, device)
    x = random_rows(rows, k, dtype, device)
    together = fp8_linear(x, weight)
    for first, last, deterministic in [(0, 1, True), (0, 64, False), (7, 90, False), (1, rows, False)]:
        part = FP8Activations(x.values[first:last], x.scales[first:last], dtype)
        with use_deterministic(deterministic):
            assert_same(fp8_linear(part, weight), together[first:last])


def test_nan_and_inf_activations_propagate(device: torch.device) -> None:
    """A NaN stays NaN; an infinite scale gives values that are not finite."""
    weight, _ = random_weight(130, 300, device)
    x = torch.randn(5, 300).half().to(device)
    clean = fp8_linear(quantize_fp8_ref(x), weight)
    for value in (torch.nan, torch.inf):
        x[3, 200] = value
        for layer in (fp8_linear, quantized_linear_ref):
            y = layer(quantize_fp8_ref(x), weight)[3]
            assert not y.isfinite().any()
            assert value == torch.inf or y.isnan().all()
        assert torch.equal(fp8_linear(quantize_fp8_ref(x), weight)[:3], clean[:3])


@pytest.mark.parametrize("kernels", [False, True])
def test_fp8_activations_apply_within_context_only(
    kernels: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch, force_kernels: Callable[[bool], None]
) -> None:
    force_kernels(kernels)
    if device.type == "cpu":
        # The interpreter's cast to FP8 is wrong.
        monkeypatch.setattr("specbatch.kernels.gemm.quantized.fp8_quantize_triton.rms_norm_fp8", rms_norm_fp8_ref)
    weight, _ = random_weight(140, 200, device)
    layer, norm = FP8Linear(weight), Norm(torch.rand(200, device=device) + 0.5, 1e-5)
    x, residual = torch.randn(3, 200).to(device), torch.randn(3, 140).to(device)
    for dtype in (torch.float16, torch.float32):
        given = (x.to(dtype), Norm(norm.weight.to(dtype), norm.eps), residual.to(dtype))
        plain = layer(given[0], norm=given[1], residual=given[2])
        with use_fp8_activations(True):
            prompt = layer(given[0], norm=given[1], residual=given[2])
        with use_fp8_activations(False):
            assert torch.equal(layer(given[0], norm=given[1], residual=given[2]), plain)
        normal = rms_norm_ref(given[0], *given[1])
        if dtype == torch.float32:
            assert torch.equal(prompt, plain)
        else:
            check(
                prompt,
                quantize_fp8_ref(normal).dequantize().double() @ weight.dequantize(torch.float64).t()
                + given[2].double(),
                dtype,
            )
            assert (prompt - plain).abs().max() > 0.01 * plain.abs().max()
        assert torch.equal(layer(given[0], norm=given[1], residual=given[2]), plain)


@pytest.mark.parametrize("kernels", [False, True])
def test_the_activation_before_a_gemm_is_quantized_with_it(
    kernels: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch, force_kernels: Callable[[bool], None]
) -> None:
    force_kernels(kernels)
    seen = quantized_by_activations(monkeypatch)
    first, second = random_weight(140, 140, device)[0], random_weight(140, 70, device)[0]
    gate_up, down = FP8Linear(first), FP8Linear(second)
    for dtype in (torch.float16, torch.float32):
        x, norm = torch.randn(3, 140).to(device, dtype), Norm(torch.ones(140, device=device, dtype=dtype), 1e-5)
        plain = down.after_gate(gate_up, x, norm, residual=x)
        assert torch.equal(plain, down(gate_up.gated(x, norm), residual=x))
        assert not seen
        with use_fp8_activations(True):
            found = down.after_gate(gate_up, x, norm, residual=x)
            if dtype == torch.float16:
                wanted = fp8_linear_module.fp8_linear(silu_and_mul_fp8(gate_up(x, norm=norm)), second, None, x)
                assert torch.equal(found, wanted)
                assert seen == [dtype]
                seen.clear()
            else:
                assert torch.equal(found, plain)
