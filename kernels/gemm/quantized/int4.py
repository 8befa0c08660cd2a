"""INT4 weights: 4-bit whole numbers in groups of inputs that share a scale and a zero point (AWQ, GPTQ).

A weight is (value - zero) * scale: Lin et al., "AWQ" (2023); Frantar et al., "GPTQ" (2022).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specbatch.kernels.dispatch import op
from specbatch.kernels.gemm.quantized.four_bits import CHUNK, pack_four_bits, unpack_four_bits
from specbatch.kernels.gemm.quantized.grouped import GroupedWeight, shortest
from specbatch.kernels.gemm.quantized.weight import UnfusedLinear, Weight, quantized_linear_ref

LARGEST_INT4_SCALE = 64  # 512 times as large it is finite in float16, as GEMMs of few rows need it


def side_of(size: int) -> int:
    """Of a tile of a weight with so many outputs or inputs: 128, or the largest power of two that divides their number
    where that is less."""
    return min(CHUNK, size & -size)


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """values uint8 [..., in] below 16 -> uint8 [..., in / 2]: `pack_four_bits`."""
    return pack_four_bits(values, side_of(values.shape[-1]))


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., in / 2] from `pack_int4` -> its values uint8 [..., in]."""
    return unpack_four_bits(packed, side_of(2 * packed.shape[-1]))


@dataclass(frozen=True)
class Int4Weight(Weight):
    """values uint8 [..., out, in / 2] from `pack_int4`; scales float16, bfloat16 or float32 [..., out, in / group];
    zeros uint8, as many. GEMMs read `Int4Tiles` of it."""

    scales: torch.Tensor
    zeros: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, inner = self.values.shape
        return (*outer, 2 * inner)

    @property
    def block(self) -> tuple[int, int | None]:
        return 1, self.shape[-1] // self.scales.shape[-1]

    def unpacked(self) -> torch.Tensor:
        return unpack_int4(self.values)

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        return pack_int4(values)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        found = self.unpacked().unflatten(-1, (self.scales.shape[-1], -1)).float() - self.zeros.float()[..., None]
        weight: torch.Tensor = found * self.scales.float()[..., None]
        return weight.flatten(-2).to(dtype)

    def grouped(self) -> GroupedWeight:
        scales, values = self.scales.float(), self.unpacked().view(torch.int8)
        return GroupedWeight(values, *shortest(scales, -self.zeros.float() * scales))

    def linear(self, bias: torch.Tensor | None = None) -> Int4Linear:
        return Int4Linear(self, bias)

    def for_experts(self) -> Int4Tiles:
        return int4_tiles(self)


@dataclass(frozen=True)
class Int4Tiles(Weight):
    """An INT4 weight as GEMMs read it: in tiles of U outputs by C inputs (`side_of` both sizes). A tile is
    contiguous, and those of the same outputs follow one another: memory is slow to read in pieces of 64 bytes.

    values uint8 [..., out / U, in / C, U, C / 2], of each output those of `pack_int4`. scales [..., out / U, in / C, U,
    C / group, 2], float16 or bfloat16: a scale, and the zero point times the smallest subnormal number, negative."""

    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, tiles, chunks, _, _ = self.values.shape
        return (*outer, tiles * self.unit, chunks * self.chunk)

    @property
    def unit(self) -> int:
        """Outputs of a tile."""
        return self.values.shape[-2]

    @property
    def chunk(self) -> int:
        """Inputs of a tile."""
        return 2 * self.values.shape[-1]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.chunk // self.scales.shape[-2]

    def words(self) -> tuple[torch.Tensor, torch.Tensor]:
        """values and scales as int32, in the order of memory."""
        assert self.values.is_contiguous(), "the weight must be contiguous"
        assert self.scales.is_contiguous(), "the scales must be contiguous"
        return self.values.flatten().view(torch.int32), self.scales.flatten().view(torch.int32)

    def rows(self) -> Int4Weight:
        """The weight that `int4_tiles` was given."""
        values = self.values.transpose(-3, -2).flatten(-2).flatten(-3, -2)
        scales, zeros = self.scales.transpose(-4, -3).flatten(-3, -2).flatten(-4, -3).unbind(-1)
        return Int4Weight(values, scales.contiguous(), (zeros.contiguous().view(torch.int16) & 15).byte())

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self.rows().dequantize(dtype)


def with_short_scales(weight: Int4Weight, dtype: torch.dtype) -> Int4Weight:
    """An INT4 weight with scales as GEMMs of activations of a type need them: of that type, or of FP32 ones of 16 bits,
    as stored or else float16."""
    short = dtype if dtype.itemsize == 2 else weight.scales.dtype
    return replace(weight, scales=weight.scales.to(torch.float16 if short.itemsize > 2 else short))


def int4_tiles(weight: Int4Weight) -> Int4Tiles:
    """An INT4 weight [..., out, in] whose scales are float16 or bfloat16, in the layout of GEMMs."""
    (out, inputs), scales, zeros = weight.shape[-2:], weight.scales, weight.zeros
    assert scales.dtype in (torch.float16, torch.bfloat16), f"scales are {scales.dtype}, not of 16 bits"
    group = inputs // scales.shape[-1]
    assert group >= 32, f"groups have {group} inputs, not 32 or more"
    unit, chunks = side_of(out), inputs // side_of(inputs)

    def tiled(part: torch.Tensor) -> torch.Tensor:
        tiles: torch.Tensor = part.unflatten(-1, (chunks, -1)).unflatten(-3, (-1, unit)).transpose(-3, -2)
        return tiles.contiguous()

    pairs = torch.stack([tiled(scales.view(torch.int16)), tiled(zeros.short() | -0x8000)], -1)
    return Int4Tiles(tiled(weight.values), pairs.view(scales.dtype))


class Int4Linear(UnfusedLinear):
    """A `Linear` whose weight is INT4."""

    def __init__(self, weight: Int4Weight, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight.shape, bias)
        self._tiles = int4_tiles(weight)

    def _gemm(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        return int4_linear(x, self._tiles, self.bias, residual, out)


# The scales have the type of x if that is of 16 bits.
int4_linear = op(quantized_linear_ref, "specbatch.kernels.gemm.quantized.int4_triton:int4_linear")
