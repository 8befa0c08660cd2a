"""Torch references of a verify budget: which drafts are verified, and what is learned from a verify.

The method is described in `engine.device.verify_budget`.
"""

from __future__ import annotations

import torch

from specbatch.kernels.common.packed_rows import pack_rows
from specbatch.kernels.dispatch import op
from specbatch.kernels.sampling.accept import Proposal

# Drafts are counted together that have about the same confidence and place in their chains (first, second, third and
# fourth, later ones), of greedy requests and of sampled ones; and all of padding.
LEVELS, PLACES = 16, 4
PADDING = 2 * LEVELS * PLACES
KINDS = PADDING + 1
WEIGHT = 8.0  # drafts that the confidence itself counts as
MOST = 1 << 12  # counted drafts of a level; then both counts are halved, so that newer drafts weigh more
# Of a drafter without confidence: the acceptance of a new request, how many drafts it counts as, and the weight of a
# draft after another verify. A request that has no drafts verified returns to the guess.
GUESS, GUESSED, MEMORY = 0.7, 2.0, 0.9


def draft_values(conditional: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """The probability that each draft is reached and accepted, float32 [B, n], for conditional probabilities of
    acceptance float32 [B, n] and drafted int64 [B]; -1 of those that do not count."""
    place = torch.arange(conditional.shape[1], device=drafted.device)
    return conditional.double().cumprod(1).float().masked_fill(place >= drafted[:, None], -1.0)


def verified_drafts(conditional: torch.Tensor, drafted: torch.Tensor, total: int) -> torch.Tensor:
    """How many drafts of each request are verified, `total` in all: int64 [B], for conditional probabilities of
    acceptance float32 [B, n] and drafted int64 [B], of which the first ones count.

    Among equal values earlier drafts come first, then earlier requests. Drafts that do not count come last; they fill
    the rows that nothing else takes.
    """
    batch, values = len(drafted), draft_values(conditional, drafted)
    # By position first, so that the stable sort keeps this order among equals.
    chosen = values.T.flatten().sort(descending=True, stable=True).indices[:total]
    return torch.zeros_like(drafted).index_add_(0, chosen % batch, torch.ones_like(chosen))


def spend_ref(
    counts: torch.Tensor,
    recent: torch.Tensor,
    slots: torch.Tensor,
    proposal: Proposal,
    temperature: torch.Tensor | None,
    total: int,
    *,
    with_values: bool = False,
) -> Proposal:
    """Choose the drafts of requests in `slots` int64 [B], 0 for padding, that are verified by `total` rows: the
    proposal with as many drafts, the packed rows, the levels of confidence and, if asked for, the values.

    counts int64 [2, KINDS] and recent float32 [2, slots + 1]: see `VerifyBudget`; temperature float32 [B]:
    None if all requests are greedy.
    """
    batch, most = proposal.tokens.shape
    confidence = proposal.confidence
    if confidence is None:
        compared, accepted = recent[:, slots]
        confidence = ((accepted + GUESS * GUESSED) / (compared + GUESSED))[:, None].expand(-1, most)
    confidence = confidence.nan_to_num(0.0).clamp(0.0, 1.0)
    place = torch.arange(most, device=slots.device)
    levels = (confidence * LEVELS).long().clamp(max=LEVELS - 1)
    levels = levels + LEVELS * ((place > 0).long() + (place > 1) + (place > 3))
    if temperature is not None:
        levels = levels + LEVELS * PLACES * (temperature > 0)[:, None]
    levels = levels.masked_fill((slots == 0)[:, None], PADDING)
    compared, accepted = counts[:, levels]
    conditional = (accepted + WEIGHT * confidence) / (compared + WEIGHT)
    drafted = torch.where(slots > 0, proposal.drafted, 0)
    count = verified_drafts(conditional, drafted, total - batch)
    packed = pack_rows(count + 1, most + 1, total)
    values = draft_values(conditional, drafted) if with_values else None
    return proposal._replace(
        drafted=torch.minimum(count, proposal.drafted), packed=packed, levels=levels, values=values
    )


def learn_ref(
    counts: torch.Tensor, recent: torch.Tensor, slots: torch.Tensor, proposal: Proposal, accepted: torch.Tensor
) -> None:
    """Add a verify that accepted so many drafts int64 [B] to counts and recent. `recent` of slot 0 has no meaning."""
    verified, levels = proposal.drafted, proposal.levels
    assert levels is not None, "no budget was spent on it"
    place = torch.arange(levels.shape[1], device=accepted.device)
    compared = torch.minimum(accepted + 1, verified)
    for count, late, number in zip(counts, recent, (compared, accepted), strict=True):
        count.index_add_(0, levels.flatten(), (place < number[:, None]).flatten().long())
        late[slots] = late[slots] * MEMORY + number
    counts.copy_(torch.where(counts[0] < MOST, counts, counts >> 1))


spend = op(spend_ref, "specbatch.kernels.sampling.verify_budget_triton:spend")
learn = op(learn_ref, "specbatch.kernels.sampling.verify_budget_triton:learn")
