"""Triton kernels of `argmax_topk`, two launches each: blocks of the vocabulary, then the merge of their results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, next_power_of_2
from specbatch.kernels.sampling.accept_triton import (
    argmax_partials,
    argmax_partials_and_sums,
    pack,
    score_partials,
    sum_below,
    unpack,
)
from specbatch.kernels.sampling.argmax_topk import Maxima, Scores

_BLOCK = 2048  # logits among which one program looks for children
_COLUMNS = 1024  # of an embedding that one program copies
_NOTHING = tl.constexpr(-(1 << 63))  # below whatever `pack` makes


@triton.jit(do_not_specialize_on_alignment=["tokens", "chances"])  # columns of tables
def _likeliest_kernel(
    partials, sums, ids, tokens, chances, embedding, embedded, chunks, spacing, chance_spacing, width,
    BLOCK_CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    parts = tl.load(partials + row * chunks + chunk, chunk < chunks, other=_NOTHING)
    top, token = unpack(tl.max(parts, 0))
    if sums is not None:
        inside = chunk < chunks
        tops = tl.where(inside, unpack(parts)[0], -float("inf"))
        total = sum_below(top, tops, tl.load(sums + row * chunks + chunk, inside, other=0.0))
        # Of logits that are not finite the sum is NaN or 0.
        chance = tl.where(total > 0.0, tl.minimum(1.0 / total, 1.0), 0.0)
        tl.store(chances + row * chance_spacing, chance, part == 0)
    if ids is not None:
        token = tl.load(ids + token)
    tl.store(tokens + row * spacing, token, part == 0)
    if embedding is not None:
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        tl.store(embedded + row * width + column, tl.load(embedding + token * width + column, inside), inside)


def argmax_keys(logits: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """`argmax_topk.argmax_keys`."""
    return argmax_partials(logits, first, count)


def argmax(
    logits: Scores,
    ids: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    chances: torch.Tensor | None = None,
) -> torch.Tensor:
    """`argmax_topk.argmax`."""
    like = logits.keys if isinstance(logits, Maxima) else logits
    tokens = torch.empty(like.shape[:-1], dtype=torch.int64, device=like.device) if out is None else out
    _finish(logits, ids, tokens, chances, None, None)
    return tokens


def argmax_embedding(
    logits: Scores,
    embedding: torch.Tensor,
    ids: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    chances: torch.Tensor | None = None,
) -> torch.Tensor:
    """`argmax_topk.argmax_embedding`; embedding contiguous."""
    rows = len(logits.keys if isinstance(logits, Maxima) else logits)
    tokens = torch.empty(rows, dtype=torch.int64, device=embedding.device) if out is None else out
    embedded = embedding.new_empty(rows, embedding.shape[1])
    _finish(logits, ids, tokens, chances, embedding, embedded)
    return embedded


def _finish(
    logits: Scores,
    ids: torch.Tensor | None,
    tokens: torch.Tensor,
    chances: torch.Tensor | None,
    embedding: torch.Tensor | None,
    embedded: torch.Tensor | None,
) -> None:
    assert tokens.dim() == 1 or tokens.is_contiguous(), "tokens of a block must be contiguous"
    sums = None
    if chances is None:
        partials = score_partials(logits)
    else:
        assert isinstance(logits, torch.Tensor), "maxima have no probabilities"
        assert chances.dim() == 1 or chances.is_contiguous(), "chances of a block must be contiguous"
        partials, sums = argmax_partials_and_sums(logits)
    rows, chunks = partials.shape
    width = 0 if embedding is None else embedding.shape[1]
    _likeliest_kernel[(rows, max(1, cdiv(width, _COLUMNS)))](
        partials, sums, ids, tokens, chances, embedding, embedded, chunks, tokens.stride(-1),
        0 if chances is None else chances.stride(-1), width,
        BLOCK_CHUNKS=next_power_of_2(chunks), COLUMNS=_COLUMNS, **pdl(partials),
    )  # fmt: skip


@triton.jit
def _block_kernel(
    logits, keys, tops, sums, vocabulary, stride, TOPK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """The TOPK largest of a block, largest first, as `pack` has them; its largest number, and the sum of exponentials
    below it."""
    wait_for_previous_kernel(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocabulary
    x = tl.load(logits + row * stride + ids, inside, other=-float("inf")).to(tl.float32)
    at = row * tl.num_programs(1) + block
    top = tl.max(x, 0)
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(tl.exp(x - tl.where(top == -float("inf"), 0.0, top)), 0))
    left = tl.where(inside, pack(x, ids), _NOTHING)
    for place in range(TOPK):
        best = tl.max(left, 0)
        tl.store(keys + at * TOPK + place, best)
        left = tl.where(left == best, _NOTHING, left)


@triton.jit
def _children_kernel(
    keys, tops, sums, ids, scores, tokens, blocks,
    TOPK: tl.constexpr, BLOCK_TOPK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    block, place = tl.arange(0, BLOCKS), tl.arange(0, BLOCK_TOPK)
    at = row * blocks + block
    top = tl.load(tops + at, block < blocks, other=-float("inf"))
    most = tl.max(top, 0)
    shares = tl.load(sums + at, block < blocks, other=0.0) * tl.exp(top - most)
    total = most + tl.log(tl.sum(shares, 0))
    inside = (block < blocks)[:, None] & (place < TOPK)[None, :]
    left = tl.load(keys + at[:, None] * TOPK + place[None, :], inside, other=_NOTHING)
    found = tl.full([BLOCK_TOPK], 0, tl.int64)
    for index in range(TOPK):
        best = tl.max(tl.max(left, 1), 0)
        found = tl.where(place == index, best, found)
        left = tl.where(left == best, _NOTHING, left)
    x, token = unpack(found)
    # Rounding must not make a child more likely than its parent. NaN has no probability.
    score = tl.where(tl.abs(total) < float("inf"), tl.minimum(x - total, 0.0), -float("inf"))
    if ids is not None:
        token = tl.load(ids + token, place < TOPK, other=0)
    tl.store(scores + row * TOPK + place, score, place < TOPK)
    tl.store(tokens + row * TOPK + place, token, place < TOPK)


def topk_logprobs(
    logits: torch.Tensor, topk: int, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`argmax_topk.topk_logprobs`."""
    *shape, vocabulary = logits.shape
    rows = logits.flatten(0, -2)
    assert rows.stride(1) == 1, "the logits of a row must be adjacent"
    assert topk <= vocabulary, "no more children than tokens"
    device, blocks = logits.device, cdiv(vocabulary, _BLOCK)
    keys = torch.empty(len(rows), blocks, topk, dtype=torch.int64, device=device)
    tops = torch.empty(len(rows), blocks, device=device)
    sums = torch.empty_like(tops)
    scores = torch.empty(*shape, topk, device=device)
    tokens = torch.empty(*shape, topk, dtype=torch.int64, device=device)
    settings = pdl(logits)
    _block_kernel[(len(rows), blocks)](
        rows, keys, tops, sums, vocabulary, rows.stride(0), TOPK=topk, BLOCK=_BLOCK, **settings
    )
    block_topk, many = next_power_of_2(topk), next_power_of_2(blocks)
    _children_kernel[(len(rows),)](
        keys, tops, sums, ids, scores, tokens, blocks,
        TOPK=topk, BLOCK_TOPK=block_topk, BLOCKS=many, num_warps=8 if block_topk * many > 2048 else 4, **settings,
    )  # fmt: skip
    return scores, tokens
