"""Triton kernel of `decode_attention`: q/k RMSNorm, RoPE, KV write and paged attention of a verify in one launch.

It reads the output of the qkv GEMM and writes the input of the output projection.

q/k RMSNorm, RoPE, the paged write of the new K and V, and attention over the old keys split among programs
(flash-decoding: Dao et al., 2023), with the query heads of a KV head packed into one tile. The last split of each tile
takes the new keys from the qkv output and never reads them back from the cache, so no program waits for another; with
shared keys it does read them from the cache, where the kernel of an earlier layer has written them. The last program to
arrive at a tile's counter adds the partial sums in the order of the splits. The first old keys are loaded before the
previous kernel has ended, and the new ones are attended to while they arrive: in the loop over the old keys, or ahead
of it with an FP8 cache, whose loop needs the registers; there the first old keys are fetched to the L2. Decoding is a
verify of one row.

Heads are multiplied in two parts, their halves, which RoPE pairs. Those of an FP8 cache are read as pairs of
neighbouring channels (`stored_kv_triton`), and their parts are the first and the second channels of pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.paged_attention import last_ancestors
from specbatch.kernels.attention.queries import LOG2E, AttentionInputs, DecodeQueries, Mask
from specbatch.kernels.attention.stored_kv_triton import fp8_pairs
from specbatch.kernels.attention.verify.new_keys_triton import NEW_KEYS, attend, attend_to_new_keys
from specbatch.kernels.attention.verify.prefix_attention_configs import PrefixLaunch, PrefixTile, PrefixWork
from specbatch.kernels.attention.verify.prefix_attention_triton import divide, merge_prefixes, prefix_attention
from specbatch.kernels.attention.verify.rotated_heads_triton import whole_heads
from specbatch.kernels.attention.verify.verify_attention_configs import (
    LEAST_SPLIT,
    Tile,
    most_splits,
    splits_for,
    tile_for,
)
from specbatch.kernels.common.pdl_triton import (
    fetch_to_l2,
    gdc_wait,
    let_next_kernel_start,
    pdl,
    wait_for_previous_kernel,
    wait_in_loop,
)
from specbatch.kernels.common.sizes import cdiv, next_power_of_2, tile_side
from specbatch.kernels.common.workspace import reserve

_AHEAD = tl.constexpr(2)  # steps of an FP8 cache that are fetched to the L2 before the wait
_FETCH = tl.constexpr(64)  # bytes of a fetch to the L2
_GRAIN = tl.constexpr(16)  # the keys of a split are a multiple of this
_LEAST = tl.constexpr(LEAST_SPLIT)  # and at least this


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
    given = (
        qkv, k_cache, v_cache, k_by, v_by, pages, positions, ancestors, q_norm, k_norm, k_offset, sinks, cos, sin, eps,
        n, first_node, capacity, window, root, length, head, tile, last, row, position, word,
    )  # fmt: skip
    if PAIRS:
        if (begin >= length) & (split < splits - 1):
            return
        # Attention to the new keys fills no registers of the loop, and the first old ones are on their way to the L2.
        if PDL:
            early = tl.maximum(tl.minimum(begin + tl.arange(0, _AHEAD * BLOCK_N), end - 1), 0)
            ahead = (tl.load(pages + early // PAGE) * PAGE + early % PAGE)[:, None] * (KV * DIM) + head * DIM
            ahead += tl.minimum(tl.arange(0, (PADDED + _FETCH - 1) // _FETCH) * _FETCH, DIM - 1)
            fetch_to_l2(k_cache + ahead)
            fetch_to_l2(v_cache + ahead)
        wait_for_previous_kernel(PDL and prefixes is None)
        q_one, q_two, scale, one, two, peak, weights = attend_to_new_keys(
            given, scale, one, two, peak, weights, wide, KV, GROUP, DIM, HALF, PAGE, NEW, CAUSAL, SHARED
        )
        steps_end = end
    else:
        q_one = tl.zeros([BLOCK_M, HALF], wide)
        q_two = tl.zeros([BLOCK_M, HALF], wide)
        steps_end = tl.where(last, tl.maximum(end, begin + 1), end)
    for start in range(begin, steps_end, BLOCK_N):
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
        if not PAIRS and start == begin:
            wait_in_loop(PDL and prefixes is None)
            q_one, q_two, _, one, two, peak, weights = attend_to_new_keys(
                given, scale, one, two, peak, weights, wide, KV, GROUP, DIM, HALF, PAGE, NEW, CAUSAL, SHARED
            )
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
        one, two, peak, weights = attend(q_one, q_two, k_one, k_two, v_one, v_two, seen, one, two, peak, weights, scale)

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
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, FEW=few, PARTS=parts, NEW=cdiv(n, NEW_KEYS.value),
        CAUSAL=causal, GROWN=first > 0, SHARED=heads.shared, num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=tile.registers, **pdl(qkv),
    )  # fmt: skip
