"""Non-blocking copies from host to device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# Bytes that the driver copies from pageable memory without waiting for the stream. Pinning them takes longer.
_STAGED = 64 << 10


def upload(
    values: Sequence[Any] | np.ndarray | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """A small table as a tensor on the device, copied in stream order."""
    host = torch.as_tensor(values, dtype=dtype)
    return host if device.type == "cpu" else _staged(host).to(device, non_blocking=True)


def upload_to(out: torch.Tensor, values: np.ndarray) -> None:
    """The same to a place on the device, without a second one."""
    host = torch.as_tensor(values, dtype=out.dtype)
    out.copy_(_staged(host) if out.is_cuda else host, non_blocking=True)


def _staged(host: torch.Tensor) -> torch.Tensor:
    """In memory from which a copy does not block the host."""
    return host if host.nbytes <= _STAGED else host.pin_memory()
