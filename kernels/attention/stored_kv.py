"""What a KV cache stores of keys and values, and what is read from it: FP8 with a scale per KV head, or as they are."""

from __future__ import annotations

import torch

from specbatch.kernels.common.block_sizes import FP8_MAX


def to_stored(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., kv, dim] as a cache of `dtype` stores it: times the inverse of scale float32 [..., kv], if given.
    float8_e4m3fn is saturated, where torch's own cast makes NaN of anything above 448; NaN stays."""
    if scale is not None:
        x = x.float() * (1 / scale)[..., None]
    return x.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def from_stored(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Stored x [..., kv, dim], multiplied by its scale, in `dtype`."""
    return x.to(dtype) if scale is None else (x.float() * scale[..., None]).to(dtype)


def copyable(cache: torch.Tensor) -> torch.Tensor:
    """The memory of a cache as a type whose rows torch copies and gathers: FP8 as bytes."""
    return cache.view(torch.uint8) if cache.itemsize == 1 else cache


def gather_stored(
    cache: torch.Tensor, index: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """`from_stored` of cache[index]: [len(index), ..., kv, dim]."""
    return from_stored(copyable(cache).index_select(0, index).view(cache.dtype), dtype, scale)
