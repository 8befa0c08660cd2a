"""What all Triton kernels of latent attention do with a tile of query rows: attention to keys that pages hold."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.attention.stored_kv_triton import fp8_pairs, latent_scales, power_of_two
from specbatch.kernels.common.e4m3_triton import dequantize_e4m3


@triton.jit
def attend_latents(
    q_latent, q_turned, k_cache, v_cache, k_scale, v_scale, pages, begin, end, scale, position, length, word,
    RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of rows q_latent [M, R], q_turned [M, P] to the keys from `begin` to `end`: averages of latents [M, R],
    and base-2 logarithms of the sums of weights [M].

    Rows see the keys up to their `position` [M], or in a tree those before `length` and the nodes after it whose bit is
    in their `word` [M]; without both all. The row `pages` of the page table has their pages.
    """
    BLOCK_M: tl.constexpr = q_latent.shape[0]
    BLOCK_R: tl.constexpr = q_latent.shape[1]
    column, turning = tl.arange(0, BLOCK_R), tl.arange(0, q_turned.shape[1])
    inside, turns = column < RANK, turning < ROPE
    turned_scale, ratio = latent_scales(scale, k_scale, v_scale)
    # In FP8, a warp's instructions take keys from registers in float16 (`stored_kv_triton`). Those of a warpgroup (64
    # rows) take them, and queries as they are, from shared memory.
    FP8: tl.constexpr = v_cache.dtype.element_ty == tl.float8e4nv
    PAIRS: tl.constexpr = FP8 and BLOCK_M < 64
    if PAIRS and q_latent.dtype == tl.bfloat16:
        largest = tl.max(tl.abs(q_turned.to(tl.float32)), 1)
        largest = tl.maximum(largest, tl.max(tl.abs(q_latent.to(tl.float32)), 1))
        power, inverse = power_of_two(largest[:, None])
        q_latent, q_turned = (q_latent * inverse).to(tl.float16), (q_turned * inverse).to(tl.float16)
        turned_scale *= power
    wide: tl.constexpr = q_latent.dtype
    if PAIRS:
        pair = tl.arange(0, BLOCK_R // 2)
        paired = pair < RANK // 2
        q_one, q_two = tl.split(tl.reshape(q_latent, (BLOCK_M, BLOCK_R // 2, 2)))
        one, two = tl.zeros([BLOCK_M, BLOCK_R // 2], tl.float32), tl.zeros([BLOCK_M, BLOCK_R // 2], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Pages are asked for a step before their keys are.
    key = begin + tl.arange(0, BLOCK_N)
    page = tl.load(pages + key // PAGE, key < end, 0)
    for at in range(begin, end, BLOCK_N):
        key = at + tl.arange(0, BLOCK_N)
        exists = key < end
        slot = page * PAGE + key % PAGE
        later = key + BLOCK_N
        page = tl.load(pages + later // PAGE, later < end, 0)
        turned = tl.load(k_cache + slot[:, None] * ROPE + turning[None, :], exists[:, None] & turns[None, :], 0.0)
        if PAIRS:
            place = v_cache.to(tl.pointer_type(tl.int16)) + slot[:, None] * (RANK // 2) + pair[None, :]
            first, second = fp8_pairs(tl.load(place, exists[:, None] & paired[None, :], 0), wide)
            scores = tl.dot(q_one, tl.trans(first), input_precision="ieee")
            scores = tl.dot(q_two, tl.trans(second), scores, input_precision="ieee")
        else:
            place = v_cache + slot[:, None] * RANK + column[None, :]
            latent = tl.load(place, exists[:, None] & inside[None, :], 0.0)
            if FP8:
                latent, turned = dequantize_e4m3(latent, wide), dequantize_e4m3(turned, wide)
            scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        if (k_scale is not None) | (v_scale is not None):
            scores *= ratio
        scores = tl.dot(q_turned, tl.trans(turned.to(wide)), scores, input_precision="ieee") * turned_scale
        if word is not None:
            node = key - length
            bit = (word[:, None] >> tl.minimum(tl.maximum(node, 0), 63)[None, :]) & 1
            seen = exists[None, :] & ((node < 0)[None, :] | (bit == 1))
        elif position is not None:
            seen = exists[None, :] & (key[None, :] <= position[:, None])
        else:
            seen = exists[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weights, 1)
        weights = weights.to(wide)
        if PAIRS:
            one = tl.dot(weights, first, one * fade[:, None], input_precision="ieee")
            two = tl.dot(weights, second, two * fade[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights, latent, acc * fade[:, None], input_precision="ieee")
        peak = higher
    if PAIRS:
        acc = tl.reshape(tl.join(one, two), (BLOCK_M, BLOCK_R))
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if v_scale is not None:
        acc *= tl.load(v_scale)
    return acc, peak + tl.log2(total)
