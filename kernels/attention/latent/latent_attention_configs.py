"""Tile sizes of the `latent_attention` kernels, and memory for prefixes that sequences share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from specbatch.kernels.attention.queries import DecodeQueries
from specbatch.kernels.attention.verify.prefix_attention_configs import PrefixLaunch, PrefixTile, most_lines
from specbatch.kernels.common.sizes import multiprocessors, tile_side

LEAST_SPLIT = 256  # keys that are worth a program of their own
MOST_QUERIES = 64  # rows of a tile
HOPPER, AMPERE = 227 << 10, 163 << 10  # bytes of shared memory that a program may have, on an H100 and on an A100


@dataclass(frozen=True)
class LatentTile:
    """Query rows (tokens x heads) and keys of a step, warps of a program, stages of its pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def tile_for(rows: int, item: int, device: torch.device, *, fp8: bool = False) -> LatentTile:
    """For `rows` query rows that see the same keys, of `item` bytes a value. fp8: the keys.

    A row of the output is as wide as a latent: of 512 numbers, 64 rows take 128 registers of each of 256 threads. With
    64 keys in BF16 instead of 32, an H200 takes 14% less time for 16 rows and 34% less for 64.
    """
    shared = _shared_memory(device)
    if rows <= 16:
        return LatentTile(16, 64 if shared >= HOPPER and item == 2 and not fp8 else 32, 4, 2)
    if item == 4 or shared < AMPERE:  # in FP32, shared memory would not hold 64 rows and the keys of an FP8 cache
        return LatentTile(32, 32, 8, 2)
    return LatentTile(64, 64 if shared >= HOPPER else 32, 8, 2)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; on a CPU as on Hopper."""
    if device.type != "cuda":
        return HOPPER
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def prefix_launch(
    queries: DecodeQueries, count: int, item: int, *, fp8: bool = False, tile: LatentTile | None = None
) -> PrefixLaunch:
    """Attention of queries with `count` heads of `item` bytes a value to the latents of `queries.prefixes`; tile:
    chosen by the sizes if None."""
    assert queries.prefixes is not None
    sequences, device = len(queries.lengths), queries.lengths.device
    shape = _prefix_tile(tile or tile_for(MOST_QUERIES, item, device, fp8=fp8))
    rows, groups = sequences * queries.num_queries * count, queries.prefixes.groups.shape[1]
    programs = multiprocessors(device)
    return PrefixLaunch(shape, "slots", programs, most_lines(rows, min(groups, sequences // 2), programs, shape))


def _prefix_tile(tile: LatentTile) -> PrefixTile:
    return PrefixTile(tile.block_m, tile.block_n, tile.warps, tile.stages)


def latent_prefix_bytes(sequences: int, n: int, groups: int, count: int, rank: int, device: torch.device) -> int:
    """Memory for what passes over up to so many sequences of n tokens in up to so many groups find in prefixes and
    after them, with `count` heads and latents of `rank` numbers."""
    rows, shape = sequences * n * count, _prefix_tile(tile_for(MOST_QUERIES, 2, device))
    lines = most_lines(rows, min(groups, sequences // 2), multiprocessors(device), shape)
    return (lines * (2 * tile_side(rank // 2) + 1) + rows * (rank + 1)) * torch.float32.itemsize
