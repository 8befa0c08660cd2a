"""MXFP4 weights: 4-bit floats (E2M1) in blocks of 32 inputs that share a power of two (E8M0).

Open Compute Project, "OCP Microscaling Formats (MX) Specification" 1.0 (2023).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specbatch.kernels.gemm.weight import MX_BLOCK

LARGEST_SCALE = 252  # 2^125: with more, the largest value is not finite in float32; 255 is NaN
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_PAIRS = [(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)]
_HALF = MX_BLOCK // 2
_AT_ONCE = 1 << 24  # bytes: what is needed on the way stays small


def pack_mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks uint8 [..., out, in / 32, 16] as they are stored, values 2 j and 2 j + 1 of a block in byte j, to what the
    kernels take: uint8 [..., out, in / 2], values j and j + 16 of a block in byte j, the first in the low bits. Each
    half of a block is then multiplied by adjacent columns."""
    found = torch.empty_like(blocks)
    for part, to in zip(*(x.flatten(0, -2).split(_AT_ONCE // _HALF) for x in (blocks, found)), strict=True):
        first, second = part[:, : _HALF // 2], part[:, _HALF // 2 :]
        low, high = (torch.stack([half & 15, half >> 4], -1).flatten(1) for half in (first, second))
        to.copy_(low | high << 4)
    return found.flatten(-2)


def dequantize_mxfp4(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values uint8 [..., out, in / 2] from `pack_mxfp4`; scales uint8 [..., out, in / 32], exponents of two plus 127 ->
    [..., out, in], exact in bfloat16 and float32; float16 rounds what is too small for it."""
    *outer, inner = values.shape
    found = torch.empty(*outer, 2 * inner, dtype=dtype, device=values.device)
    pairs = torch.tensor(_PAIRS, device=values.device)
    parts = (x.flatten(0, -2).split(max(1, _AT_ONCE // inner)) for x in (values, scales, found))
    for value, scale, to in zip(*parts, strict=True):
        bits = (scale.int() << 23).where(scale > 0, 1 << 22)  # 2^-127 is subnormal
        halves = F.embedding(value.int(), pairs).unflatten(1, (-1, _HALF)).transpose(2, 3)
        to.view(len(to), -1, 2, _HALF).copy_(halves * bits.view(torch.float32)[..., None, None])
    return found


def keeps_mxfp4(device: torch.device) -> bool:
    """Do weights stay MXFP4 on this device? A CPU has no such GEMM: they are dequantized once, at load."""
    return device.type == "cuda"
