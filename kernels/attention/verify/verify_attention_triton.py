"""Triton kernel of `decode_attention`: q/k RMSNorm, RoPE, KV write and paged attention of a verify in one launch.

It reads the output of the qkv GEMM and writes the input of the output projection.

q/k RMSNorm, RoPE, the paged write of the new K and V, and attention over the old keys split among programs
(flash-decoding: Dao et al., 2023), with the query heads of a KV head packed into one tile. The last split of each tile
takes the new keys from the qkv output and never reads them back from the cache, so no program waits for another; with
shared keys it does read them from the cache, where the kernel of an earlier layer has written them. The last program to
arrive at a tile's counter adds the partial sums in the order of the splits. The first old keys are loaded before the
previous kernel has ended, and the new ones are attended to while they arrive. Decoding is a verify of one row.

Heads are multiplied in two parts, their halves, which RoPE pairs. Those of an FP8 cache are read as pairs of
neighbouring channels (`stored_kv_triton`), and their parts are the first and the second channels of pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.paged_attention import last_ancestors
from specbatch.kernels.attention.queries import LOG2E, AttentionInputs, DecodeQueries, Mask
from specbatch.kernels.attention.stored_kv_triton import fp8_pairs, power_of_two, to_stored
from specbatch.kernels.attention.verify.prefix_attention_configs import PrefixLaunch, PrefixTile, PrefixWork
from specbatch.kernels.attention.verify.prefix_attention_triton import divide, merge_prefixes, prefix_attention
from specbatch.kernels.attention.verify.rotated_heads_triton import halves, rotate, turn, whole_heads
from specbatch.kernels.attention.verify.verify_attention_configs import (
    LEAST_SPLIT,
    Tile,
    most_splits,
    splits_for,
    tile_for,
)
from specbatch.kernels.common.kv_slots_triton import kv_slot
from specbatch.kernels.common.pdl_triton import gdc_wait, let_next_kernel_start, pdl, wait_in_loop
from specbatch.kernels.common.sizes import cdiv, next_power_of_2, tile_side
from specbatch.kernels.common.workspace import reserve

_NEW = tl.constexpr(16)  # new keys a step; the smallest tile of `tl.dot`
_GRAIN = tl.constexpr(16)  # the keys of a split are a multiple of this
_LOG2E = tl.constexpr(LOG2E)
_LEAST = tl.constexpr(LEAST_SPLIT)  # and at least this


@triton.jit
def _largest(x):
    return tl.max(tl.abs(x.to(tl.float32)), 1)


@triton.jit
def _in_pairs(one, two):
    """The first and the second channels of pairs [R, HALF], of heads that come as their halves."""
    return tl.split(tl.reshape(whole_heads(one, two), (one.shape[0], one.shape[1], 2)))


@triton.jit
def _attend(q_one, q_two, k_one, k_two, v_one, v_two, seen, one, two, peak, weights, scale):
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
    new = first + tl.arange(0, _NEW)
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
def verify_attention_kernel(
    qkv, out, k_cache, v_cache, k_scale, v_scale, page_table, rows, lengths, firsts, positions, ancestors, q_norm,
    k_norm, k_offset, sinks, cos, sin, partials, arrivals, prefixes, sums, n, first_node, capacity, width, window, eps,
    scale,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FEW: tl.constexpr, PARTS: tl.constexpr,
    NEW: tl.constexpr, CAUSAL: tl.constexpr, GROWN: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PADDED: tl.constexpr = 2 * HALF
    kept: tl.constexpr = k_cache.dtype.element_ty
    WIDTH: tl.constexpr = KV * (GROUP if SHARED else GROUP + 2) * DIM  # of a row of qkv
    head = tl.program_id(0) % KV
    tile = tl.program_id(0) // KV
    split, splits = tl.program_id(1), tl.num_programs(1)
    sequence = tl.program_id(2)
    root = sequence * n
    if firsts is not None:  # packed rows, of which this sequence has n
        root = tl.load(firsts + sequence, cache_modifier=".cg").to(tl.int32)
        n = tl.load(firsts + sequence + 1, cache_modifier=".cg").to(tl.int32) - root
        if tile * BLOCK_M >= n * GROUP:
            return
    length = tl.load(lengths + sequence, cache_modifier=".cg").to(tl.int32)
    if GROWN:
        length += first_node
    pages = page_table + tl.load(rows + sequence, cache_modifier=".cg") * width
    oldest = length * 0
    if window is not None:
        oldest = tl.maximum(length - first_node + 1 - window, 0)
    if prefixes is not None:  # whose keys `prefix_attention` reads, meanwhile
        oldest = tl.minimum(tl.load(prefixes + sequence, cache_modifier=".cg"), length)  # less: a row of padding
        let_next_kernel_start(PDL)
    share = tl.maximum(tl.cdiv(tl.cdiv(length - oldest, splits), _GRAIN) * _GRAIN, _LEAST)
    begin = oldest + split * share
    end = tl.minimum(begin + share, length)
    last = split == splits - 1  # it has the new keys, too
    # Pages are asked for a step before their keys are, and used nowhere in between.
    key = begin + tl.arange(0, BLOCK_N)
    page = tl.load(pages + key // PAGE, key < end, 0)
    # Halves of heads are loaded, rotated and multiplied apart from each other, each padded for itself.
    half = tl.arange(0, HALF)
    inside = half < DIM // 2
    PAIRS: tl.constexpr = kept == tl.float8e4nv
    wide: tl.constexpr = tl.float16 if qkv.dtype.element_ty == tl.bfloat16 and PAIRS else qkv.dtype.element_ty
    if DIM == PADDED:
        pair, in_pair = half, inside
    else:
        pair = half // (HALF // 2) * (DIM // 4) + half % (HALF // 2)
        in_pair = half % (HALF // 2) < DIM // 4
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node = row // GROUP
    live = node < n
    token = root + node
    position = length + node
    if positions is not None:
        position = tl.load(positions + token, live, 0).to(tl.int32)
    word = node.to(tl.int64)
    if ancestors is not None:
        word = tl.load(ancestors + token, live, 0)
    q_one = tl.zeros([BLOCK_M, HALF], wide)
    q_two = tl.zeros([BLOCK_M, HALF], wide)
    if PAIRS:
        scale = tl.zeros([BLOCK_M, 1], tl.float32) + scale
    k_by, v_by = k_scale, v_scale
    if k_scale is not None:
        k_by = tl.load(k_scale + head)
        scale = scale * k_by
    if v_scale is not None:
        v_by = tl.load(v_scale + head)
    one = tl.zeros([BLOCK_M, HALF], tl.float32)
    two = tl.zeros([BLOCK_M, HALF], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin, tl.where(last, tl.maximum(end, begin + 1), end), BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        old = key < end
        here = old[:, None] & inside
        place = (page * PAGE + key % PAGE)[:, None] * (KV * DIM) + head * DIM + half
        if PAIRS:
            at = (page * PAGE + key % PAGE)[:, None] * (KV * DIM // 2) + head * (DIM // 2) + pair
            both = old[:, None] & in_pair
            k_one, k_two = fp8_pairs(tl.load(k_cache.to(tl.pointer_type(tl.int16)) + at, both, 0), wide)
            v_one, v_two = fp8_pairs(tl.load(v_cache.to(tl.pointer_type(tl.int16)) + at, both, 0), wide)
        else:
            k_one, k_two = tl.load(k_cache + place, here, 0.0), tl.load(k_cache + place + DIM // 2, here, 0.0)
            v_one, v_two = tl.load(v_cache + place, here, 0.0), tl.load(v_cache + place + DIM // 2, here, 0.0)
        page = tl.load(pages + (key + BLOCK_N) // PAGE, key + BLOCK_N < end, 0)
        # The pipeline asks for the first keys ahead of the loop, hence before the wait for the kernel in front.
        if start == begin:
            wait_in_loop(PDL and prefixes is None)
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
                new_weights = tl.zeros([BLOCK_M, _NEW], tl.float32)
                if sinks is not None:  # the first key, with a value of 0
                    peak = tl.load(sinks + head * GROUP + row % GROUP) * _LOG2E
                    new_weights += tl.where(tl.arange(0, _NEW) == 0, 1.0, 0.0)[None, :]
                for chunk in tl.static_range(NEW):
                    a, b, c, d, new_cos, new_sin = fresh
                    if chunk + 1 < NEW:
                        first = (chunk + 1) * _NEW
                        fresh = _fresh(
                            qkv, k_cache, v_cache, pages, capacity, cos, sin, positions, root, length, head, first,
                            n, KV, GROUP, DIM, HALF, PAGE, SHARED,
                        )  # fmt: skip
                    # a, b: halves of the new keys; c, d: of the new values
                    new = chunk * _NEW + tl.arange(0, _NEW)
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
                    one, two, peak, new_weights = _attend(
                        q_one, q_two, a, b, c, d, visible, one, two, peak, new_weights, scale
                    )
                weights = tl.where(tl.arange(0, BLOCK_N) == 0, tl.sum(new_weights, 1)[:, None], 0.0)
        seen = old[None, :]
        if GROWN:
            at = key - (length - first_node)  # the node of the tree; negative: before it
            bit = (word[:, None] >> tl.minimum(tl.maximum(at, 0), 63)[None, :]) & 1
            near = (at < 0)[None, :]
            if window is not None:
                near = near & (key[None, :] > (position - window)[:, None])
            seen = seen & (near | ((at >= 0)[None, :] & (bit == 1)))
        elif window is not None:
            seen &= key[None, :] > (position - window)[:, None]
        one, two, peak, weights = _attend(
            q_one, q_two, k_one, k_two, v_one, v_two, seen, one, two, peak, weights, scale
        )

    if (begin >= length) & (split < splits - 1):
        return
    total = tl.sum(weights, 1)
    # No program waits for `prefix_attention` but one: they would keep others from running beside it. This kernel then
    # ends after it, so that the next one may read what both have written.
    if prefixes is not None:  # noqa: SIM102 (a constant, for Triton)
        if last & (tl.program_id(0) == 0) & (sequence == tl.num_programs(2) - 1):
            gdc_wait(PDL)
    inverse = (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    if v_scale is not None:
        inverse = inverse * v_by
    if PAIRS:
        acc = tl.reshape(tl.join(one * inverse, two * inverse), (BLOCK_M, PADDED))
    else:
        acc = whole_heads(one * inverse, two * inverse)
    both = tl.arange(0, PADDED)
    column, inside = both % HALF + both // HALF * (DIM // 2), both % HALF < DIM // 2
    mask = live[:, None] & inside
    # Splits that hold keys, and the last one, which holds the new keys in any case.
    expected = tl.minimum(tl.cdiv(length - oldest, tl.maximum(share, 1)) + 1, splits)
    if expected == 1:
        result = out + (token * KV * GROUP + head * GROUP + row % GROUP)[:, None] * DIM + column
        tl.store(result, acc.to(out.dtype.element_ty), mask)
        if sums is not None:
            tl.store(sums + token * KV * GROUP + head * GROUP + row % GROUP, peak + tl.log2(total), live)
        return

    group = sequence * tl.num_programs(0) + tl.program_id(0)
    size: tl.constexpr = FEW * (PADDED + 1)  # a split's output, and the logarithms of its rows' sums
    parts = partials + (group * splits).to(tl.int64) * size
    cell = tl.arange(0, BLOCK_M)
    tl.store(parts + split * size + cell[:, None] * PADDED + both, acc, mask)
    tl.store(parts + split * size + FEW * PADDED + cell, peak + tl.log2(total), cell < FEW)
    tl.debug_barrier()  # every thread has stored before one of them arrives
    if tl.atomic_add(arrivals + group, 1, sem="acq_rel") + 1 < expected:
        return
    tl.store(arrivals + group, 0)
    few = tl.arange(0, FEW)
    few_row = tile * BLOCK_M + few
    few_token = root + few_row // GROUP
    few_mask = (few_row < n * GROUP)[:, None] & inside
    whole = tl.zeros([FEW, PADDED], tl.float32)
    top = tl.full([FEW, 1], float("-inf"), tl.float32)
    mass = tl.zeros([FEW, 1], tl.float32)
    for first in tl.range(0, expected, PARTS, num_stages=1):
        loaded = ()
        for step in tl.static_range(PARTS):
            index = first + step
            source = parts + tl.where(index < expected - 1, index, splits - 1) * size + few[:, None] * PADDED + both
            there = few_mask & (few * 0 + index < expected)[:, None]
            part = tl.load(source, there, 0.0, cache_modifier=".cg")
            loaded = loaded + (part,)  # type: ignore[assignment]  # noqa: RUF005 (Triton knows no stars)
        tl.debug_barrier()  # all are asked for before the first is waited for
        for step in tl.static_range(PARTS):
            index = first + step
            source = parts + tl.where(index < expected - 1, index, splits - 1) * size + FEW * PADDED + few[:, None]
            there = (few * 0 + index < expected)[:, None]
            log = tl.load(source, there, float("-inf"), cache_modifier=".cg")
            higher = tl.maximum(top, log)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade, gain = tl.exp2(top - base), tl.exp2(log - base)
            whole = whole * fade + loaded[step] * gain
            mass = mass * fade + gain
            top = higher
    result = out + (few_token * KV * GROUP + head * GROUP + few_row % GROUP)[:, None] * DIM + column
    tl.store(result, (whole / tl.where(mass == 0.0, 1.0, mass)).to(out.dtype.element_ty), few_mask)
    if sums is not None:
        log_place = sums + (few_token * KV * GROUP + head * GROUP + few_row % GROUP)[:, None]
        tl.store(log_place, top + tl.log2(mass), (few_row < n * GROUP)[:, None])


def verify_attention(
    queries: DecodeQueries,
    inputs: AttentionInputs,
    mask: Mask,
    *,
    splits: int | None = None,
    tile: Tile | None = None,
    prefix_tile: PrefixTile | None = None,
    works: dict[tuple[PrefixLaunch, int], PrefixWork] | None = None,
) -> torch.Tensor:
    """`DecodeAttentionRef` of `queries`; the positions of a chain follow from its lengths and are not read. splits: how
    many programs share the old keys of a tile; tile: its configuration; both are chosen by the sizes if None, as is
    prefix_tile. works: where a pass with shared prefixes keeps how its work is divided, for all of its layers.

    All inputs but `projected` are read before the previous kernel, as a rule the qkv GEMM, has ended: that kernel must
    not write them. The writes of any earlier kernel are visible, because a GEMM lets the next kernel start only after
    its own wait, that is, when all kernels before it have ended.
    """
    qkv, heads = inputs.projected, inputs.heads
    out = torch.empty(len(qkv), heads.count * heads.dim, dtype=qkv.dtype, device=qkv.device)
    if queries.prefixes is None or mask.window is not None:
        _attention(queries, inputs, mask, out, None, splits, tile)
        return out
    launch = PrefixLaunch.of(queries, inputs, prefix_tile)
    works = {} if works is None else works
    key = launch, heads.count
    if key not in works:
        works[key] = divide(queries, heads, launch)
    found = prefix_attention(queries, inputs, launch, works[key])
    own = torch.empty_like(out, dtype=torch.float32)
    sums = torch.empty(len(qkv), heads.count, dtype=torch.float32, device=qkv.device)
    _attention(queries, inputs, mask, own, sums, splits, tile)
    merge_prefixes(queries, heads, works[key], found, own, sums, out)
    return out


def _attention(
    queries: DecodeQueries,
    inputs: AttentionInputs,
    mask: Mask,
    out: torch.Tensor,
    sums: torch.Tensor | None,
    splits: int | None,
    tile: Tile | None,
) -> None:
    """Attention to all keys, in `out`, or given `sums` float32 [T, count] to those after the shared prefixes: then the
    logarithms to base 2 of the sums of weights are stored there."""
    qkv, heads, positions, k_cache, v_cache, k_scale, v_scale = inputs
    n, first = queries.num_queries, queries.first_node
    batch, table_pages, page_size = len(queries.lengths), queries.page_table.shape[1], k_cache.shape[1]
    group, capacity = heads.count // heads.kv, table_pages * page_size
    half = tile_side(heads.dim // 2)
    padded = 2 * half
    fp8 = k_cache.element_size() == 1 < qkv.element_size() < 4
    tile = tile or tile_for(n * group, batch * heads.kv, padded * qkv.element_size(), qkv.device, fp8=fp8)
    tiles = cdiv(n * group, tile.block_m) * heads.kv
    if splits is None:
        splits = splits_for(batch * tiles, tile.block_m, most_splits(capacity), qkv.device)
    few = min(tile.block_m, next_power_of_2(n * group))  # rows of a tile that are not padding
    held = max(1, few * padded // (32 * tile.warps))  # registers of a thread for a partial sum
    parts = max(1, min(16, (tile.registers + 1) // 2 // held))  # as many as half of its registers hold
    cells = batch * tiles * splits * few * (padded + 1)
    partials, arrivals = reserve(qkv.device, cells if splits > 1 else 1, batch * tiles)
    is_tree = queries.ancestors is not None
    assert queries.packed is None or not (is_tree or first), "packed rows are those of chains"
    causal, window = mask
    ancestors = queries.ancestors
    if ancestors is not None and window is not None:
        ancestors = last_ancestors(ancestors, window)
    verify_attention_kernel[(tiles, splits, batch)](
        qkv, out, k_cache, v_cache, k_scale, v_scale, queries.page_table, queries.slots, queries.lengths,
        None if queries.packed is None else queries.packed.firsts,
        positions if is_tree else None, ancestors,
        heads.q_norm, heads.k_norm, heads.k_offset, heads.sinks, heads.cos, heads.sin, partials, arrivals,
        None if sums is None or queries.prefixes is None else queries.prefixes.lengths, sums,
        n, first, capacity, table_pages, window, heads.eps, heads.dim**-0.5 * LOG2E,
        KV=heads.kv, GROUP=group, DIM=heads.dim, HALF=half, PAGE=page_size,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, FEW=few, PARTS=parts, NEW=cdiv(n, _NEW.value),
        CAUSAL=causal, GROWN=first > 0, SHARED=heads.shared, num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=tile.registers, **pdl(qkv),
    )  # fmt: skip
