"""MXFP4 weights: 4-bit floats (E2M1) in blocks of 32 inputs that share a power of two (E8M0).

Open Compute Project, "OCP Microscaling Formats (MX) Specification" 1.0 (2023).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specbatch.errors import refuse
from specbatch.kernels.gemm.weight import MX_BLOCK

LARGEST_SCALE = 252  # 2^125: with more, the largest value is not finite in float32; 255 is NaN
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_PAIRS = [(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)]
_AT_ONCE = 1 << 24  # bytes


def dequantize_mxfp4(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values uint8 [..., out, in / 2], two in a byte, the low bits first; scales uint8 [..., out, in / 32], exponents
    of two plus 127 -> [..., out, in], exact in bfloat16 and float32; float16 rounds what is too small for it."""
    *outer, inner = values.shape
    found = torch.empty(*outer, 2 * inner, dtype=dtype, device=values.device)
    pairs = torch.tensor(_PAIRS, device=values.device)
    rows = max(1, _AT_ONCE // inner)  # what is needed on the way stays small
    parts = (x.flatten(0, -2).split(rows) for x in (values, scales, found))
    for value, scale, to in zip(*parts, strict=True):
        bits = (scale.int() << 23).where(scale > 0, 1 << 22)  # 2^-127 is subnormal
        to.unflatten(1, (-1, MX_BLOCK)).copy_(
            F.embedding(value.int(), pairs).view(len(value), -1, MX_BLOCK) * bits.view(torch.float32)[..., None]
        )
    return found


def check_scales(name: str, scales: torch.Tensor) -> None:
    """Refuse scales with which values are not finite."""
    if len(scales) and int(scales.max()) > LARGEST_SCALE:
        works = f"it has a scale of {int(scales.max())}, with which values are not finite; the file is damaged"
        raise refuse("model", name, works)
