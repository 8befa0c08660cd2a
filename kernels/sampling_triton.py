"""Draws from truncated distributions without sorting: `sampling.probabilities_ref` and `draw_ref` in four launches.

A row's law is found by a search over values: the smallest logit that stays is the largest value whose tokens, together
with all greater ones, reach k in number or top-p in probability; how many of those that equal it stay follows from
what is missing. Before that, one pass over the row bounds the value from below (each lane's greatest logit: what those
few reach, all reach), and what lies above the bound is mostly a short list, which is then searched in place of the row.

Nothing depends on the number of programs. Where the reference's and these sums, of other order, put a token on two
sides of a cut or a coin, the two differ; both are right to some 1e-6.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from specbatch.kernels.accept import argmax_partials, unpack
from specbatch.kernels.coins import coin_bits
from specbatch.kernels.sampling import ACCEPT, RESIDUAL, offset_of

_BLOCK = 8192  # logits that one program looks at together, and the longest list
_WARPS = 16
_STAGES = tl.constexpr(3)  # blocks on their way while one is summed
# Columns of a law, float64 [rows, 8]. Token `id` of logit x has weight exp2((x - PEAK) * SCALE) if that is at least
# FLOOR and x > CUT, or x == CUT and id <= LAST. SCALE 0: LIKELIEST has all the weight.
_PEAK, _SCALE, _FLOOR, _CUT, _LAST, _LIKELIEST = (tl.constexpr(column) for column in range(6))
_COLUMNS = tl.constexpr(8)
_ACCEPT, _RESIDUAL = tl.constexpr(offset_of(ACCEPT)), tl.constexpr(offset_of(RESIDUAL))


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
def _load(source, at, count):
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
        for start in tl.range(0, count, BLOCK, num_stages=_STAGES):
            x = _load(source, start + lane, count)
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
        equal = (_load(source, at, count) == value) & (at < count)
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
    source,
    ids,
    count,
    low,
    top_k,
    top_p,
    total,
    peak,
    scale,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
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
        for start in tl.range(0, count, BLOCK, num_stages=_STAGES):
            x = _load(source, start + lane, count)
            sums += tl.where(x > cut, _weight(x, peak, scale), 0.0)
        total = tl.sum(sums, 0) + _weight(cut, peak, scale) * equal
    if top_p < 1:
        target = tl.maximum(top_p * total, 1e-30)
        low = cut
        cut, more = _search(source, count, low, peak, scale, target, BLOCK, SHIFT)
        # The likeliest token always stays.
        stay = tl.ceil(tl.minimum((target - more) / _weight(cut, peak, scale), 1e9)).to(tl.int32)
        equal = tl.minimum(tl.maximum(stay, 1), tl.where(cut == low, equal, 0x7FFFFFFF))
    return cut, _nth_equal(source, ids, count, cut, equal, LISTED, BLOCK)


@triton.jit
def _law_kernel(
    logits,
    partials,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    laws,
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
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
            for start in tl.range(0, vocabulary, BLOCK, num_stages=_STAGES):
                x = _load(logits, start + lane, vocabulary)
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

    laws += row * _COLUMNS
    tl.store(laws + _PEAK, peak.to(tl.float64))
    tl.store(laws + _SCALE, scale.to(tl.float64))
    tl.store(laws + _FLOOR, floor.to(tl.float64))
    tl.store(laws + _CUT, cut.to(tl.float64))
    tl.store(laws + _LAST, last.to(tl.float64))
    tl.store(laws + _LIKELIEST, likeliest.to(tl.float64))


@triton.jit
def _kept(x, ids, law):
    """Weights, float32, of tokens `ids` of logits x under the law at that place; 0 for what it drops."""
    scale = tl.load(law + _SCALE).to(tl.float32)
    weight = _weight(x, tl.load(law + _PEAK).to(tl.float32), scale)
    cut = tl.load(law + _CUT).to(tl.float32)
    stays = (x > cut) | ((x == cut) & (ids <= tl.load(law + _LAST).to(tl.int32)))
    stays = stays & (weight >= tl.load(law + _FLOOR).to(tl.float32))
    likeliest = (ids == tl.load(law + _LIKELIEST).to(tl.int32)).to(tl.float32)
    return tl.where(scale > 0, tl.where(stays, weight, 0.0), likeliest)


@triton.jit
def _total(sums, blocks, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    return tl.sum(tl.load(sums + block, block < blocks, other=0.0), 0)


@triton.jit
def _sums_kernel(logits, laws, sums, vocabulary, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    weight = _kept(_load(logits + row * vocabulary, at, vocabulary), at, laws + row * _COLUMNS)
    tl.store(sums + row * tl.num_programs(1) + block, tl.sum(weight.to(tl.float64), 0))


@triton.jit
def _probabilities_kernel(
    logits, laws, sums, p, vocabulary, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = _kept(_load(logits + row * vocabulary, at, vocabulary), at, laws + row * _COLUMNS)
    total = _total(sums + row * blocks, blocks, BLOCKS).to(tl.float32)
    tl.store(p + row * vocabulary + at, weight / total, at < vocabulary)


@triton.jit
def _rest(logits, q, at, vocabulary, law, total):
    """max(p - q, 0) of tokens `at`; 0 behind the vocabulary."""
    p = _kept(_load(logits, at, vocabulary), at, law) / total.to(tl.float32)
    return tl.where(at < vocabulary, tl.maximum(p - tl.load(q + at, at < vocabulary, other=0.0), 0.0), 0.0)


@triton.jit
def _block_of(sums, blocks, coin, BLOCKS: tl.constexpr):
    """Where inversion ends: the block, the sum to exceed in it, counted from its start."""
    block = tl.arange(0, BLOCKS)
    running = tl.cumsum(tl.load(sums + block, block < blocks, other=0.0), 0)
    target = coin * tl.max(running, 0)
    passed = running <= target
    return tl.minimum(tl.sum(passed.to(tl.int32), 0), blocks - 1), target - tl.max(tl.where(passed, running, 0.0), 0)


@triton.jit
def _invert(weight, at, target, otherwise):
    """The first of tokens `at` at which the running sum of weight exceeds target."""
    weight = weight.to(tl.float64)
    first = tl.min(tl.where((tl.cumsum(weight, 0) > target) & (weight > 0), at, 0x7FFFFFFF), 0)
    final = tl.max(tl.where(weight > 0, at, -1), 0)  # sums in another order differ in their last bits
    token = tl.minimum(first, final)
    return tl.where(token >= 0, token, otherwise)  # NaN logits


@triton.jit
def _unit(bits):
    return bits.to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def _draw_kernel(
    logits,
    laws,
    sums,
    seeds,
    positions,
    tokens,
    sound,
    vocabulary,
    per_sequence,
    blocks,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    law = laws + row * _COLUMNS
    coin = _unit(coin_bits(tl.load(seeds + row // per_sequence), tl.load(positions + row), OFFSET))
    block, target = _block_of(sums + row * blocks, blocks, coin, BLOCKS)
    at = block * BLOCK + tl.arange(0, BLOCK)
    weight = tl.where(at < vocabulary, _kept(_load(logits + row * vocabulary, at, vocabulary), at, law), 0.0)
    token = _invert(weight, at, target, tl.load(law + _LIKELIEST).to(tl.int32))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(sound + row, tl.abs(tl.load(law + _PEAK)) < float("inf"))


@triton.jit
def _accept_kernel(
    logits,
    laws,
    sums,
    q,
    drafts,
    drafted,
    seeds,
    positions,
    accepted,
    sound,
    vocabulary,
    blocks,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0).to(tl.int64)
    place, block = tl.arange(0, BLOCK_N), tl.arange(0, BLOCKS)
    inside = place < N - 1
    row = sequence * N + place
    draft = tl.load(drafts + sequence * (N - 1) + place, inside, other=0)
    x = tl.load(logits + row * vocabulary + draft, inside, other=0.0).to(tl.float32)
    law = laws + tl.where(inside, row, 0) * _COLUMNS
    is_sum = inside[:, None] & (block < blocks)[None, :]
    total = tl.sum(tl.load(sums + row[:, None] * blocks + block[None, :], is_sum, other=0.0), 1)
    p = _kept(x, draft.to(tl.int32), law) / total.to(tl.float32)
    q_draft = tl.load(q + (sequence * (N - 1) + place) * vocabulary + draft, inside, other=0.0)
    coins = _unit(coin_bits(tl.load(seeds + sequence), tl.load(positions + row, inside, other=0), _ACCEPT))
    stays = (coins * q_draft < p) & (place < tl.load(drafted + sequence)) & inside
    tl.store(accepted + sequence, tl.min(tl.where(stays, N - 1, place), 0).to(tl.int64))
    peak = tl.load(laws + row * _COLUMNS + _PEAK, place < N, other=0.0)
    tl.store(sound + row, tl.abs(peak) < float("inf"), place < N)


@triton.jit
def _rest_kernel(
    logits,
    laws,
    sums,
    q,
    drafted,
    accepted,
    rests,
    vocabulary,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums of max(p - q, 0), by block, behind the last accepted draft; 0 where no draft was rejected."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    count = tl.load(accepted + sequence)
    row = sequence * N + count
    rest = tl.zeros([], tl.float64)
    if count < tl.load(drafted + sequence):
        total = _total(sums + row * blocks, blocks, BLOCKS)
        at = block * BLOCK + tl.arange(0, BLOCK)
        q += (row - sequence) * vocabulary
        weight = _rest(logits + row * vocabulary, q, at, vocabulary, laws + row * _COLUMNS, total)
        rest = tl.sum(weight.to(tl.float64), 0)
    tl.store(rests + sequence * blocks + block, rest)


@triton.jit
def _bonus_kernel(
    logits,
    laws,
    sums,
    q,
    drafts,
    seeds,
    positions,
    accepted,
    rests,
    tokens,
    vocabulary,
    blocks,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0).to(tl.int64)
    count = tl.load(accepted + sequence)
    row = sequence * N + count
    law = laws + row * _COLUMNS
    logits += row * vocabulary
    sums += row * blocks
    rests += sequence * blocks
    coin = _unit(coin_bits(tl.load(seeds + sequence), tl.load(positions + row), _RESIDUAL))
    lane = tl.arange(0, BLOCK)
    if _total(rests, blocks, BLOCKS) > 0:
        block, target = _block_of(rests, blocks, coin, BLOCKS)
        at = block * BLOCK + lane
        total = _total(sums, blocks, BLOCKS)
        weight = _rest(logits, q + (row - sequence) * vocabulary, at, vocabulary, law, total)
    else:  # nothing to subtract, or p == q up to rounding: p itself is the law
        block, target = _block_of(sums, blocks, coin, BLOCKS)
        at = block * BLOCK + lane
        weight = tl.where(at < vocabulary, _kept(_load(logits, at, vocabulary), at, law), 0.0)
    bonus = _invert(weight, at, target, tl.load(law + _LIKELIEST).to(tl.int32)).to(tl.int64)
    place = tl.arange(0, BLOCK_N)
    draft = tl.load(drafts + sequence * (N - 1) + place, place < N - 1, other=0)
    tl.store(tokens + sequence * N + place, tl.where(place == count, bonus, draft), place < N)


class Law(NamedTuple):
    """The distributions of the rows of logits [B * n, V], not written out.

    columns float64 [B * n, 8]; sums float64 [B * n, blocks]: weights of each block of tokens.
    """

    logits: torch.Tensor
    columns: torch.Tensor
    sums: torch.Tensor


def law_of(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    truncated: bool,
) -> Law:
    """What `probabilities_ref` says of logits [B * n, V], contiguous, in three launches.

    temperature, top_p and min_p: float32 [B]; top_k: int64 [B], 0 is off. truncated: some row uses one of the three;
    else they are not looked at.
    """
    rows, vocabulary = logits.shape
    device, cuda = logits.device, logits.is_cuda
    partials = argmax_partials(logits)
    columns = torch.empty(rows, _COLUMNS.value, dtype=torch.float64, device=device)
    listed = rows if truncated else 0
    _law_kernel[(rows,)](
        logits,
        partials,
        temperature,
        top_k,
        top_p,
        min_p,
        columns,
        torch.empty(listed, _BLOCK, dtype=logits.dtype, device=device),
        torch.empty(listed, _BLOCK, dtype=torch.int32, device=device),
        vocabulary,
        rows // len(temperature),
        partials.shape[1],
        BLOCK_CHUNKS=max(64, triton.next_power_of_2(partials.shape[1])),
        TRUNCATED=truncated,
        SHIFT={torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[logits.dtype],
        BLOCK=_BLOCK,
        PDL=cuda,
        num_warps=_WARPS if truncated else 1,
        launch_pdl=cuda,
    )
    blocks = triton.cdiv(vocabulary, _BLOCK)
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=device)
    _sums_kernel[(rows, blocks)](
        logits, columns, sums, vocabulary, BLOCK=_BLOCK, PDL=cuda, num_warps=8, launch_pdl=cuda
    )
    return Law(logits, columns, sums)


def _blocks(law: Law) -> dict[str, Any]:
    """How the kernels that read a law are launched."""
    cuda = law.logits.is_cuda
    return {"BLOCKS": triton.next_power_of_2(law.sums.shape[1]), "PDL": cuda, "launch_pdl": cuda}


def probabilities(law: Law) -> torch.Tensor:
    """The law written out: float32 [B * n, V]."""
    p = torch.empty(law.logits.shape, dtype=torch.float32, device=law.logits.device)
    _probabilities_kernel[law.sums.shape](*law, p, p.shape[1], BLOCK=_BLOCK, num_warps=8, **_blocks(law))
    return p


def draw(law: Law, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw_ref` with the coins of seeds int64 [B] at positions int64 [B, n]: tokens int64 [B, n] and, where their
    logits are free of NaN and infinity, sound bool [B, n]."""
    tokens = torch.empty_like(positions)
    sound = torch.empty(positions.shape, dtype=torch.bool, device=positions.device)
    _draw_kernel[(tokens.numel(),)](
        *law,
        seeds,
        positions,
        tokens,
        sound,
        law.logits.shape[1],
        positions.shape[1],
        law.sums.shape[1],
        OFFSET=offset_of(stream),
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        **_blocks(law),
    )
    return tokens, sound


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    stream: int,
    *,
    truncated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`law_of` and `draw`: logits [B * n, V] and positions int64 [B, n] -> tokens int64 [B, n], sound bool [B, n]."""
    return draw(law_of(logits, temperature, top_k, top_p, min_p, truncated=truncated), seeds, positions, stream)


def reject(
    law: Law,
    drafts: torch.Tensor,
    drafted: torch.Tensor,
    q: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Speculative sampling of a chain, as `verification.verify` does it, in three launches.

    law: of the target's B * n rows; drafts int64 [B, n-1], of which drafted int64 [B] count, drawn from q float32
    [B, n-1, V]; seeds int64 [B]; positions int64 [B, n]. Returns tokens int64 [B, n], accepted int64 [B] and sound
    bool [B, n].
    """
    batch, n = positions.shape
    vocabulary, blocks = law.logits.shape[1], law.sums.shape[1]
    tokens, accepted = torch.empty_like(positions), torch.empty_like(drafted)
    sound = torch.empty(batch, n, dtype=torch.bool, device=positions.device)
    rests = torch.empty(batch, blocks, dtype=torch.float64, device=positions.device)
    common = {"N": n, **_blocks(law)}
    block_n = triton.next_power_of_2(n)
    _accept_kernel[(batch,)](
        *law, q, drafts, drafted, seeds, positions, accepted, sound, vocabulary, blocks, BLOCK_N=block_n, **common
    )
    _rest_kernel[(batch, blocks)](*law, q, drafted, accepted, rests, vocabulary, BLOCK=_BLOCK, num_warps=8, **common)
    _bonus_kernel[(batch,)](
        *law,
        q,
        drafts,
        seeds,
        positions,
        accepted,
        rests,
        tokens,
        vocabulary,
        blocks,
        BLOCK_N=block_n,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        **common,
    )
    return tokens, accepted, sound
