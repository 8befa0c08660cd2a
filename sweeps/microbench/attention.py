"""Speed of verify attention on this GPU, as a Markdown table: `python -m specbatch.sweeps.microbench.attention`.

Each time is one launch in a CUDA graph that goes through caches larger than the L2, pages in random order. Bytes are
the K and V that exist before the verify; the share is of the bandwidth at which this GPU reads 4 GiB here. SDPA is
torch's attention over the same keys, contiguous and without a mask: no norm, no rotation, no pages, nothing written.

With `--sweep`, instead: at each point the time of the tile and splits that the rules choose, and the best of a grid.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass

import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

from specbatch.kernels.attention.qkv import Heads
from specbatch.kernels.attention.verify_attention import verify_attention
from specbatch.kernels.attention.verify_tiles import Tile, splits_for, tile_for
from specbatch.kernels.elementwise.rope import rope_table
from specbatch.sweeps.bench.machine import require_cuda

PAGE_SIZE = 16
ROTATED = 200 << 20  # bytes of KV that a graph goes through: more than the L2
POINTS = [
    *((batch, n, keys) for keys in (672, 1152) for n in (1, 4, 16) for batch in (1, 32, 128)),
    *((1, n, keys) for keys in (8192, 32768) for n in (1, 16)),
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


@dataclass(frozen=True)
class Work:
    """A verify of `n` rows over `keys` keys of `batch` sequences, in Qwen3-8B's heads (32 of 128 on 8)."""

    batch: int
    n: int
    keys: int
    count: int = 32
    kv: int = 8
    dim: int = 128

    @property
    def bytes(self) -> int:
        return self.batch * self.keys * self.kv * self.dim * 2 * 2

    @property
    def copies(self) -> int:
        return max(2, min(64, -(-ROTATED // self.bytes)))

    @property
    def capacity(self) -> int:
        """Keys of a sequence that the page table has room for: a graph is made for the longest there may be."""
        return max(16384, self.keys + 64)

    @property
    def packed(self) -> int:
        """Query rows of a KV head."""
        return self.n * self.count // self.kv

    def programs(self, tile: Tile) -> int:
        """Without splits."""
        return self.batch * self.kv * -(-self.packed // tile.block_m)

    def rule(self) -> tuple[Tile, int]:
        device = torch.device("cuda")
        tile = tile_for(self.packed, self.batch * self.kv, 2 * self.dim, device)
        return tile, splits_for(self.programs(tile), tile.block_m, self.capacity, device)

    def grid(self) -> list[tuple[Tile, int]]:
        """Tiles and splits worth a try: up to six programs for each processor, and no split of less than 32 keys."""
        processors = torch.cuda.get_device_properties("cuda").multi_processor_count
        chosen = []
        for tile, splits in itertools.product(TILES, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)):
            programs = self.programs(tile) * splits
            fills = splits == 1 or programs <= 6 * processors
            busy = programs >= min(processors // 2, self.batch * self.kv * self.keys // 64)
            if (tile.block_m == 16 or self.packed > 16) and fills and busy and splits * 32 <= self.keys:
                chosen.append((tile, splits))
        return chosen


def seconds(step: Callable[[int], object], copies: int, repeats: int = 7) -> float:
    """Median time of one `step(copy)` inside a graph of at least 24 steps that takes the copies in turn."""
    for copy in range(copies):
        step(copy)
    graph = torch.cuda.CUDAGraph()
    steps = copies * -(-24 // copies)
    with torch.cuda.graph(graph):
        for index in range(steps):
            step(index % copies)
    times: list[float] = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3 / steps)
    return statistics.median(times[1:])


def verify_step(work: Work) -> Callable[..., torch.Tensor]:
    """One launch of `verify_attention` on a copy of the caches, with its options."""
    pages = work.capacity // PAGE_SIZE
    used = -(-(work.keys + work.n) // PAGE_SIZE)
    table = torch.zeros(work.batch + 1, pages, dtype=torch.int64, device="cuda")
    table[1:, :used] = torch.randperm(work.batch * used, device="cuda").view(work.batch, used) + 1
    shape = (work.copies, work.batch * used + 1, PAGE_SIZE, work.kv, work.dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    width = (work.count + 2 * work.kv) * work.dim
    qkv = torch.randn(work.batch * work.n, width, dtype=torch.bfloat16, device="cuda")
    frequencies = 1e6 ** (-torch.arange(work.dim // 2) / (work.dim / 2))
    cos, sin = (one.to("cuda", torch.bfloat16) for one in rope_table(frequencies, work.capacity, 1.0))
    norm = torch.ones(work.dim, dtype=torch.bfloat16, device="cuda")
    heads = Heads(work.count, work.kv, work.dim, norm, norm, 1e-6, cos, sin)
    rows = torch.arange(1, work.batch + 1, device="cuda")
    lengths = torch.full((work.batch,), work.keys, device="cuda")
    torch.cuda.synchronize()  # some of it is read before the kernel in front has ended
    return lambda copy, **options: verify_attention(
        qkv, heads, k[copy], v[copy], table, rows, lengths, work.n, **options
    )


def sdpa_step(work: Work) -> Callable[[int], torch.Tensor]:
    """torch's attention, the query rows of a KV head packed as if they were positions."""
    shape = (work.copies, work.batch, work.kv, work.keys, work.dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q = torch.randn(work.batch, work.kv, work.packed, work.dim, dtype=torch.bfloat16, device="cuda")
    return lambda copy: F.scaled_dot_product_attention(q, k[copy], v[copy])


def read_bandwidth() -> float:
    """Bytes per second of a sum over 4 GiB."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    return data.nbytes / seconds(lambda _: data.sum(), 1)


def compiles(n: int, tile: Tile) -> bool:
    """Compile for `n` rows, into Triton's cache on disk."""
    try:
        verify_step(Work(1, n, 64))(0, tile=tile)
    except OutOfResources:
        return False
    torch.cuda.synchronize()
    return True


def sweep() -> None:
    """Print, for each point, the rule's choice and the three fastest of the grid."""
    works = [Work(*point) for point in POINTS]
    jobs = sorted({(work.n, tile) for work in works for tile, _ in [work.rule(), *work.grid()]}, key=repr)
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        fits = dict(zip(jobs, pool.map(compiles, *zip(*jobs, strict=True)), strict=True))
    print("tile: query rows, keys, warps, stages, registers\n")
    print("| batch | rows | keys | rule: us, tile, splits | best | second | third |\n|---|---|---|---|---|---|---|")
    for work in works:
        step = verify_step(work)
        choices = [work.rule(), *work.grid()]

        def time(tile: Tile, splits: int, work: Work = work, step: Callable[..., object] = step) -> str:
            once = seconds(lambda copy: step(copy, tile=tile, splits=splits), work.copies, 3)
            return f"{once * 1e6:6.1f}, {astuple(tile)}, {splits}"

        rule, *others = (time(*choice) for choice in choices if fits[work.n, choice[0]])
        best = sorted(others, key=lambda cell: float(cell.split(",")[0]))[:3]
        print(f"| {work.batch} | {work.n} | {work.keys} | {rule} | {' | '.join(best)} |", flush=True)


def table() -> None:
    """Print the time of each point, its bandwidth, and SDPA's time."""
    peak = read_bandwidth()
    print(
        f"* {torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, 32/8 heads of 128, page size {PAGE_SIZE}"
    )
    print(f"* read bandwidth (torch sum over 4 GiB): {peak / 1e12:.2f} TB/s\n")
    print("| batch | rows | keys | us | TB/s | share | SDPA us |\n|---|---|---|---|---|---|---|")
    for point in POINTS:
        work = Work(*point)
        time = seconds(verify_step(work), work.copies)
        other = seconds(sdpa_step(work), work.copies)
        rate = work.bytes / time
        print(
            f"| {work.batch} | {work.n} | {work.keys} | {time * 1e6:.1f} | {rate / 1e12:.2f} | {rate / peak:.0%} "
            f"| {other * 1e6:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of verify attention on this GPU.")
    parser.add_argument("--sweep", action="store_true", help="find the best tile and splits of each point")
    arguments = parser.parse_args()
    require_cuda()
    if arguments.sweep:
        sweep()
    else:
        table()


if __name__ == "__main__":
    main()
