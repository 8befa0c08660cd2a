"""Linear layers with FP8 weights, scaled per block or per output: W8A8, or W8A16 with BF16 or FP16 activations."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from specbatch.kernels.dispatch import is_deterministic, op
from specbatch.kernels.elementwise.activations import relu_squared, silu_and_mul
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.deterministic.fixed_rows import linear_in_blocks
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.gemm.quantized import fp8_activations
from specbatch.kernels.gemm.quantized.fp8_activations import FP8Activations
from specbatch.kernels.gemm.quantized.fp8_quantize import quantize_fp8, rms_norm_fp8, silu_and_mul_fp8
from specbatch.kernels.gemm.quantized.int4 import int4_linear, int4_tiles
from specbatch.kernels.gemm.quantized.weight import Weight


def fp8_linear_ref(
    x: torch.Tensor | FP8Activations,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias + residual for x [T, in], FP8 weight [out, in] with scales, bias [out], residual [T, out]; in
    the memory of `out` [T, out] if given; else that of the residual may be used up. With FP8 x it is computed in
    float32 and cast once, to the type before quantization."""
    linear = linear_in_blocks if is_deterministic() else F.linear
    if isinstance(x, FP8Activations):
        y = linear(x.dequantize(), weight.dequantize(torch.float32), None if bias is None else bias.float())
        y = (y if residual is None else residual + y).to(x.dtype)
    else:
        y = linear(x, weight.dequantize(x.dtype), bias)
        y = y if residual is None else residual + y
    return y if out is None else out.copy_(y)


fp8_linear = op(fp8_linear_ref, "specbatch.kernels.gemm.quantized.fp8_linear_triton:fp8_linear")


class _Unfused(Linear):
    """The norm before the GEMM and the activation after it are operations of their own."""

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._gemm(x if norm is None else rms_norm(x, *norm), residual, out)

    def _gemm(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError

    def gated(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return silu_and_mul(self(x, norm=norm))

    def squared(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return relu_squared(self(x, norm=norm))


class FP8Linear(_Unfused):
    """A `Linear` whose weight is FP8. Where x is quantized, the norm or the activation before it is fused with that."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        self.shape, self.bias = weight.values.shape, bias
        assert weight.scales is not None, "a weight without scales is for Linear"
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


class Int4Linear(_Unfused):
    """A `Linear` whose weight is INT4."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        self.shape, self.bias = torch.Size(weight.shape), bias
        self._tiles = int4_tiles(weight)

    def _gemm(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        return int4_linear(x, self._tiles, self.bias, residual, out)


class ConcatLinear(_Unfused):
    """GEMMs of the same x with concatenated outputs, where weights of several types form one `Linear`."""

    def __init__(self, *parts: Linear) -> None:
        self.shape, self.bias = torch.Size((sum(part.shape[0] for part in parts), parts[0].shape[1])), None
        self._parts = parts

    def _gemm(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(len(x), self.shape[0]) if out is None else out
        for part, columns in zip(self._parts, out.split([part.shape[0] for part in self._parts], 1), strict=True):
            part(x, out=columns)
        return out if residual is None else residual + out


def linear(weight: Weight, bias: torch.Tensor | None = None) -> Linear:
    """The layer of a weight as it is stored."""
    if weight.scales is None:
        return Linear(weight.values, bias)
    return Int4Linear(weight, bias) if weight.is_int4 else FP8Linear(weight, bias)
