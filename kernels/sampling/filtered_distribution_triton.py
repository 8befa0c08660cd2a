"""Sort-free top-k, top-p and min-p filtering in Triton; probabilities are not materialized.

The filter of a row follows from a search over values: the smallest logit that stays is the largest value whose tokens,
together with all greater ones, reach k in number or top-p in probability. How many tokens of exactly that value stay
follows from what is missing. Before the search, one pass over the row bounds the value from below (each lane's greatest
logit: what these few reach, all of them reach). The logits above the bound are usually a short list, which is then
searched instead of the row.

The sums are added in another order than the reference's and may put a token on the other side of a cut; both are right
to some 1e-6.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, next_power_of_2
from specbatch.kernels.sampling.accept_triton import argmax_partials, unpack
from specbatch.kernels.sampling.filtered_distribution import SamplingTensors

BLOCK = 8192  # logits that a program handles at once, and the longest list
WARPS = 16  # 32 are slower, by 9 to 60 us a call
# Columns of a row's filter, float64 [rows, 8]. Token `id` of logit x has weight exp2((x - PEAK) * SCALE) if that is at
# least FLOOR and x > CUT, or x == CUT and id <= LAST. SCALE 0: ARGMAX has all the weight.
PEAK, _SCALE, _FLOOR, _CUT, _LAST, ARGMAX = (tl.constexpr(column) for column in range(6))
COLUMNS = tl.constexpr(8)


@triton.jit
def _to_key(x, SHIFT: tl.constexpr):
    """int32 that orders like x; SHIFT: bits that are 0 in every x."""
    bits = x.to(tl.int32, bitcast=True) >> SHIFT
    return bits ^ ((bits >> 31) & (0x7FFFFFFF >> SHIFT))


@triton.jit
def _to_value(key, SHIFT: tl.constexpr):
    bits = (key ^ ((key >> 31) & (0x7FFFFFFF >> SHIFT))) << SHIFT
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load(source, at, count):
    return tl.load(source + at, at < count, other=-float("inf")).to(tl.float32)


@triton.jit
def _weight(x, peak, scale):
    """exp((x - peak) / temperature); with scale 0 each possible token counts 1."""
    return tl.where(x > -float("inf"), tl.exp2((x - peak) * scale), 0.0)


@triton.jit
def _between(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _search(source, count, low, peak, scale, target, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """The largest value, `low` at least, of which logits >= value weigh `target`; and what those > value weigh."""
    lane = tl.arange(0, BLOCK)
    low_key, high_key = _to_key(low, SHIFT), _to_key(peak, SHIFT) + 1
    heavier = target * 0.0
    while low_key + 1 < high_key:  # four parts in each pass
        middle = _between(low_key, high_key)
        left, right = _between(low_key, middle), _between(middle, high_key)
        value1, value2, value3 = _to_value(left, SHIFT), _to_value(middle, SHIFT), _to_value(right, SHIFT)
        sums1 = tl.zeros([BLOCK], tl.float32)
        sums2 = tl.zeros([BLOCK], tl.float32)
        sums3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, count, BLOCK):
            x = load(source, start + lane, count)
            weight = _weight(x, peak, scale)
            sums1 += tl.where(x >= value1, weight, 0.0)
            sums2 += tl.where(x >= value2, weight, 0.0)
            sums3 += tl.where(x >= value3, weight, 0.0)
        weight1, weight2, weight3 = tl.sum(sums1, 0), tl.sum(sums2, 0), tl.sum(sums3, 0)
        is1, is2, is3 = (weight1 >= target) | (left == low_key), weight2 >= target, weight3 >= target
        low_key = tl.where(is3, right, tl.where(is2, middle, tl.where(is1, left, low_key)))
        high_key = tl.where(is3, high_key, tl.where(is2, right, tl.where(is1, middle, left)))
        heavier = tl.where(is3, heavier, tl.where(is2, weight3, tl.where(is1, weight2, weight1)))
    return _to_value(low_key, SHIFT), heavier


@triton.jit
def _nth_equal(source, ids, count, value, nth, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Id of the nth logit, counted from 1, that equals value; a large number if there are fewer."""
    lane = tl.arange(0, BLOCK)
    found = (nth * 0).to(tl.int32) + 0x7FFFFFFF
    start = 0
    while start < count:
        at = start + lane
        equal = (load(source, at, count) == value) & (at < count)
        here = tl.sum(equal.to(tl.int32), 0)
        if here >= nth:
            rank = tl.cumsum(equal.to(tl.int32), 0)
            chosen = at
            if LISTED:
                chosen = tl.load(ids + at)
            found = tl.min(tl.where(equal & (rank == nth), chosen, 0x7FFFFFFF), 0)
            start = count
        nth -= here
        start += BLOCK
    return found


