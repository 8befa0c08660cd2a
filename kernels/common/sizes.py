"""Sizes of launches, computed on the host: tiles, and the number of a device's multiprocessors.

Triton's functions `cdiv` and `next_power_of_2` are made for kernels, too: each of their calls takes 4 us, a sixth of a
launch.
"""

from __future__ import annotations

from functools import cache

import torch

_ON_CPU = 16  # multiprocessors, for Triton's interpreter: enough that work on small inputs is split


def cdiv(size: int, part: int) -> int:
    """How many parts hold `size`."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << max(0, size - 1).bit_length()


def tile_side(size: int) -> int:
    """The side of a tile that holds `size`: a power of two, and at least the 16 that `tl.dot` needs."""
    return max(16, next_power_of_2(size))


@cache
def multiprocessors(device: torch.device) -> int:
    """How many a CUDA device has; other devices count as 16. Cached, as launches ask for it."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else _ON_CPU
