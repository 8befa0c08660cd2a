"""Penalties, logit bias, bad words and grammars, for all rows of a verify. Each row sees the drafted tokens before it
as if they had been generated, so that speculation changes neither greedy tokens nor distributions.

The rules are those of OpenAI's API (bias, presence, frequency) and of CTRL (Keskar et al. 2019, repetition). A bias is
added first, and penalties change the sum, as in vLLM.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbatch.core.token_constraint import Constraint, HostGrammars, HostMasks

ANY, NONE = -1, -2  # in place of tokens: before the first token of a word; one that no word has


class Adjustments(NamedTuple):
    """Of B requests. What none of them asks for is None.

    bias_tokens  int64 [B, K], distinct, or with a bias of 0
    biases       float32 [B, K]
    penalties    float32 [B, 3]: presence, frequency (0 is off) and repetition (1 is off)
    prompts      int64 [B]: tokens of the prompt
    banned       int64 [B, W, L]: words whose last token is not chosen after the others; ANY before the first token of a
                 word, and throughout where there is none
    constraint   the grammars on the device
    masks        of those on the host, for a verify
    host         those on the host, for drafting
    """

    bias_tokens: torch.Tensor | None
    biases: torch.Tensor | None
    penalties: torch.Tensor | None
    prompts: torch.Tensor
    banned: torch.Tensor | None = None
    constraint: Constraint | None = None
    masks: HostMasks | None = None
    host: HostGrammars | None = None


class History(NamedTuple):
    """What is before the rows of a pass.

    tokens     int64 [B, W]: prompts and outputs
    lengths    int64 [B]: how many of them are before the token that the first row predicts
    drafts     int64 [B, n - 1]: tokens of the other rows
    ancestors  int64 [B, n], for a tree: bit j of a row's word is set if node j is the row or before it; None: a chain
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    drafts: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None


def adjusted_logits(
    logits: torch.Tensor, adjustments: Adjustments, history: History, states: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits [B, n, V] with biases, penalties and without bad words, as float32: a small penalty would be lost in
    BF16. states: of the grammars, int64 [B, n]; where they allow bad words only, these stay."""
    adjusted = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    tokens, values, penalties, prompts, banned, constraint, masks, _ = adjustments
    if tokens is not None and values is not None:
        shape = (*logits.shape[:2], tokens.shape[1])
        adjusted.scatter_add_(-1, tokens[:, None].expand(shape), values[:, None].expand(shape))
    if penalties is not None:
        _penalize(adjusted, penalties, prompts, history)
    if constraint is not None and states is not None:
        constraint.mask(adjusted, states)
    if masks is not None:
        masks.mask(adjusted)
    if banned is not None:
        with_banned = None if constraint is None else adjusted.clone()
        _ban(adjusted, banned, prompts, history)
        if with_banned is not None:
            is_empty = adjusted.amax(-1, keepdim=True) == -torch.inf
            adjusted = torch.where(is_empty, with_banned, adjusted)
    return adjusted


def _penalize(adjusted: torch.Tensor, penalties: torch.Tensor, prompts: torch.Tensor, history: History) -> None:
    presence, frequency, repetition = penalties[:, :, None].unbind(1)
    place = torch.arange(history.tokens.shape[1], device=adjusted.device)
    known = place < history.lengths[:, None]
    zeros = torch.zeros_like(adjusted[:, 0])
    everywhere = zeros.scatter_add(1, history.tokens, known.float())
    generated = zeros.scatter_add(1, history.tokens, (known & (place >= prompts[:, None])).float())
    for row in range(adjusted.shape[1]):
        seen, made = everywhere, generated
        if row and history.drafts is not None:
            before = _before(row, history).float()
            seen = everywhere.scatter_add(1, history.drafts, before)
            made = generated.scatter_add(1, history.drafts, before)
        values = adjusted[:, row]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(seen > 0, repeated, values)
        adjusted[:, row] = values - frequency * made - presence * (made > 0)


def _ban(adjusted: torch.Tensor, banned: torch.Tensor, prompts: torch.Tensor, history: History) -> None:
    beginnings, last = banned[:, :, :-1], banned[:, :, -1]
    for row in range(adjusted.shape[1]):
        recent = _recent(row, beginnings.shape[2], prompts, history)
        completes = ((beginnings == ANY) | (beginnings == recent[:, None])).all(-1) & (last != ANY)
        adjusted[:, row].scatter_add_(1, last.clamp(min=0), torch.where(completes, -torch.inf, 0.0))


def _recent(row: int, count: int, prompts: torch.Tensor, history: History) -> torch.Tensor:
    """The last `count` tokens of the answer before what a row predicts: int64 [B, count], NONE where it is shorter."""
    lengths = history.lengths[:, None]
    place = lengths - torch.arange(count, 0, -1, device=lengths.device)
    drafts = history.drafts
    if row and drafts is not None:
        before = _before(row, history)
        place = place + before.sum(1, keepdim=True)
        # The drafts before the row come first, in their order.
        path = drafts.gather(1, (~before).long().sort(dim=1, stable=True).indices)
        drafted = path.gather(1, (place - lengths).clamp(0, drafts.shape[1] - 1))
    known = history.tokens.gather(1, place.clamp(0, history.tokens.shape[1] - 1))
    recent = torch.where(place >= lengths, drafted, known) if row and drafts is not None else known
    return torch.where(place >= prompts[:, None], recent, NONE)


def parent_row(row: int, history: History) -> torch.Tensor | int:
    """The row before a row, which is at least 1: int64 [B] for a tree, where it is the last of those before it."""
    if history.ancestors is None:
        return row - 1
    node = torch.arange(row, device=history.ancestors.device)
    return torch.where(history.ancestors[:, row, None] >> node & 1 == 1, node, 0).amax(1)


def _before(row: int, history: History) -> torch.Tensor:
    """Which drafts are before what a row predicts: bool [B, n - 1]."""
    assert history.drafts is not None
    node = torch.arange(1, history.drafts.shape[1] + 1, device=history.drafts.device)
    if history.ancestors is None:
        return (node <= row).expand_as(history.drafts)
    return history.ancestors[:, row, None] >> node & 1 == 1
