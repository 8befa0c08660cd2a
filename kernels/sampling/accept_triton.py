"""Triton kernels for argmax and for accepting and committing a chain, in two launches, and for the inputs of a verify.

The references are `torch.argmax`, `acceptance.accept_ref` and `accept.commit_ref`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, next_power_of_2
from specbatch.kernels.sampling.accept import BatchRows, Proposal
from specbatch.kernels.sampling.argmax_topk import Maxima, Scores
from specbatch.kernels.sampling.rng_triton import simulated_accept

BLOCK = 2048  # logits that a program handles at once
PROGRAMS = 2048  # enough to fill a large device
FEW = 256  # with no more programs than these, half a block each takes less time


@triton.jit
def pack(x, ids):
    """An int64 that orders like (x, -ids), NaN above all and 0 == -0: its maximum is torch's argmax, lowest id first.

    x: float32; ids: int32.
    """
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(x == 0, 0, key)
    key = tl.where(x != x, 0x7FFFFFFF, key)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def unpack(packed):
    """(x float32, id int64) of `pack`; the sign of a zero and the kind of a NaN are lost."""
    key = (packed >> 32).to(tl.int32)
    x = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return x, 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def argmax_kernel(
    logits, partials, sums, vocabulary, first, group, outer, inner, chunks, steps, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row // group * outer + row % group * inner
    start = chunk * steps * BLOCK
    end = tl.minimum(vocabulary, start + steps * BLOCK)
    ids = start + tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_step = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)  # of e^(x - best)
    ahead = tl.load(logits + ids, ids < end, other=-float("inf"))
    for step in range(steps):
        x = ahead.to(tl.float32)
        ids += BLOCK
        # Loaded while this block is compared, with few instructions per logit: memory bandwidth is the limit.
        ahead = tl.load(logits + ids, ids < end, other=-float("inf"))
        best_step = tl.where(x > best, step, best_step)  # among equals the earlier one stays
        before = best
        best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
        if sums is not None:
            base = tl.where(best == -float("inf"), 0.0, best)
            total = total * tl.exp(before - base) + tl.exp(x - base)
    ids = start + best_step * BLOCK + tl.arange(0, BLOCK)
    if tl.max((best != best).to(tl.int32), 0) > 0:  # a NaN: where its lane had the first is looked up again
        for step in range(steps):
            at = start + (steps - 1 - step) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + at, at < end, other=0.0).to(tl.float32)
            ids = tl.where(x != x, at, ids)
    largest = tl.max(pack(best, first + ids), 0)
    tl.store(partials + row * chunks + chunk, largest)
    if sums is not None:
        tl.store(sums + row * chunks + chunk, sum_below(unpack(largest)[0], best, total))


@triton.jit
def sum_below(top, tops, sums):
    """The sum of e^(x - top), from its parts: `sums` [P] of e^(x - tops); top is the largest of tops [P]."""
    return tl.sum(sums * tl.exp(tops - tl.where(top == -float("inf"), 0.0, top)), 0)


@triton.jit
def load_chosen(partials, finite, sequence, place, chunks, N: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """The tokens chosen at each of a sequence's rows, and whether all of their logits are finite.

    partials: int64 [B * N, chunks] of argmax_kernel, or where BLOCK_CHUNKS is 0 the chosen tokens int64 [B, N], with
    finite bool [B, N], which is not read otherwise.
    """
    if BLOCK_CHUNKS:
        chunk = tl.arange(0, BLOCK_CHUNKS)
        inside = (place < N)[:, None] & (chunk < chunks)[None, :]
        at = (sequence * N + place)[:, None] * chunks + chunk[None, :]
        best = tl.max(tl.load(partials + at, inside, other=-(1 << 63)), 1)
        x, chosen = unpack(best)
        row_finite = (tl.abs(x) < float("inf")) | (place >= N)
        is_finite = tl.min(row_finite.to(tl.int64), 0)
    else:
        chosen = tl.load(partials + sequence * N + place, place < N, other=0)
        is_finite = tl.min(tl.load(finite + sequence * N + place, place < N, other=1).to(tl.int64), 0)
    return chosen, is_finite


@triton.jit
def _commit_kernel(
    partials,  # of load_chosen
    finite,
    drafts,
    drafted,
    accepted,
    seeds,
    thresholds,
    tokens,
    lengths,
    rows,
    packed,
    width,
    chunks,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    GIVEN: tl.constexpr,  # `accepted` is an input
    DEPTH: tl.constexpr,  # how many of the thresholds are used; 0: acceptance is not simulated
    WIDTH: tl.constexpr,  # of `simulated_accept`
    PDL: tl.constexpr,
):
    wait_for_previous_kernel(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_N)
    chosen, is_finite = load_chosen(partials, finite, sequence, place, chunks, N, BLOCK_CHUNKS)
    row = tl.load(rows + sequence)
    length = tl.load(lengths + row)
    limit = tl.load(drafted + sequence)
    if DEPTH:
        count = simulated_accept(tl.load(seeds + sequence), length, limit, thresholds, DEPTH, WIDTH, BLOCK_N)
    elif GIVEN:
        count = tl.load(accepted + sequence)
    else:
        draft = tl.load(drafts + sequence * (N - 1) + place, place < N - 1, other=-1)
        wrong = (draft != chosen) | (place >= limit) | (place >= N - 1)
        count = tl.min(tl.where(wrong, place, N - 1), 0).to(tl.int64)

    tl.store(tokens + row * width + length + 1 + place, chosen, place < N)
    # Several sequences may be the padding row at once; it must stay as it is.
    tl.store(lengths + row, length + count + 1, row != 0)
    packed += sequence * (N + 3)
    tl.store(packed + place, chosen, place < N)
    tl.store(packed + N, count)
    tl.store(packed + N + 1, limit)
    tl.store(packed + N + 2, is_finite)


def argmax_partials(
    logits: torch.Tensor, first: int = 0, count: int | None = None, *, programs: int = PROGRAMS, few: int = FEW
) -> torch.Tensor:
    """The largest of each chunk of each row of logits [M, V] or [B, n, V], as `pack` has it: int64 [M, chunks], M being
    B * n. Rows may be apart in memory, their elements not. first: the token of column 0; count: columns that count,
    None: all."""
    return _partials(logits, first, count, has_sums=False, programs=programs, few=few)[0]


def argmax_partials_and_sums(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`argmax_partials`, and of each chunk the sum of e^(x - its largest) over its logits x: float32 [M, chunks]."""
    partials, sums = _partials(logits, 0, None, has_sums=True)
    assert sums is not None
    return partials, sums


