"""Sizes of launches, computed on the host. Triton's functions of these names are made for kernels, too: each of their
calls takes 4 us, a sixth of a launch."""

from __future__ import annotations


def cdiv(size: int, part: int) -> int:
    """How many parts hold `size`."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << max(0, size - 1).bit_length()


def tile_side(size: int) -> int:
    """The side of a tile that holds `size`: a power of two, and at least the 16 that `tl.dot` needs."""
    return max(16, next_power_of_2(size))
