"""Non-blocking copies from host to device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def upload(
    values: Sequence[Any] | np.ndarray | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """A small table as a tensor on the device, copied from pinned memory in stream order."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def upload_to(out: torch.Tensor, values: np.ndarray) -> None:
    """The same to a place on the device, without a second one."""
    host = torch.as_tensor(values, dtype=out.dtype)
    out.copy_(host.pin_memory() if out.is_cuda else host, non_blocking=True)
