"""One-shot all-reduce and all-gather over NVLink: every rank writes its tensor into the memory of all others and polls.

Data is its own flag. One word marks an empty place of a mailbox: senders write 0 in its place, receivers poll until a
word differs, and empty the place again. Each block of threads
has its own count of calls, whose parity chooses one of two mailboxes: a rank that is one call ahead cannot overwrite
what was not read yet, because it has received the words of the call before from everyone. No barrier and no atomic
operation is needed, so that a call takes about two microseconds up to 64 KiB. The idea of polling for data is that of
NCCL's LL protocol.
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
from specbatch.kernels.common.sizes import cdiv

BLOCK = 64  # threads, of 16 bytes each


@triton.jit(do_not_specialize=["vectors", "out_vectors"])  # a specialized 1 would be no tensor
def exchange_kernel(
    x, residual, out, mailboxes, calls, abort, late, vectors, out_vectors, mailbox_bytes, timeout_ns,
    RANK: tl.constexpr, RANKS: tl.constexpr, KIND: tl.constexpr, EMPTY_WORD: tl.constexpr, REDUCES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    pid = tl.program_id(0)
    call = tl.load(calls + pid)
    place = (pid * THREADS + tl.arange(0, THREADS)).to(tl.int64)
    # Threads past the end have places of their own in the mailboxes, and repeat the last vector everywhere else.
    at = tl.minimum(place, vectors - 1) * 16
    box = (call & 1).to(tl.int64) * RANKS
    a, b, c, d = load((x.to(tl.int64) + at).to(tl.uint64))
    a = tl.where(a == EMPTY_WORD, 0, a)
    b = tl.where(b == EMPTY_WORD, 0, b)
    c = tl.where(c == EMPTY_WORD, 0, c)
    d = tl.where(d == EMPTY_WORD, 0, d)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            theirs = tl.load(mailboxes + rank) + (box + RANK) * mailbox_bytes + place * 16
            store(theirs.to(tl.uint64), a, b, c, d)
    mine = tl.load(mailboxes + RANK)
    limit = clock(pid) + timeout_ns
    zero = tl.zeros([THREADS], tl.float32)
    l0, l1, l2, l3 = zero, zero, zero, zero
    h0, h1, h2, h3 = zero, zero, zero, zero
    is_late = tl.zeros([THREADS], tl.int32)
    empty = tl.zeros([THREADS], tl.uint32) + EMPTY_WORD
    for rank in tl.static_range(RANKS):  # in their order, so that all ranks add alike
        e, f, g, h = a, b, c, d
        if rank != RANK:
            letter = (mine + (box + rank) * mailbox_bytes + place * 16).to(tl.uint64)
            everywhere = tl.zeros([THREADS], tl.uint64)
            e, f, g, h = poll(letter, empty, everywhere + limit, everywhere + abort.to(tl.uint64))
            is_late |= ((e == empty) | (f == empty) | (g == empty) | (h == empty)).to(tl.int32)
            store(letter, empty, empty, empty, empty)
        if REDUCES:
            l0, l1, l2, l3 = l0 + low(e, KIND), l1 + low(f, KIND), l2 + low(g, KIND), l3 + low(h, KIND)
            h0, h1, h2, h3 = h0 + high(e, KIND), h1 + high(f, KIND), h2 + high(g, KIND), h3 + high(h, KIND)
        else:
            store((out.to(tl.int64) + rank * out_vectors.to(tl.int64) * 16 + at).to(tl.uint64), e, f, g, h)
    if REDUCES:
        if HAS_RESIDUAL:
            e, f, g, h = load((residual.to(tl.int64) + at).to(tl.uint64))
            l0, l1, l2, l3 = l0 + low(e, KIND), l1 + low(f, KIND), l2 + low(g, KIND), l3 + low(h, KIND)
            h0, h1, h2, h3 = h0 + high(e, KIND), h1 + high(f, KIND), h2 + high(g, KIND), h3 + high(h, KIND)
        words = (word(l0, h0, KIND), word(l1, h1, KIND), word(l2, h2, KIND), word(l3, h3, KIND))
        store((out.to(tl.int64) + at).to(tl.uint64), words[0], words[1], words[2], words[3])
    any_late = tl.max(is_late, 0)  # with a barrier: all threads have read the count before one of them changes it
    tl.store(calls + pid, call + 1)
    if any_late > 0:
        tl.store(late, 1)


class OneShot:
    """All-reduce and all-gather of tensors of up to `most` bytes.

    memory     int32, of `bytes_for` bytes, allocated by `torch.distributed._symmetric_memory`
    addresses  of the memory of each rank, in their order
    """

    def __init__(self, memory: torch.Tensor, addresses: list[int], rank: int, most: int) -> None:
        """most: bytes of the largest tensor. Every rank must have done this before any of them sends."""
        device = memory.device
        self.rank, self.ranks, self.most = rank, len(addresses), most
        self._memory = memory.fill_(EMPTY - (1 << 32))
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._calls = torch.zeros(most // VECTOR // BLOCK + 1, dtype=torch.int32, device=device)
        # In host memory, so that the host can read and write them while a kernel waits.
        self.abort, self.late = (torch.zeros(1, dtype=torch.int32).pin_memory() for _ in range(2))

    @staticmethod
    def bytes_for(most: int, ranks: int) -> int:
        return 2 * ranks * (most + BLOCK * VECTOR)

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the sum over ranks plus `residual` to `out`. All are alike, contiguous, and whole vectors."""
        self._exchange(x, residual, out, 0, True)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write x [n] of rank r to out[r]. out: [ranks, n], of which the columns may be a part of a larger tensor's."""
        self._exchange(x, None, out, out.stride(0) * out.element_size() // VECTOR, False)

    def _exchange(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, out_vectors: int, reduces: bool
    ) -> None:
        vectors = x.numel() * x.element_size() // VECTOR
        exchange_kernel[(cdiv(vectors, BLOCK),)](
            x, x if residual is None else residual, out, self._addresses, self._calls, self.abort, self.late, vectors,
            out_vectors, self.most + BLOCK * VECTOR, TIMEOUT_NS,
            RANK=self.rank, RANKS=self.ranks, KIND=KINDS[x.dtype], EMPTY_WORD=EMPTY, REDUCES=reduces,
            HAS_RESIDUAL=residual is not None, THREADS=BLOCK, num_warps=BLOCK // 32, **pdl(x),
        )  # fmt: skip
