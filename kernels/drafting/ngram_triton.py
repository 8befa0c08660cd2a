"""Triton kernel of `ngram.ngram_match`: the n-gram lookup in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import next_power_of_2

BLOCK = 2048  # tokens that are read at once


@triton.jit
def _match_kernel(
    tokens, rows, lengths, drafts, found, width,
    TEXTS: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, COUNT: tl.constexpr, BLOCK_COUNT: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    tokens += tl.load(rows + sequence) * width
    last = tl.load(lengths + sequence)
    lane = tl.arange(0, BLOCK)
    ends = ()
    for text in tl.static_range(TEXTS):
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
            fits = run >= SHORTEST
            for other in tl.static_range(text):  # what goes on as a better one does
                alike = fits
                for step in range(COUNT):
                    following = tl.load(tokens + place + 1 + step % tl.maximum(last - place, 1), alike, other=-1)
                    alike = alike & (following == tl.load(tokens + ends[other] + 1 + step % (last - ends[other])))
                fits = fits & (alike == 0)
            score = tl.where(fits, tl.maximum(score, (run << 32) | place), score)
        best = tl.max(score, 0)
        end = tl.where(best >= 0, best & 0xFFFFFFFF, last - 1)
        ends = ends + (end,)  # type: ignore[assignment]  # noqa: RUF005 (Triton knows no stars)

        steps = tl.arange(0, BLOCK_COUNT)
        source = tl.where(best >= 0, end + 1 + steps % (last - end), last)
        draft = tl.load(tokens + source, steps < COUNT, other=0)
        tl.store(drafts + (sequence * TEXTS + text) * COUNT + steps, draft, steps < COUNT)
        tl.store(found + sequence * TEXTS + text, best >= 0)


def ngram_match(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    shortest: int,
    count: int,
    texts: int = 1,
    bound: int | None = None,
    block: int = BLOCK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ngram_match_ref`. One program per sequence reads its tokens once for each text; the time depends on the longest
    sequence, not on W, and `bound` is ignored."""
    drafts = torch.empty(len(rows), texts, count, dtype=torch.int64, device=rows.device)
    found = torch.empty(len(rows), texts, dtype=torch.bool, device=rows.device)
    _match_kernel[(len(rows),)](
        tokens, rows, lengths, drafts, found, tokens.shape[1],
        TEXTS=texts, LONGEST=longest, SHORTEST=shortest, COUNT=count, BLOCK_COUNT=next_power_of_2(count), BLOCK=block,
        **pdl(rows), num_warps=8,
    )  # fmt: skip
    return drafts, found
