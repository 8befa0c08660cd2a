"""Tile sizes and splits of verify attention: the rules' choice and the three fastest of a grid, in microseconds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from specbatch.kernels.attention.verify.verify_attention_configs import Tile, most_splits, splits_for, tile_for
from specbatch.kernels.common.sizes import multiprocessors
from specbatch.sweeps.microbench.attention import POINTS, Work, verify_step
from specbatch.sweeps.microbench.runner import Call, Row, Table
from specbatch.sweeps.microbench.tile_search import compile_all, fastest

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
Choice = tuple[Tile, int]


def tables() -> Iterator[Table]:
    works = [Work(*point) for point in POINTS]
    choices = {(work.n, tile) for work in works for tile, _ in [_rule(work), *_grid(work)]}
    compile_all(_launch, sorted(choices, key=repr))
    yield Table(_row(work) for work in works)


def _row(work: Work) -> Row:
    step = verify_step(work)

    def launches(choice: Choice) -> Sequence[Call]:
        tile, splits = choice
        return work.launches(partial(step, tile=tile, splits=splits))

    labels: Row = {"batch": work.batch, "rows": work.n, "keys": work.keys}
    columns = "query rows, keys, warps, stages, registers, splits"
    return fastest(labels, launches, _rule(work), _grid(work), columns)


def _programs(work: Work, tile: Tile) -> int:
    """Without splits."""
    return work.batch * work.kv * -(-work.packed // tile.block_m)


def _rule(work: Work) -> Choice:
    device = torch.device("cuda")
    tile = tile_for(work.packed, work.batch * work.kv, 2 * work.dim, device)
    return tile, splits_for(_programs(work, tile), tile.block_m, most_splits(work.capacity), device)


def _grid(work: Work) -> list[Choice]:
    """Tiles and splits worth a try: up to six programs for each processor, and no split of less than 32 keys."""
    processors = multiprocessors(torch.device("cuda"))
    chosen = []
    for tile, splits in itertools.product(TILES, SPLITS):
        programs = _programs(work, tile) * splits
        fills = splits == 1 or programs <= 6 * processors
        busy = programs >= min(processors // 2, work.batch * work.kv * work.keys // 64)
        if (tile.block_m == 16 or work.packed > 16) and fills and busy and splits * 32 <= work.keys:
            chosen.append((tile, splits))
    return chosen


def _launch(n: int, tile: Tile) -> None:
    verify_step(Work(1, n, 64))(0, tile=tile)
