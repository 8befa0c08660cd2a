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

from specbatch.kernels.attention.queries import AttentionInputs, DecodeQueries, QKVLayout
from specbatch.kernels.attention.stored_kv_triton import power_of_two
from specbatch.kernels.attention.verify.prefix_attention_configs import LEAST_KEYS, PrefixLaunch, PrefixTile
from specbatch.kernels.attention.verify.rotated_heads_triton import halves, rotate, turn, whole_heads
from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, next_power_of_2, tile_side


class PrefixPartials(NamedTuple):
    """What attention to prefixes leaves for `verify_attention`.

    outputs  float32 [KV heads, lines, width]: averages of values, normalized
    sums     float32 [KV heads, lines]: logarithms to base 2 of the sums of weights
    places   int32 [B, 3]: for sequences with a prefix, the line of their first row (the rows of a sequence are token by
             token, and query head by query head), how many lines later the next split is, and the number of splits
    """

    outputs: torch.Tensor
    sums: torch.Tensor
    places: torch.Tensor
    lines: int


@triton.jit
def prefix_attention_kernel(
    qkv, keys, values, k_scale, v_scale, page_table, slots, lengths, firsts, positions, prefix_members, groups, q_norm,
    cos, sin, outputs, sums, places, n, first_node, width, lines, eps, scale,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    SOURCE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
    SHARED: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SOURCE of keys and values: "slots", gathered from the caches; "pages", bulk copies of (parts of) pages."""
    PADDED: tl.constexpr = 2 * HALF
    WIDTH: tl.constexpr = KV * (GROUP if SHARED else GROUP + 2) * DIM  # of a row of qkv
    head, programs = tl.program_id(0), tl.num_programs(1)
    own = n * GROUP  # rows of a sequence
    group = tl.arange(0, GROUPS)
    counts, reach = tl.load(groups + GROUPS + group), tl.load(groups + 2 * GROUPS + group)
    tiles = tl.cdiv(counts * own, BLOCK_M)
    least = tl.maximum(tl.cdiv(tl.sum(tiles * reach), programs), LEAST)
    splits = tl.maximum(reach // least, 1)
    ends = tl.cumsum(tiles * splits)
    both = tl.arange(0, PADDED)
    column, inside = both % HALF + both // HALF * (DIM // 2), both % HALF < DIM // 2
    # Also where there is nothing to do: `verify_attention` reads qkv as soon as all programs have passed here.
    wait_for_previous_kernel(PDL)
    for item in range(tl.program_id(1), tl.sum(tiles * splits), programs):
        mine = group == tl.sum((ends <= item).to(tl.int32))
        count, prefix = tl.sum(tl.where(mine, counts, 0)), tl.sum(tl.where(mine, reach, 0))
        own_tiles, own_splits = tl.sum(tl.where(mine, tiles, 0)), tl.sum(tl.where(mine, splits, 0))
        begin = tl.sum(tl.where(mine, ends, 0)) - own_tiles * own_splits  # the first item of the group
        members = prefix_members + tl.sum(tl.where(mine, tl.load(groups + group), 0))
        split, tile = (item - begin) // own_tiles, (item - begin) % own_tiles

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

        share = tl.cdiv(tl.cdiv(prefix, own_splits), BLOCK_N) * BLOCK_N
        low = split * share
        high = tl.minimum(low + share, prefix)
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
        if (head == 0) & (split == 0):
            opens = live & (row % own == 0)
            tl.store(places + sequence * 3, begin * BLOCK_M + row, opens)
            tl.store(places + sequence * 3 + 1, tl.zeros_like(row) + own_tiles * BLOCK_M, opens)
            tl.store(places + sequence * 3 + 2, tl.zeros_like(row) + own_splits, opens)


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
        line = lines * head.to(tl.int64) + tl.load(places + sequence * 3) + row
        apart, splits = tl.load(places + sequence * 3 + 1), tl.load(places + sequence * 3 + 2)
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
    found: PrefixPartials,
    own: torch.Tensor,
    sums: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the average of what was found in the prefixes and in the rest, `own` float32 [T, count * dim] with the
    logarithms to base 2 of the sums of weights, `sums` [T, count], to `out` [T, count * dim]. Parts are added in the
    order of the splits."""
    assert queries.prefixes is not None
    rows = queries.num_queries * (heads.count // heads.kv)
    tile = min(16, next_power_of_2(rows))
    merge_prefixes_kernel[(heads.kv * cdiv(rows, tile), len(queries.lengths))](
        own, sums, *found[:3], queries.prefixes.lengths, None if queries.packed is None else queries.packed.firsts, out,
        queries.num_queries, found.lines,
        KV=heads.kv, GROUP=heads.count // heads.kv, DIM=heads.dim, HALF=tile_side(heads.dim // 2), ROWS=tile, PARTS=4,
        num_warps=max(1, tile // 4), **pdl(out),
    )  # fmt: skip


def prefix_attention(queries: DecodeQueries, inputs: AttentionInputs, tile: PrefixTile | None = None) -> PrefixPartials:
    """Attention of `queries` to the keys of their `prefixes`; it leaves sequences without one out. tile: chosen by the
    sizes if None."""
    qkv, heads, positions, keys, values, k_scale, v_scale = inputs
    prefixes, launch, half = queries.prefixes, PrefixLaunch.of(queries, inputs, tile), tile_side(heads.dim // 2)
    assert prefixes is not None
    tile = launch.tile
    cells = torch.empty(heads.kv * launch.lines * (2 * half + 1), dtype=torch.float32, device=qkv.device)
    outputs, sums = cells.split([heads.kv * launch.lines * 2 * half, heads.kv * launch.lines])
    places = torch.empty(len(queries.lengths), 3, dtype=torch.int32, device=qkv.device)
    if launch.source == "pages":
        keys, values = (
            TensorDescriptor.from_tensor(x.view(-1, heads.kv * heads.dim), [tile.block_n, heads.dim])
            for x in (keys, values)
        )
    prefix_attention_kernel[(heads.kv, launch.programs)](
        qkv, keys, values, k_scale, v_scale, queries.page_table, queries.slots, queries.lengths,
        None if queries.packed is None else queries.packed.firsts, None if queries.ancestors is None else positions,
        prefixes.members, prefixes.groups, heads.q_norm, heads.cos, heads.sin, outputs, sums, places,
        queries.num_queries, queries.first_node, queries.page_table.shape[1], launch.lines, heads.eps,
        heads.dim**-0.5 * 1.4426950408889634,
        KV=heads.kv, GROUP=heads.count // heads.kv, DIM=heads.dim, HALF=half, PAGE=queries.page_size,
        SOURCE=launch.source, GROUPS=prefixes.groups.shape[1], BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        LEAST=max(LEAST_KEYS, tile.block_n), SHARED=heads.shared, FP8=inputs.k_cache.dtype.itemsize == 1,
        num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=tile.registers, **pdl(qkv),
    )  # fmt: skip
    return PrefixPartials(outputs, sums, places, launch.lines)
