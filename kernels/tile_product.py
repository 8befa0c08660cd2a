"""The loop over K that products with stored weights have in common."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_product(
    x_tile, x_rows, weight_tile, scale_row, K, SCALED: tl.constexpr, SIDE: tl.constexpr, ONCE: tl.constexpr,
    EARLY: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x @ weight.T float32 [BM, BN] from pointers to their first BK columns, [BM, BK] and [BK, BN].

    x_rows bool [BM]: the rows there are; the others are 0, and not read.
    SCALED: float8 weights, whose every SIDE columns share a scale in `scale_row` [BN]; BK divides SIDE. The weights
    are exact in the type of x, and sums are scaled, not weights: nothing is rounded on the way.
    ONCE: nobody else reads these weights. EARLY: the wait for the kernel before is here, behind the first weights.
    """
    ks = tl.arange(0, BK)
    policy: tl.constexpr = "evict_first" if ONCE else ""
    total = tl.zeros([BM, BN], tl.float32)
    a_next = tl.zeros([BM, BK], x_tile.dtype.element_ty)
    for k in tl.range(0, K, BK):
        if EARLY:
            # The compiler's pipeline fetches weights ahead of the loop, hence before the wait; rows of x come after
            # it, as they pass through a branch and a variable of the loop.
            a = a_next
            if k == 0:
                if PDL:
                    tl.extra.cuda.gdc_wait()
                    tl.extra.cuda.gdc_launch_dependents()
                a = tl.load(x_tile, x_rows[:, None] & (ks < K)[None, :], other=0.0)
            a_next = tl.load(x_tile + k + BK, x_rows[:, None] & (k + BK + ks < K)[None, :], other=0.0)
        elif EVEN_K:
            a = tl.load(x_tile + k, x_rows[:, None], other=0.0)
        else:
            a = tl.load(x_tile + k, x_rows[:, None] & (k + ks < K)[None, :], other=0.0)
        if EVEN_K:
            b = tl.load(weight_tile + k, eviction_policy=policy)
        else:
            b = tl.load(weight_tile + k, (k + ks < K)[:, None], other=0.0, eviction_policy=policy)
        if SCALED:
            scale = tl.load(scale_row + k // SIDE).to(tl.float32)
            total += tl.dot(a, b.to(a.dtype), input_precision="ieee") * scale[None, :]
        else:
            total = tl.dot(a, b, total, input_precision="ieee")
    return total
