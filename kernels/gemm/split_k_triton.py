"""GEMMs that are split over K: partial sums in a workspace, added in the order of the splits.

Every program of a tile leaves its float32 sums; the last to arrive adds all of them, so that results do not depend on
timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.sizes import cdiv

WORKSPACE = 8 << 20  # float32 partial sums
COUNTERS = 4096
MULTIPROCESSORS = 132  # of an H200
_workspaces: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The partial sums and arrival counters that all GEMMs on a device share; made on first use.

    Call it before a graph capture. GEMMs of one device must all run on one stream.
    """
    device = torch.empty(0, device=device).device  # with its number
    if device not in _workspaces:
        with torch.inference_mode(False):  # writable in and outside inference mode
            _workspaces[device] = (
                torch.empty(WORKSPACE, device=device, dtype=torch.float32),
                torch.zeros(COUNTERS, device=device, dtype=torch.int32),
            )
    return _workspaces[device]


def fills_device(rows: int, n: int) -> bool:
    """Whether the tiles of 64 x 128 of a result [rows, n] occupy at least two thirds of the multiprocessors."""
    return cdiv(rows, 64) * cdiv(n, 128) >= MULTIPROCESSORS * 2 // 3


def splits_for(tiles: int, size: int, k: int, resident: int, least: int = 512) -> int:
    """How many programs share the K of each of so many tiles of `size` results: until every multiprocessor has
    `resident` of them, or each program the `least` columns of K that are worth one."""
    tiles = max(1, tiles)  # none without rows
    splits = min(resident * MULTIPROCESSORS // tiles, k // least, WORKSPACE // (tiles * size))
    return max(1, splits)


def used_splits(steps: int, splits: int) -> int:
    """Of so many splits of the steps over K those that have a step, each as many as the others but the last."""
    return -(-steps // -(-steps // splits))


@triton.jit
def is_last_split(total, partial, counters, tile, split, SPLITS: tl.constexpr):
    """Leaves the sums [M, N] of a split of a tile; whether those of all others are there."""
    M: tl.constexpr = total.shape[0]
    N: tl.constexpr = total.shape[1]
    inner = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(partial + (tile * SPLITS + split) * (M * N) + inner, total)
    tl.debug_barrier()
    return tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1


@triton.jit
def sum_of_splits(partial, counters, tile, SPLITS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The sums of all splits of a tile, float32 [M, N]. The counter is 0 again for the next GEMM."""
    inner = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    total = tl.zeros([M, N], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + (tile * SPLITS + split) * (M * N) + inner, cache_modifier=".cg")
    tl.store(counters + tile, 0)
    return total
