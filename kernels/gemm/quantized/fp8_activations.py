"""FP8 activations: values and scales, and whether GEMMs with FP8 weights quantize them (W8A8) or not (W8A16)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from specbatch.kernels.common.block_sizes import SCALE_BLOCK
from specbatch.kernels.common.sizes import cdiv

_ROW_MULTIPLE = 4  # so that each column of scales starts at a multiple of 16 bytes
SMALLEST_MAX = 2.0**-100  # that a block's largest value counts as: its inverse is finite, and zeros stay zeros
_enabled = ContextVar("fp8_activations", default=False)


class FP8Activations(NamedTuple):
    """values float8_e4m3fn [T, K] contiguous; scales float32 [T, ceil(K / 128)], column-major, which values are
    multiplied by to dequantize; dtype: before quantization, and of GEMM outputs. See `empty_fp8`."""

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def is_cuda(self) -> bool:
        return self.values.is_cuda

    def dequantize(self) -> torch.Tensor:
        """float32 [T, K]."""
        return self.values.float() * self.scales.repeat_interleave(SCALE_BLOCK, 1)[:, : self.values.shape[1]]


def empty_fp8(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> FP8Activations:
    """Uninitialized activations [rows, width]. There is memory for `allocated_rows`, and scales are column-major,
    because cuBLASLt reads both that way."""
    whole = allocated_rows(rows)
    values = torch.empty(whole, width, device=device, dtype=torch.float8_e4m3fn)
    scales = torch.empty(cdiv(width, SCALE_BLOCK), whole, device=device).t()
    return FP8Activations(values[:rows], scales[:rows], dtype)


def allocated_rows(rows: int) -> int:
    """How many rows `empty_fp8` has memory for."""
    return cdiv(rows, _ROW_MULTIPLE) * _ROW_MULTIPLE


@contextmanager
def use_fp8_activations(enabled: bool) -> Iterator[None]:
    """Within this context GEMMs with FP8 weights also quantize their activations, if `enabled`.

    An engine sets it once for all of its passes, so that a verify computes what the baseline computes, and a prompt the
    same in whatever chunks it comes. Engines that share weights may differ in it.
    """
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def quantizes(x: torch.Tensor) -> bool:
    """Whether x is quantized before a GEMM with FP8 weights: BF16 and FP16 only, float32 stays exact."""
    return _enabled.get() and x.element_size() == 2
