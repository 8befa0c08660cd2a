"""The structure of a module: what decides which kernels it launches, without the values of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_ALIGNMENT = 16  # bytes, for which Triton compiles kernels of their own


def structure_of(value: Any) -> Any:
    """Equal for values of this package that differ only in what their tensors hold: types, settings, and of tensors
    sizes, strides, types and alignment. What others define counts by its type. The values have no cycles."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:  # of a weight on a CPU
            return tuple(value.shape), value.dtype, value.layout
        return tuple(value.shape), value.stride(), value.dtype, value.data_ptr() % _ALIGNMENT == 0
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    kind = type(value)
    if isinstance(value, tuple | list):
        return kind, tuple(map(structure_of, value))
    if isinstance(value, Mapping):
        return kind, tuple((key, structure_of(item)) for key, item in value.items())
    if kind.__module__.partition(".")[0] != "specbatch":
        return getattr(value, "__qualname__", kind)
    return kind, structure_of(vars(value))
