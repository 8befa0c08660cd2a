"""Linear layers: GEMM with RMSNorm, bias, residual and activation, fused where a kernel can."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from specbatch.kernels.dispatch import is_deterministic, runs_kernels
from specbatch.kernels.elementwise.activations import relu_squared, silu_and_mul
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.deterministic.fixed_rows import gemm_in_blocks


class Norm(NamedTuple):
    """An RMSNorm: weight [H] and eps."""

    weight: torch.Tensor
    eps: float


_LARGE = 1 << 16  # elements; measured for 1 to 40 rows: from twice as many on, the blocked layout is faster


class Linear:
    """`norm(x) @ weight.T + bias + residual` for x [T, in], weight [out, in], bias [out], residual [T, out].

    On a CUDA device few rows go through our own GEMMs (`skinny_gemm_triton`), which read the weights at nearly the
    speed of the memory and fuse norm and residual; more rows go through cuBLAS, with an algorithm of `cublas_lt` where
    that is faster.

    On a CPU a float32 weight is kept in oneDNN's blocked layout, as inductor does when it freezes a model: for up to
    some 40 rows the GEMM then runs at the speed at which the weight can be read, about twice that of `F.linear`.
    oneDNN compiles and keeps a kernel, of about half a megabyte, for every number of rows. Rows are therefore padded to
    few different numbers. A small weight is left as it is: a call of oneDNN takes longer than its GEMM.

    In deterministic mode see `fixed_order` for a GPU, and `fixed_rows` for a CPU.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.shape = weight.shape
        self.bias = bias
        is_large = weight.numel() >= _LARGE
        self._blocked = is_large and is_blocked(weight.dtype, weight.device) and not runs_kernels(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._blocked else weight

    @property
    def weight(self) -> torch.Tensor:
        """[out, in]; a copy if it is kept in another layout."""
        return self._weight.to_dense() if self._blocked else self._weight

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, in] -> [T, out], in the memory of `out` if that is given; that of `residual` may be used up."""
        assert x.stride(1) == 1, "the elements of a row of x must be adjacent, as kernels of GPUs need it"
        if runs_kernels(x):
            y = self._on_cuda(x, norm, residual, out)
        else:
            x = x if norm is None else rms_norm(x, *norm)
            if is_deterministic():
                y = gemm_in_blocks(self._on_cpu, x, (*self.shape, self.bias is None, self._blocked))
            elif self._blocked:
                padding = _padded(len(x)) - len(x)
                y = self._on_cpu(F.pad(x, (0, 0, 0, padding)) if padding else x)[: len(x)]
            else:
                y = self._on_cpu(x)
            y = y if residual is None else residual + y
        return y if out is None or y is out else out.copy_(y)

    def _on_cpu(self, x: torch.Tensor) -> torch.Tensor:
        if not self._blocked:
            return F.linear(x, self._weight, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return y

    def _on_cuda(
        self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        from specbatch.kernels.gemm.dense import cublas_lt, skinny_gemm_triton
        from specbatch.kernels.gemm.deterministic import fixed_order

        if is_deterministic() and fixed_order.takes(self._weight):
            x = x if norm is None else rms_norm(x, *norm)
            return fixed_order.fixed_order_linear(x, self._weight, self.bias, residual, out)
        if skinny_gemm_triton.is_skinny(len(x), self._weight):
            return skinny_gemm_triton.skinny_linear(x, self._weight, self.bias, norm=norm, residual=residual)
        x = x if norm is None else rms_norm(x, *norm)
        if self.bias is None and not is_deterministic():
            y = cublas_lt.linear(x, self._weight, residual, out)
            if y is not None:
                return y
        if residual is not None and self.bias is None:
            return residual.addmm_(x, self._weight.t())  # free in the GEMM's epilogue; out of place it copies first
        if self.bias is not None:
            y = torch.addmm(self.bias, x, self._weight.t(), out=out)
            return y if residual is None else residual.add_(y)
        return torch.mm(x, self._weight.t(), out=out)

    def gated(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """silu(g) * u for [g | u] = norm(x) @ weight.T + bias: x [T, in] -> [T, out / 2]."""
        if runs_kernels(x):
            from specbatch.kernels.gemm.dense import skinny_gemm_triton
            from specbatch.kernels.gemm.deterministic import fixed_order

            if is_deterministic() and fixed_order.takes(self._weight):
                return fixed_order.fixed_order_gated(rms_norm(x, *norm), self._weight, self.bias)
            if skinny_gemm_triton.is_skinny(len(x), self._weight):
                return skinny_gemm_triton.skinny_gated(x, self._weight, self.bias, norm=norm)
        return silu_and_mul(self(x, norm=norm))

    def after_gate(
        self, gate_up: Linear, x: torch.Tensor, norm: Norm, *, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """The second GEMM of an MLP: `gate_up.gated(x, norm) @ weight.T + bias + residual`, in which the memory of the
        residual may be used up."""
        return self(gate_up.gated(x, norm), residual=residual)

    def squared(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """relu(norm(x) @ weight.T + bias)^2: x [T, in] -> [T, out]."""
        if runs_kernels(x) and not is_deterministic():
            from specbatch.kernels.gemm.dense import skinny_gemm_triton

            if skinny_gemm_triton.is_skinny(len(x), self._weight):
                return skinny_gemm_triton.skinny_linear(x, self._weight, self.bias, norm=norm, squared=True)
        return relu_squared(self(x, norm=norm))


def _padded(rows: int) -> int:
    """The rows to compute: up to 8 as they are, then 4 numbers for each power of two (10, 12, 14, 16, 20, ...)."""
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step


def is_blocked(dtype: torch.dtype, device: torch.device) -> bool:
    """Is a weight of this type kept as a reordered copy of its own?"""
    has_product = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return device.type == "cpu" and dtype == torch.float32 and has_product
