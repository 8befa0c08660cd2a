"""Verify attention in Qwen3-8B's shape (32 query and 8 KV heads of 128), BF16, and torch's SDPA.

Caches are larger than the L2 and their pages in random order. Bytes are the K and V that exist before the verify. SDPA
has the same keys, contiguous and without a mask: no norm, no rotary embedding, no pages, nothing written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from specbatch.kernels.attention.queries import AttentionInputs, DecodeQueries, Mask, QKVLayout
from specbatch.kernels.attention.verify.verify_attention_triton import verify_attention
from specbatch.kernels.elementwise.rope import rope_table
from specbatch.sweeps.microbench.runner import Call, Case, Table

PAGE_SIZE = 16
CACHE_BYTES = 200 << 20  # of KV that a graph goes through: more than the L2
LAUNCHES = 24  # of a graph, at least
POINTS = [
    *((batch, n, keys) for keys in (672, 1152) for n in (1, 4, 16) for batch in (1, 32, 128)),
    *((1, n, keys) for keys in (8192, 32768) for n in (1, 16)),
]


@dataclass(frozen=True)
class Work:
    """A verify of `n` rows over `keys` keys of `batch` sequences."""

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
        return max(2, min(64, -(-CACHE_BYTES // self.bytes)))

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


def tables() -> Iterator[Table]:
    yield Table(_cases(), shows=("GB/s", "floor"))


def _cases() -> Iterator[Case]:
    for point in POINTS:
        work = Work(*point)
        calls = {"specbatch": work.launches(verify_step(work)), "SDPA": work.launches(sdpa_step(work))}
        yield Case({"batch": work.batch, "rows": work.n, "keys": work.keys}, calls, bytes=work.bytes)


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
    heads = QKVLayout(work.count, work.kv, work.dim, norm, norm, 1e-6, cos, sin)
    rows = torch.arange(1, work.batch + 1, device="cuda")
    lengths = torch.full((work.batch,), work.keys, device="cuda")
    torch.cuda.synchronize()  # the kernel reads some inputs before the previous kernel has ended
    queries = DecodeQueries(table, rows, lengths, work.n, PAGE_SIZE)
    inputs = [AttentionInputs(qkv, heads, lengths, k[copy], v[copy]) for copy in range(work.copies)]
    return lambda copy, **options: verify_attention(queries, inputs[copy], Mask(), **options)


def sdpa_step(work: Work) -> Callable[[int], torch.Tensor]:
    """torch's attention, with the query rows of a KV head packed as if they were positions."""
    shape = (work.copies, work.batch, work.kv, work.keys, work.dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q = torch.randn(work.batch, work.kv, work.packed, work.dim, dtype=torch.bfloat16, device="cuda")
    return lambda copy: F.scaled_dot_product_attention(q, k[copy], v[copy])
