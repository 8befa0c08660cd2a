"""Speed of verify attention on this GPU, as a Markdown table: `python -m specbatch.sweeps.attention_speed`.

Each time is one launch in a CUDA graph that goes through caches larger than the L2, pages in random order. Bytes are
the K and V that exist before the verify; the share is of the bandwidth at which this GPU reads 4 GiB here. SDPA is
torch's attention over the same keys, contiguous and without a mask: no norm, no rotation, no pages, nothing written.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specbatch.kernels.heads import Heads
from specbatch.kernels.rope import rope_table
from specbatch.kernels.verify_attention import verify_attention

PAGE_SIZE = 16
ROTATED = 200 << 20  # bytes of KV that a graph goes through: more than the L2
POINTS = [
    *((batch, n, keys) for keys in (672, 1152) for n in (1, 4, 16) for batch in (1, 32, 128)),
    *((1, n, keys) for keys in (8192, 32768) for n in (1, 16)),
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


def verify_step(work: Work, capacity: int) -> Callable[[int], torch.Tensor]:
    """One launch of `verify_attention`; the page table has room for `capacity` keys of a sequence."""
    pages = capacity // PAGE_SIZE
    used = -(-(work.keys + work.n) // PAGE_SIZE)
    table = torch.zeros(work.batch + 1, pages, dtype=torch.int64, device="cuda")
    table[1:, :used] = torch.randperm(work.batch * used, device="cuda").view(work.batch, used) + 1
    shape = (work.copies, work.batch * used + 1, PAGE_SIZE, work.kv, work.dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    width = (work.count + 2 * work.kv) * work.dim
    qkv = torch.randn(work.batch * work.n, width, dtype=torch.bfloat16, device="cuda")
    frequencies = 1e6 ** (-torch.arange(work.dim // 2) / (work.dim / 2))
    cos, sin = (one.to("cuda", torch.bfloat16) for one in rope_table(frequencies, capacity, 1.0))
    norm = torch.ones(work.dim, dtype=torch.bfloat16, device="cuda")
    heads = Heads(work.count, work.kv, work.dim, norm, norm, 1e-6, cos, sin)
    rows = torch.arange(1, work.batch + 1, device="cuda")
    lengths = torch.full((work.batch,), work.keys, device="cuda")
    return lambda copy: verify_attention(qkv, heads, k[copy], v[copy], table, rows, lengths, work.n)


def sdpa_step(work: Work) -> Callable[[int], torch.Tensor]:
    """torch's attention, the query rows of a KV head packed as if they were positions."""
    shape = (work.copies, work.batch, work.kv, work.keys, work.dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    packed = work.n * work.count // work.kv
    q = torch.randn(work.batch, work.kv, packed, work.dim, dtype=torch.bfloat16, device="cuda")
    return lambda copy: F.scaled_dot_product_attention(q, k[copy], v[copy])


def read_bandwidth() -> float:
    """Bytes per second of a sum over 4 GiB."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    return data.nbytes / seconds(lambda _: data.sum(), 1)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("attention_speed needs a CUDA device")
    peak = read_bandwidth()
    print(
        f"* {torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, 32/8 heads of 128, page size {PAGE_SIZE}"
    )
    print(f"* read bandwidth (torch sum over 4 GiB): {peak / 1e12:.2f} TB/s\n")
    print("| batch | rows | keys | us | TB/s | share | SDPA us |\n|---|---|---|---|---|---|---|")
    for point in POINTS:
        work = Work(*point)
        time = seconds(verify_step(work, max(4096, 2 * work.keys)), work.copies)
        other = seconds(sdpa_step(work), work.copies)
        rate = work.bytes / time
        print(
            f"| {work.batch} | {work.n} | {work.keys} | {time * 1e6:.1f} | {rate / 1e12:.2f} | {rate / peak:.0%} "
            f"| {other * 1e6:.1f} |"
        )


if __name__ == "__main__":
    main()
