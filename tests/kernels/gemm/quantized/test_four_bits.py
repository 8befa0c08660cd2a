"""Packing of 4-bit weights, and the assembly that unpacks them and FP8."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from assembly import run, values_of

from specbatch.kernels.common import e4m3_triton
from specbatch.kernels.gemm.quantized import four_bits_mainloop_triton as loops
from specbatch.kernels.gemm.quantized import fp8_few_rows_triton
from specbatch.kernels.gemm.quantized import int4_few_rows_triton as few_rows
from specbatch.kernels.gemm.quantized.four_bits import pack_four_bits, unpack_four_bits
from specbatch.kernels.gemm.quantized.mxfp4 import _VALUES


@pytest.mark.parametrize(("shape", "chunk"), [((3, 256), 128), ((2, 5, 64), 64), ((4, 96), 32)])
def test_values_are_found_again(shape: tuple[int, ...], chunk: int) -> None:
    values = torch.randint(0, 16, shape).byte()
    packed = pack_four_bits(values, chunk)
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert packed.is_contiguous()
    assert torch.equal(unpack_four_bits(packed, chunk), values)
    assert pack_four_bits(values.transpose(0, 1).contiguous().transpose(0, 1), chunk).is_contiguous()


def test_bytes_of_a_thread() -> None:
    """Thread t has its columns of all four groups of 16 in 16 adjacent bytes: PTX, fragment A of m16n8k16."""
    columns = torch.arange(128)
    low, high = (pack_four_bits((columns >> shift & 15).byte()[None]).view(4, 4, 4) for shift in (0, 4))
    for thread, group in product(range(4), range(4)):
        first = 16 * group + 2 * thread
        expected = [first, first + 8, first + 1, first + 9]
        bytes_of = zip(low[thread, group].tolist(), high[thread, group].tolist(), strict=True)
        found = [(a & 15 | (b & 15) << 4, a >> 4 | (b >> 4) << 4) for a, b in bytes_of]
        assert found == [(column, column + 64) for column in expected]


def every_byte() -> torch.Tensor:
    """Words int64 [1024] with every byte in every place, beside random ones."""
    rng = torch.Generator().manual_seed(0)
    others = torch.randint(0, 1 << 32, (4, 256), generator=rng)
    shifts = torch.arange(0, 32, 8)[:, None]
    return (others & ~(255 << shifts) | torch.arange(256) << shifts).flatten()


@pytest.mark.parametrize("given", [{}, {"$0": "$2"}, {"$1": "$2"}])
@pytest.mark.parametrize(
    ("code", "shift", "dtype", "base"),
    [
        (loops._INT4_LOW_BF16, 0, torch.bfloat16, 128),
        (loops._INT4_HIGH_BF16, 4, torch.bfloat16, 128),
        (loops._INT4_LOW_FP16, 0, torch.float16, 1024),
        (loops._INT4_HIGH_FP16, 4, torch.float16, 1024),
        (loops._MXFP4_LOW, 0, torch.bfloat16, None),
        (loops._MXFP4_HIGH, 4, torch.bfloat16, None),
    ],
)
def test_assembly_unpacks_bytes_0_2_1_and_3(
    code: Any, shift: int, dtype: torch.dtype, base: int | None, given: dict[str, str]
) -> None:
    words = every_byte()
    codes = torch.stack([words >> 8 * byte + shift & 15 for byte in (0, 2, 1, 3)], -1)
    found = torch.cat([values_of(pair, dtype) for pair in run(code.value, {"$2": words}, given)], -1)
    if base is None:  # e2m1 below its other bias
        assert torch.equal(found * 2.0**126, torch.tensor(_VALUES, dtype=torch.float64)[codes])
    else:
        assert torch.equal(found, (base + codes).double())


@pytest.mark.parametrize(
    "given", [{}, *({f"${place}": f"${word}"} for place, word in product(range(4), range(4, 9)))], ids=str
)
@pytest.mark.parametrize(
    ("unpack", "factors", "dtype", "unit"),
    [
        (few_rows._UNPACK_BF16, few_rows._FACTORS_BF16, torch.bfloat16, 2.0**29),
        (few_rows._UNPACK_FP16, few_rows._FACTORS_FP16, torch.float16, 1.0),
    ],
)
def test_assembly_multiplies_differences_and_scales(
    unpack: Any, factors: Any, dtype: torch.dtype, unit: float, given: dict[str, str]
) -> None:
    """Low bits of bytes 0 and 2, of 1 and 3, then the high bits of both pairs, of two groups. FP16 is rounded once; in
    BF16 the zero point's product is, too, and rounding changes a number by 1/256 of it at most."""
    words, zeros = every_byte().repeat(16), torch.arange(16).repeat_interleave(1024)
    scales = 2.0 ** torch.empty(2, len(zeros)).uniform_(-14, 6, generator=torch.Generator().manual_seed(0))
    groups = list(zip((zeros, 15 - zeros), scales.to(dtype), strict=True))
    places = ("$0", "$1", "$2")
    (low_zero, low, _), (high_zero, _, high) = (
        run(factors.value, {"$3": word_of(scale, zero)}, {}, places, dtype) for zero, scale in groups
    )
    registers = {"$4": words, "$5": low_zero, "$6": high_zero, "$7": low, "$8": high}
    found = run(unpack.value, registers, given, (*places, "$3"), dtype)
    for pair, (byte, shift) in zip(found, ((0, 0), (1, 0), (0, 4), (1, 4)), strict=True):
        codes = torch.stack([words >> 8 * place + shift & 15 for place in (byte, byte + 2)], -1)
        zero, scale = (part[:, None].double() for part in groups[shift // 4])
        exact, weight = (codes - zero) * scale, values_of(pair, dtype) * unit
        if dtype == torch.float16:
            assert torch.equal(weight, exact.half().double())
        else:
            assert ((weight - exact).abs() <= (zero * scale + weight.abs()) / 256).all()


@pytest.mark.parametrize("given", [{}, {"$0": "$3"}, {"$1": "$3"}, {"$2": "$3"}], ids=str)
@pytest.mark.parametrize(
    ("code", "dtype", "expected"),
    [
        (few_rows._FACTORS_BF16, torch.bfloat16, (-5 * 2.0**-29, 2.0**104, 2.0**100)),
        (few_rows._FACTORS_FP16, torch.float16, (-5 * 2.0**-9, 512, 512)),
    ],
)
def test_assembly_of_factors(code: Any, dtype: torch.dtype, expected: tuple[float, ...], given: dict[str, str]) -> None:
    """A zero point of 5; in FP16 it is not scaled."""
    scales = torch.tensor([2.0**-13, 1.0, 1.5, 48.0]).to(dtype)
    words = {"$3": word_of(scales, torch.full((4,), 5))}
    found = run(code.value, words, given, ("$0", "$1", "$2"), dtype)
    for place, (pair, factor) in enumerate(zip(found, expected, strict=True)):
        scaled = torch.ones(4) if place == 0 and dtype == torch.float16 else scales
        assert torch.equal(values_of(pair, dtype), (factor * scaled.double())[:, None].expand(4, 2))


def word_of(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Words int64 as in `Int4Tiles`."""
    return scale.view(torch.int16).long() & 0xFFFF | (zero | 0x8000) << 16


@pytest.mark.parametrize("given", [{}, {"$0": "$2"}, {"$1": "$2"}])
@pytest.mark.parametrize(
    ("code", "dtype", "order"),
    [
        (e4m3_triton._WIDEN, torch.bfloat16, (0, 1, 2, 3)),
        (fp8_few_rows_triton._WIDEN_BF16, torch.bfloat16, (0, 2, 1, 3)),
        (fp8_few_rows_triton._WIDEN_FP16, torch.float16, (0, 2, 1, 3)),
    ],
)
def test_assembly_converts_e4m3(code: Any, dtype: torch.dtype, order: tuple[int, ...], given: dict[str, str]) -> None:
    """order: the bytes of a word whose values the results have."""
    words = every_byte()
    stored = torch.stack([words >> 8 * byte & 255 for byte in order], -1).to(torch.uint8)
    expected = stored.view(torch.float8_e4m3fn).double()
    results = run(code.value, {"$2": words}, given, dtype=dtype)
    found = torch.cat([values_of(pair, dtype) for pair in results], -1)
    is_number = ~expected.isnan()  # weights have no NaN
    assert torch.equal(found[is_number], expected[is_number])
