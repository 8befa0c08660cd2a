"""FP8 weights, scaled per block or per output, and their linear layers: W8A8, or W8A16 with BF16 or FP16 inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from specbatch.kernels.common.block_sizes import FP8_MAX, SCALE_BLOCK
from specbatch.kernels.dispatch import op
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.gemm.quantized import fp8_activations
from specbatch.kernels.gemm.quantized.fp8_quantize import quantize_fp8, rms_norm_fp8, silu_and_mul_fp8
from specbatch.kernels.gemm.quantized.weight import UnfusedLinear, Weight, quantized_linear_ref

SMALLEST_SCALE = 2.0**-100  # of a quantized block, so that zeros stay zeros
_PART = 1 << 24

fp8_linear = op(quantized_linear_ref, "specbatch.kernels.gemm.quantized.fp8_linear_triton:fp8_linear")


@dataclass(frozen=True)
class FP8Weight(Weight):
    """values float8_e4m3fn [..., out, in]; scales float32, bfloat16 or float16 [..., ceil(out / 128), ceil(in / 128)],
    what the checkpoints of DeepSeek-V3, Qwen3 and Qwen3.5 in FP8 call `weight_scale_inv`, which multiplies all the
    same; or [..., out, 1], a scale per output (the compressed-tensors strategies channel and, all equal, tensor)."""

    scales: torch.Tensor

    @property
    def is_per_channel(self) -> bool:
        """Whether each output has a scale of its own, in place of blocks."""
        return self.scales.shape[-2:] == (self.values.shape[-2], 1)

    @property
    def block(self) -> tuple[int, int | None]:
        return (1, None) if self.is_per_channel else (SCALE_BLOCK, SCALE_BLOCK)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        if self.is_per_channel:
            return (self.values.float() * self.scales.float()).to(dtype)
        out, inner = self.values.shape[-2:]
        scales = self.scales.float().repeat_interleave(SCALE_BLOCK, -2).repeat_interleave(SCALE_BLOCK, -1)
        return (self.values.float() * scales[..., :out, :inner]).to(dtype)

    def linear(self, bias: torch.Tensor | None = None) -> FP8Linear:
        return FP8Linear(self, bias)


class FP8Linear(UnfusedLinear):
    """A `Linear` whose weight is FP8. Where x is quantized, the norm or the activation before it is fused with that."""

    def __init__(self, weight: FP8Weight, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight.shape, bias)
        # Block scales are converted to float32, which is exact and the only type that cuBLASLt reads.
        self._scaled = weight if weight.is_per_channel else replace(weight, scales=weight.scales.float())

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if norm is None or not fp8_activations.quantizes(x):
            return super().__call__(x, norm=norm, residual=residual, out=out)
        return fp8_linear(rms_norm_fp8(x, *norm), self._scaled, self.bias, residual, out)

    def _gemm(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        inputs = quantize_fp8(x, before_gemm=True) if fp8_activations.quantizes(x) else x
        return fp8_linear(inputs, self._scaled, self.bias, residual, out)

    def after_gate(
        self, gate_up: Linear, x: torch.Tensor, norm: Norm, *, residual: torch.Tensor | None
    ) -> torch.Tensor:
        if not fp8_activations.quantizes(x):
            return super().after_gate(gate_up, x, norm, residual=residual)
        return fp8_linear(silu_and_mul_fp8(gate_up(x, norm=norm)), self._scaled, self.bias, residual)


def quantize_fp8_weight(values: torch.Tensor, part: int = _PART) -> FP8Weight:
    """A matrix or a stack of them, [..., out, in], in float8_e4m3fn with a float32 scale per block of 128 x 128: the
    block's largest value / 448. It is computed in parts of about `part` values, because the float32 values on the way
    are four times as large."""
    out, inner = values.shape[-2:]
    rows = max(1, part // (inner * SCALE_BLOCK)) * SCALE_BLOCK
    matrices = [_quantize_rows(some) for matrix in values.reshape(-1, out, inner) for some in matrix.split(rows)]
    found, scales = (torch.cat(parts) for parts in zip(*matrices, strict=True))
    stack = values.shape[:-2]
    return FP8Weight(found.view(torch.float8_e4m3fn).view(values.shape), scales.view(*stack, -1, scales.shape[-1]))


def _quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """values [rows, in] -> the bytes of FP8 values [rows, in], scales [ceil(rows / 128), ceil(in / 128)]."""
    rows, inner = values.shape
    padded = F.pad(values.float(), (0, -inner % SCALE_BLOCK, 0, -rows % SCALE_BLOCK))
    blocks = padded.view(padded.shape[0] // SCALE_BLOCK, SCALE_BLOCK, -1, SCALE_BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=SMALLEST_SCALE * FP8_MAX) / FP8_MAX
    divided = (blocks / scales[:, None, :, None]).view(padded.shape)[:rows, :inner]
    # Rounding may leave the largest value of a block just above 448, which has no FP8 value.
    return divided.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).contiguous().view(torch.uint8), scales


def byte_chunks(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The bytes of FP8 values, contiguous, uint8 in parts: what is needed on the way stays small beside the weights,
    and leaves no hole as large as they are in a GPU's memory."""
    parts: tuple[torch.Tensor, ...] = values.view(torch.uint8).view(-1).split(_PART)
    return parts


def contains_nan(values: torch.Tensor) -> bool:
    """For contiguous float8_e4m3fn values. FP8 GEMMs turn NaN into finite values, so weights are checked at load."""
    return bool(torch.stack([((part & 127) == 127).any() for part in byte_chunks(values)]).any())
