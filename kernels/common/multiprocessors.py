"""The number of a device's multiprocessors, by which launches are divided."""

from __future__ import annotations

from functools import cache

import torch

_ON_CPU = 16  # for Triton's interpreter: enough that work on small inputs is split


@cache
def multiprocessors(device: torch.device) -> int:
    """How many a CUDA device has; other devices count as 16. Cached, as launches ask for it."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else _ON_CPU
