"""Tile configurations of `skinny_gemm_triton`."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """n rows of the weight (of each half where gated) by k columns per step of a program.

    splits: programs that share the K of a tile; stages: steps of weights under way at once, plus one.
    """

    n: int
    k: int
    splits: int
    warps: int
    stages: int


# (N, K, gated): best in a chain of layers on an H200, 16 rows of bfloat16; 4 rows where it says so
_MEASURED = {
    (2048, 4096, False): Tile(32, 512, 4, 4, 3),  # 4 rows
    (6144, 4096, False): Tile(64, 128, 4, 2, 5),
    (4096, 4096, False): Tile(32, 256, 3, 4, 4),
    (12288, 4096, True): Tile(32, 256, 1, 4, 3),
    (4096, 12288, False): Tile(64, 256, 6, 2, 3),
}
# the same on an H100 with 32 rows
_MEASURED_32 = {
    (6144, 4096, False): Tile(64, 128, 4, 4, 4),
    (4096, 4096, False): Tile(64, 128, 4, 4, 6),
    (12288, 4096, True): Tile(64, 128, 1, 4, 3),
    (4096, 12288, False): Tile(64, 128, 6, 4, 4),
}
_NARROW, _SHORT = 528, 4096  # N and K of a weight that few undivided programs read: a router
_RESIDENT = 3 * 132  # programs of 64 KiB of weights under way, three to a multiprocessor


def puts_weight_first(block_m: int) -> bool:
    """Whether the weight is the first operand of the matrix multiplications with block_m rows of x. With 32 rows this
    takes 153 us a layer of Qwen3-8B on an H100, and 188 with x first; with 16 rows, x first takes 6 us less."""
    return block_m == 32


def tile_for(n: int, k: int, block_m: int, gated: bool, item: int) -> Tile:
    """The tile for y [block_m, n] = x [block_m, k] @ weight.T, elements of `item` bytes.

    Shapes not measured: all programs resident at once, and split over K until they fill the device.
    To tune: `python -m specbatch.sweeps.microbench gemm-tiles`.
    """
    if item == 4:
        return Tile(32, 32, 2 if k >= 256 and not gated else 1, 4, 2)
    if block_m == 32:
        return _MEASURED_32.get((n, k, gated)) or _tile_of_32_rows(n, k, gated)
    if block_m > 16:
        return Tile(32 if gated else 64, 64, 1 if gated else min(4, max(1, k // 512)), 8 if block_m > 64 else 4, 5)
    if (n, k, gated) in _MEASURED:
        return _MEASURED[n, k, gated]
    if n <= _NARROW and k <= _SHORT and not gated:
        return Tile(16, 1024, 1, 4, 3)  # adding splits up would take longer than reading
    if gated:
        tile = Tile(32, 256, 1, 4, 3) if n <= 32 * _RESIDENT else Tile(64, 128, 1, 2, 3)
    else:
        tile = Tile(64, 128, 1, 2, 5) if n <= 64 * _RESIDENT else Tile(128, 128, 1, 4, 3)
    tiles = -(-n // tile.n)
    return replace(tile, splits=max(1, min(k // 512, _RESIDENT // tiles)))


def _tile_of_32_rows(n: int, k: int, gated: bool) -> Tile:
    """64 rows of the weight, as many as an instruction takes. Each program has 256 columns at least, and the last to
    arrive at a tile adds the sums of 8 at most."""
    resident = 2 * 132 if gated else _RESIDENT
    splits = max(1, min(k // 256, resident // -(-n // 64), 8))
    return Tile(64, 128, splits, 4, 3 if gated else 4)


def undivided_tile_for(n: int, k: int, gated: bool, item: int) -> Tile:
    """The tile for up to 16 rows where no program may take a part of K only (`fixed_order`)."""
    if item == 4:
        return Tile(32, 32, 1, 4, 2)
    if gated:
        return Tile(32, 256, 1, 4, 3)
    # With more than half of a multiprocessor's shared memory, no two programs share one. Programs that start early
    # would else crowd on the first multiprocessors that the kernel before leaves.
    if n <= 16 * 132:
        return Tile(16, 512, 1, 4, 8) if k % 512 == 0 else Tile(16, 256, 1, 4, 15)
    if n <= 32 * 132:
        return Tile(32, 256, 1, 4, 8)
    if n <= 64 * 132:
        return Tile(64, 128, 1, 4, 8)
    return tile_for(n, k, 16, gated, item) if n > 64 * _RESIDENT else Tile(64, 128, 1, 2, 5)
