"""Tile sizes of the products in `skinny_gemm`, measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """n rows of the weight (of each half where gated) by k columns per step of a program.

    splits: programs that share the K of a tile. prefetch: columns beyond the pipeline's first that a program asks
    L2 for before the kernel ahead has ended. early: dependents are released at the start, not at the end.
    """

    n: int
    k: int
    splits: int
    warps: int
    stages: int
    prefetch: int = 512
    early: bool = True


def tile_for(n: int, k: int, block_m: int, gated: bool, item: int) -> Tile:
    """The tile for y [block_m, n] = x [block_m, k] @ weight.T, elements of `item` bytes."""
    if item == 4:
        return Tile(32, 32, 2 if k >= 256 else 1, 4, 2, prefetch=0)
    splits = 1 if n >= 8192 or gated else 2
    return Tile(32 if gated else 64, 128 if block_m <= 32 else 64, splits, 4, 4)
