"""Masks the logits of tokens that the grammar of a request does not allow."""

from __future__ import annotations

import torch

from specbatch.kernels.dispatch import op


def grammar_mask_ref(
    logits: torch.Tensor, tables: torch.Tensor, starts: torch.Tensor, classes: torch.Tensor, states: torch.Tensor
) -> None:
    """Set logits float32 [B, n, V], contiguous, of tokens that are not allowed in states int64 [B, n] to -inf. Rows in
    a negative state stay as they are.

    tables int16 [cells]: for each grammar, from starts int64 [B] on, the class of each token, then for each state and
    class the state after it, or -1; classes int64 [B]: how many classes it has.
    """
    vocabulary = logits.shape[2]
    kinds = tables[starts[:, None] + torch.arange(vocabulary, device=logits.device)].long()
    rows = (starts + vocabulary)[:, None] + states.clamp(min=0) * classes[:, None]
    for row in range(logits.shape[1]):
        is_out = tables[rows[:, row, None] + kinds] < 0
        logits[:, row].masked_fill_(is_out & (states[:, row, None] >= 0), -torch.inf)


grammar_mask = op(grammar_mask_ref, "specbatch.kernels.sampling.grammar_mask_triton:grammar_mask")
