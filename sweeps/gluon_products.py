"""Skinny matrix products whose weights arrive by TMA in a ring of shared memory: a trial that the engine does not use.

128 programs, one to a multiprocessor or two. A program multiplies a strip of K (`splits` programs share a K) with some
rows of the weight, 64 at a time: W is the 64-row operand of wgmma, the rows of x (16, 32 or 64) are its columns. The
strip of x stays in shared memory, so that x costs little of the L2's bandwidth; weights pass through the ring.
The ring does not care whose weights it holds: it asks for the first weights of a kernel ahead of the wait for the
kernel before, and, where one kernel walks the products of a layer, for those of the next product ahead of the barrier
that lies between them.

The programs that share rows leave float32 partial sums, meet, and each adds its part of them in the order of the
splits. Spinning is safe since all 128 programs are resident at once; it is bounded nevertheless: programs that wait for
more than some 0.1 s go on with wrong sums.

mbarriers: slot i's completes once per use, the nth (from 0) with parity n % 2; it is armed again only after all warps
have waited for it and read the slot. Gluon 3.6 has neither TMA multicast nor reductions through distributed shared
memory, hence the partial sums in global memory; nor cache hints on TMA, hence no evict-first.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, valid-type, no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PROGRAMS = gl.constexpr(128)
PATIENCE = gl.constexpr(1 << 17)
COUNTERS = 8 * 64 * 32  # of int32; per product 64 groups, a cache line each
FLAT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # [64 rows, BK]
PAIRED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))  # [gate and up, 32 rows, BK], the same bytes


@dataclass(frozen=True)
class Product:
    """y = x @ W.T for W [n, k], or the gated half of it; k in `splits` strips. The rest as in `skinny_gemm`."""

    n: int
    k: int
    splits: int
    gated: bool = False
    normed: bool = False
    residual: bool = False

    @property
    def tiles(self) -> int:
        """Of 64 rows of W, per program."""
        assert self.n * self.splits % (64 * 128) == 0
        return self.n * self.splits // (64 * 128)

    @property
    def strip(self) -> int:
        """Columns of K per program."""
        return self.k // self.splits

    @property
    def outputs(self) -> int:
        """Columns of y."""
        return self.n // 2 if self.gated else self.n

    def describe(self, weight: torch.Tensor, block: int) -> TensorDescriptor:
        if self.gated:
            halves = weight.view(2, self.n // 2, self.k)
            return TensorDescriptor.from_tensor(halves, [2, 32, block], PAIRED.value)
        return TensorDescriptor.from_tensor(weight, [64, block], FLAT.value)


@gluon.jit
def _request(weight, ring, bars, count, step, PRODUCT: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):
    """Asks for a step of a product; its slot is that of the `count`th request of all."""
    STEPS: gl.constexpr = PRODUCT.strip // BK
    group = gl.program_id(0) // PRODUCT.splits
    tile = group * PRODUCT.tiles + step // STEPS
    k = gl.program_id(0) % PRODUCT.splits * PRODUCT.strip + step % STEPS * BK
    slot = count % STAGES
    bar = bars.index(slot)
    mbarrier.expect(bar, 64 * BK * 2)
    if PRODUCT.gated:
        paired = ring.index(slot)._reinterpret(gl.bfloat16, [2, 32, BK], PAIRED)
        tma.async_copy_global_to_shared(weight, [0, tile * 32, k], bar, paired)
    else:
        tma.async_copy_global_to_shared(weight, [tile * 64, k], bar, ring.index(slot))


@gluon.jit
def _meet(counter, EXPECTED: gl.constexpr):
    """Returns when EXPECTED programs have come here. The counter only grows: nothing to reset between launches."""
    gl.thread_barrier()
    before = gl.atomic_add(counter, 1, sem="acq_rel")
    goal = before - before % EXPECTED + EXPECTED
    seen = before
    tries = 0
    while (seen - goal < 0) & (tries < PATIENCE):
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];",
            "=r,l,r",
            [counter.to(gl.int64, bitcast=True), tries],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        tries += 1
    gl.thread_barrier()


@gluon.jit
def _load_strip(x, norm, strip, M, PRODUCT: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr):
    """x[:, strip] -> shared memory, times the norm's weight; returns the rows' sums of squares of the strip."""
    STEPS: gl.constexpr = PRODUCT.strip // BK
    AT_ONCE: gl.constexpr = min(STEPS, 256 * 32 * gl.num_warps() // (BM * BK))  # 128 registers of a thread
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, BM, gl.SliceLayout(1, layout))[:, None]
    ks = gl.program_id(0) % PRODUCT.splits * PRODUCT.strip + gl.arange(0, BK, gl.SliceLayout(0, layout))
    squares = gl.zeros([BM, BK], gl.float32, layout)
    for first in gl.static_range(0, STEPS, AT_ONCE):
        pieces = ()
        scales = ()
        for i in gl.static_range(first, min(STEPS, first + AT_ONCE)):
            # not by way of the L1: other multiprocessors may have written x since this kernel began
            pieces += (
                gl.load(x + rows * PRODUCT.k + ks[None, :] + i * BK, mask=rows < M, other=0.0, cache_modifier=".cg"),
            )
            if PRODUCT.normed:
                scales += (gl.load(norm + ks + i * BK),)
        for i in gl.static_range(first, min(STEPS, first + AT_ONCE)):
            piece = pieces[i - first]
            if PRODUCT.normed:
                exact = piece.to(gl.float32)
                squares += exact * exact
                piece = (exact * scales[i - first].to(gl.float32)[None, :]).to(gl.bfloat16)
            strip.index(i).store(piece)
    fence_async_shared()
    return gl.sum(squares, 1)


@gluon.jit
def _reduce(mine, group_sums, residual, y, M, eps, PRODUCT: gl.constexpr, BM: gl.constexpr):
    """Adds the splits' partial sums of this program's part of its group's columns, and finishes them."""
    SIZE: gl.constexpr = PRODUCT.tiles * 64 * BM + BM
    SPLITS: gl.constexpr = PRODUCT.splits
    GROUP: gl.constexpr = PRODUCT.outputs * PRODUCT.splits // PROGRAMS
    COLUMNS: gl.constexpr = GROUP // SPLITS
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [64 // BM, BM // 2], [gl.num_warps(), 1], [1, 0])
    m = gl.arange(0, BM, gl.SliceLayout(0, layout))
    scaling = gl.full([BM], 1.0, gl.float32, gl.SliceLayout(0, layout))
    if PRODUCT.normed:
        square = gl.zeros([BM], gl.float32, gl.SliceLayout(0, layout))
        for i in gl.static_range(SPLITS):
            square += gl.load(group_sums + i * SIZE + SIZE - BM + m, cache_modifier=".cg")
        scaling = gl.rsqrt(square / PRODUCT.k + eps)
    for block in gl.static_range(COLUMNS // 16):
        column = gl.program_id(0) % PRODUCT.splits * COLUMNS + block * 16
        column += gl.arange(0, 16, gl.SliceLayout(1, layout))
        row = column // 32 * 64 + column % 32 if PRODUCT.gated else column
        inner = row[:, None] * BM + m[None, :]
        total = gl.zeros([16, BM], gl.float32, layout)
        up = gl.zeros([16, BM], gl.float32, layout)
        for i in gl.static_range(SPLITS):
            total += gl.load(group_sums + i * SIZE + inner, cache_modifier=".cg")
            if PRODUCT.gated:
                up += gl.load(group_sums + i * SIZE + inner + 32 * BM, cache_modifier=".cg")
        total *= scaling[None, :]
        if PRODUCT.gated:
            total = total / (1.0 + gl.exp(-total)) * (up * scaling[None, :])
        at = m[None, :] * PRODUCT.outputs + (gl.program_id(0) // PRODUCT.splits * GROUP + column)[:, None]
        exists = (m < M)[None, :]
        if PRODUCT.residual:
            total += gl.load(residual + at, mask=exists, other=0.0, cache_modifier=".cg").to(gl.float32)
        gl.store(y + at, total.to(gl.bfloat16), mask=exists)


@gluon.jit
def _product(
    weight,
    next_weight,
    x,
    norm,
    residual,
    y,
    sums,
    counters,  # of this product's groups
    ring,
    bars,
    strip,
    M,
    eps,
    START: gl.constexpr,  # steps of the products before
    PRODUCT: gl.constexpr,
    NEXT: gl.constexpr,  # the product whose weights follow in the ring, or None
    SIGNAL: gl.constexpr,  # the step that lets the next kernel start, or -1
    BM: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One product whose first STAGES steps were asked for already; leaves NEXT in that state."""
    STEPS: gl.constexpr = PRODUCT.strip // BK
    SIZE: gl.constexpr = PRODUCT.tiles * 64 * BM + BM
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, gl.num_warps() // 4], [16, BM * 4 // gl.num_warps(), 16]
    )
    group = gl.program_id(0) // PRODUCT.splits
    mine = sums + gl.program_id(0) * SIZE
    inner = (
        gl.arange(0, 64, gl.SliceLayout(1, mma))[:, None] * BM + gl.arange(0, BM, gl.SliceLayout(0, mma))[None, :]
    )
    squares = _load_strip(x, norm, strip, M, PRODUCT, BM, BK)
    if PRODUCT.normed:
        gl.store(mine + SIZE - BM + gl.arange(0, BM, squares.type.layout), squares)
    for tile in range(PRODUCT.tiles):
        total = gl.zeros([64, BM], gl.float32, mma)
        for piece in range(STEPS):
            step = tile * STEPS + piece
            count = START + step
            slot = count % STAGES
            mbarrier.wait(bars.index(slot), count // STAGES & 1)
            total = warpgroup_mma(ring.index(slot), strip.index(piece).permute((1, 0)), total, is_async=True)
            total = warpgroup_mma_wait(0, (total,))
            gl.thread_barrier()  # all warps have read the slot
            if step + STAGES < PRODUCT.tiles * STEPS:
                _request(weight, ring, bars, count + STAGES, step + STAGES, PRODUCT, BK, STAGES)
            elif NEXT is not None:
                ahead = step + STAGES - PRODUCT.tiles * STEPS
                _request(next_weight, ring, bars, count + STAGES, ahead, NEXT, BK, STAGES)
            if step == SIGNAL:
                gdc_launch_dependents()
        gl.store(mine + tile * (64 * BM) + inner, total)
    if PRODUCT.splits > 1:
        _meet(counters + group * 32, PRODUCT.splits)
    else:
        gl.thread_barrier()
    _reduce(mine, sums + group * PRODUCT.splits * SIZE, residual, y, M, eps, PRODUCT, BM)


@gluon.jit
def _start(weight, PRODUCT: gl.constexpr, PIECES: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):
    """Ring, its barriers and the strip; the first weights are asked for, and the kernel before is waited for."""
    ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, BK], FLAT)
    strip = gl.allocate_shared_memory(gl.bfloat16, [PIECES, BM, BK], FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    for i in gl.static_range(STAGES):
        _request(weight, ring, bars, i, i, PRODUCT, BK, STAGES)
    gdc_wait()
    return ring, bars, strip


@gluon.jit
def product_kernel(
    weight,
    x,
    norm,
    residual,
    y,
    sums,
    counters,
    M,
    eps,
    PRODUCT: gl.constexpr,
    SIGNAL: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One product: x [M, k], y [M, outputs], weights as `Product.describe` describes them."""
    ring, bars, strip = _start(weight, PRODUCT, PRODUCT.strip // BK, BM, BK, STAGES)
    _product(
        weight, weight, x, norm, residual, y, sums, counters, ring, bars, strip, M, eps,
        0, PRODUCT, None, SIGNAL, BM, BK, STAGES,
    )  # fmt: skip


@gluon.jit
def layer_kernel(
    o_weight,
    gated_weight,
    down_weight,
    qkv_weight,
    attention,
    x,
    middle,
    inner,
    y,
    qkv,
    gated_norm,
    qkv_norm,
    sums,
    counters,
    M,
    eps,
    O: gl.constexpr,  # noqa: E741
    GATED: gl.constexpr,
    DOWN: gl.constexpr,
    QKV: gl.constexpr,  # of the next layer; None: the last layer
    PIECES: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """From the attention's output to the next layer's qkv.

    middle = x + o(attention), inner = gated(norm(middle)), y = middle + down(inner), qkv = qkv(norm(y)).
    """
    O_STEPS: gl.constexpr = O.tiles * O.strip // BK
    GATED_STEPS: gl.constexpr = O_STEPS + GATED.tiles * GATED.strip // BK
    DOWN_STEPS: gl.constexpr = GATED_STEPS + DOWN.tiles * DOWN.strip // BK
    everyone = counters + 7 * 64 * 32
    ring, bars, strip = _start(o_weight, O, PIECES, BM, BK, STAGES)
    _product(
        o_weight, gated_weight, attention, x, x, middle, sums, counters, ring, bars, strip, M, eps,
        0, O, GATED, -1, BM, BK, STAGES,
    )  # fmt: skip
    _meet(everyone, PROGRAMS)
    _product(
        gated_weight, down_weight, middle, gated_norm, x, inner, sums, counters + 64 * 32, ring, bars, strip,
        M, eps, O_STEPS, GATED, DOWN, -1, BM, BK, STAGES,
    )  # fmt: skip
    _meet(everyone, PROGRAMS)
    _product(
        down_weight, qkv_weight, inner, x, middle, y, sums, counters + 2 * 64 * 32, ring, bars, strip,
        M, eps, GATED_STEPS, DOWN, QKV, 0 if QKV is None else -1, BM, BK, STAGES,
    )  # fmt: skip
    if QKV is not None:
        _meet(everyone, PROGRAMS)
        _product(
            qkv_weight, qkv_weight, y, qkv_norm, x, qkv, sums, counters + 3 * 64 * 32, ring, bars, strip,
            M, eps, DOWN_STEPS, QKV, None, 0, BM, BK, STAGES,
        )  # fmt: skip
