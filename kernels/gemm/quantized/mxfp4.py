"""MXFP4 weights: 4-bit floats (E2M1) in blocks of 32 inputs that share a power of two (E8M0).

Open Compute Project, "OCP Microscaling Formats (MX) Specification" 1.0 (2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specbatch.kernels.common.block_sizes import MX_BLOCK
from specbatch.kernels.gemm.quantized.four_bits import CHUNK, pack_four_bits, unpack_four_bits
from specbatch.kernels.gemm.quantized.weight import Weight

LARGEST_SCALE = 252  # 2^125: with more, the largest value is not finite in float32; 255 is NaN
LARGEST_PACKED_SCALE = 128  # 2^1, hence values up to 12: what the GEMMs of a GPU take
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_AT_ONCE = 1 << 24  # bytes: what is needed on the way stays small


@dataclass(frozen=True)
class Mxfp4Weight(Weight):
    """A stack of experts: values uint8 [..., out, about in / 2] from `pack_mxfp4`, scales uint8 [..., out, in / 32].
    Only GEMMs of experts read it."""

    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], MX_BLOCK * self.scales.shape[-1])

    @property
    def block(self) -> tuple[int, int | None]:
        return 1, MX_BLOCK

    def unpacked(self) -> torch.Tensor:
        return unpack_four_bits(self.values)[..., : self.shape[-1]]

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        return pack_four_bits(F.pad(values, (0, -values.shape[-1] % CHUNK)))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_mxfp4(self.values, self.scales, dtype)


def pack_mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks uint8 [..., out, in / 32, 16] as they are stored, values 2 j and 2 j + 1 of a block in byte j, to what the
    kernels take: uint8 [..., out, n / 2] from `pack_four_bits`, where n is in, and zeros up to a multiple of 128."""
    *outer, count, _ = blocks.shape
    missing = -count % (CHUNK // MX_BLOCK)
    found = blocks.new_empty(*outer, (count + missing) * MX_BLOCK // 2)
    for part, to in zip(
        *(x.flatten(0, -k).split(max(1, _AT_ONCE // (count * 16))) for x, k in ((blocks, 3), (found, 2))), strict=True
    ):
        values = torch.stack([part & 15, part >> 4], -1).flatten(1)
        to.copy_(pack_four_bits(F.pad(values, (0, missing * MX_BLOCK))))
    return found


def mxfp4_bytes(groups: Sequence[int]) -> int:
    """Memory of packed weights and their scales, uint8 [..., out, in / 32]."""
    *outer, count = groups
    return math.prod(outer) * (-(-count * MX_BLOCK // CHUNK) * CHUNK // 2 + count)


def dequantize_mxfp4(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values uint8 [..., out, n / 2] from `pack_mxfp4`; scales uint8 [..., out, in / 32], exponents of two plus 127 ->
    [..., out, in], exact in bfloat16 and float32; float16 rounds what is too small for it."""
    inputs = MX_BLOCK * scales.shape[-1]
    found = torch.empty(*scales.shape[:-1], inputs, dtype=dtype, device=values.device)
    meanings = torch.tensor(_VALUES, device=values.device)[:, None]
    parts = (x.flatten(0, -2).split(max(1, _AT_ONCE // inputs)) for x in (values, scales, found))
    for value, scale, to in zip(*parts, strict=True):
        bits = (scale.int() << 23).where(scale > 0, 1 << 22)  # 2^-127 is subnormal
        meant = F.embedding(unpack_four_bits(value)[:, :inputs].int(), meanings).view(*scale.shape, MX_BLOCK)
        to.view(*scale.shape, MX_BLOCK).copy_(meant * bits.view(torch.float32)[..., None])
    return found