@triton.jit
def _cut_at(
    source, ids, count, low, top_k, top_p, total, peak, scale,
    LISTED: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The smallest logit that top-k, then top-p leave, and the last id of those that equal it.

    source: the row, or a list of all its logits >= low with their ids; total: weight of the row.
    """
    cut = low
    equal = (top_k * 0).to(tl.int32) + 0x7FFFFFFF  # how many that equal the cut stay
    if top_k > 0:
        cut, more = _search(source, count, low, peak, scale * 0, top_k.to(tl.float32), BLOCK, SHIFT)
        equal = top_k.to(tl.int32) - more.to(tl.int32)
        lane = tl.arange(0, BLOCK)
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, count, BLOCK):
            x = load(source, start + lane, count)
            sums += tl.where(x > cut, _weight(x, peak, scale), 0.0)
        total = tl.sum(sums, 0) + _weight(cut, peak, scale) * equal
    if top_p < 1:
        target = tl.maximum(top_p * total, 1e-30)
        low = cut
        cut, more = _search(source, count, low, peak, scale, target, BLOCK, SHIFT)
        # The most likely token always stays.
        stay = tl.ceil(tl.minimum((target - more) / _weight(cut, peak, scale), 1e9)).to(tl.int32)
        equal = tl.minimum(tl.maximum(stay, 1), tl.where(cut == low, equal, 0x7FFFFFFF))
    return cut, _nth_equal(source, ids, count, cut, equal, LISTED, BLOCK)


@triton.jit
def _filter_kernel(
    logits,
    partials,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    dists,
    values,  # [rows, BLOCK] in the logits' type: the list
    ids,  # int32 [rows, BLOCK]
    vocabulary,
    per_sequence,
    chunks,
    BLOCK_CHUNKS: tl.constexpr,
    TRUNCATED: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    sequence = row // per_sequence
    chunk = tl.arange(0, BLOCK_CHUNKS)
    best = tl.max(tl.load(partials + row * chunks + chunk, chunk < chunks, other=-(1 << 63)), 0)
    peak, likeliest = unpack(best)
    temperature = tl.load(temperatures + sequence)
    scale = 1.4426950408889634 / tl.minimum(tl.maximum(temperature, 1e-30), 1e30)
    scale = tl.where(temperature > 0, scale, 0.0)
    cut = peak * 0 - float("inf")
    last = (likeliest * 0).to(tl.int32) + 0x7FFFFFFF
    floor = scale * 0

    if TRUNCATED:
        floor = tl.load(min_ps + sequence)
        top_k, top_p = tl.load(top_ks + sequence), tl.load(top_ps + sequence)
        top_k = tl.where(top_k < vocabulary, top_k, 0)
        if (scale > 0) & (tl.abs(peak) < float("inf")) & ((top_k > 0) | (top_p < 1)):
            logits += row * vocabulary
            values += row * BLOCK
            ids += row * BLOCK
            lane = tl.arange(0, BLOCK)
            greatest = tl.full([BLOCK], -float("inf"), tl.float32)
            sums = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocabulary, BLOCK):
                x = load(logits, start + lane, vocabulary)
                greatest = tl.maximum(greatest, x)
                sums += _weight(x, peak, scale)
            total = tl.sum(sums, 0)

            # A bound from the lanes' greatest: as many tokens reach it, or as likely ones.
            bound_scale = tl.where(top_k > 0, 0.0, scale)
            target = tl.where(top_k > 0, top_k.to(tl.float32), top_p * total * 1.0001)
            length = BLOCK + 1
            low = peak * 0 - float("inf")
            if tl.sum(_weight(greatest, peak, bound_scale), 0) >= target:
                tl.store(values + lane, greatest.to(values.dtype.element_ty))
                tl.debug_barrier()
                low, _ = _search(values, BLOCK, low, peak, bound_scale, target, BLOCK, SHIFT)
                tl.debug_barrier()
                tl.store(values + lane, tl.full([BLOCK], -float("inf"), values.dtype.element_ty))
                tl.debug_barrier()
                length = 0
                for start in range(0, vocabulary, BLOCK):
                    at = start + lane
                    x = tl.load(logits + at, at < vocabulary, other=-float("inf"))
                    stays = (x.to(tl.float32) >= low) & (at < vocabulary)
                    here = tl.sum(stays.to(tl.int32), 0)
                    if (here > 0) & (length + here <= BLOCK):
                        to = length + tl.cumsum(stays.to(tl.int32), 0) - 1
                        tl.store(values + to, x, stays)
                        tl.store(ids + to, at, stays)
                    length += here
                tl.debug_barrier()
            if length <= BLOCK:
                cut, last = _cut_at(values, ids, BLOCK, low, top_k, top_p, total, peak, scale, True, BLOCK, SHIFT)
            else:
                cut, last = _cut_at(logits, ids, vocabulary, low, top_k, top_p, total, peak, scale, False, BLOCK, SHIFT)

    dists += row * COLUMNS
    tl.store(dists + PEAK, peak.to(tl.float64))
    tl.store(dists + _SCALE, scale.to(tl.float64))
    tl.store(dists + _FLOOR, floor.to(tl.float64))
    tl.store(dists + _CUT, cut.to(tl.float64))
    tl.store(dists + _LAST, last.to(tl.float64))
    tl.store(dists + ARGMAX, likeliest.to(tl.float64))


@triton.jit
def kept(x, ids, dist):
    """Weights, float32, of tokens `ids` of logits x under the filter `dist`; 0 for dropped tokens."""
    scale = tl.load(dist + _SCALE).to(tl.float32)
    weight = _weight(x, tl.load(dist + PEAK).to(tl.float32), scale)
    cut = tl.load(dist + _CUT).to(tl.float32)
    stays = (x > cut) | ((x == cut) & (ids <= tl.load(dist + _LAST).to(tl.int32)))
    stays = stays & (weight >= tl.load(dist + _FLOOR).to(tl.float32))
    likeliest = (ids == tl.load(dist + ARGMAX).to(tl.int32)).to(tl.float32)
    return tl.where(scale > 0, tl.where(stays, weight, 0.0), likeliest)


@triton.jit
def total_weight(sums, blocks, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    return tl.sum(tl.load(sums + block, block < blocks, other=0.0), 0)


@triton.jit
def _sums_kernel(logits, dists, sums, vocabulary, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous_kernel(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    weight = kept(load(logits + row * vocabulary, at, vocabulary), at, dists + row * COLUMNS)
    tl.store(sums + row * tl.num_programs(1) + block, tl.sum(weight.to(tl.float64), 0))


@triton.jit
def _probabilities_kernel(
    logits, dists, sums, p, vocabulary, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous_kernel(PDL)
    row, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = kept(load(logits + row * vocabulary, at, vocabulary), at, dists + row * COLUMNS)
    total = total_weight(sums + row * blocks, blocks, BLOCKS).to(tl.float32)
    tl.store(p + row * vocabulary + at, weight / total, at < vocabulary)


class FilteredDistribution(NamedTuple):
    """The filtered distributions of logits [B * n, V]; probabilities are not materialized.

    logits [B * n, V]; columns float64 [B * n, 8]; sums float64 [B * n, blocks]: weights of each `block` of tokens.
    """

    logits: torch.Tensor
    columns: torch.Tensor
    sums: torch.Tensor
    block: int


def filter_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    truncated: bool,
    block: int = BLOCK,
    warps: int = WARPS,
) -> FilteredDistribution:
    """The filtered distributions of contiguous logits [B * n, V], as `probabilities_ref`, in three launches.

    temperature, top_p and min_p: float32 [B]; top_k: int64 [B], 0 is off. truncated: some row uses one of the three;
    else they are not read.
    """
    rows, vocabulary = logits.shape
    device = logits.device
    partials = argmax_partials(logits)
    columns = torch.empty(rows, COLUMNS.value, dtype=torch.float64, device=device)
    listed = rows if truncated else 0
    _filter_kernel[(rows,)](
        logits, partials, temperature, top_k, top_p, min_p, columns,
        torch.empty(listed, block, dtype=logits.dtype, device=device),
        torch.empty(listed, block, dtype=torch.int32, device=device), vocabulary, rows // len(temperature),
        partials.shape[1],
        BLOCK_CHUNKS=max(64, next_power_of_2(partials.shape[1])), TRUNCATED=truncated,
        SHIFT={torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[logits.dtype], BLOCK=block,
        num_warps=warps if truncated else 1, **pdl(logits),
    )  # fmt: skip
    blocks = cdiv(vocabulary, block)
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=device)
    _sums_kernel[(rows, blocks)](logits, columns, sums, vocabulary, BLOCK=block, num_warps=8, **pdl(logits))
    return FilteredDistribution(logits, columns, sums, block)


def launch_settings(dist: FilteredDistribution) -> dict[str, Any]:
    """Launch arguments of kernels that read a distribution."""
    return {"BLOCKS": next_power_of_2(dist.sums.shape[1]), **pdl(dist.logits)}


def probabilities(dist: FilteredDistribution) -> torch.Tensor:
    """The probabilities, materialized: float32 [B * n, V]."""
    p = torch.empty(dist.logits.shape, dtype=torch.float32, device=dist.logits.device)
    _probabilities_kernel[dist.sums.shape](
        *dist[:3], p, p.shape[1], BLOCK=dist.block, num_warps=8, **launch_settings(dist)
    )
    return p


def sampling_distribution(logits: torch.Tensor, sampling: SamplingTensors) -> FilteredDistribution:
    """`filter_logits` of logits [B, n, V] with the parameters of B rows."""
    parameters = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return filter_logits(logits.flatten(0, 1).contiguous(), *parameters, truncated=sampling.flags.truncated)
