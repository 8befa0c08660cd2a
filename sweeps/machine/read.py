"""Triton kernel that reads memory once, as fast as the device can: the floor of a decode step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _read_sum(data, sums, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """One program per chunk of STEPS * BLOCK values; the partial sums of a block's lanes stay in registers."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(STEPS):
        total += tl.load(data + start + step * BLOCK + lanes, eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(total))


def read_sum(data: torch.Tensor, sums: torch.Tensor, *, block: int, steps: int, warps: int) -> None:
    """Write the sums of consecutive chunks of block * steps values of `data` (float32, contiguous) into `sums`."""
    _read_sum[(data.numel() // (block * steps),)](data, sums, BLOCK=block, STEPS=steps, num_warps=warps)
