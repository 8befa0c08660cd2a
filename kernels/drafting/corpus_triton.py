"""Triton kernels of `corpus.corpus_insert` and `corpus.corpus_drafts`, one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.drafting.corpus import HOPS, LEVELS, PRIME, CorpusIndex

_BLOCK = 128


@triton.jit(do_not_specialize=["start", "count"])
def _insert_kernel(
    ring,
    newest,
    earlier,
    powers,
    texts,
    start,
    count,
    size,
    table,
    SHORTEST: tl.constexpr,
    LEVELS: tl.constexpr,
    PRIME: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernel(PDL)
    level = tl.program_id(0)
    length = tl.full([], SHORTEST << (LEVELS - 1), tl.int32) >> level
    newest += level.to(tl.int64) * table
    earlier += level.to(tl.int64) * size
    lane = tl.arange(0, BLOCK)
    for first in range(0, count, BLOCK):
        at = first + lane
        place = (start + at) % size
        added = tl.load(texts + count + at, at < count, other=0) != 0
        total = tl.zeros([BLOCK], tl.int64)
        for back in range(length):
            token = tl.load(texts + at - back, (at < count) & (at >= back), other=-1).to(tl.int64)
            added = added & (token >= 0)
            total += (token + 1) * tl.load(powers + back) % PRIME
        bucket = (total % PRIME) & (table - 1)
        # The tables are as if the places were added one after the other.
        same = (bucket[:, None] == bucket[None, :]) & added[:, None] & added[None, :]
        before = tl.max(tl.where(same & (lane[None, :] < lane[:, None]), lane[None, :], -1), 1)
        after = tl.max(tl.where(same & (lane[None, :] > lane[:, None]), 1, 0), 1)
        previous = tl.load(newest + bucket, added, other=-1)
        previous = tl.where(before >= 0, (start + first + before) % size, previous)
        tl.store(earlier + place, tl.where(added, previous, -1), at < count)
        if level == 0:
            tl.store(ring + place, tl.load(texts + at, at < count, other=-1), at < count)
        tl.debug_barrier()  # no lane writes before all have read
        tl.store(newest + bucket, place, added & (after == 0))
        tl.debug_barrier()


def corpus_insert(index: CorpusIndex, texts: torch.Tensor, start: int) -> None:
    """`corpus_insert_ref`. One program per length of n-grams goes through the texts, a block at a time."""
    _insert_kernel[(LEVELS,)](
        index.tokens,
        index.newest,
        index.earlier,
        index.powers,
        texts,
        start,
        texts.shape[1],
        len(index.tokens),
        index.newest.shape[1],
        SHORTEST=index.shortest,
        LEVELS=LEVELS,
        PRIME=PRIME,
        BLOCK=_BLOCK,
        **pdl(texts),
        num_warps=8,
    )


@triton.jit
def _drafts_kernel(
    ring,
    newest,
    earlier,
    powers,
    tokens,
    rows,
    lengths,
    own,
    own_drafted,
    drafts,
    drafted,
    found,
    width,
    size,
    table,
    SHORTEST: tl.constexpr,
    LEVELS: tl.constexpr,
    HOPS: tl.constexpr,
    PRIME: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernel(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    tokens += tl.load(rows + sequence) * width
    last = tl.load(lengths + sequence)
    back = tl.arange(0, BLOCK)
    longest: tl.constexpr = SHORTEST << (LEVELS - 1)
    suffix = tl.load(tokens + last - back, (back <= last) & (back < longest), other=-2)  # newest first
    terms = (suffix + 1) * tl.load(powers + back, back < longest, other=0) % PRIME
    hit = last * 0 - 1
    for level in tl.static_range(LEVELS):
        inside = back < (SHORTEST << (LEVELS - 1 - level))
        bucket = (tl.sum(tl.where(inside, terms, 0), 0) % PRIME) & (table - 1)
        place = tl.load(newest + level * table + bucket).to(tl.int64)
        for _ in tl.static_range(HOPS):
            text = tl.load(ring + (place - back + size) % size, inside, other=0)
            wrong = tl.max((inside & (text != suffix)).to(tl.int32), 0)
            hit = tl.where((hit < 0) & (wrong == 0) & (place >= 0), place, hit)
            place = tl.load(earlier + level * size + place, place >= 0, other=-1).to(tl.int64)
    step = tl.arange(0, BLOCK_COUNT)
    text = tl.load(ring + (hit + 1 + step) % size, step < COUNT, other=-1).to(tl.int64)
    count = tl.where(hit >= 0, tl.min(tl.where(text < 0, step, COUNT), 0), 0).to(tl.int64)
    text = tl.where(step < count, text, tl.load(tokens + last))
    at = sequence * COUNT + step
    text = tl.where(count > 0, text, tl.load(own + at, step < COUNT, other=0))
    tl.store(drafts + at, text, step < COUNT)
    tl.store(drafted + sequence, tl.where(count > 0, count, tl.load(own_drafted + sequence)))
    tl.store(found + sequence, (count > 0).to(tl.int64))


def corpus_drafts(
    index: CorpusIndex,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    drafts: torch.Tensor,
    drafted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`corpus_drafts_ref`. One program per sequence; the time does not depend on the size of the corpus."""
    found = torch.empty(2, len(rows), dtype=torch.int64, device=rows.device)
    chosen, count = torch.empty(drafts.shape, dtype=torch.int64, device=rows.device), drafts.shape[1]
    _drafts_kernel[(len(rows),)](
        index.tokens,
        index.newest,
        index.earlier,
        index.powers,
        tokens,
        rows,
        lengths,
        drafts.contiguous(),
        drafted,
        chosen,
        found[0],
        found[1],
        tokens.shape[1],
        len(index.tokens),
        index.newest.shape[1],
        SHORTEST=index.shortest,
        LEVELS=LEVELS,
        HOPS=HOPS,
        PRIME=PRIME,
        BLOCK=triton.next_power_of_2(len(index.powers)),
        COUNT=count,
        BLOCK_COUNT=triton.next_power_of_2(count),
        **pdl(rows),
        num_warps=1,
    )
    return chosen, found[0], found[1]
