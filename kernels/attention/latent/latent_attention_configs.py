"""Tile sizes of the `latent_attention` kernels, and memory for prefixes that sequences share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbatch.kernels.attention.queries import DecodeQueries
from specbatch.kernels.attention.verify.prefix_attention_configs import PrefixLaunch, PrefixTile, most_lines
from specbatch.kernels.common.sizes import multiprocessors, tile_side

LEAST_SPLIT = 256  # keys that are worth a program of their own


@dataclass(frozen=True)
class LatentTile:
    """Query rows (tokens x heads) and keys of a step, warps of a program, stages of its pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# By query rows, for a cache in 16 bits and in FP8. A row of the output is as wide as a latent: of 512 numbers, 64 rows
# take 128 registers of each of 256 threads. To tune: `python -m specbatch.sweeps.microbench latent-tiles`.
TILES = {
    16: (LatentTile(16, 32, 4, 2), LatentTile(16, 32, 4, 2)),
    64: (LatentTile(64, 32, 8, 3), LatentTile(64, 64, 8, 2)),
}
FP32 = LatentTile(32, 32, 8, 2)  # with 64 rows, shared memory would not hold the keys of an FP8 cache besides


def tile_for(rows: int, item: int, *, fp8: bool = False) -> LatentTile:
    """For `rows` query rows that see the same keys, of `item` bytes a value. fp8: the keys."""
    if item == 4 and rows > 16:
        return FP32
    return next((tiles for most, tiles in TILES.items() if rows <= most), TILES[64])[fp8]


def prefix_launch(
    queries: DecodeQueries, count: int, item: int, *, fp8: bool = False, tile: LatentTile | None = None
) -> PrefixLaunch:
    """Attention of queries with `count` heads of `item` bytes a value to the latents of `queries.prefixes`; tile:
    chosen by the sizes if None."""
    assert queries.prefixes is not None
    tile = tile or tile_for(64, item, fp8=fp8)
    sequences, device = len(queries.lengths), queries.lengths.device
    shape = PrefixTile(tile.block_m, tile.block_n, tile.warps, tile.stages)
    rows, groups = sequences * queries.num_queries * count, queries.prefixes.groups.shape[1]
    programs = multiprocessors(device)
    return PrefixLaunch(shape, "slots", programs, most_lines(rows, min(groups, sequences // 2), programs, shape))


def latent_prefix_bytes(sequences: int, n: int, groups: int, count: int, rank: int, device: torch.device) -> int:
    """Memory for what passes over up to so many sequences of n tokens in up to so many groups find in prefixes and
    after them, with `count` heads and latents of `rank` numbers."""
    tile = tile_for(64, 2)
    shape = PrefixTile(tile.block_m, tile.block_n, tile.warps, tile.stages)
    rows = sequences * n * count
    lines = most_lines(rows, min(groups, sequences // 2), multiprocessors(device), shape)
    return (lines * (2 * tile_side(rank // 2) + 1) + rows * (rank + 1)) * torch.float32.itemsize
