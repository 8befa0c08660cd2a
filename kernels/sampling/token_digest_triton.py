"""Triton kernel of `token_digest`: one program, whose sum does not depend on the order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.sampling.rng import GOLDEN, MIX1, MIX2


@triton.jit(do_not_specialize=["total"])
def _digest_kernel(
    history, drafts, packed, slots, lengths, total, stride,
    DRAFTS: tl.constexpr, KEPT: tl.constexpr, PLACE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    WIDTH: tl.constexpr = DRAFTS + 4  # of `packed`
    digest = tl.zeros([BLOCK], tl.int64)
    for start in range(0, total, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < total
        row, place = (at // (DRAFTS + WIDTH + 1)).to(tl.int64), at % (DRAFTS + WIDTH + 1)
        token = place - DRAFTS
        is_draft, is_length = token < 0, token == WIDTH
        value = tl.load(drafts + row * stride + place, inside & is_draft, other=0)
        value += tl.load(packed + row * WIDTH + token, inside & (token >= 0) & (token < WIDTH), other=0)
        value += tl.load(lengths + row, inside & is_length, other=0)
        accepted = tl.load(packed + row * WIDTH + WIDTH - 3, inside, other=0)
        drafted = tl.load(packed + row * WIDTH + WIDTH - 2, inside, other=0)
        counts = (is_draft & (place < drafted)) | ((token >= 0) & (token <= accepted)) | (token > DRAFTS)
        counts = counts & inside & (tl.load(slots + row, inside, other=0) > 0)
        mixed = (value + at.to(tl.int64) * PLACE) * FIRST
        mixed = (mixed ^ (mixed >> 32)) * SECOND
        digest += tl.where(counts, mixed, 0)
    step = tl.load(history)
    tl.debug_barrier()  # all have read it
    tl.store(history + 1 + step % KEPT, tl.sum(digest, 0))
    tl.store(history, step + 1)


def token_digest(
    history: torch.Tensor, drafts: torch.Tensor, packed: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
) -> None:
    """`token_digest.token_digest_ref`; drafts may be rows of a larger tensor."""
    batch, count = drafts.shape
    assert drafts.stride(1) == 1 or count < 2, "drafts of a row must be adjacent"
    _digest_kernel[(1,)](
        history, drafts, packed, slots, lengths, batch * (2 * count + 5), drafts.stride(0),
        DRAFTS=count, KEPT=len(history) - 1, PLACE=GOLDEN, FIRST=MIX1, SECOND=MIX2, BLOCK=1024, **pdl(packed),
    )  # fmt: skip
