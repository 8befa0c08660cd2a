"""Attention of a verify's queries to the new keys, those of the pass itself, within the kernel of verify attention."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.attention.queries import LOG2E
from specbatch.kernels.attention.stored_kv_triton import power_of_two, to_stored
from specbatch.kernels.attention.verify.rotated_heads_triton import halves, rotate, turn, whole_heads
from specbatch.kernels.common.kv_slots_triton import kv_slot

NEW_KEYS = tl.constexpr(16)  # of a step; the smallest tile of `tl.dot`
_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _largest(x):
    return tl.max(tl.abs(x.to(tl.float32)), 1)


@triton.jit
def _in_pairs(one, two):
    """The first and the second channels of pairs [R, HALF], of heads that come as their halves."""
    return tl.split(tl.reshape(whole_heads(one, two), (one.shape[0], one.shape[1], 2)))


@triton.jit
def attend(q_one, q_two, k_one, k_two, v_one, v_two, seen, one, two, peak, weights, scale):
    """One step of softmax(q k^T) v over keys k, v [N, D] where `seen`, in base 2; heads come as their halves.

    one, two [M, D / 2]: halves of the output so far, to be divided by the sum of `weights` [M, N], which is left to the
    end: it takes more than one warp. peak [M]: the largest score so far.
    """
    score = tl.dot(q_one, tl.trans(k_one.to(q_one.dtype)), input_precision="ieee")
    score = tl.dot(q_two, tl.trans(k_two.to(q_one.dtype)), score, input_precision="ieee")
    score = tl.where(seen, score * scale, float("-inf"))
    top = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
    weight = tl.exp2(score - base[:, None])
    fade = tl.exp2(peak - base)
    weights = weights * fade[:, None] + weight
    weight = weight.to(q_one.dtype)
    one = tl.dot(weight, v_one.to(q_one.dtype), one * fade[:, None], input_precision="ieee")
    two = tl.dot(weight, v_two.to(q_one.dtype), two * fade[:, None], input_precision="ieee")
    return one, two, top, weights


@triton.jit
def _fresh(
    qkv, k_cache, v_cache, pages, capacity, cos, sin, positions, root, length, head, first, stop,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """New keys from `first` on, not yet rotated unless SHARED: halves of K and of V, cosines and sines; 0 from `stop`
    on. root: the row of the first query."""
    new = first + tl.arange(0, NEW_KEYS)
    there = new < stop
    if SHARED:
        stored = there & (length + new < capacity)
        source = kv_slot(pages, length + new, PAGE, stored) * (KV * DIM) + head * DIM
        one, two = halves(k_cache, source, stored, DIM, HALF)
        v_one, v_two = halves(v_cache, source, stored, DIM, HALF)
    else:
        source = (root + new) * (KV * (GROUP + 2) * DIM) + (KV * GROUP + head) * DIM
        one, two = halves(qkv, source, there, DIM, HALF)
        v_one, v_two = halves(qkv, source + KV * DIM, there, DIM, HALF)
    position = length + new
    if positions is not None:
        position = tl.load(positions + root + new, there, 0).to(tl.int32)
    new_cos, new_sin = turn(cos, sin, position, there, DIM, HALF)
    return one, two, v_one, v_two, new_cos, new_sin


@triton.jit
def attend_to_new_keys(
    given, scale, one, two, peak, weights, wide: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, NEW: tl.constexpr, CAUSAL: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Queries, and what `attend` returns if the program has the `last` split: then new keys are written, too."""
    (
        qkv, k_cache, v_cache, k_by, v_by, pages, positions, ancestors, q_norm, k_norm, k_offset, sinks, cos, sin, eps,
        n, first_node, capacity, window, root, length, head, tile, last, row, position, word,
    ) = given  # fmt: skip
    kept: tl.constexpr = k_cache.dtype.element_ty
    PAIRS: tl.constexpr = kept == tl.float8e4nv
    WIDTH: tl.constexpr = KV * (GROUP if SHARED else GROUP + 2) * DIM  # of a row of qkv
    half = tl.arange(0, HALF)
    inside = half < DIM // 2
    node = row // GROUP
    live = node < n
    token = root + node
    query = token * WIDTH + (head * GROUP + row % GROUP) * DIM
    x_one, x_two = halves(qkv, query, live, DIM, HALF)
    q_cos, q_sin = turn(cos, sin, position, live, DIM, HALF)
    fresh = _fresh(
        qkv, k_cache, v_cache, pages, capacity, cos, sin, positions, root, length, head, 0,
        tl.where(last, n, 0), KV, GROUP, DIM, HALF, PAGE, SHARED,
    )  # fmt: skip
    q_one, q_two = rotate(x_one, x_two, q_cos, q_sin, q_norm, eps, DIM, HALF)
    if PAIRS:
        power, inverse = power_of_two(tl.maximum(_largest(q_one), _largest(q_two))[:, None])
        q_one, q_two = _in_pairs((q_one * inverse).to(wide), (q_two * inverse).to(wide))
        scale *= power
    if last:
        new_weights = tl.zeros([row.shape[0], NEW_KEYS], tl.float32)
        if sinks is not None:  # the first key, with a value of 0
            peak = tl.load(sinks + head * GROUP + row % GROUP) * _LOG2E
            new_weights += tl.where(tl.arange(0, NEW_KEYS) == 0, 1.0, 0.0)[None, :]
        for chunk in tl.static_range(NEW):
            a, b, c, d, new_cos, new_sin = fresh
            if chunk + 1 < NEW:
                first = (chunk + 1) * NEW_KEYS
                fresh = _fresh(
                    qkv, k_cache, v_cache, pages, capacity, cos, sin, positions, root, length, head, first,
                    n, KV, GROUP, DIM, HALF, PAGE, SHARED,
                )  # fmt: skip
            # a, b: halves of the new keys; c, d: of the new values
            new = chunk * NEW_KEYS + tl.arange(0, NEW_KEYS)
            if not SHARED:
                a, b = rotate(a, b, new_cos, new_sin, k_norm, eps, DIM, HALF)
                if k_offset is not None:
                    less_one, less_two = halves(k_offset, head * DIM + tl.zeros_like(new), new < n, DIM, HALF)
                    a, b = a.to(tl.float32) - less_one, b.to(tl.float32) - less_two
                a, b = to_stored(a, k_by, kept), to_stored(b, k_by, kept)
                c, d = to_stored(c, v_by, kept), to_stored(d, v_by, kept)
                if tile == 0:
                    stored = (new < n) & (length + new < capacity)
                    slot = kv_slot(pages, length + new, PAGE, stored)
                    free = slot[:, None] * (KV * DIM) + head * DIM + half
                    fits = stored[:, None] & inside
                    tl.store(k_cache + free, a, fits)
                    tl.store(k_cache + free + DIM // 2, b, fits)
                    tl.store(v_cache + free, c, fits)
                    tl.store(v_cache + free + DIM // 2, d, fits)
            if PAIRS:
                a, b = _in_pairs(a.to(wide), b.to(wide))
                c, d = _in_pairs(c.to(wide), d.to(wide))
            visible = live[:, None] & (new < n)[None, :]
            if ancestors is not None:
                visible &= ((word[:, None] >> (first_node + new)[None, :]) & 1) == 1
            elif CAUSAL:
                visible &= new[None, :] <= node[:, None]
            if window is not None and ancestors is None:
                visible &= new[None, :] > (node - window)[:, None]
            one, two, peak, new_weights = attend(q_one, q_two, a, b, c, d, visible, one, two, peak, new_weights, scale)
        weights = tl.where(tl.arange(0, weights.shape[1]) == 0, tl.sum(new_weights, 1)[:, None], 0.0)
    return q_one, q_two, scale, one, two, peak, weights
