"""Tile sizes, programs and memory of the `prefix_attention` kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from specbatch.kernels.attention.hopper import ROWS, TILINGS, Layout, gpu_of, has_bulk_copies, not_gluon
from specbatch.kernels.attention.queries import AttentionInputs, DecodeQueries
from specbatch.kernels.common.sizes import cdiv, multiprocessors, tile_side

LEAST_KEYS = 128  # of a split


@dataclass(frozen=True)
class PrefixTile:
    """Query rows and keys of a step, warps of a program, stages of its pipeline, registers that a thread may have,
    programs for each processor, and whether it is the Gluon kernel's."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None
    resident: int = 1
    gluon: bool = False


GLUON_TILES = {dim: PrefixTile(ROWS, tile.keys, 4, tile.stages, gluon=True) for dim, tile in TILINGS.items()}


def prefix_tile(dtype: torch.dtype, width: int, source: str) -> PrefixTile:
    """For heads of `width` numbers, whose keys come from `source`: see the kernel."""
    if dtype == torch.float32:
        return PrefixTile(32, 32, 4, 1)
    if width > 256:
        return PrefixTile(64, 32, 8, 2)
    if width > 128:
        return PrefixTile(64, 64, 4, 2)
    return PrefixTile(128, 64, 8, 3, 168)  # registers for a program of `verify_attention` beside it


class PrefixWork(NamedTuple):
    """How the work of a pass is divided, which is the same in layers with the same heads.

    items   int32 [most, 5]: a tile of rows and a split of keys each: the first member of the group, how many there are,
            the number of the tile, the first key and the end of the keys. Item i has lines i * block_m to (i + 1) *
            block_m of the partial results of a KV head
    end     int32 [1]: how many items there are
    places  int32 [B, 3]: for sequences with a prefix, the line of their first row (the rows of a sequence are token by
            token, and query head by query head), how many lines later the next split is, and the number of splits
    """

    items: torch.Tensor
    end: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class PrefixLaunch:
    """A launch for queries of some shape: its tile, where keys come from, programs for each KV head, lines of
    `PrefixPartials`."""

    tile: PrefixTile
    source: str
    programs: int
    lines: int

    @classmethod
    def of(cls, queries: DecodeQueries, inputs: AttentionInputs, tile: PrefixTile | None = None) -> PrefixLaunch:
        """tile: chosen by the sizes if None."""
        prefixes, heads, cache, dtype = queries.prefixes, inputs.heads, inputs.k_cache, inputs.projected.dtype
        assert prefixes is not None
        width, source = 2 * tile_side(heads.dim // 2), "slots"
        is_half = cache.dtype == dtype and dtype != torch.float32
        has_scales = inputs.k_scale is not None or inputs.v_scale is not None
        layout = Layout(dtype, heads.dim, cache.shape[1])
        if tile is None and is_half and not has_scales and _takes_gluon(cache.device, layout):
            tile = GLUON_TILES[heads.dim]
        if heads.dim == width and is_half and has_bulk_copies(cache.device):
            step = (tile or prefix_tile(dtype, width, "pages")).block_n
            source = "slots" if cache.shape[1] % step else "pages"
        tile = tile or prefix_tile(dtype, width, source)
        rows = len(queries.lengths) * queries.num_queries * (heads.count // heads.kv)
        programs = max(1, tile.resident * multiprocessors(cache.device) // heads.kv)
        lines = most_lines(rows, min(prefixes.groups.shape[1], len(queries.lengths) // 2), programs, tile)
        return cls(tile, source, programs, lines)


def prefix_bytes(sequences: int, n: int, groups: int, count: int, kv: int, dim: int, device: torch.device) -> int:
    """Memory for `PrefixPartials` of passes over up to so many sequences of n tokens in up to so many groups, with
    `count` query heads and `kv` KV heads of `dim`."""
    width = 2 * tile_side(dim // 2)
    tile = prefix_tile(torch.bfloat16, width, "slots")
    programs = max(1, tile.resident * multiprocessors(device) // kv)
    lines = most_lines(sequences * n * (count // kv), min(groups, sequences // 2), programs, tile)
    return kv * lines * (width + 1) * torch.float32.itemsize


def most_lines(rows: int, groups: int, programs: int, tile: PrefixTile) -> int:
    """The most that there may be: splits are rounded down, but each tile has one, and the last tile of each group may
    have any number of rows."""
    return (programs + cdiv(rows, tile.block_m) + groups) * tile.block_m


@cache
def _takes_gluon(device: torch.device, layout: Layout) -> bool:
    return not_gluon(gpu_of(device), layout) is None
