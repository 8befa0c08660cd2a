"""A digest of the tokens of each decode step, by which ranks of a tensor-parallel group notice that they differ."""

from __future__ import annotations

import torch

from specbatch.kernels.dispatch import op
from specbatch.kernels.sampling.rng import GOLDEN, MIX1, MIX2

KEPT = 64  # digests of the last steps


def new_history(device: torch.device) -> torch.Tensor:
    """int64 [1 + KEPT]: number of steps so far, and the digest of step n at 1 + n % KEPT."""
    return torch.zeros(1 + KEPT, dtype=torch.int64, device=device)


def token_digest_ref(
    history: torch.Tensor, drafts: torch.Tensor, packed: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Add a step to `history`, see `new_history`.

    drafts int64 [B, N-1]; packed int64 [B, N+3], see `Accepted`; slots and lengths int64 [B]: before the step. The 64
    bits depend on drafts that count, accepted tokens, their numbers and places, but not on rows of slot 0, which is
    padding.
    """
    count = drafts.shape[1]
    accepted, drafted = packed[:, -3, None], packed[:, -2, None]
    values = torch.cat([drafts, packed, lengths[:, None]], 1)
    place = torch.arange(values.shape[1], device=values.device)
    token = place - count
    counts = (place < drafted) & (token < 0) | (token >= 0) & (token <= accepted) | (token > count)
    mixed = (values + torch.arange(values.numel(), device=values.device).view_as(values) * GOLDEN) * MIX1
    mixed = (mixed ^ mixed >> 32) * MIX2
    digest = (mixed * (counts & (slots > 0)[:, None])).sum()
    history.index_copy_(0, 1 + history[:1] % KEPT, digest[None])
    history[:1] += 1


token_digest = op(token_digest_ref, "specbatch.kernels.sampling.token_digest_triton:token_digest")