def _partials(
    logits: torch.Tensor, first: int, count: int | None, *, has_sums: bool, programs: int = PROGRAMS, few: int = FEW
) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert logits.stride(-1) == 1, "the logits of a row must be adjacent"
    vocabulary = logits.shape[-1]
    group = logits.shape[1] if logits.dim() == 3 else 1
    rows = logits.shape[0] * group
    block = BLOCK
    if rows * cdiv(vocabulary, block) <= few:
        block //= 2
    blocks = cdiv(vocabulary, block)
    steps = cdiv(blocks, max(1, programs // rows))
    chunks = cdiv(blocks, steps)
    partials = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    sums = torch.empty(rows, chunks, device=logits.device) if has_sums else None
    argmax_kernel[(rows, chunks)](
        logits, partials, sums, vocabulary if count is None else count, first, group, logits.stride(0),
        logits.stride(-2), chunks, steps,
        BLOCK=block, **pdl(logits),
    )  # fmt: skip
    return partials, sums


def score_partials(scores: Scores) -> torch.Tensor:
    """`argmax_partials` of logits, or those that were gathered: int64 [M, chunks]."""
    return scores.keys.flatten(0, -2).contiguous() if isinstance(scores, Maxima) else argmax_partials(scores)


class Chosen(NamedTuple):
    """The token chosen at each node: int64 [B, N], and whether its logits are finite, bool [B, N]; or the
    `argmax_partials` of the logits and None, from which the kernels that commit find both."""

    tokens: torch.Tensor
    finite: torch.Tensor | None

    def launch(self, n: int, simulate: torch.Tensor | None) -> dict[str, Any]:
        """Launch arguments of kernels that commit N = n nodes. simulate: see `commit`."""
        chunks = self.tokens.shape[1] if self.finite is None else 0
        # A step that drafts less than the most (draft_tokens="auto") uses the first of the thresholds.
        depth = 0 if simulate is None else min(simulate.shape[-1], n - 1)
        return {
            "partials": self.tokens,
            "finite": self.tokens if self.finite is None else self.finite,
            "chunks": chunks,
            "N": n,
            "BLOCK_N": next_power_of_2(n),
            "BLOCK_CHUNKS": next_power_of_2(chunks) if chunks else 0,
            "thresholds": self.tokens if simulate is None else simulate,
            "DEPTH": depth,
            "WIDTH": simulate.shape[1] if simulate is not None and simulate.dim() == 2 else 0,
            **pdl(self.tokens),
        }


def commit(
    chosen: Chosen,
    proposal: Proposal,
    rows: BatchRows,
    seeds: torch.Tensor,
    simulate: torch.Tensor | None = None,
    accepted: torch.Tensor | None = None,
) -> torch.Tensor:
    """Accept the drafts of a chain that equal the chosen tokens, and `commit_ref` the chosen tokens.

    accepted int64 [B]: how many drafts are accepted, where another rule decides than equality. simulate: thresholds of
    `rng.simulated_accept_ref`; then random numbers of seeds int64 [B] decide.
    Returns int64 [B, N + 3]: tokens, then accepted, drafted and finite (1 if the logits of all chosen tokens are).
    """
    (drafts, drafted, *_), (tokens, lengths, slots) = proposal, rows
    batch, n = len(slots), drafts.shape[1] + 1
    packed = torch.empty(batch, n + 3, dtype=torch.int64, device=slots.device)
    _commit_kernel[(batch,)](
        drafts=drafts, drafted=drafted, accepted=drafted if accepted is None else accepted, seeds=seeds, tokens=tokens,
        lengths=lengths, rows=slots, packed=packed, width=tokens.shape[1], GIVEN=accepted is not None,
        **chosen.launch(n, simulate),
    )  # fmt: skip
    return packed


@triton.jit
def popcount(x):
    """Bits of int64 x."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (x * 0x0101010101010101) >> 56


@triton.jit
def _verify_inputs_kernel(
    tokens, lengths, rows, drafts, ancestors, verify_tokens, positions, width,
    N: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_N)
    row = tl.load(rows + sequence)
    length = tl.load(lengths + row)
    root = tl.load(tokens + row * width + length)
    draft = tl.load(drafts + sequence * (N - 1) + place - 1, (place > 0) & (place < N), other=0)
    at = sequence * N + place
    tl.store(verify_tokens + at, tl.where(place == 0, root, draft), place < N)
    depth = place.to(tl.int64)
    if ancestors is not None:
        depth = popcount(tl.load(ancestors + at, place < N, other=0)) - 1
    tl.store(positions + at, length + depth, place < N)


def verify_inputs(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    drafts: torch.Tensor,
    ancestors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`verify_inputs_ref`."""
    batch, n = len(rows), drafts.shape[1] + 1
    verify_tokens = torch.empty(batch * n, dtype=torch.int64, device=rows.device)
    positions = torch.empty_like(verify_tokens)
    _verify_inputs_kernel[(batch,)](
        tokens, lengths, rows, drafts, ancestors, verify_tokens, positions, tokens.shape[1],
        N=n, BLOCK_N=next_power_of_2(n), **pdl(rows), num_warps=1,
    )  # fmt: skip
    return verify_tokens, positions
