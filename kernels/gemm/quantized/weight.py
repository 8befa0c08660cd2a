"""Weights as they are stored: in the type of the activations, FP8 scaled per block or per output, MXFP4 or INT4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SCALE_BLOCK = 128  # of a block that shares a scale
FP8_MAX = 448.0  # of float8_e4m3fn
SMALLEST_SCALE = 2.0**-100  # of a quantized block, so that zeros stay zeros
MX_BLOCK = 32  # inputs that share one, in MXFP4
INT4_GROUPS = (32, 64, 128)  # inputs that share one, in INT4
_PART = 1 << 24


@dataclass(frozen=True)
class Weight:
    """values [..., out, in]; scales None, or float32, bfloat16 or float16: [..., ceil(out / 128), ceil(in / 128)], what
    the checkpoints of DeepSeek-V3, Qwen3 and Qwen3.5 in FP8 call `weight_scale_inv`, which multiplies all the same; or
    [..., out, 1], a scale per output (the compressed-tensors strategies channel and, all equal, tensor).
    MXFP4: values uint8 [..., out, about in / 2] from `pack_mxfp4` and scales uint8 [..., out, in / 32].
    INT4: values uint8 [..., out, in / 2] from `pack_int4`, scales [..., out, in / group] and zeros uint8, as many, of
    which GEMMs read `Int4Tiles`."""

    values: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None

    @property
    def is_mxfp4(self) -> bool:
        return self.scales is not None and self.scales.dtype == self.values.dtype  # of FP8 weights they are wider

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]."""
        *outer, inner = self.values.shape
        if self.is_mxfp4:
            assert self.scales is not None
            return (*outer, MX_BLOCK * self.scales.shape[-1])
        return (*outer, 2 * inner if self.is_int4 else inner)

    def of(self, expert: int) -> Weight:
        """One of a stack."""
        scales, zeros = (None if part is None else part[expert] for part in (self.scales, self.zeros))
        return Weight(self.values[expert], scales, zeros)

    @property
    def is_int4(self) -> bool:
        return self.zeros is not None

    @property
    def is_per_channel(self) -> bool:
        """Whether each output has a scale of its own, in place of blocks."""
        if self.scales is None or self.is_mxfp4 or self.is_int4:
            return False
        return self.scales.shape[-2:] == (self.values.shape[-2], 1)

    @property
    def scale_rows(self) -> int:
        """How many outputs a row of scales is for."""
        return 1 if self.is_per_channel or self.is_int4 else SCALE_BLOCK

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in this type: values * scales, cast once."""
        if self.scales is None:
            return self.values.to(dtype)
        if self.is_mxfp4:
            from specbatch.kernels.gemm.quantized.mxfp4 import dequantize_mxfp4

            return dequantize_mxfp4(self.values, self.scales, dtype)
        if self.zeros is not None:
            from specbatch.kernels.gemm.quantized.int4 import dequantize_int4

            return dequantize_int4(self.values, self.scales, self.zeros, dtype)
        if self.is_per_channel:
            return (self.values.float() * self.scales.float()).to(dtype)
        out, inner = self.values.shape[-2:]
        scales = self.scales.float().repeat_interleave(SCALE_BLOCK, -2).repeat_interleave(SCALE_BLOCK, -1)
        return (self.values.float() * scales[..., :out, :inner]).to(dtype)


def concat_outputs(weights: Sequence[Weight]) -> Weight | None:
    """Weights [..., out, in] one below the other; None where they are of several types, or where another one than the
    last is cut off within a block of scales."""
    if len(weights) == 1:
        return weights[0]
    scales = [weight.scales for weight in weights if weight.scales is not None]
    if not scales:
        return Weight(_joined([weight.values for weight in weights], -2))
    if len(scales) < len(weights) or len({(weight.is_per_channel, weight.is_int4) for weight in weights}) > 1:
        return None
    if any(weight.values.shape[-2] % weight.scale_rows for weight in weights[:-1]):
        return None
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    values = _joined([weight.values for weight in weights], -2)
    return Weight(values, _joined(scales, -2), _joined(zeros, -2) if zeros else None)


def split_input_columns(weight: Weight) -> tuple[Weight, Weight]:
    """The left and the right columns of a weight [out, in]; in / 2 is a multiple of 128 if blocks have scales."""
    first, second = (half.contiguous() for half in weight.values.chunk(2, 1))
    if weight.scales is None or weight.is_per_channel:
        return Weight(first, weight.scales), Weight(second, weight.scales)
    if weight.zeros is not None:
        from specbatch.kernels.gemm.quantized.int4 import pack_int4, unpack_int4

        assert weight.scales.shape[1] % 2 == 0, "a group would be cut"
        first, second = (pack_int4(half) for half in unpack_int4(weight.values).chunk(2, 1))
        halves = ([half.contiguous() for half in part.chunk(2, 1)] for part in (weight.scales, weight.zeros))
        (scale, other_scale), (zero, other_zero) = halves
        return Weight(first, scale, zero), Weight(second, other_scale, other_zero)
    assert weight.values.shape[1] % (2 * SCALE_BLOCK) == 0, "a block of scales would be cut"
    left, right = (half.contiguous() for half in weight.scales.chunk(2, 1))
    return Weight(first, left), Weight(second, right)


def concat_experts(first: Weight, second: Weight) -> Weight:
    """Two stacks [E, out, in] of one type as one."""
    scales = [weight.scales for weight in (first, second) if weight.scales is not None]
    zeros = [weight.zeros for weight in (first, second) if weight.zeros is not None]
    values = _joined([first.values, second.values], 0)
    return Weight(values, _joined(scales, 0) if scales else None, _joined(zeros, 0) if zeros else None)


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    import torch

    kind = parts[0].dtype
    if kind != torch.float8_e4m3fn:
        return torch.cat(parts, dim)
    return torch.cat([part.view(torch.uint8) for part in parts], dim).view(kind)


def quantize_fp8_weight(values: torch.Tensor) -> Weight:
    """A matrix or a stack of them, [..., out, in], in float8_e4m3fn with a float32 scale per block of 128 x 128: the
    block's largest value / 448. It is computed in parts, because the float32 values on the way are four times as
    large."""
    import torch

    out, inner = values.shape[-2:]
    rows = max(1, _PART // (inner * SCALE_BLOCK)) * SCALE_BLOCK
    matrices = [_quantize_rows(part) for matrix in values.reshape(-1, out, inner) for part in matrix.split(rows)]
    found, scales = (torch.cat(parts) for parts in zip(*matrices, strict=True))
    stack = values.shape[:-2]
    return Weight(found.view(torch.float8_e4m3fn).view(values.shape), scales.view(*stack, -1, scales.shape[-1]))


def _quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """values [rows, in] -> the bytes of FP8 values [rows, in], scales [ceil(rows / 128), ceil(in / 128)]."""
    import torch
    import torch.nn.functional as F

    rows, inner = values.shape
    padded = F.pad(values.float(), (0, -inner % SCALE_BLOCK, 0, -rows % SCALE_BLOCK))
    blocks = padded.view(padded.shape[0] // SCALE_BLOCK, SCALE_BLOCK, -1, SCALE_BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=SMALLEST_SCALE * FP8_MAX) / FP8_MAX
    divided = (blocks / scales[:, None, :, None]).view(padded.shape)[:rows, :inner]
    # Rounding may leave the largest value of a block just above 448, which has no FP8 value.
    return divided.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).contiguous().view(torch.uint8), scales


def keeps_quantized(device: torch.device) -> bool:
    """Do weights stay quantized on this device? A CPU has no GEMM for them: they are dequantized once, at load.
    Dequantizing for each GEMM would read and write four times as much."""
    return device.type == "cuda"


def byte_chunks(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The bytes of FP8 values, contiguous, uint8 in parts: what is needed on the way stays small beside the weights,
    and leaves no hole as large as they are in a GPU's memory."""
    import torch

    parts: tuple[torch.Tensor, ...] = values.view(torch.uint8).view(-1).split(_PART)
    return parts


def contains_nan(values: torch.Tensor) -> bool:
    """For contiguous float8_e4m3fn values. FP8 GEMMs turn NaN into finite values, so weights are checked at load."""
    import torch

    return bool(torch.stack([((part & 127) == 127).any() for part in byte_chunks(values)]).any())
