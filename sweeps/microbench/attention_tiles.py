"""Tile sizes and splits of verify attention: the rules' choice and the three fastest of a grid, in microseconds.

Qwen3-8B's shape (32 query and 8 KV heads of 128), BF16 or an FP8 cache. Caches are larger than the L2 and their pages
in random order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer

from specbatch.kernels.attention.queries import AttentionInputs, DecodeQueries, Mask, QKVLayout, SharedPrefixes
from specbatch.kernels.attention.verify.prefix_attention_configs import PrefixWork
from specbatch.kernels.attention.verify.verify_attention_configs import Tile, most_splits, splits_for, tile_for
from specbatch.kernels.attention.verify.verify_attention_triton import verify_attention
from specbatch.kernels.common.sizes import multiprocessors
from specbatch.kernels.elementwise.rope import rope_table
from specbatch.sweeps.microbench.runner import Call, Row, Table
from specbatch.sweeps.microbench.tile_search import compile_all, fastest

PAGE_SIZE = 16
CACHE_BYTES = 200 << 20  # of KV that a graph goes through: more than the L2
LAUNCHES = 24  # of a graph, at least
POINTS = [
    *((batch, n, keys) for keys in (672, 1152) for n in (1, 4, 16) for batch in (1, 32, 128)),
    *((1, n, keys) for keys in (8192, 32768) for n in (1, 16)),
    *((batch, n, keys) for batch, keys in ((32, 8192), (8, 32768)) for n in (1, 4)),
]
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
FP8_TILES = [
    *(Tile(16, 128, 4, stages, 255) for stages in (3, 4)),
    *(Tile(16, 64, 4, stages, 255) for stages in (3, 4)),
    *(Tile(16, 64, 4, stages, 168) for stages in (3, 4)),
    *(Tile(16, 32, 4, 3, registers) for registers in (128, 255)),
    *(Tile(32, 64, 4, 3, registers) for registers in (168, 255)),
    *(Tile(64, keys, 4, 3, 255) for keys in (32, 64)),
]
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
Choice = tuple[Tile, int]


@dataclass(frozen=True)
class Work:
    """A verify of `n` rows over `keys` keys of `batch` sequences, the first `shared` of which are the same for all
    sequences of each of `groups` groups."""

    batch: int
    n: int
    keys: int
    count: int = 32
    kv: int = 8
    dim: int = 128
    fp8: bool = False  # the cache
    shared: int = 0
    groups: int = 1
    page_size: int = PAGE_SIZE

    @property
    def copies(self) -> int:
        item = 1 if self.fp8 else 2
        held = self.batch * (self.keys - self.shared) + self.groups * self.shared
        return max(2, min(64, -(-CACHE_BYTES // (held * self.kv * self.dim * 2 * item))))

    @property
    def capacity(self) -> int:
        """Keys of a sequence that the page table has room for: a graph is made for the longest there may be."""
        return max(16384, self.keys + 64)

    @property
    def packed(self) -> int:
        """Query rows of a KV head."""
        return self.n * self.count // self.kv

    def launches(self, step: Callable[[int], object]) -> list[Call]:
        """Enough for a graph, each on the next copy of the caches."""
        calls: list[Call] = [partial(step, copy) for copy in range(self.copies)]
        return calls * -(-LAUNCHES // self.copies)


def tables(fp8: Annotated[bool, typer.Option(help="An FP8 cache.")] = False) -> Iterator[Table]:
    works = [Work(*point, fp8=fp8) for point in POINTS]
    choices = {(work.n, fp8, tile) for work in works for tile, _ in [_rule(work), *_grid(work)]}
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
    tile = tile_for(work.packed, work.batch * work.kv, 2 * work.dim, device, fp8=work.fp8)
    return tile, splits_for(_programs(work, tile), tile.block_m, most_splits(work.capacity), device)


def _grid(work: Work) -> list[Choice]:
    """Tiles and splits worth a try: up to six programs for each processor, and no split of less than 32 keys."""
    processors = multiprocessors(torch.device("cuda"))
    chosen = []
    for tile, splits in itertools.product(FP8_TILES if work.fp8 else TILES, SPLITS):
        programs = _programs(work, tile) * splits
        fills = splits == 1 or programs <= 6 * processors
        busy = programs >= min(processors // 2, work.batch * work.kv * work.keys // 64)
        if (tile.block_m == 16 or work.packed > 16) and fills and busy and splits * 32 <= work.keys:
            chosen.append((tile, splits))
    return chosen


def _launch(n: int, fp8: bool, tile: Tile) -> None:
    verify_step(Work(1, n, 64, fp8=fp8))(0, tile=tile)


def verify_step(work: Work, prefixes: SharedPrefixes | None = None) -> Callable[..., torch.Tensor]:
    """One launch of `verify_attention` on a copy of the caches, with its options."""
    pages, size = work.capacity // work.page_size, work.page_size
    used, common = -(-(work.keys + work.n) // size), work.shared // size
    table = torch.zeros(work.batch + 1, pages, dtype=torch.int64, device="cuda")
    held = work.batch * (used - common) + work.groups * common
    order = torch.randperm(held, device="cuda") + 1
    first, rest = order.split([work.groups * common, held - work.groups * common])
    table[1:, :common] = first.view(work.groups, common).repeat_interleave(-(-work.batch // work.groups), 0)[
        : work.batch
    ]
    table[1:, common:used] = rest.view(work.batch, used - common)
    shape = (work.copies, held + 1, size, work.kv, work.dim)
    stored = torch.float8_e4m3fn if work.fp8 else torch.bfloat16
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(stored) for _ in range(2))
    width = (work.count + 2 * work.kv) * work.dim
    qkv = torch.randn(work.batch * work.n, width, dtype=torch.bfloat16, device="cuda")
    frequencies = 1e6 ** (-torch.arange(work.dim // 2) / (work.dim / 2))
    cos, sin = (one.to("cuda", torch.bfloat16) for one in rope_table(frequencies, work.capacity, 1.0))
    norm = torch.ones(work.dim, dtype=torch.bfloat16, device="cuda")
    heads = QKVLayout(work.count, work.kv, work.dim, norm, norm, 1e-6, cos, sin)
    rows = torch.arange(1, work.batch + 1, device="cuda")
    lengths = torch.full((work.batch,), work.keys, device="cuda")
    torch.cuda.synchronize()  # the kernel reads some inputs before the previous kernel has ended
    queries = DecodeQueries(table, rows, lengths, work.n, size, prefixes=prefixes)
    inputs = [AttentionInputs(qkv, heads, lengths, k[copy], v[copy]) for copy in range(work.copies)]
    works: dict[Any, PrefixWork] = {}
    return lambda copy, **options: verify_attention(queries, inputs[copy], Mask(), works=works, **options)
