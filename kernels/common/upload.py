"""Non-blocking copies from host to device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# Up to so many bytes the driver copies from pageable memory without waiting for the stream (measured on an H200:
# `results/h200/experiments.md`). A copy to pinned memory first takes as long again.
_MOST_PAGEABLE = 64 << 10


def upload(
    values: Sequence[Any] | np.ndarray | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """A small table as a tensor on the device, copied in stream order. `values` may change after the call, except on a
    CPU, where an array of this dtype is not copied."""
    host = torch.as_tensor(values, dtype=dtype)
    return host if device.type == "cpu" else _pinned_if_large(host).to(device, non_blocking=True)


def upload_to(out: torch.Tensor, values: np.ndarray) -> None:
    """The same to a place on the device, without a second one."""
    host = torch.as_tensor(values, dtype=out.dtype)
    out.copy_(_pinned_if_large(host) if out.is_cuda else host, non_blocking=True)


def _pinned_if_large(host: torch.Tensor) -> torch.Tensor:
    """In pinned memory, if a copy from pageable memory would wait for the stream."""
    return host if host.nbytes <= _MOST_PAGEABLE else host.pin_memory()
