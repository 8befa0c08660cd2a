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

Where the ring holds too little to bridge the wait, a few more steps are brought into the L2.

mbarriers: slot i's completes once per use, the nth (from 0) with parity n % 2; it is armed again only after all warps
have waited for it and read the slot. Gluon 3.6 has neither TMA multicast nor reductions through distributed shared
memory, hence the partial sums in global memory; nor cache hints on TMA, hence no evict-first.
"""

# mypy: ignore-errors

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
        assert self.splits > 1
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


@dataclass(frozen=True)
class Plan:
    """`stages` slots of 64 x `block` weights, `rows` of x (padded), `ahead` more steps brought into the L2."""

    rows: int
    block: int
    stages: int
    ahead: int


@gluon.jit
def _request(weight, memory, count, step, PRODUCT: gl.constexpr, PLAN: gl.constexpr):
    """Asks for a step of a product; its slot is that of the `count`th request of all."""
    STEPS: gl.constexpr = PRODUCT.strip // PLAN.block
    ring, bars, _ = memory
    tile = gl.program_id(0) // PRODUCT.splits * PRODUCT.tiles + step // STEPS
    k = gl.program_id(0) % PRODUCT.splits * PRODUCT.strip + step % STEPS * PLAN.block
    slot = count % PLAN.stages
    bar = bars.index(slot)
    mbarrier.expect(bar, 64 * PLAN.block * 2)
    if PRODUCT.gated:
        paired = ring.index(slot)._reinterpret(gl.bfloat16, [2, 32, PLAN.block], PAIRED)
        tma.async_copy_global_to_shared(weight, [0, tile * 32, k], bar, paired)
    else:
        tma.async_copy_global_to_shared(weight, [tile * 64, k], bar, ring.index(slot))


@gluon.jit
def _prefetch(matrix, PRODUCT: gl.constexpr, PLAN: gl.constexpr):
    """Into the L2: a product's steps behind those that fill the ring."""
    STEPS: gl.constexpr = PRODUCT.strip // PLAN.block
    if PLAN.ahead > 0:
        segment = gl.arange(0, PLAN.ahead * 64, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        step = gl.minimum(PLAN.stages + segment // 64, PRODUCT.tiles * STEPS - 1)
        tile = gl.program_id(0) // PRODUCT.splits * PRODUCT.tiles + step // STEPS
        row = segment % 64
        row = tile * 32 + row % 32 + row // 32 * (PRODUCT.n // 2) if PRODUCT.gated else tile * 64 + row
        k = gl.program_id(0) % PRODUCT.splits * PRODUCT.strip + step % STEPS * PLAN.block
        gl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [(matrix + row.to(gl.int64) * PRODUCT.k + k).to(gl.int64, bitcast=True), gl.full_like(row, PLAN.block * 2)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _arrive(counter, EXPECTED: gl.constexpr):
    """Shows the others of EXPECTED programs what this one wrote; returns what `_await` needs."""
    gl.thread_barrier()
    before = gl.atomic_add(counter, 1, sem="acq_rel")
    return before - before % EXPECTED + EXPECTED  # the counter only grows: nothing to reset between launches


@gluon.jit
def _await(counter, goal):
    """Until all have arrived, or patience ends. One thread asks, the others wait for it."""
    missing, tries = goal - goal + 1, 0
    while (missing > 0) & (tries < PATIENCE):
        seen = gl.inline_asm_elementwise(
            """{
            .reg .pred asks;
            .reg .b32 seen;
            mov.u32 seen, %tid.x;
            setp.eq.u32 asks, seen, 0;
            mov.b32 seen, $2;
            @asks ld.acquire.gpu.global.b32 seen, [$1];
            mov.b32 $0, seen;
            }""",
            "=r,l,r",
            [counter.to(gl.int64, bitcast=True), goal],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        missing = goal - seen
        tries += 1
    gl.thread_barrier()


@gluon.jit
def _load_strip(x, norm, strip, M, PRODUCT: gl.constexpr, PLAN: gl.constexpr):
    """x[:, strip] -> shared memory, times the norm's weight; returns the rows' sums of squares of the strip."""
    ROWS: gl.constexpr = PLAN.rows
    BLOCK: gl.constexpr = PLAN.block
    STEPS: gl.constexpr = PRODUCT.strip // BLOCK
    AT_ONCE: gl.constexpr = min(STEPS, 256 * 32 * gl.num_warps() // (ROWS * BLOCK))  # 128 registers of a thread
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK, BLOCK // 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    ks = gl.program_id(0) % PRODUCT.splits * PRODUCT.strip + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    from_rows = x + rows * PRODUCT.k + ks[None, :]
    squares = gl.zeros([ROWS, BLOCK], gl.float32, layout)
    for first in gl.static_range(0, STEPS, AT_ONCE):
        pieces, scales = (), ()
        for i in gl.static_range(first, min(STEPS, first + AT_ONCE)):
            # not by way of the L1: other multiprocessors may have written x since this kernel began
            pieces += (gl.load(from_rows + i * BLOCK, mask=rows < M, other=0.0, cache_modifier=".cg"),)
            if PRODUCT.normed:
                scales += (gl.load(norm + ks + i * BLOCK),)
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
def _reduce(sums, residual, y, M, eps, PRODUCT: gl.constexpr, PLAN: gl.constexpr):
    """Adds the splits' partial sums of this program's part of its group's columns, and finishes them."""
    ROWS: gl.constexpr = PLAN.rows
    SPLITS: gl.constexpr = PRODUCT.splits
    SIZE: gl.constexpr = PRODUCT.tiles * 64 * ROWS + ROWS
    GROUP: gl.constexpr = PRODUCT.outputs * SPLITS // PROGRAMS
    COLUMNS: gl.constexpr = GROUP // SPLITS
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [64 // ROWS, ROWS // 2], [gl.num_warps(), 1], [1, 0])
    group = gl.program_id(0) // SPLITS
    theirs = sums + group * SPLITS * SIZE
    m = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    exists = (m < M)[None, :]
    parts, ups, added = (), (), ()
    for block in gl.static_range(COLUMNS // 16):
        column = gl.program_id(0) % SPLITS * COLUMNS + block * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        row = column // 32 * 64 + column % 32 if PRODUCT.gated else column
        inner = row[:, None] * ROWS + m[None, :]
        for i in gl.static_range(SPLITS):
            parts += (gl.load(theirs + i * SIZE + inner, cache_modifier=".cg"),)
            if PRODUCT.gated:
                ups += (gl.load(theirs + i * SIZE + inner + 32 * ROWS, cache_modifier=".cg"),)
        if PRODUCT.residual:
            at = m[None, :] * PRODUCT.outputs + (group * GROUP + column)[:, None]
            added += (gl.load(residual + at, mask=exists, other=0.0, cache_modifier=".cg"),)
    # The compiler would move sums ahead of loads and wait for each in turn. All loads are issued before the barrier,
    # and what sums need from behind it they cannot have sooner.
    gl.thread_barrier()
    scaling = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, layout))
    if PRODUCT.normed:
        square = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, layout))
        for i in gl.static_range(SPLITS):
            square += gl.load(theirs + i * SIZE + SIZE - ROWS + m, cache_modifier=".cg")
        scaling = gl.rsqrt(square / PRODUCT.k + eps)
    scaling = scaling[None, :]
    for block in gl.static_range(COLUMNS // 16):
        column = gl.program_id(0) % SPLITS * COLUMNS + block * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        total = parts[block * SPLITS] * scaling
        for i in gl.static_range(1, SPLITS):
            total += parts[block * SPLITS + i] * scaling
        if PRODUCT.gated:
            up = ups[block * SPLITS] * scaling
            for i in gl.static_range(1, SPLITS):
                up += ups[block * SPLITS + i] * scaling
            total = total / (1.0 + gl.exp(-total)) * up
        if PRODUCT.residual:
            total += added[block].to(gl.float32)
        at = m[None, :] * PRODUCT.outputs + (group * GROUP + column)[:, None]
        gl.store(y + at, total.to(gl.bfloat16), mask=exists)


@gluon.jit
def _start(weight, matrix, PIECES: gl.constexpr, PRODUCT: gl.constexpr, PLAN: gl.constexpr):
    """Ring, its barriers and the strip; the first weights are asked for, and the kernel before is waited for."""
    ring = gl.allocate_shared_memory(gl.bfloat16, [PLAN.stages, 64, PLAN.block], FLAT)
    strip = gl.allocate_shared_memory(gl.bfloat16, [PIECES, PLAN.rows, PLAN.block], FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [PLAN.stages, 1], mbarrier.MBarrierLayout())
    memory = (ring, bars, strip)
    STAGES: gl.constexpr = PLAN.stages
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES):
        _request(weight, memory, i, i, PRODUCT, PLAN)
    _prefetch(matrix, PRODUCT, PLAN)
    gdc_wait()
    return memory


@gluon.jit
def _product(
    weights,  # this product's descriptor, the next's, the next's matrix
    tensors,  # x, norm, residual, y
    scratch,  # partial sums, counters of this product's groups
    memory,
    M,
    eps,
    START: gl.constexpr,  # steps of the products before
    PRODUCT: gl.constexpr,
    NEXT: gl.constexpr,  # the product whose weights follow in the ring, or None
    SIGNAL: gl.constexpr,  # the step that lets the next kernel start, or -1
    PLAN: gl.constexpr,
):
    """One product whose first steps were asked for already, as many as the ring holds; leaves NEXT in that state."""
    ROWS: gl.constexpr = PLAN.rows
    STEPS: gl.constexpr = PRODUCT.strip // PLAN.block
    TOTAL: gl.constexpr = PRODUCT.tiles * STEPS
    SIZE: gl.constexpr = PRODUCT.tiles * 64 * ROWS + ROWS
    WARPS: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, ROWS * 4 // WARPS, 16])
    gl.static_assert(PLAN.stages <= TOTAL, "the ring would ask for more than there is")
    weight, next_weight, next_matrix = weights
    x, norm, residual, y = tensors
    sums, counters = scratch
    ring, bars, strip = memory
    mine = sums + gl.program_id(0) * SIZE
    inner = gl.arange(0, 64, gl.SliceLayout(1, mma))[:, None] * ROWS
    inner += gl.arange(0, ROWS, gl.SliceLayout(0, mma))[None, :]
    squares = _load_strip(x, norm, strip, M, PRODUCT, PLAN)
    if PRODUCT.normed:
        gl.store(mine + SIZE - ROWS + gl.arange(0, ROWS, squares.type.layout), squares)
    for tile in range(PRODUCT.tiles):
        total = gl.zeros([64, ROWS], gl.float32, mma)
        for piece in range(STEPS):
            step = tile * STEPS + piece
            count = START + step
            slot = count % PLAN.stages
            mbarrier.wait(bars.index(slot), count // PLAN.stages & 1)
            total = warpgroup_mma(ring.index(slot), strip.index(piece).permute((1, 0)), total, is_async=True)
            total = warpgroup_mma_wait(0, (total,))
            gl.thread_barrier()  # all warps have read the slot
            ahead = step + PLAN.stages
            if ahead < TOTAL:
                _request(weight, memory, START + ahead, ahead, PRODUCT, PLAN)
            elif NEXT is not None:
                _request(next_weight, memory, START + ahead, ahead - TOTAL, NEXT, PLAN)
            if step == SIGNAL:
                gdc_launch_dependents()
        gl.store(mine + tile * (64 * ROWS) + inner, total)
    counter = counters + gl.program_id(0) // PRODUCT.splits * 32
    goal = _arrive(counter, PRODUCT.splits)
    if NEXT is not None:
        _prefetch(next_matrix, NEXT, PLAN)
    _await(counter, goal)
    _reduce(sums, residual, y, M, eps, PRODUCT, PLAN)


@gluon.jit(do_not_specialize=["M"])
def product_kernel(
    weight,
    matrix,
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
    PLAN: gl.constexpr,
):
    """One product: x [M, k] -> y [M, outputs]; `weight` is `Product.describe` of `matrix`."""
    memory = _start(weight, matrix, PRODUCT.strip // PLAN.block, PRODUCT, PLAN)
    weights = (weight, weight, matrix)
    _product(weights, (x, norm, residual, y), (sums, counters), memory, M, eps, 0, PRODUCT, None, SIGNAL, PLAN)


@gluon.jit(do_not_specialize=["M"])
def layer_kernel(
    o_weight,
    gated_weight,
    down_weight,
    qkv_weight,
    o_matrix,
    gated_matrix,
    down_matrix,
    qkv_matrix,
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
    OUT: gl.constexpr,
    GATED: gl.constexpr,
    DOWN: gl.constexpr,
    QKV: gl.constexpr,  # of the next layer; None: the last layer
    PIECES: gl.constexpr,  # of the longest strip
    PLAN: gl.constexpr,
):
    """From the attention's output to the next layer's qkv.

    middle = x + o(attention), inner = gated(norm(middle)), y = middle + down(inner), qkv = qkv(norm(y)).
    """
    AT_GATED: gl.constexpr = OUT.tiles * (OUT.strip // PLAN.block)
    AT_DOWN: gl.constexpr = AT_GATED + GATED.tiles * (GATED.strip // PLAN.block)
    AT_QKV: gl.constexpr = AT_DOWN + DOWN.tiles * (DOWN.strip // PLAN.block)
    everyone = counters + 7 * 64 * 32
    memory = _start(o_weight, o_matrix, PIECES, OUT, PLAN)
    weights = (o_weight, gated_weight, gated_matrix)
    tensors = (attention, x, x, middle)
    _product(weights, tensors, (sums, counters), memory, M, eps, 0, OUT, GATED, -1, PLAN)
    _await(everyone, _arrive(everyone, PROGRAMS))
    weights = (gated_weight, down_weight, down_matrix)
    tensors = (middle, gated_norm, x, inner)
    _product(weights, tensors, (sums, counters + 64 * 32), memory, M, eps, AT_GATED, GATED, DOWN, -1, PLAN)
    _await(everyone, _arrive(everyone, PROGRAMS))
    weights = (down_weight, qkv_weight, qkv_matrix)
    tensors = (inner, x, middle, y)
    scratch = (sums, counters + 2 * 64 * 32)
    if QKV is None:
        _product(weights, tensors, scratch, memory, M, eps, AT_DOWN, DOWN, None, 0, PLAN)
    else:
        _product(weights, tensors, scratch, memory, M, eps, AT_DOWN, DOWN, QKV, -1, PLAN)
        _await(everyone, _arrive(everyone, PROGRAMS))
        weights = (qkv_weight, qkv_weight, qkv_matrix)
        tensors = (y, qkv_norm, x, qkv)
        _product(weights, tensors, (sums, counters + 3 * 64 * 32), memory, M, eps, AT_QKV, QKV, None, 0, PLAN)
