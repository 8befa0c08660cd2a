"""One-shot all-reduce and all-gather over NVLink: every rank writes its tensor into the memory of all others and polls.

Data is its own flag. One word marks an empty place of a mailbox: senders write 0 in its place, receivers poll until a
word differs, and empty the place again. It is a pair of -0.0 in 16 bits, and -4.6e-41 in float32. Each block of threads
has its own count of calls, whose parity chooses one of two mailboxes: a rank that is one call ahead cannot overwrite
what was not read yet, because it has received the words of the call before from everyone. No barrier and no atomic
operation is needed, so that a call takes about two microseconds up to 64 KiB. The idea of polling for data is that of
NCCL's LL protocol.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel

BLOCK = 64  # threads, of 16 bytes each
VECTOR = 16  # bytes
KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
EMPTY = 0x80008000
_TIMEOUT_NS = 120_000_000_000  # a rank may compile kernels while the others wait


@triton.jit
def _store(p, a, b, c, d):
    tl.inline_asm_elementwise(
        "{ st.volatile.global.v4.u32 [$1], {$2,$3,$4,$5}; mov.u32 $0, 0; }",
        "=r,l,r,r,r,r",
        [p, a, b, c, d],
        dtype=tl.uint32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load(p):
    return tl.inline_asm_elementwise(
        "ld.global.v4.u32 {$0,$1,$2,$3}, [$4];",
        "=r,=r,=r,=r,l",
        [p],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _poll(p, empty, limit, abort):
    """Four words, as soon as none of them is empty; or whatever is there once the clock passes `limit` or the word
    `abort` is set, which is in host memory and therefore read rarely."""
    return tl.inline_asm_elementwise(
        """{ .reg .pred %a; .reg .u64 %t; .reg .u32 %n; .reg .u32 %w;
        mov.u32 %n, 0;
        again: ld.volatile.global.v4.u32 {$0,$1,$2,$3}, [$4];
        setp.ne.u32 %a, $0, $5; setp.ne.and.u32 %a, $1, $5, %a;
        setp.ne.and.u32 %a, $2, $5, %a; setp.ne.and.u32 %a, $3, $5, %a;
        @%a bra done;
        add.u32 %n, %n, 1; and.b32 %w, %n, 4095; setp.ne.u32 %a, %w, 0; @%a bra again;
        ld.volatile.global.u32 %w, [$7]; setp.ne.u32 %a, %w, 0; @%a bra done;
        mov.u64 %t, %globaltimer; setp.lt.u64 %a, %t, $6; @%a bra again;
        done: }""",
        "=&r,=&r,=&r,=&r,l,r,l,l",
        [p, empty, limit, abort],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _clock(x):
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [x], dtype=tl.uint64, is_pure=False, pack=1)


@triton.jit
def _low(w, KIND: tl.constexpr):
    """The first number of a word, in float32."""
    if KIND == 0:
        return (w << 16).to(tl.float32, bitcast=True)
    if KIND == 1:
        return (w & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return w.to(tl.float32, bitcast=True)


@triton.jit
def _high(w, KIND: tl.constexpr):
    """The second number of a word; of a float32 the first again."""
    if KIND == 0:
        return (w & 0xFFFF0000).to(tl.float32, bitcast=True)
    if KIND == 1:
        return (w >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return w.to(tl.float32, bitcast=True)


@triton.jit
def _word(low, high, KIND: tl.constexpr):
    """A word of two numbers, rounded once."""
    if KIND == 0:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.uint32, is_pure=True, pack=1
        )
    if KIND == 1:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.uint32, is_pure=True, pack=1
        )
    return low.to(tl.uint32, bitcast=True)


@triton.jit
def _exchange_kernel(
    x,
    residual,
    out,
    mailboxes,
    calls,
    abort,
    late,
    vectors,
    mailbox_bytes,
    timeout_ns,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    KIND: tl.constexpr,
    EMPTY_WORD: tl.constexpr,
    REDUCES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernel(PDL)
    pid = tl.program_id(0)
    call = tl.load(calls + pid)
    place = (pid * THREADS + tl.arange(0, THREADS)).to(tl.int64)
    # Threads past the end have places of their own in the mailboxes, and repeat the last vector everywhere else.
    at = tl.minimum(place, vectors - 1) * 16
    box = (call & 1).to(tl.int64) * RANKS
    a, b, c, d = _load((x.to(tl.int64) + at).to(tl.uint64))
    a = tl.where(a == EMPTY_WORD, 0, a)
    b = tl.where(b == EMPTY_WORD, 0, b)
    c = tl.where(c == EMPTY_WORD, 0, c)
    d = tl.where(d == EMPTY_WORD, 0, d)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            theirs = tl.load(mailboxes + rank) + (box + RANK) * mailbox_bytes + place * 16
            _store(theirs.to(tl.uint64), a, b, c, d)
    mine = tl.load(mailboxes + RANK)
    limit = _clock(pid) + timeout_ns
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
            e, f, g, h = _poll(letter, empty, everywhere + limit, everywhere + abort.to(tl.uint64))
            is_late |= ((e == empty) | (f == empty) | (g == empty) | (h == empty)).to(tl.int32)
            _store(letter, empty, empty, empty, empty)
        if REDUCES:
            l0, l1, l2, l3 = l0 + _low(e, KIND), l1 + _low(f, KIND), l2 + _low(g, KIND), l3 + _low(h, KIND)
            h0, h1, h2, h3 = h0 + _high(e, KIND), h1 + _high(f, KIND), h2 + _high(g, KIND), h3 + _high(h, KIND)
        else:
            _store((out.to(tl.int64) + rank * vectors.to(tl.int64) * 16 + at).to(tl.uint64), e, f, g, h)
    if REDUCES:
        if HAS_RESIDUAL:
            e, f, g, h = _load((residual.to(tl.int64) + at).to(tl.uint64))
            l0, l1, l2, l3 = l0 + _low(e, KIND), l1 + _low(f, KIND), l2 + _low(g, KIND), l3 + _low(h, KIND)
            h0, h1, h2, h3 = h0 + _high(e, KIND), h1 + _high(f, KIND), h2 + _high(g, KIND), h3 + _high(h, KIND)
        words = (_word(l0, h0, KIND), _word(l1, h1, KIND), _word(l2, h2, KIND), _word(l3, h3, KIND))
        _store((out.to(tl.int64) + at).to(tl.uint64), words[0], words[1], words[2], words[3])
    tl.store(calls + pid, call + 1)
    if tl.max(is_late, 0) > 0:
        tl.store(late, 1)


class Mailboxes:
    """Memory of this rank that the others can write to, and theirs.

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

    def fits(self, x: torch.Tensor) -> bool:
        """Whether a tensor can be sent: floating-point, whole vectors, not too large."""
        size = x.numel() * x.element_size()
        return x.dtype in KINDS and 0 < size <= self.most and size % VECTOR == 0

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """The sum over ranks plus `residual`, like x."""
        x = x.contiguous()
        return self._exchange(x, residual if residual is None else residual.contiguous(), torch.empty_like(x), True)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks: [ranks, ...]."""
        x = x.contiguous()
        return self._exchange(x, None, x.new_empty(self.ranks, *x.shape), False)

    def _exchange(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, reduces: bool
    ) -> torch.Tensor:
        vectors = x.numel() * x.element_size() // VECTOR
        _exchange_kernel[(triton.cdiv(vectors, BLOCK),)](
            x,
            x if residual is None else residual,
            out,
            self._addresses,
            self._calls,
            self.abort,
            self.late,
            vectors,
            self.most + BLOCK * VECTOR,
            _TIMEOUT_NS,
            RANK=self.rank,
            RANKS=self.ranks,
            KIND=KINDS[x.dtype],
            EMPTY_WORD=EMPTY,
            REDUCES=reduces,
            HAS_RESIDUAL=residual is not None,
            THREADS=BLOCK,
            num_warps=BLOCK // 32,
            **pdl(x),
        )
        return out
