"""Tile sizes and KV splits of the `verify_attention` kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbatch.kernels.common.sizes import cdiv, multiprocessors, next_power_of_2

LEAST_SPLIT = 64  # fewest old keys of a split: as many as the pipeline loads before the wait


@dataclass(frozen=True)
class Tile:
    """Query rows and keys of a step, warps of a program, stages of its pipeline, registers that a thread may have.

    Registers and shared memory decide how many programs a processor holds, hence how many keys are on their way.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int


def tile_for(rows: int, programs: int, row_bytes: int, device: torch.device, *, fp8: bool = False) -> Tile:
    """For `rows` query rows of each of `programs` KV heads in all, whose queries have `row_bytes` each. fp8: the keys.

    Where registers hold no more rows, or processors would idle, query rows are spread over several tiles, which read
    the same keys from the L2. With more programs than would fit, registers are limited so that a processor of an H200
    holds four programs of 16 query rows, or three of 64; with few programs the limit only costs time.
    Keys play no part: a graph is made for as many as there may ever be. To tune:
    `python -m specbatch.sweeps.microbench attention-tiles`.
    """
    processors = multiprocessors(device)
    if row_bytes > 256:
        return Tile(16, 32 if row_bytes <= 512 else 16, 4, 3, 255)
    if fp8 and rows <= 16:
        return Tile(16, 128, 4, 3, 255)
    if programs * cdiv(rows, 16) <= processors:
        return Tile(16, 32, 4, 3, 255)
    if rows <= 16:
        return Tile(16, 64, 8, 3, 128) if programs <= 2 * processors else Tile(16, 32, 4, 3, 128)
    return Tile(min(64, next_power_of_2(rows)), 32, 4, 3, 168 if programs > 2 * processors else 255)


def most_splits(keys: int) -> int:
    """For at most this many old keys. The last split then has only the new keys, which take about as long as a split of
    old ones."""
    return cdiv(keys, LEAST_SPLIT) + 1


def splits_for(programs: int, block_m: int, most: int, device: torch.device) -> int:
    """As many as processors hold when one split takes `programs`, and no more than `most`."""
    resident = (2 if block_m == 16 else 1) * multiprocessors(device)
    return max(1, min(resident // programs, most))
