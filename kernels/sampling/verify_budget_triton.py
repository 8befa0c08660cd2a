"""Triton kernels of `verify_budget`, one launch each.

`spend` is a single program, which holds the values of all drafts: at 128 requests with 15 drafts each these are 2,048
numbers. Each draft has a key that orders them by value, position and request; no two are equal. The smallest key that
is chosen is found bit by bit, by counting the keys that are not below it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.packed_rows import PackedRows
from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import next_power_of_2
from specbatch.kernels.sampling.accept import Proposal
from specbatch.kernels.sampling.verify_budget import GUESS, GUESSED, KINDS, LEVELS, MEMORY, MOST, PLACES, WEIGHT

VALUE_BITS = 30  # enough for 1 + the bit pattern of a float32 between 0 and 1


@triton.jit(do_not_specialize=["batch", "total", "columns"])
def spend_kernel(
    counts, recent, slots, drafted, confidence, temperature, verified, levels, values, places, rows, firsts, batch,
    total, columns, spacing, draft_spacing,
    DRAFTS: tl.constexpr, BATCH: tl.constexpr, NODES: tl.constexpr, VALUE_BITS: tl.constexpr, TIE_BITS: tl.constexpr,
    LEVELS: tl.constexpr, PLACES: tl.constexpr, WEIGHT: tl.constexpr, GUESS: tl.constexpr, GUESSED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    request, place = tl.arange(0, BATCH), tl.arange(0, NODES)
    real = request < batch
    is_draft = real[:, None] & (place < DRAFTS)[None, :]
    cell = request[:, None] * DRAFTS + place[None, :]
    slot = tl.load(slots + request, real, other=0)
    limit = tl.load(drafted + request, real, other=0)
    if confidence is None:
        compared = tl.load(recent + slot, real, other=0.0)
        accepted = tl.load(recent + columns + slot, real, other=0.0)
        sure = tl.div_rn(accepted + GUESS * GUESSED, compared + GUESSED)[:, None] + tl.zeros([BATCH, NODES], tl.float32)
    else:
        apart = request[:, None] * spacing + place[None, :] * draft_spacing
        sure = tl.load(confidence + apart, is_draft, other=0.0)
    sure = tl.where(sure > 0.0, tl.minimum(sure, 1.0), 0.0)  # 0 for NaN
    level = tl.minimum((sure * LEVELS).to(tl.int64), LEVELS - 1)
    level += LEVELS * ((place > 0).to(tl.int64) + (place > 1).to(tl.int64) + (place > 3).to(tl.int64))[None, :]
    if temperature is not None:
        level += tl.where(tl.load(temperature + request, real, other=0.0) > 0.0, LEVELS * PLACES, 0)[:, None]
    level = tl.where((slot == 0)[:, None], 2 * LEVELS * PLACES, level)
    tl.store(levels + cell, level, is_draft)
    compared = tl.load(counts + level, is_draft, other=0).to(tl.float32)
    accepted = tl.load(counts + 2 * LEVELS * PLACES + 1 + level, is_draft, other=0).to(tl.float32)
    conditional = tl.div_rn(accepted + WEIGHT * sure, compared + WEIGHT).to(tl.float64)
    # One factor after the other: a scan would round the products in another order.
    product = tl.full([BATCH], 1.0, tl.float64)
    value = tl.zeros([BATCH, NODES], tl.float32)
    for draft in range(DRAFTS):
        product *= tl.sum(tl.where((place == draft)[None, :], conditional, 0.0), 1)
        value = tl.where((place == draft)[None, :], product.to(tl.float32)[:, None], value)

    counted = place[None, :] < tl.where(slot > 0, limit, 0)[:, None]
    if values is not None:
        tl.store(values + cell, tl.where(counted, value, -1.0), is_draft)
    key = tl.where(counted, value.to(tl.int32, bitcast=True) + 1, 0).to(tl.int64) << TIE_BITS
    key += BATCH * NODES - 1 - (place[None, :] * BATCH + request[:, None])
    key = tl.where(is_draft, key, -1)
    least = tl.zeros([], tl.int64)
    for step in range(VALUE_BITS + TIE_BITS):
        more = least | (tl.full([], 1, tl.int64) << (VALUE_BITS + TIE_BITS - 1 - step))
        above = tl.sum(tl.sum((key >= more).to(tl.int32), 1), 0)
        least = tl.where(above >= total - batch, more, least)

    count = tl.sum((key >= least).to(tl.int32), 1)
    tl.store(verified + request, tl.minimum(count, limit), real)
    nodes = tl.where(real, count + 1, 0)
    last = tl.cumsum(nodes, 0)
    first = last - nodes
    tl.store(firsts + request + 1, last, real)
    tl.store(firsts, 0)
    exists = place[None, :] < nodes[:, None]
    node = request[:, None] * (DRAFTS + 1) + place[None, :]
    row = first[:, None] + tl.where(exists, place[None, :], 0)
    tl.store(rows + node, row, real[:, None] & (place <= DRAFTS)[None, :])
    tl.store(places + row, node, exists)


def warps_for(drafts: int) -> int:
    """For a program that holds so many drafts, a power of two: 16 of a thread, while there are threads."""
    return min(16, max(1, drafts // 512))


def spend(
    counts: torch.Tensor,
    recent: torch.Tensor,
    slots: torch.Tensor,
    proposal: Proposal,
    temperature: torch.Tensor | None,
    total: int,
    *,
    with_values: bool = False,
) -> Proposal:
    """`verify_budget.spend_ref`; confidence may be strided."""
    batch, most = proposal.tokens.shape
    assert batch <= total <= batch * (most + 1), "every request has its newest token verified, and at most all drafts"
    confidence = proposal.confidence
    verified, levels = torch.empty_like(slots), slots.new_empty(batch, most)
    values = torch.empty(batch, most, dtype=torch.float32, device=slots.device) if with_values else None
    places, rows, firsts = (slots.new_empty(size) for size in (total, batch * (most + 1), batch + 1))
    block, nodes = next_power_of_2(batch), next_power_of_2(most + 1)
    spend_kernel[(1,)](
        counts, recent, slots, proposal.drafted, confidence, temperature, verified, levels, values, places, rows,
        firsts, batch, total, recent.stride(0), *((0, 0) if confidence is None else confidence.stride()),
        DRAFTS=most, BATCH=block, NODES=nodes, VALUE_BITS=VALUE_BITS, TIE_BITS=(block * nodes).bit_length() - 1,
        LEVELS=LEVELS, PLACES=PLACES, WEIGHT=WEIGHT, GUESS=GUESS, GUESSED=GUESSED, num_warps=warps_for(block * nodes),
        enable_fp_fusion=False, **pdl(slots),
    )  # fmt: skip
    return proposal._replace(drafted=verified, packed=PackedRows(places, rows, firsts), levels=levels, values=values)


@triton.jit(do_not_specialize=["batch", "columns"])
def learn_kernel(
    counts, recent, slots, verified, levels, accepted, batch, columns, spacing,
    DRAFTS: tl.constexpr, KINDS: tl.constexpr, MOST: tl.constexpr, MEMORY: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each program counts the drafts of one level; the first one also writes `recent`."""
    wait_for_previous_kernel(PDL)
    level = tl.program_id(0)
    compared, right = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for start in range(0, batch * DRAFTS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < batch * DRAFTS
        request, place = at // DRAFTS, at % DRAFTS
        here = inside & (tl.load(levels + at, inside, other=-1) == level)
        took = tl.load(accepted + request * spacing, here, other=0)
        tried = tl.minimum(took + 1, tl.load(verified + request, here, other=0))
        compared += (here & (place < tried)).to(tl.int64)
        right += (here & (place < took)).to(tl.int64)
    all_compared = tl.load(counts + level) + tl.sum(compared, 0)
    all_right = tl.load(counts + KINDS + level) + tl.sum(right, 0)
    shift = tl.where(all_compared < MOST, 0, 1)
    tl.store(counts + level, all_compared >> shift)
    tl.store(counts + KINDS + level, all_right >> shift)
    if level == 0:
        for start in range(0, batch, BLOCK):
            request = start + tl.arange(0, BLOCK)
            slot = tl.load(slots + request, request < batch, other=0)
            real = slot > 0
            took = tl.load(accepted + request * spacing, real, other=0)
            tried = tl.minimum(took + 1, tl.load(verified + request, real, other=0))
            for row in tl.static_range(2):
                late = recent + row * columns + slot
                number = (took if row else tried).to(tl.float32)
                tl.store(late, tl.load(late, real, other=0.0) * MEMORY + number, real)


def learn(
    counts: torch.Tensor, recent: torch.Tensor, slots: torch.Tensor, proposal: Proposal, accepted: torch.Tensor
) -> None:
    """`verify_budget.learn_ref`; accepted may be strided."""
    levels = proposal.levels
    assert levels is not None, "no budget was spent on it"
    batch, most = levels.shape
    learn_kernel[(KINDS,)](
        counts, recent, slots, proposal.drafted, levels, accepted, batch, recent.stride(0),
        accepted.stride(0),
        DRAFTS=most, KINDS=KINDS, MOST=MOST, MEMORY=MEMORY, BLOCK=min(1024, next_power_of_2(batch * most)),
        enable_fp_fusion=False, **pdl(slots),
    )  # fmt: skip
