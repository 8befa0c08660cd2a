"""Triton kernels of `tree_draft`: one launch for each level and one to prune. A program handles one sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import next_power_of_2
from specbatch.kernels.drafting.tree_draft import Candidates, Level
from specbatch.kernels.sampling.accept_triton import pack

_NOTHING = tl.constexpr(-(1 << 63))  # below whatever `pack` makes


@triton.jit
def _take_best(scores, places, inside, COUNT: tl.constexpr, BLOCK_COUNT: tl.constexpr):
    """Places of the COUNT largest scores, largest first, among equals the first; what is left of BLOCK_COUNT is 0."""
    left = tl.where(inside, pack(scores, places), _NOTHING)
    rank = tl.arange(0, BLOCK_COUNT)
    best = tl.zeros([BLOCK_COUNT], tl.int64)
    for index in range(COUNT):
        largest = tl.max(left, 0)
        best = tl.where(rank == index, 0x7FFFFFFF - (largest & 0x7FFFFFFF), best)
        left = tl.where(left == largest, _NOTHING, left)
    return best


@triton.jit(do_not_specialize=["start", "first"])
def _grow_kernel(
    all_scores,
    all_tokens,
    all_parents,
    scores,
    tokens,
    above_scores,  # None: above is the root alone
    above_numbers,
    above_ancestors,
    next_tokens,
    next_origin,
    next_ancestors,
    next_scores,
    next_numbers,
    start,
    first,
    total,
    WIDTH: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernel(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    scores += sequence * WIDTH * TOPK
    tokens += sequence * WIDTH * TOPK
    child = tl.arange(0, BLOCK)
    inside = child < WIDTH * TOPK
    score = tl.load(scores + child, inside, other=0.0)
    number = tl.zeros([BLOCK], tl.int64)
    if above_scores is not None:
        parent = sequence * WIDTH + child // TOPK
        score += tl.load(above_scores + parent, inside, other=0.0)
        number = tl.load(above_numbers + parent, inside, other=0)
    home = sequence * total + start + child
    tl.store(all_scores + home, score, inside)
    tl.store(all_tokens + home, tl.load(tokens + child, inside, other=0), inside)
    tl.store(all_parents + home, number, inside)

    best = _take_best(score, child, inside, TOPK, BLOCK_TOPK)
    place = tl.arange(0, BLOCK_TOPK)
    used = place < TOPK
    origin = best // TOPK
    best_score = tl.load(scores + best, used, other=0.0)
    word = tl.full([BLOCK_TOPK], 1, tl.int64)
    if above_scores is not None:
        best_score += tl.load(above_scores + sequence * WIDTH + origin, used, other=0.0)
        word = tl.load(above_ancestors + sequence * WIDTH + origin, used, other=0)
    to = sequence * TOPK + place
    tl.store(next_tokens + to, tl.load(tokens + best, used, other=0), used)
    tl.store(next_origin + to, origin, used)
    tl.store(next_ancestors + to, word | (tl.full([BLOCK_TOPK], 1, tl.int64) << (first + place)), used)
    tl.store(next_scores + to, best_score, used)
    tl.store(next_numbers + to, best + start + 1, used)


def expand(
    candidates: Candidates, scores: torch.Tensor, tokens: torch.Tensor, above: Level | None, start: int, first: int
) -> Level:
    """`tree_draft.expand_ref`; everything contiguous."""
    batch, width, topk = tokens.shape
    level = Level(
        tokens=tokens.new_empty(batch, topk),
        origin=tokens.new_empty(batch, topk),
        ancestors=tokens.new_empty(batch, topk),
        scores=scores.new_empty(batch, topk),
        numbers=tokens.new_empty(batch, topk),
    )
    block = next_power_of_2(width * topk)
    _grow_kernel[(batch,)](
        *candidates, scores, tokens, None if above is None else above.scores, None if above is None else above.numbers,
        None if above is None else above.ancestors, *level, start, first, candidates.tokens.shape[1],
        WIDTH=width, TOPK=topk, BLOCK=block, BLOCK_TOPK=next_power_of_2(topk), num_warps=_warps(block), **pdl(tokens),
    )  # fmt: skip
    return level


@triton.jit
def _keep_kernel(
    scores, tokens, parents, kept_tokens, ancestors, total, depth,
    COUNT: tl.constexpr, BLOCK_COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    score = tl.load(scores + sequence * total + candidate, candidate < total, other=0.0)
    best = _take_best(score, candidate, candidate < total, COUNT, BLOCK_COUNT)
    place = tl.arange(0, BLOCK_COUNT)
    used = place < COUNT
    tl.store(kept_tokens + sequence * COUNT + place, tl.load(tokens + sequence * total + best, used, other=0), used)
    # Which of the kept nodes is the parent? None of them: the root, which all nodes see.
    number = tl.load(parents + sequence * total + best, used, other=0)
    is_parent = (number[:, None] == (best + 1)[None, :]) & used[None, :] & used[:, None]
    own = tl.full([BLOCK_COUNT], 1, tl.int64) << (place + 1)
    word = own | 1
    for _ in range(1, depth):
        word = tl.sum(tl.where(is_parent, word[None, :], 0), 1) | own | 1
    ancestors += sequence * (COUNT + 1)
    tl.store(ancestors, 1)
    tl.store(ancestors + 1 + place, word, used)


def prune(candidates: Candidates, count: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`tree_draft.prune_ref`."""
    batch, total = candidates.tokens.shape
    tokens = torch.empty(batch, count, dtype=torch.int64, device=candidates.tokens.device)
    ancestors = torch.empty(batch, count + 1, dtype=torch.int64, device=tokens.device)
    block, block_count = next_power_of_2(total), next_power_of_2(count)
    _keep_kernel[(batch,)](
        *candidates, tokens, ancestors, total, depth,
        COUNT=count, BLOCK_COUNT=block_count, BLOCK=block, num_warps=_warps(max(block, block_count * block_count)),
        **pdl(tokens),
    )  # fmt: skip
    return tokens, ancestors


def _warps(elements: int) -> int:
    """One looks for the best of few without waiting for others."""
    return 1 if elements <= 256 else 4
