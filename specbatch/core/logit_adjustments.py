"""Penalties and logit bias, for all rows of a verify: each row sees the drafted tokens before it as if they had been
generated, so that speculation changes neither greedy tokens nor distributions.

The rules are those of OpenAI's API (bias, presence, frequency) and of CTRL (Keskar et al. 2019, repetition). A bias is
added first, and penalties change the sum, as in vLLM.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Adjustments(NamedTuple):
    """Of B requests. What none of them asks for is None.

    bias_tokens  int64 [B, K], distinct, or with a bias of 0
    biases       float32 [B, K]
    penalties    float32 [B, 3]: presence, frequency (0 is off) and repetition (1 is off)
    prompts      int64 [B]: tokens of the prompt
    """

    bias_tokens: torch.Tensor | None
    biases: torch.Tensor | None
    penalties: torch.Tensor | None
    prompts: torch.Tensor


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


def adjusted_logits(logits: torch.Tensor, adjustments: Adjustments, history: History) -> torch.Tensor:
    """Logits [B, n, V] with biases and penalties, as float32: a small penalty would be lost in BF16."""
    adjusted = logits.to(torch.float32, copy=True)
    tokens, values, penalties, prompts = adjustments
    if tokens is not None and values is not None:
        shape = (*logits.shape[:2], tokens.shape[1])
        adjusted.scatter_add_(-1, tokens[:, None].expand(shape), values[:, None].expand(shape))
    if penalties is None:
        return adjusted
    presence, frequency, repetition = penalties[:, :, None].unbind(1)
    place = torch.arange(history.tokens.shape[1], device=logits.device)
    known = place < history.lengths[:, None]
    zeros = torch.zeros_like(adjusted[:, 0])
    everywhere = zeros.scatter_add(1, history.tokens, known.float())
    generated = zeros.scatter_add(1, history.tokens, (known & (place >= prompts[:, None])).float())
    for row in range(logits.shape[1]):
        seen, made = everywhere, generated
        if row and history.drafts is not None:
            drafted = _before(row, history)
            seen = everywhere.scatter_add(1, history.drafts, drafted)
            made = generated.scatter_add(1, history.drafts, drafted)
        values = adjusted[:, row]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(seen > 0, repeated, values)
        adjusted[:, row] = values - frequency * made - presence * (made > 0)
    return adjusted


def _before(row: int, history: History) -> torch.Tensor:
    """Which drafts are before what a row predicts: float32 [B, n - 1]."""
    assert history.drafts is not None
    node = torch.arange(1, history.drafts.shape[1] + 1, device=history.drafts.device)
    if history.ancestors is None:
        return (node <= row).float().expand_as(history.drafts)
    return (history.ancestors[:, row, None] >> node & 1).float()
