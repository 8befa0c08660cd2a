"""Which GPUs, types and shapes the Gluon kernels of attention are for, and their tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

FIRST_TRITON, LAST_TRITON = (3, 6), (3, 9)  # Gluon may change with every version
HALVES = (torch.float16, torch.bfloat16)
ROWS = 128  # of a tile


@dataclass(frozen=True)
class Tiling:
    """Keys of a block, and how many blocks of keys (and as many of values) shared memory holds."""

    keys: int
    stages: int


TILINGS = {64: Tiling(128, 2), 128: Tiling(128, 2), 256: Tiling(64, 2)}  # by size of the heads


class Layout(NamedTuple):
    """Type of the queries, size of a head, tokens of a page."""

    dtype: torch.dtype
    head_dim: int
    page_size: int


class Gpu(NamedTuple):
    """Its compute capability, and the version of Triton."""

    capability: tuple[int, int]
    triton: str


def gpu_of(device: torch.device) -> Gpu | None:
    if device.type == "cpu" or not torch.cuda.is_available():
        return None
    from triton import __version__

    return Gpu(torch.cuda.get_device_capability(device), __version__)


def not_gluon(gpu: Gpu | None, layout: Layout) -> str | None:
    """Why the Gluon kernels cannot run, if so."""
    if gpu is None or gpu.capability != (9, 0):
        return "needs a Hopper GPU"
    if not FIRST_TRITON <= tuple(map(int, gpu.triton.split(".")[:2])) <= LAST_TRITON:
        return f"was compiled with Triton 3.6 to 3.9 only, not {gpu.triton}"
    if layout.dtype not in HALVES:
        return "has float16 and bfloat16 only"
    if layout.head_dim not in TILINGS:
        return f"has no heads of {layout.head_dim}, only {', '.join(map(str, TILINGS))}"
    if layout.page_size % 8:
        return f"reads pages of a multiple of 8 tokens only, not {layout.page_size}"
    return None


@cache
def has_bulk_copies(device: torch.device) -> bool:
    """Can it copy a tile by one instruction (Hopper's TMA and its like)?"""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)
