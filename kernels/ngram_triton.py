"""The n-gram lookup of `ngram.ngram_match_ref` in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _match_kernel(
    tokens,
    rows,
    lengths,
    drafts,
    found,
    width,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0).to(tl.int64)
    tokens += tl.load(rows + sequence) * width
    last = tl.load(lengths + sequence)
    lane = tl.arange(0, BLOCK)
    score = tl.full([BLOCK], -1, tl.int64)
    for start in range(0, last, BLOCK):
        place = start + lane
        run = tl.zeros([BLOCK], tl.int64)  # tokens that match, counted backwards from each place
        alive = place < last
        for back in tl.static_range(LONGEST):
            suffix = tl.load(tokens + last - back, last >= back, other=-1)
            alive = alive & (place >= back)
            alive = alive & (tl.load(tokens + place - back, alive, other=-2) == suffix)
            run += alive.to(tl.int64)
        score = tl.where(run >= SHORTEST, tl.maximum(score, (run << 32) | place), score)
    best = tl.max(score, 0)

    end = best & 0xFFFFFFFF
    step = tl.arange(0, BLOCK_COUNT)
    source = tl.where(best >= 0, end + 1 + step % (last - end), last)
    draft = tl.load(tokens + source, step < COUNT, other=0)
    tl.store(drafts + sequence * COUNT + step, draft, step < COUNT)
    tl.store(found + sequence, best >= 0)


def ngram_match(
    tokens: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, longest: int, shortest: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ngram_match_ref(tokens[rows], lengths, ...)`: drafts int64 [B, count] and found bool [B].

    tokens int64 [R, W]; rows int64 [B]; lengths int64 [B]: index of each sequence's newest token. One program per
    sequence reads its tokens once; the time follows the longest sequence, not W.
    """
    drafts = torch.empty(len(rows), count, dtype=torch.int64, device=rows.device)
    found = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
    _match_kernel[(len(rows),)](
        tokens,
        rows,
        lengths,
        drafts,
        found,
        tokens.shape[1],
        LONGEST=longest,
        SHORTEST=shortest,
        COUNT=count,
        BLOCK_COUNT=triton.next_power_of_2(count),
        BLOCK=_BLOCK,
        PDL=rows.is_cuda,
        num_warps=8,
        launch_pdl=rows.is_cuda,
    )
    return drafts, found
