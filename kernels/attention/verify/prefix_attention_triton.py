"""Triton kernel of attention to prefixes that sequences share: a block of their keys serves the queries of all.

`verify_attention` then attends to what follows the prefix of each sequence, beside this kernel, and adds what it finds
here as one split more (partial softmax: Dao et al., "Flash-Decoding", 2023; shared prefixes apart from the rest:
"Cascade inference", Ye et al., 2024; Hydragen, Juravsky et al., 2024). As in prefill attention, the rows of a tile are
many and the work is that of tensor cores. A tile's rows are those of a group's sequences, side by side: their tokens,
and the query heads of one KV head. How groups are divided is known on the device only, so a launch has a fixed number
of programs, which share the items of work: a tile and a split of the keys each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from specbatch.kernels.attention.queries import LOG2E, AttentionInputs, DecodeQueries, QKVLayout
from specbatch.kernels.attention.stored_kv_triton import power_of_two
from specbatch.kernels.attention.verify.prefix_attention_configs import LEAST_KEYS, PrefixLaunch, PrefixWork
from specbatch.kernels.attention.verify.rotated_heads_triton import halves, rotate, turn, whole_heads
from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, next_power_of_2, tile_side


class PrefixPartials(NamedTuple):
    """What is found in the prefixes.

    outputs  float32 [KV heads, lines, width]: averages of values
    sums     float32 [KV heads, lines]: logarithms to base 2 of the sums of weights
    """

    outputs: torch.Tensor
    sums: torch.Tensor


@triton.jit
def divide_kernel(
    members, groups, items, count, places, n, programs,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    own = n * GROUP  # rows of a sequence
    group = tl.arange(0, GROUPS)
    firsts, counts = tl.load(groups + group), tl.load(groups + GROUPS + group)
    reach = tl.load(groups + 2 * GROUPS + group)
    # Splits are rounded down, so that all items run at the same time if they can.
    tiles = tl.cdiv(counts * own, BLOCK_M)
    least = tl.maximum(tl.cdiv(tl.sum(tiles * reach), programs), LEAST)
    share = tl.cdiv(tl.cdiv(reach, tl.maximum(reach // least, 1)), BLOCK_N) * BLOCK_N
    splits = tl.cdiv(reach, tl.maximum(share, 1))
    ends = tl.cumsum(tiles * splits)
    begins = ends - tiles * splits
    if tl.program_id(0) == 0:
        tl.store(count, tl.sum(tiles * splits))

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    of = (item[:, None] >= begins[None, :]) & (item[:, None] < ends[None, :])
    exists = tl.sum(of.to(tl.int32), 1) > 0
    place = item - _pick(of, begins)
    own_tiles, own_share = tl.maximum(_pick(of, tiles), 1), _pick(of, share)
    low = place // own_tiles * own_share
    tl.store(items + item * 5, _pick(of, firsts), exists)
    tl.store(items + item * 5 + 1, _pick(of, counts), exists)
    tl.store(items + item * 5 + 2, place % own_tiles, exists)
    tl.store(items + item * 5 + 3, low, exists)
    tl.store(items + item * 5 + 4, tl.minimum(low + own_share, _pick(of, reach)), exists)

    of = (item[:, None] >= firsts[None, :]) & (item[:, None] < (firsts + counts)[None, :])
    exists = tl.sum(of.to(tl.int32), 1) > 0
    sequence = tl.load(members + item, exists, 0)
    tl.store(places + sequence * 3, _pick(of, begins) * BLOCK_M + (item - _pick(of, firsts)) * own, exists)
    tl.store(places + sequence * 3 + 1, _pick(of, tiles) * BLOCK_M, exists)
    tl.store(places + sequence * 3 + 2, _pick(of, splits), exists)


@triton.jit
def _pick(of, values):
    """Of each row, the value [G] of the group that it is `of` [R, G]; 0 of none."""
    return tl.sum(tl.where(of, values[None, :], 0), 1)


def divide(queries: DecodeQueries, heads: QKVLayout, launch: PrefixLaunch) -> PrefixWork:
    """Divide the work of a pass. It reads nothing but `queries.prefixes`."""
    prefixes, most, size = queries.prefixes, launch.lines // launch.tile.block_m, 32
    assert prefixes is not None
    device, batch = prefixes.groups.device, len(queries.lengths)
    items = torch.empty(cdiv(most, size) * size, 5, dtype=torch.int32, device=device)
    count, places = (torch.empty(shape, dtype=torch.int32, device=device) for shape in (1, (batch, 3)))
    divide_kernel[(cdiv(max(most, batch), size),)](
        prefixes.members, prefixes.groups, items, count, places, queries.num_queries, launch.programs,
        GROUP=heads.count // heads.kv, GROUPS=prefixes.groups.shape[1], BLOCK_M=launch.tile.block_m,
        BLOCK_N=launch.tile.block_n, LEAST=max(LEAST_KEYS, launch.tile.block_n), ITEMS=size,
    )  # fmt: skip
    return PrefixWork(items, count, places)


@triton.jit
def prefix_attention_kernel(
    qkv, keys, values, k_scale, v_scale, page_table, slots, lengths, firsts, positions, prefix_members, items,
    items_end, q_norm, cos, sin, outputs, sums, n, first_node, width, lines, eps, scale,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    SOURCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHARED: tl.constexpr, FP8: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """SOURCE of keys and values: "slots", gathered from the caches; "pages", bulk copies of (parts of) pages."""
    PADDED: tl.constexpr = 2 * HALF
    WIDTH: tl.constexpr = KV * (GROUP if SHARED else GROUP + 2) * DIM  # of a row of qkv
    head = tl.program_id(0)
    own = n * GROUP  # rows of a sequence
    both = tl.arange(0, PADDED)
    column, inside = both % HALF + both // HALF * (DIM // 2), both % HALF < DIM // 2
    # Also where there is nothing to do: `verify_attention` reads qkv as soon as all programs have passed here.
    wait_for_previous_kernel(PDL)
    for item in range(tl.program_id(1), tl.load(items_end), tl.num_programs(1)):
        members, count = prefix_members + tl.load(items + item * 5), tl.load(items + item * 5 + 1)
        tile = tl.load(items + item * 5 + 2)
        low, high = tl.load(items + item * 5 + 3), tl.load(items + item * 5 + 4)
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        place, node = row // own, row % own // GROUP
        live = place < count
        sequence = tl.load(members + place, live, 0)
        token = sequence * n + node
        if firsts is not None:  # packed rows, of which a sequence may have fewer than n
            token = tl.load(firsts + sequence, live, 0).to(tl.int32) + node
            live = live & (token < tl.load(firsts + sequence + 1, live, 0).to(tl.int32))
        if positions is not None:
            position = tl.load(positions + token, live, 0).to(tl.int32)
        else:
            position = tl.load(lengths + sequence, live, 0).to(tl.int32) + first_node + node
        query = token * WIDTH + (head * GROUP + row % GROUP) * DIM
        one, two = halves(qkv, query, live, DIM, HALF)
        turn_cos, turn_sin = turn(cos, sin, position, live, DIM, HALF)
        one, two = rotate(one, two, turn_cos, turn_sin, q_norm, eps, DIM, HALF)
        q, by = whole_heads(one, two), scale  # by: of the scores, of all rows or of each
        if k_scale is not None:
            by *= tl.load(k_scale + head)
        if FP8:  # is multiplied in float16, to which a device converts it fast
            power, inverse = power_of_two(tl.max(tl.abs(q.to(tl.float32)), 1)[:, None])
            q, by = (q * inverse).to(tl.float16 if q.dtype == tl.bfloat16 else q.dtype), by * power

        pages = page_table + tl.load(slots + tl.load(members)) * width
        row_by = tl.reshape(by, (BLOCK_M,)) if FP8 else by
        acc = tl.zeros([BLOCK_M, PADDED], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        # Pages are asked for a step before their keys are.
        key = low + tl.arange(0, BLOCK_N)
        page = tl.load(pages + (low if SOURCE == "pages" else tl.minimum(key, high - 1)) // PAGE)
        for at in tl.range(low, high, BLOCK_N):
            key = at + tl.arange(0, BLOCK_N)
            if SOURCE == "pages":
                line = (page * PAGE + at % PAGE).to(tl.int32)
                k, v = keys.load([line, head * DIM]), values.load([line, head * DIM])
                page = tl.load(pages + tl.minimum(at + BLOCK_N, high - 1) // PAGE)
            else:
                inner = tl.minimum(key, high - 1) % PAGE  # the last block may repeat its last key
                source = ((page * PAGE + inner) * (KV * DIM) + head * DIM)[:, None] + column[None, :]
                if 2 * HALF == DIM:
                    k, v = tl.load(keys + source), tl.load(values + source)
                else:
                    k, v = tl.load(keys + source, inside[None, :], 0.0), tl.load(values + source, inside[None, :], 0.0)
                page = tl.load(pages + tl.minimum(key + BLOCK_N, high - 1) // PAGE)
            score = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")
            if at + BLOCK_N > high:
                score = tl.where((key < high)[None, :], score, float("-inf"))
            peak = tl.maximum(top, tl.max(score, 1) * row_by)
            weight = tl.math.exp2(score * by - peak[:, None])
            fade = tl.math.exp2(top - peak)
            acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
            total = total * fade + tl.sum(weight, 1)
            top = peak

        whole = 1.0 / total
        if v_scale is not None:
            whole *= tl.load(v_scale + head)
        line = lines * head.to(tl.int64) + item * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(
            outputs + line[:, None] * PADDED + both[None, :], acc * whole[:, None], live[:, None] & inside[None, :]
        )
        tl.store(sums + line, top + tl.math.log2(total), live)


@triton.jit
def merge_prefixes_kernel(
    own, own_sums, outputs, sums, places, prefixes, firsts, out, n, lines,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PADDED: tl.constexpr = 2 * HALF
    head, tile = tl.program_id(0) % KV, tl.program_id(0) // KV
    sequence = tl.program_id(1)
    root = sequence * n
    if firsts is not None:
        root = tl.load(firsts + sequence).to(tl.int32)
        n = tl.load(firsts + sequence + 1).to(tl.int32) - root
    shares = tl.load(prefixes + sequence) > 0
    start, apart = tl.load(places + sequence * 3, shares, 0), tl.load(places + sequence * 3 + 1, shares, 0)
    splits = tl.load(places + sequence * 3 + 2, shares, 0)
    row = tile * ROWS + tl.arange(0, ROWS)
    live = row < n * GROUP
    both = tl.arange(0, PADDED)
    column, inside = both % HALF + both // HALF * (DIM // 2), both % HALF < DIM // 2
    mask = live[:, None] & inside[None, :]
    cell = (root + row // GROUP) * (KV * GROUP) + head * GROUP + row % GROUP
    wait_for_previous_kernel(PDL)
    whole = tl.load(own + cell[:, None] * DIM + column[None, :], mask, 0.0)
    top = tl.load(own_sums + cell, live, 0.0)
    mass = tl.full([ROWS], 1.0, tl.float32)
    if shares:
        line = lines * head.to(tl.int64) + start + row
        for first in tl.range(0, splits, PARTS, num_stages=1):
            parts, logs = (), ()
            for step in tl.static_range(PARTS):  # all are asked for before the first is waited for
                at = line + (first + step) * apart
                there = live & (row * 0 + first + step < splits)
                part = tl.load(outputs + at[:, None] * PADDED + both[None, :], there[:, None] & inside[None, :], 0.0)
                parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005 (Triton knows no stars)
                logs = logs + (tl.load(sums + at, there, float("-inf")),)  # type: ignore[assignment]  # noqa: RUF005
            for step in tl.static_range(PARTS):
                higher = tl.maximum(top, logs[step])
                fade, gain = tl.exp2(top - higher), tl.exp2(logs[step] - higher)
                whole = whole * fade[:, None] + parts[step] * gain[:, None]
                mass = mass * fade + gain
                top = higher
    tl.store(out + cell[:, None] * DIM + column[None, :], (whole / mass[:, None]).to(out.dtype.element_ty), mask)


def merge_prefixes(
    queries: DecodeQueries,
    heads: QKVLayout,
    work: PrefixWork,
    found: PrefixPartials,
    own: torch.Tensor,
    sums: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the average of what was found in the prefixes and in the rest, `own` float32 [T, count * dim] with the
    logarithms to base 2 of the sums of weights, `sums` [T, count], to `out` [T, count * dim]. Parts are added in the
    order of the splits. dim: of values."""
    assert queries.prefixes is not None
    rows, dim = queries.num_queries * (heads.count // heads.kv), out.shape[1] // heads.count
    most = 16 if dim <= 256 else 4  # as many as registers hold
    tile = min(most, next_power_of_2(rows))
    merge_prefixes_kernel[(heads.kv * cdiv(rows, tile), len(queries.lengths))](
        own, sums, *found, work.places, queries.prefixes.lengths,
        None if queries.packed is None else queries.packed.firsts, out,
        queries.num_queries, found.sums.shape[1],
        KV=heads.kv, GROUP=heads.count // heads.kv, DIM=dim, HALF=tile_side(dim // 2), ROWS=tile, PARTS=4,
        num_warps=max(1, 4 * tile // most), **pdl(out),
    )  # fmt: skip


def prefix_attention(
    queries: DecodeQueries, inputs: AttentionInputs, launch: PrefixLaunch, work: PrefixWork
) -> PrefixPartials:
    """Attention of `queries` to the keys of their `prefixes`; it leaves sequences without one out."""
    qkv, heads, positions, keys, values, k_scale, v_scale = inputs
    prefixes, tile, half = queries.prefixes, launch.tile, tile_side(heads.dim // 2)
    assert prefixes is not None
    outputs = torch.empty(heads.kv, launch.lines, 2 * half, dtype=torch.float32, device=qkv.device)
    sums = torch.empty(heads.kv, launch.lines, dtype=torch.float32, device=qkv.device)
    if tile.gluon:
        from specbatch.kernels.attention.verify.prefix_attention_gluon import prefix_attention as launch_gluon

        launch_gluon(queries, inputs, launch, work, outputs, sums)
        return PrefixPartials(outputs, sums)
    if launch.source == "pages":
        keys, values = (
            TensorDescriptor.from_tensor(x.view(-1, heads.kv * heads.dim), [tile.block_n, heads.dim])
            for x in (keys, values)
        )
    prefix_attention_kernel[(heads.kv, launch.programs)](
        qkv, keys, values, k_scale, v_scale, queries.page_table, queries.slots, queries.lengths,
        None if queries.packed is None else queries.packed.firsts, None if queries.ancestors is None else positions,
        prefixes.members, work.items, work.end, heads.q_norm, heads.cos, heads.sin, outputs, sums,
        queries.num_queries, queries.first_node, queries.page_table.shape[1], launch.lines, heads.eps,
        heads.dim**-0.5 * LOG2E,
        KV=heads.kv, GROUP=heads.count // heads.kv, DIM=heads.dim, HALF=half, PAGE=queries.page_size,
        SOURCE=launch.source, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, SHARED=heads.shared,
        FP8=inputs.k_cache.dtype.itemsize == 1, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        **pdl(qkv),
    )  # fmt: skip
    return PrefixPartials(outputs, sums)
