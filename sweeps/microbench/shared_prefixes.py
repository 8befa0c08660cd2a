"""Attention of sequences that share a prefix: its keys read once for each group, and once for each sequence.

Qwen3-8B's shape (32 query and 8 KV heads of 128), BF16. Each sequence has 128 tokens of its own. With tiles of
`prefix_attention`: what the rules choose (None), and the three fastest of a grid, in microseconds of all kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from specbatch.kernels.attention.queries import SharedPrefixes
from specbatch.kernels.attention.verify.prefix_attention_configs import GLUON_TILES, PrefixTile
from specbatch.kernels.common.sizes import cdiv
from specbatch.sweeps.microbench.attention_tiles import Work, verify_step
from specbatch.sweeps.microbench.runner import Call, Case, Row, Table
from specbatch.sweeps.microbench.tile_search import compile_all, fastest

OWN = 128
GROUPS = 32  # that a launch has room for
TILED = [(128, n, 2048, 1) for n in (1, 4, 16)]
POINTS = [  # sequences, rows of each, keys of a prefix, groups
    *((batch, 1, 2048, 1) for batch in (4, 8, 16, 32)),
    *((batch, 1, 512, 1) for batch in (16, 32, 64, 128)),
    *((128, n, keys, 1) for n in (1, 4) for keys in (128, 256, 2048)),
    (128, 1, 2048, 4),
    (128, 1, 512, 16),
    (128, 4, 2048, 16),
    (4, 1, 32768, 1),
]
TILES = [
    *(PrefixTile(128, 64, 8, 3, registers) for registers in (None, 168)),
    PrefixTile(64, 64, 4, 3),
    PrefixTile(64, 64, 4, 2, None, 2),
    GLUON_TILES[128],
    PrefixTile(128, 64, 4, 4, gluon=True),
]


def tables() -> Iterator[Table]:
    compile_all(_launch, [(n, tile) for n in (1, 4, 16) for tile in TILES])
    yield Table([_tiled(_work(*point)) for point in TILED], title="tiles")
    yield Table(map(_case, POINTS), title="once for each group, and for each sequence")


def prefixes_of(work: Work) -> SharedPrefixes:
    """Groups of equal size, but for the last."""
    size = cdiv(work.batch, work.groups)
    groups = torch.zeros(3, GROUPS, dtype=torch.int32)
    for index in range(work.groups):
        groups[:, index] = torch.tensor([index * size, min(size, work.batch - index * size), work.shared])
    lengths = torch.full((work.batch,), work.shared, dtype=torch.int32, device="cuda")
    return SharedPrefixes(lengths, torch.arange(work.batch, dtype=torch.int32, device="cuda"), groups.cuda())


def _work(batch: int, n: int, shared: int, groups: int) -> Work:
    return Work(batch, n, shared + OWN, shared=shared, groups=groups)


def _tiled(work: Work) -> Row:
    step = verify_step(work, prefixes_of(work))

    def launches(tile: PrefixTile | None) -> Sequence[Call]:
        return work.launches(partial(step, prefix_tile=tile))

    labels: Row = {"batch": work.batch, "rows": work.n, "shared": work.shared}
    columns = "query rows, keys, warps, stages, registers, resident, gluon"
    return fastest(labels, launches, None, TILES, columns)


def _case(point: tuple[int, int, int, int]) -> Case:
    work = _work(*point)
    once, each = verify_step(work, prefixes_of(work)), verify_step(work)
    calls = {"once": work.launches(once), "each": work.launches(each)}
    labels = dict(zip(("sequences", "rows", "keys", "groups"), point, strict=True))
    flop = 4.0 * work.batch * work.n * work.count * work.dim * work.shared
    return Case(labels, calls, flop=flop)


def _launch(n: int, tile: PrefixTile) -> None:
    work = _work(8, n, 256, 1)
    verify_step(work, prefixes_of(work))(0, prefix_tile=tile)
