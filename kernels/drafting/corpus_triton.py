"""Triton kernels of `corpus.corpus_insert`, `corpus_extend` and `corpus_drafts`, one launch each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import next_power_of_2
from specbatch.kernels.drafting.corpus import HOPS, LEVELS, PRIME, CorpusIndex

BLOCK = 128  # places that a program handles at once


@triton.jit
def _add(
    newest,
    earlier,
    powers,
    places,
    table,
    windows,  # int64 [BLOCK, BLOCK_BACK]: the tokens up to each place, newest first, and -1
    place,
    added,
    stored,
    LONGEST: tl.constexpr,
    PRIME: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_BACK: tl.constexpr,
):
    """Add the n-grams of this program's length that end at a block of places, as if one after the other, where `added`
    and all of their tokens are known. stored: where `earlier` is written."""
    level, back, lane = tl.program_id(0), tl.arange(0, BLOCK_BACK), tl.arange(0, BLOCK)
    newest += level.to(tl.int64) * table
    earlier += level.to(tl.int64) * places
    inside = back < (tl.full([BLOCK_BACK], LONGEST, tl.int32) >> level)
    terms = (windows + 1) * tl.load(powers + back, inside, other=0)[None, :] % PRIME
    bucket = ((tl.sum(terms, 1) % PRIME) & (table - 1)).to(tl.int32)
    lacks = tl.max((inside[None, :] & (windows < 0)).to(tl.int32), 1)
    added = added & (lacks == 0)
    same = (bucket[:, None] == bucket[None, :]) & added[:, None] & added[None, :]
    before = tl.max(tl.where(same & (lane[None, :] < lane[:, None]), lane[None, :], -1), 1)
    after = tl.max(tl.where(same & (lane[None, :] > lane[:, None]), 1, 0), 1)
    in_block = tl.sum(tl.where(lane[None, :] == before[:, None], place[None, :], 0), 1)
    previous = tl.where(before >= 0, in_block, tl.load(newest + bucket, added, other=-1))
    tl.store(earlier + place, tl.where(added, previous, -1), stored)
    tl.debug_barrier()  # no lane writes before all have read
    tl.store(newest + bucket, place, added & (after == 0))
    tl.debug_barrier()


@triton.jit(do_not_specialize=["start", "count"])
def _insert_kernel(
    ring, newest, earlier, powers, size, places, table, texts, start, count,
    LONGEST: tl.constexpr, PRIME: tl.constexpr, BLOCK: tl.constexpr, BLOCK_BACK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    back = tl.arange(0, BLOCK_BACK)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < count
        place = (start + at) % size
        if tl.program_id(0) == 0:
            tl.store(ring + place, tl.load(texts + at, inside, other=-1), inside)
        known = inside[:, None] & (at[:, None] >= back[None, :])
        windows = tl.load(texts + at[:, None] - back[None, :], known, other=-1).to(tl.int64)
        added = tl.load(texts + count + at, inside, other=0) != 0
        _add(newest, earlier, powers, places, table, windows, place, added, inside, LONGEST, PRIME, BLOCK, BLOCK_BACK)


def corpus_insert(index: CorpusIndex, texts: torch.Tensor, start: int, block: int = BLOCK) -> None:
    """`corpus_insert_ref`. One program per length of n-grams goes through the texts, a block at a time."""
    _insert_kernel[(LEVELS,)](
        **_tables(index), texts=texts, start=start, count=texts.shape[1], BLOCK=block, **pdl(texts), num_warps=8
    )


@triton.jit
def _extend_kernel(
    ring, newest, earlier, powers, size, places, table, tokens, width, rows, lengths, accepted, stride, batch,
    COUNT: tl.constexpr, LONGEST: tl.constexpr, PRIME: tl.constexpr, BLOCK: tl.constexpr, BLOCK_BACK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    back = tl.arange(0, BLOCK_BACK)
    for first in range(0, batch * COUNT, BLOCK):
        at = first + tl.arange(0, BLOCK)
        sequence, step = at // COUNT, at % COUNT
        inside = sequence < batch
        row = tl.load(rows + sequence, inside, other=0)
        end = tl.load(lengths + sequence, inside, other=0) - 1 + step
        added = inside & (step <= tl.load(accepted + sequence * stride, inside, other=-1)) & (row > 0) & (end >= 0)
        known = added[:, None] & (end[:, None] >= back[None, :])
        windows = tl.load(tokens + (row * width + end)[:, None] - back[None, :], known, other=-1)
        place = (size + row * width + end).to(tl.int32)
        _add(newest, earlier, powers, places, table, windows, place, added, added, LONGEST, PRIME, BLOCK, BLOCK_BACK)


def corpus_extend(
    index: CorpusIndex,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    accepted: torch.Tensor,
    count: int,
    block: int = BLOCK,
) -> None:
    """`corpus_extend_ref`. One program per length of n-grams goes through the tokens of all sequences."""
    _extend_kernel[(LEVELS,)](
        **_tables(index), tokens=tokens, width=tokens.shape[1], rows=rows, lengths=lengths, accepted=accepted,
        stride=accepted.stride(0), batch=len(rows), COUNT=count, BLOCK=block, **pdl(rows), num_warps=8,
    )  # fmt: skip


@triton.jit
def _drafts_kernel(
    ring, newest, earlier, powers, size, places, table, tokens, width, known, rows, own, own_drafted, drafts, drafted,
    found,
    LONGEST: tl.constexpr, LEVELS: tl.constexpr, HOPS: tl.constexpr, PRIME: tl.constexpr, BLOCK_BACK: tl.constexpr,
    COUNT: tl.constexpr, BLOCK_COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sequence)
    last = tl.load(known + row)
    newest_token = tokens + row * width + last
    back = tl.arange(0, BLOCK_BACK)
    suffix = tl.load(newest_token - back, (back <= last) & (back < LONGEST), other=-2)  # newest first
    terms = (suffix + 1) * tl.load(powers + back, back < LONGEST, other=0) % PRIME
    hit = last * 0 - 1
    for level in tl.static_range(LEVELS):
        inside = back < (LONGEST >> level)
        bucket = (tl.sum(tl.where(inside, terms, 0), 0) % PRIME) & (table - 1)
        place = tl.load(newest + level * table + bucket).to(tl.int64)
        for _ in tl.static_range(HOPS):
            finished = tl.load(ring + (place - back + size) % size, inside, other=0).to(tl.int64)
            at = tl.maximum(place - size, 0)
            # An earlier request's place may be past the tokens of the one that has its row now.
            there = (at % width >= (LONGEST >> level) - 1) & (at % width < tl.load(known + at // width))
            running = tl.load(tokens + tl.maximum(at - back, 0), inside, other=0)
            text = tl.where(place < size, finished, running)
            wrong = tl.max((inside & (text != suffix)).to(tl.int32), 0)
            is_same = (wrong == 0) & (place >= 0) & ((place < size) | there)
            hit = tl.where((hit < 0) & is_same, place, hit)
            place = tl.load(earlier + places * level + place, place >= 0, other=-1).to(tl.int64)
    step = tl.arange(0, BLOCK_COUNT)
    finished = tl.load(ring + (hit + 1 + step) % size, step < COUNT, other=-1).to(tl.int64)
    from_row = tl.where(hit >= size, (hit - size) // width, 0)
    column = tl.where(hit >= size, (hit - size) % width, 0)
    ahead = (column + 1 + step <= tl.load(known + from_row)) & (step < COUNT)
    running = tl.load(tokens + from_row * width + column + 1 + step, ahead, other=-1)
    text = tl.where(hit < size, finished, running)
    count = tl.where(hit >= 0, tl.min(tl.where(text < 0, step, COUNT), 0), 0).to(tl.int64)
    text = tl.where(step < count, text, tl.load(newest_token))
    at = sequence * COUNT + step
    text = tl.where(count > 0, text, tl.load(own + at, step < COUNT, other=0))
    tl.store(drafts + at, text, step < COUNT)
    tl.store(drafted + sequence, tl.where(count > 0, count, tl.load(own_drafted + sequence)))
    tl.store(found + sequence, (count > 0).to(tl.int64))


def corpus_drafts(
    index: CorpusIndex,
    tokens: torch.Tensor,
    known: torch.Tensor,
    rows: torch.Tensor,
    drafts: torch.Tensor,
    drafted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`corpus_drafts_ref`. One program per sequence; the time does not depend on the size of the corpus."""
    found = torch.empty(2, len(rows), dtype=torch.int64, device=rows.device)
    chosen, count = torch.empty(drafts.shape, dtype=torch.int64, device=rows.device), drafts.shape[1]
    _drafts_kernel[(len(rows),)](
        **_tables(index), tokens=tokens, width=tokens.shape[1], known=known, rows=rows, own=drafts.contiguous(),
        own_drafted=drafted, drafts=chosen, drafted=found[0], found=found[1], LEVELS=LEVELS, HOPS=HOPS, COUNT=count,
        BLOCK_COUNT=next_power_of_2(count), **pdl(rows), num_warps=1,
    )  # fmt: skip
    return chosen, found[0], found[1]


def _tables(index: CorpusIndex) -> dict[str, Any]:
    """Launch arguments of all kernels."""
    return {
        "ring": index.ring,
        "newest": index.newest,
        "earlier": index.earlier,
        "powers": index.powers,
        "size": len(index.ring),
        "places": index.earlier.shape[1],
        "table": index.newest.shape[1],
        "LONGEST": len(index.powers),
        "PRIME": PRIME,
        "BLOCK_BACK": next_power_of_2(len(index.powers)),
    }
