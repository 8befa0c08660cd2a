"""Inputs of acceptance (`Proposal`, `BatchRows`) and the torch reference that commits accepted tokens to the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbatch.kernels.common.packed_rows import PackedRows


class Proposal(NamedTuple):
    """N - 1 drafts after each root, as a chain or a tree.

    tokens         int64 [B, N-1]
    drafted        int64 [B]: how many of them count, the first ones (a sequence without an n-gram match drafts none)
    probabilities  float32 [B, N-1, V]: the distribution each was sampled from; None for deterministic drafts, which
                   those of a tree always are
    ancestors      int64 [B, N], for a tree: node 0 is the root and draft i is node i + 1; bit j of a node's word is set
                   if it sees node j, itself included. Parents come before their children. None for a chain
    of_corpus      int64 [B], 1 where the drafts come from other answers; None without a corpus
    confidence     float32 [B, N-1]: the predicted probability that each draft is accepted, given that those before it
                   are. It may depend on the drafts before, never on the draft itself (`engine.device.verify_budget`).
                   None where nothing asks for it or the drafter has none
    packed         rows that the verify computes; None for all of them
    levels         int64 [B, N-1]: of the confidence in each draft, for `verify_budget.learn`; None without a budget
    values         float32 [B, N-1]: the predicted probability that each draft is reached and accepted, -1 of those that
                   do not count; None unless the host chooses budgets
    """

    tokens: torch.Tensor
    drafted: torch.Tensor
    probabilities: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None
    of_corpus: torch.Tensor | None = None
    confidence: torch.Tensor | None = None
    packed: PackedRows | None = None
    levels: torch.Tensor | None = None
    values: torch.Tensor | None = None


class BatchRows(NamedTuple):
    """Tokens int64 [R, W] and lengths int64 [R] of all slots, and the slots int64 [B] of a step. Slot 0 is padding."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor


def commit_ref(rows: BatchRows, tokens: torch.Tensor, accepted: torch.Tensor) -> None:
    """Write tokens [B, N] after the roots and add accepted [B] + 1 to the lengths."""
    lengths = rows.lengths[rows.slots]
    places = lengths[:, None] + torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    # All N tokens are written; those past the new length are overwritten before anything reads them.
    rows.tokens[rows.slots[:, None], places] = tokens
    # The padding slot keeps its length.
    rows.lengths[rows.slots] = torch.where(rows.slots > 0, lengths + accepted + 1, lengths)
