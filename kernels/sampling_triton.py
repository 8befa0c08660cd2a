"""Draws from truncated distributions without sorting: `sampling.probabilities_ref` and `draw_ref` in three launches.

A row's law is found by a search over values: the smallest logit that stays is the largest value whose tokens, together
with all greater ones, reach k in number or top-p in probability; how many of those that equal it stay follows from
what is missing. Before that, one pass over the row bounds the value from below (each lane's greatest logit: what those
few reach, all reach), and what lies above the bound is mostly a short list, which is then searched in place of the row.

Nothing depends on the number of programs. Where the reference's and these sums, of other order, put a token on two
sides of a cut or a coin, the two differ; both are right to some 1e-6.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specbatch.kernels.accept import argmax_partials, unpack
from specbatch.kernels.coins import coin_bits
from specbatch.kernels.sampling import ACCEPT, RESIDUAL, offset_of

_BLOCK = 8192  # logits that one program looks at together, and the longest list
_WARPS = 16
# Columns of a law, float64 [rows, 8]. Token `id` of logit x has weight exp2((x - PEAK) * SCALE) if that is at least
# FLOOR and x > CUT, or x == CUT and id <= LAST; TOTAL is their sum. SCALE 0: LIKELIEST has all the weight.
_PEAK, _SCALE, _FLOOR, _CUT, _LAST, _TOTAL, _LIKELIEST = (tl.constexpr(column) for column in range(7))
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
def _above(source, count, value, peak, scale, BLOCK: tl.constexpr):
    """Weight of the logits >= value."""
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        x = _load(source, start + lane, count)
        sums += tl.where(x >= value, _weight(x, peak, scale), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _search(source, count, low, peak, scale, target, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """The largest value, `low` at least, of which logits >= value weigh `target`; and what those > value weigh."""
    low_key, high_key = _to_key(low, SHIFT), _to_key(peak, SHIFT) + 1
    heavier = target * 0.0
    while low_key + 1 < high_key:
        middle = (low_key >> 1) + (high_key >> 1) + (low_key & high_key & 1)
        weight = _above(source, count, _to_value(middle, SHIFT), peak, scale, BLOCK)
        reached = weight >= target
        low_key = tl.where(reached, middle, low_key)
        high_key = tl.where(reached, high_key, middle)
        heavier = tl.where(reached, heavier, weight)
    return _to_value(low_key, SHIFT), heavier


@triton.jit
def _id_of(ids, at, listed):
    """Token ids of places in a list of `listed` logits, or in the row itself where that is 0."""
    return tl.where(listed > 0, tl.load(ids + at, at < listed, other=0), at)


@triton.jit
def _nth_equal(source, ids, count, value, nth, listed, BLOCK: tl.constexpr):
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
            chosen = _id_of(ids, at, listed)
            found = tl.min(tl.where(equal & (rank == nth), chosen, 0x7FFFFFFF), 0)
            start = count
        nth -= here
        start += BLOCK
    return found


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
    if temperature <= 0:
        scale = scale * 0
    logits += row * vocabulary
    lane = tl.arange(0, BLOCK)
    cut = peak * 0 - float("inf")
    last = (likeliest * 0).to(tl.int32) + 0x7FFFFFFF
    floor = scale * 0
    total = scale.to(tl.float64) * 0

    if (scale > 0) & (tl.abs(peak) < float("inf")):
        greatest = tl.full([BLOCK], -float("inf"), tl.float32)
        sums = tl.zeros([BLOCK], tl.float64)
        for start in range(0, vocabulary, BLOCK):
            x = _load(logits, start + lane, vocabulary)
            greatest = tl.maximum(greatest, x)
            sums += _weight(x, peak, scale)
        total = tl.sum(sums, 0)
        if TRUNCATED:
            top_k, top_p = tl.load(top_ks + sequence), tl.load(top_ps + sequence)
            floor = tl.load(min_ps + sequence)
            values += row * BLOCK
            ids += row * BLOCK
            source = logits
            count = vocabulary
            listed = 0
            limited = (top_k > 0) & (top_k < vocabulary)
            if limited | (top_p < 1):
                # A bound from the lanes' greatest: at least as many, or as likely, tokens reach it.
                tl.store(values + lane, greatest.to(values.dtype.element_ty))
                tl.debug_barrier()
                bound_scale = tl.where(limited, 0.0, scale)
                target = tl.where(limited, top_k.to(tl.float32), (top_p * total * 1.0001).to(tl.float32))
                if tl.sum(_weight(greatest, peak, bound_scale), 0) >= target:
                    cut, _ = _search(values, BLOCK, cut, peak, bound_scale, target, BLOCK, SHIFT)
                tl.debug_barrier()
                length = 0
                for start in range(0, vocabulary, BLOCK):
                    at = start + lane
                    x = tl.load(logits + at, at < vocabulary, other=-float("inf"))
                    stays = (x.to(tl.float32) >= cut) & (at < vocabulary)
                    here = tl.sum(stays.to(tl.int32), 0)
                    if (here > 0) & (length + here <= BLOCK):
                        to = length + tl.cumsum(stays.to(tl.int32), 0) - 1
                        tl.store(values + to, x, stays)
                        tl.store(ids + to, at, stays)
                    length += here
                tl.debug_barrier()
                if length <= BLOCK:
                    listed = length
                    source = values
                    count = length
                equal = (likeliest * 0).to(tl.int32) + 0x7FFFFFFF  # how many that equal the cut stay
                mass = total.to(tl.float32)
                if limited:
                    cut, more = _search(source, count, cut, peak, scale * 0, top_k.to(tl.float32), BLOCK, SHIFT)
                    equal = top_k.to(tl.int32) - more.to(tl.int32)
                    one = _weight(cut, peak, scale)
                    above = _above(source, count, _to_value(_to_key(cut, 0) + 1, 0), peak, scale, BLOCK)
                    mass = above + one * equal
                if top_p < 1:
                    target = tl.maximum(top_p * mass, 1e-30)
                    low = cut
                    cut, more = _search(source, count, low, peak, scale, target, BLOCK, SHIFT)
                    stay = tl.ceil(tl.minimum((target - more) / _weight(cut, peak, scale), 1e9)).to(tl.int32)
                    equal = tl.minimum(tl.maximum(stay, 1), tl.where(cut == low, equal, 0x7FFFFFFF))
                last = _nth_equal(source, ids, count, cut, equal, listed, BLOCK)
            if limited | (top_p < 1) | (floor > 0):
                sums = tl.zeros([BLOCK], tl.float64)
                for start in range(0, count, BLOCK):
                    at = start + lane
                    x = _load(source, at, count)
                    chosen = _id_of(ids, at, listed)
                    sums += _kept(x, chosen, peak, scale, floor, cut, last)
                total = tl.sum(sums, 0)

    laws += row * _COLUMNS
    tl.store(laws + _PEAK, peak.to(tl.float64))
    tl.store(laws + _SCALE, scale.to(tl.float64))
    tl.store(laws + _FLOOR, floor.to(tl.float64))
    tl.store(laws + _CUT, cut.to(tl.float64))
    tl.store(laws + _LAST, last.to(tl.float64))
    tl.store(laws + _TOTAL, total)
    tl.store(laws + _LIKELIEST, likeliest.to(tl.float64))


@triton.jit
def _kept(x, ids, peak, scale, floor, cut, last):
    """Weights under a law, 0 for what it drops."""
    weight = _weight(x, peak, scale)
    stays = ((x > cut) | ((x == cut) & (ids <= last))) & (weight >= floor)
    return tl.where(stays, weight, 0.0)


@triton.jit
def _probability(x, ids, law):
    """float32 probabilities of tokens `ids` of logits x under the law at that place."""
    scale = tl.load(law + _SCALE).to(tl.float32)
    weight = _kept(
        x,
        ids,
        tl.load(law + _PEAK).to(tl.float32),
        scale,
        tl.load(law + _FLOOR).to(tl.float32),
        tl.load(law + _CUT).to(tl.float32),
        tl.load(law + _LAST).to(tl.int32),
    )
    likeliest = (ids == tl.load(law + _LIKELIEST).to(tl.int32)).to(tl.float32)
    return tl.where(scale > 0, weight / tl.load(law + _TOTAL).to(tl.float32), likeliest)


@triton.jit
def _rest(logits, q, at, vocabulary, law, minus, WITH_Q: tl.constexpr):
    """p, or max(p - q, 0) where minus is 1, of the tokens `at`; 0 behind the vocabulary."""
    inside = at < vocabulary
    p = tl.where(inside, _probability(_load(logits, at, vocabulary), at, law), 0.0)
    if WITH_Q:
        p = tl.maximum(p - tl.load(q + at, at < vocabulary * minus, other=0.0), 0.0)
    return p


@triton.jit
def _invert(logits, q, vocabulary, law, minus, target, WITH_Q: tl.constexpr, BLOCK: tl.constexpr):
    """The first token at which the running sum of `_rest` exceeds target, in vocabulary order."""
    lane = tl.arange(0, BLOCK)
    token = tl.load(law + _LIKELIEST).to(tl.int32)  # also where there is none such: NaN logits
    before = target * 0
    start = 0
    while start < vocabulary:
        at = start + lane
        weight = _rest(logits, q, at, vocabulary, law, minus, WITH_Q).to(tl.float64)
        after = before + tl.sum(weight, 0)
        if after > target:
            sums = before + tl.cumsum(weight, 0)
            first = tl.min(tl.where((sums > target) & (weight > 0), at, 0x7FFFFFFF), 0)
            final = tl.max(tl.where(weight > 0, at, -1), 0)  # the two sums differ in their last bits
            token = tl.minimum(first, final)
            start = vocabulary
        before = after
        start += BLOCK
    return token


@triton.jit
def _draw_kernel(
    logits,
    laws,
    seeds,
    positions,
    tokens,
    sound,
    vocabulary,
    per_sequence,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    law = laws + row * _COLUMNS
    token = tl.load(law + _LIKELIEST).to(tl.int32)
    if tl.load(law + _SCALE) > 0:
        coin = coin_bits(tl.load(seeds + row // per_sequence), tl.load(positions + row), OFFSET)
        target = coin.to(tl.float64) * (1.0 / (1 << 53))
        token = _invert(logits + row * vocabulary, logits, vocabulary, law, 0, target, False, BLOCK)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(sound + row, tl.abs(tl.load(law + _PEAK)) < float("inf"))


@triton.jit
def _probabilities_kernel(logits, laws, p, vocabulary, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _load(logits + row * vocabulary, at, vocabulary)
    tl.store(p + row * vocabulary + at, _probability(x, at, laws + row * _COLUMNS), at < vocabulary)


@triton.jit
def _reject_kernel(
    logits,
    laws,
    q,
    drafts,
    drafted,
    seeds,
    positions,
    tokens,
    accepted,
    sound,
    vocabulary,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_N)
    inside = place < N - 1
    draft = tl.load(drafts + sequence * (N - 1) + place, inside, other=0)
    limit = tl.load(drafted + sequence)
    seed = tl.load(seeds + sequence)
    position = tl.load(positions + sequence * N + place, place < N, other=0)
    row = sequence * N + tl.minimum(place, N - 1)
    x = tl.load(logits + row * vocabulary + draft).to(tl.float32)
    p = _probability(x, draft.to(tl.int32), laws + row * _COLUMNS)
    q_draft = tl.load(q + (sequence * (N - 1) + place) * vocabulary + draft, inside, other=0.0)
    coins = coin_bits(seed, position, _ACCEPT).to(tl.float64) * (1.0 / (1 << 53))
    stays = (coins * q_draft < p) & (place < limit) & inside
    count = tl.min(tl.where(stays, N - 1, place), 0)

    row = sequence * N + count
    law = laws + row * _COLUMNS
    logits += row * vocabulary
    q += (sequence * (N - 1) + count) * vocabulary
    # Behind the last draft there is nothing to subtract; p == q up to rounding leaves nothing: then p is the law.
    minus = (count < limit).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    total = tl.sum(tl.zeros([BLOCK], tl.float64), 0)
    for start in range(0, vocabulary, BLOCK):
        rest = _rest(logits, q, start + lane, vocabulary, law, minus, True)
        total += tl.sum(rest.to(tl.float64), 0)
    minus = tl.where(total > 0, minus, 0)
    total = tl.where(total > 0, total, 1.0)
    coin = coin_bits(seed, tl.load(positions + sequence * N + count), _RESIDUAL).to(tl.float64) * (1.0 / (1 << 53))
    bonus = _invert(logits, q, vocabulary, law, minus, coin * total, True, BLOCK)

    tl.store(tokens + sequence * N + place, tl.where(place == count, bonus.to(tl.int64), draft), place < N)
    tl.store(accepted + sequence, count.to(tl.int64))
    peaks = tl.load(laws + (sequence * N + tl.minimum(place, N - 1)) * _COLUMNS + _PEAK)
    tl.store(sound + sequence * N + place, tl.abs(peaks) < float("inf"), place < N)


class Law(NamedTuple):
    """The distributions of rows of logits [B * n, V], not written out: logits and float64 [B * n, 8]."""

    logits: torch.Tensor
    columns: torch.Tensor


def law_of(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    truncated: bool,
) -> Law:
    """What `probabilities_ref` says of logits [B * n, V], contiguous, in two launches.

    temperature, top_p and min_p: float32 [B]; top_k: int64 [B], 0 is off. truncated: some row uses one of the three;
    else they are not looked at.
    """
    rows, vocabulary = logits.shape
    partials = argmax_partials(logits)
    columns = torch.empty(rows, _COLUMNS.value, dtype=torch.float64, device=logits.device)
    listed = rows if truncated else 0
    _law_kernel[(rows,)](
        logits,
        partials,
        temperature,
        top_k,
        top_p,
        min_p,
        columns,
        torch.empty(listed, _BLOCK, dtype=logits.dtype, device=logits.device),
        torch.empty(listed, _BLOCK, dtype=torch.int32, device=logits.device),
        vocabulary,
        rows // len(temperature),
        partials.shape[1],
        BLOCK_CHUNKS=max(64, triton.next_power_of_2(partials.shape[1])),
        TRUNCATED=truncated,
        SHIFT={torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[logits.dtype],
        BLOCK=_BLOCK,
        PDL=logits.is_cuda,
        num_warps=_WARPS,
        launch_pdl=logits.is_cuda,
    )
    return Law(logits, columns)


def probabilities(law: Law) -> torch.Tensor:
    """The law written out: float32 [B * n, V]."""
    rows, vocabulary = law.logits.shape
    p = torch.empty(rows, vocabulary, dtype=torch.float32, device=law.logits.device)
    cuda = p.is_cuda
    _probabilities_kernel[(rows, triton.cdiv(vocabulary, 4096))](
        *law, p, vocabulary, BLOCK=4096, PDL=cuda, launch_pdl=cuda
    )
    return p


def draw(law: Law, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw_ref` with the coins of seeds int64 [B] at positions int64 [B, n]: tokens int64 [B, n] and, where their
    logits are free of NaN and infinity, sound bool [B, n]."""
    vocabulary = law.logits.shape[1]
    tokens = torch.empty_like(positions)
    sound = torch.empty(positions.shape, dtype=torch.bool, device=positions.device)
    _draw_kernel[(tokens.numel(),)](
        *law,
        seeds,
        positions,
        tokens,
        sound,
        vocabulary,
        positions.shape[1],
        OFFSET=offset_of(stream),
        BLOCK=_BLOCK,
        PDL=tokens.is_cuda,
        num_warps=_WARPS,
        launch_pdl=tokens.is_cuda,
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
    """Speculative sampling of a chain, as `verification.verify` does it, in one launch.

    law: of the target's B * n rows; drafts int64 [B, n-1], of which drafted int64 [B] count, drawn from q float32
    [B, n-1, V]; seeds int64 [B]; positions int64 [B, n]. Returns tokens int64 [B, n], accepted int64 [B] and sound
    bool [B, n].
    """
    batch, n = positions.shape
    tokens, accepted = torch.empty_like(positions), torch.empty_like(drafted)
    sound = torch.empty(batch, n, dtype=torch.bool, device=positions.device)
    _reject_kernel[(batch,)](
        *law,
        q,
        drafts,
        drafted,
        seeds,
        positions,
        tokens,
        accepted,
        sound,
        law.logits.shape[1],
        N=n,
        BLOCK_N=triton.next_power_of_2(n),
        BLOCK=_BLOCK,
        PDL=tokens.is_cuda,
        num_warps=_WARPS,
        launch_pdl=tokens.is_cuda,
    )
    return tokens, accepted, sound
