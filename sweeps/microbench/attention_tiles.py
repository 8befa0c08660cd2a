"""Tile sizes and splits of verify attention: the rules' choice and the three fastest of a grid.

Times in microseconds; a tile is query rows, keys, warps, stages, registers.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple
from functools import partial
from statistics import median

import torch
from triton.runtime.errors import OutOfResources

from specbatch.kernels.attention.verify_attention_configs import Tile, splits_for, tile_for
from specbatch.sweeps.machine.timing import captured, interleaved_seconds
from specbatch.sweeps.microbench.attention import POINTS, Work, verify_step
from specbatch.sweeps.microbench.runner import Row, Table, in_a_row

TILES = [
    *(Tile(16, 32, 4, stages, 128) for stages in (3, 4, 5)),
    *(Tile(16, 32, 4, 3, registers) for registers in (96, 168, 255)),
    Tile(16, 32, 4, 4, 255),
    Tile(16, 32, 2, 4, 168),
    Tile(16, 64, 8, 3, 128),
    Tile(16, 64, 4, 3, 168),
    Tile(16, 64, 8, 4, 128),
    Tile(16, 128, 8, 2, 128),
    *(Tile(16, 64, 4, stages, 128) for stages in (2, 3)),
    *(Tile(64, 32, 4, stages, 168) for stages in (3, 4)),
    *(Tile(64, 32, 4, stages, 255) for stages in (3, 4)),
    *(Tile(64, 64, 4, stages, 255) for stages in (2, 3)),
    Tile(64, 64, 8, 3, 128),
]
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
REPEATS = 3


def tables() -> Iterator[Table]:
    works = [Work(*point) for point in POINTS]
    jobs = sorted({(work.n, tile) for work in works for tile, _ in [_rule(work), *_grid(work)]}, key=repr)
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        fits = dict(zip(jobs, pool.map(_compiles, *zip(*jobs, strict=True)), strict=True))
    yield Table(_row(work, [choice for choice in _grid(work) if fits[work.n, choice[0]]]) for work in works)


def _row(work: Work, grid: list[tuple[Tile, int]]) -> Row:
    step = verify_step(work)

    def time(tile: Tile, splits: int) -> tuple[float, str]:
        run = captured(in_a_row(work.launches(partial(step, tile=tile, splits=splits))))
        seconds = median(interleaved_seconds({"": run}, torch.device("cuda"), REPEATS, warm_ups=1)[""])
        once = 1e6 * seconds / len(work.launches(step))
        return once, f"{once:.1f}, {astuple(tile)}, {splits}"

    rule = time(*_rule(work))
    best = [text for _, text in sorted(time(*choice) for choice in grid)[:3]]
    labels: Row = {"batch": work.batch, "rows": work.n, "keys": work.keys, "rule: us, tile, splits": rule[1]}
    return labels | dict(zip(("best", "second", "third"), best, strict=False))


def _programs(work: Work, tile: Tile) -> int:
    """Without splits."""
    return work.batch * work.kv * -(-work.packed // tile.block_m)


def _rule(work: Work) -> tuple[Tile, int]:
    device = torch.device("cuda")
    tile = tile_for(work.packed, work.batch * work.kv, 2 * work.dim, device)
    return tile, splits_for(_programs(work, tile), tile.block_m, work.capacity, device)


def _grid(work: Work) -> list[tuple[Tile, int]]:
    """Tiles and splits worth a try: up to six programs for each processor, and no split of less than 32 keys."""
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    chosen = []
    for tile, splits in itertools.product(TILES, SPLITS):
        programs = _programs(work, tile) * splits
        fills = splits == 1 or programs <= 6 * processors
        busy = programs >= min(processors // 2, work.batch * work.kv * work.keys // 64)
        if (tile.block_m == 16 or work.packed > 16) and fills and busy and splits * 32 <= work.keys:
            chosen.append((tile, splits))
    return chosen


def _compiles(n: int, tile: Tile) -> bool:
    """Compile for `n` rows, into Triton's cache on disk; False for a tile that needs too much of the device."""
    try:
        verify_step(Work(1, n, 64))(0, tile=tile)
    except OutOfResources:
        return False
    torch.cuda.synchronize()
    return True
