"""Two-shot all-reduce over NVLink: each rank sums one part of the tensor and sends the sum to all others.

A rank sends 2 (n - 1) / n of the tensor in place of the n - 1 tensors of a one-shot, for one more exchange. Mailboxes,
polling and the count of calls are those of `push_triton`; there is a pair of mailboxes for parts and one for sums.

The number of blocks is fixed, and each loops over its places: all blocks of a call run at once, and no rank waits for a
block of another one that has no room to start.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.collectives.peer_words_triton import (
    EMPTY,
    KINDS,
    TIMEOUT_NS,
    VECTOR,
    clock,
    high,
    load,
    low,
    poll,
    store,
    word,
)
from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel

BLOCK = 256  # threads, of 16 bytes each
BLOCKS = 264  # two for each SM of an H100 or H200


@triton.jit(do_not_specialize=["vectors", "part"])
def two_shot_kernel(
    x, residual, out, mailboxes, calls, abort, late, vectors, part, mailbox_bytes, timeout_ns,
    RANK: tl.constexpr, RANKS: tl.constexpr, KIND: tl.constexpr, EMPTY_WORD: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    pid = tl.program_id(0)
    call = tl.load(calls + pid)
    first = pid * THREADS
    step = tl.num_programs(0) * THREADS
    threads = tl.arange(0, THREADS)
    mine = tl.load(mailboxes + RANK)
    parts_box = (call & 1).to(tl.int64) * RANKS
    sums_box = (2 + (call & 1)).to(tl.int64) * RANKS
    everywhere = tl.zeros([THREADS], tl.uint64)
    limit = everywhere + (clock(pid) + timeout_ns)
    stop = everywhere + abort.to(tl.uint64)
    zero = tl.zeros([THREADS], tl.float32)
    empty = tl.zeros([THREADS], tl.uint32) + EMPTY_WORD
    is_late = tl.zeros([THREADS], tl.int32)

    for rank in tl.static_range(RANKS):
        if rank != RANK:
            theirs = tl.load(mailboxes + rank) + (parts_box + RANK) * mailbox_bytes
            for start in tl.range(first, part, step):
                place = (start + threads).to(tl.int64)
                at = tl.minimum(rank * part + place, vectors - 1) * 16
                a, b, c, d = load((x.to(tl.int64) + at).to(tl.uint64))
                a = tl.where(a == EMPTY_WORD, 0, a)
                b = tl.where(b == EMPTY_WORD, 0, b)
                c = tl.where(c == EMPTY_WORD, 0, c)
                d = tl.where(d == EMPTY_WORD, 0, d)
                store((theirs + place * 16).to(tl.uint64), a, b, c, d)

    for start in tl.range(first, part, step):
        place = (start + threads).to(tl.int64)
        at = tl.minimum(RANK * part + place, vectors - 1) * 16
        a, b, c, d = load((x.to(tl.int64) + at).to(tl.uint64))
        l0, l1, l2, l3 = zero, zero, zero, zero
        h0, h1, h2, h3 = zero, zero, zero, zero
        for rank in tl.static_range(RANKS):  # in their order, as in a one-shot
            e, f, g, h = a, b, c, d
            if rank != RANK:
                letter = (mine + (parts_box + rank) * mailbox_bytes + place * 16).to(tl.uint64)
                e, f, g, h = poll(letter, empty, limit, stop)
                is_late |= ((e == empty) | (f == empty) | (g == empty) | (h == empty)).to(tl.int32)
                store(letter, empty, empty, empty, empty)
            l0, l1, l2, l3 = l0 + low(e, KIND), l1 + low(f, KIND), l2 + low(g, KIND), l3 + low(h, KIND)
            h0, h1, h2, h3 = h0 + high(e, KIND), h1 + high(f, KIND), h2 + high(g, KIND), h3 + high(h, KIND)
        if HAS_RESIDUAL:
            e, f, g, h = load((residual.to(tl.int64) + at).to(tl.uint64))
            l0, l1, l2, l3 = l0 + low(e, KIND), l1 + low(f, KIND), l2 + low(g, KIND), l3 + low(h, KIND)
            h0, h1, h2, h3 = h0 + high(e, KIND), h1 + high(f, KIND), h2 + high(g, KIND), h3 + high(h, KIND)
        a, b, c, d = word(l0, h0, KIND), word(l1, h1, KIND), word(l2, h2, KIND), word(l3, h3, KIND)
        # All ranks return 0 for a sum that looks like an empty place.
        a = tl.where(a == EMPTY_WORD, 0, a)
        b = tl.where(b == EMPTY_WORD, 0, b)
        c = tl.where(c == EMPTY_WORD, 0, c)
        d = tl.where(d == EMPTY_WORD, 0, d)
        store((out.to(tl.int64) + at).to(tl.uint64), a, b, c, d)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                theirs = tl.load(mailboxes + rank) + (sums_box + RANK) * mailbox_bytes
                store((theirs + place * 16).to(tl.uint64), a, b, c, d)

    for rank in tl.static_range(RANKS):
        if rank != RANK:
            for start in tl.range(first, part, step):
                place = (start + threads).to(tl.int64)
                letter = (mine + (sums_box + rank) * mailbox_bytes + place * 16).to(tl.uint64)
                e, f, g, h = poll(letter, empty, limit, stop)
                is_late |= ((e == empty) | (f == empty) | (g == empty) | (h == empty)).to(tl.int32)
                store(letter, empty, empty, empty, empty)
                at = tl.minimum(rank * part + place, vectors - 1) * 16
                store((out.to(tl.int64) + at).to(tl.uint64), e, f, g, h)
    any_late = tl.max(is_late, 0)  # with a barrier: all threads have read the count before one of them changes it
    tl.store(calls + pid, call + 1)
    if any_late > 0:
        tl.store(late, 1)


class TwoShot:
    """All-reduce of tensors of up to `most` bytes.

    memory     int32, of `bytes_for` bytes, allocated by `torch.distributed._symmetric_memory`
    addresses  of the memory of each rank, in their order
    abort, late  int32 [1] in host memory: ends a wait; is set by a wait that has ended without its data
    """

    def __init__(
        self, memory: torch.Tensor, addresses: list[int], rank: int, most: int, abort: torch.Tensor, late: torch.Tensor
    ) -> None:
        device = memory.device
        self.rank, self.ranks, self.most = rank, len(addresses), most
        self._memory = memory.fill_(EMPTY - (1 << 32))
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._calls = torch.zeros(BLOCKS, dtype=torch.int32, device=device)
        self._abort, self._late = abort, late

    @staticmethod
    def _part(size: int, ranks: int) -> int:
        """Vectors of a tensor of `size` bytes that one rank sums: whole blocks."""
        return -(-size // (VECTOR * ranks * BLOCK)) * BLOCK

    @staticmethod
    def bytes_for(most: int, ranks: int) -> int:
        return 4 * ranks * TwoShot._part(most, ranks) * VECTOR

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the sum over ranks plus `residual` to `out`. All are alike, contiguous, and whole vectors."""
        size = x.numel() * x.element_size()
        part = self._part(size, self.ranks)
        two_shot_kernel[(min(part // BLOCK, BLOCKS),)](
            x, x if residual is None else residual, out, self._addresses, self._calls, self._abort, self._late,
            size // VECTOR, part, self._part(self.most, self.ranks) * VECTOR, TIMEOUT_NS,
            RANK=self.rank, RANKS=self.ranks, KIND=KINDS[x.dtype], EMPTY_WORD=EMPTY, HAS_RESIDUAL=residual is not None,
            THREADS=BLOCK, num_warps=BLOCK // 32, **pdl(x),
        )  # fmt: skip
