"""Grammars on the device: masks logits of tokens that are not allowed, and gives the states after tokens.

Both read the tables of `TokenAutomaton`s. tables int16 [cells]: for each grammar the class of each token, then for each
state a row with the state after a token of each class, or -1, and other cells. grammars int64 [B, 3]: where the classes
start, where the rows start, and how long a row is. Nothing constrains a request in a negative state.
"""

from __future__ import annotations

import torch

from specbatch.kernels.dispatch import op


def grammar_mask_ref(
    logits: torch.Tensor,
    tables: torch.Tensor,
    grammars: torch.Tensor,
    states: torch.Tensor,
    value: float = -torch.inf,
    ids: torch.Tensor | None = None,
) -> None:
    """Set logits [B, n, V], whose rows may be strided, of tokens that are not allowed in states int64 [B, n] to a
    value. Rows in a negative state stay as they are.

    ids int64 [V], or [B, V] of each request: the token of each column; None if they are the same.
    """
    device = logits.device
    tokens = torch.arange(logits.shape[2], device=device) if ids is None else ids
    starts, rows, width = grammars[:, :, None].unbind(1)
    kinds = tables[starts + tokens].long()
    for row in range(logits.shape[1]):
        state = states[:, row, None]
        is_out = tables[rows + state.clamp(min=0) * width + kinds] < 0
        logits[:, row].masked_fill_(is_out & (state >= 0), value)


def grammar_step_ref(
    states: torch.Tensor, tokens: torch.Tensor, tables: torch.Tensor, grammars: torch.Tensor
) -> torch.Tensor:
    """The states after tokens int64 [B, n] in states int64 [B, n]: int64 [B, n], -1 after a token that is not
    allowed."""
    starts, rows, width = grammars[:, :, None].unbind(1)
    found = tables[rows + states.clamp(min=0) * width + tables[starts + tokens]]
    return torch.where(states < 0, -1, found.long())


grammar_mask = op(grammar_mask_ref, "specbatch.kernels.sampling.grammar_mask_triton:grammar_mask")
grammar_step = op(grammar_step_ref, "specbatch.kernels.sampling.grammar_mask_triton:grammar_step")
