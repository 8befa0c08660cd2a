"""Builds the inputs of a draft head, and buffers features that are not consumed yet.

A pair is a row of two tensors: the embedding of its token and its hidden state, [T, H] each
(`models/heads/draft_head.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from specbatch.kernels.dispatch import op


class PendingInputs(NamedTuple):
    """Inputs (pairs) whose keys are not written yet, n for each of B sequences, and their positions.

    embedded, hidden [B * n, H]; positions int64 [B * n]; start int64 [B]: of the first of each sequence; newest int64
    [B]: the row of the one that ends in the root; places int64 [n, B]: its own and those that follow.
    """

    embedded: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    start: torch.Tensor
    newest: torch.Tensor
    places: torch.Tensor


def pending_inputs_ref(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    waiting: torch.Tensor,
    ready: torch.Tensor,
    embedding: torch.Tensor,
    most: int,
) -> PendingInputs:
    """The pairs of up to `most` buffered features: those before the root, which has position lengths int64 [B].

    tokens int64 [R, W], waiting [R, n, H] and ready int64 [R] of all device rows, of which rows int64 [B] names the
    sequences'; embedding [V, H]. The first `ready` features count; pairs of the others are made of leftovers.
    """
    place = torch.arange(most, device=rows.device)
    start = lengths - ready[rows]
    positions = start[:, None] + place
    newest = torch.arange(len(rows), device=rows.device) * most + ready[rows] - 1
    embedded = F.embedding(tokens[rows[:, None], positions + 1].flatten(), embedding)
    places = place[:, None] + lengths - 1
    return PendingInputs(embedded, waiting[rows, :most].flatten(0, 1), positions.flatten(), start, newest, places)


def beam_inputs_ref(
    tokens: torch.Tensor,
    origin: torch.Tensor,
    before: torch.Tensor,
    root: torch.Tensor,
    depth: int,
    embedding: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pairs of beams: tokens int64 [B, K] after row `origin` int64 [B, K] of before [B, W, H], `depth` below the
    pair of the root, which has position root int64 [B]. Returns embedded, hidden [B * K, H], positions [B * K]."""
    hidden = before.gather(1, origin[:, :, None].expand(-1, -1, before.shape[2])).flatten(0, 1)
    positions = (root + depth).repeat_interleave(tokens.shape[1])
    return F.embedding(tokens.flatten(), embedding), hidden, positions


def buffer_features_ref(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    accepted: torch.Tensor,
    path: torch.Tensor | None,
    waiting: torch.Tensor,
    ready: torch.Tensor,
) -> None:
    """Buffer features of a verify for the next draft: hidden [B * N, H] of N nodes for each of rows int64 [B].

    waiting [R, n, H] gets the first of a sequence, up to n, of a tree in the order of path int64 [B, N]: no more can
    stand for tokens that were kept. ready int64 [R]: accepted [B] + 1 of them do, of padding rows, which stay at length
    1, always 1.
    """
    hidden = hidden.unflatten(0, (len(rows), -1))
    most = min(waiting.shape[1], hidden.shape[1])
    if path is not None:
        hidden = hidden.gather(1, path[:, :most, None].expand(-1, -1, hidden.shape[2]))
    waiting[rows, :most] = hidden[:, :most]
    ready[rows] = torch.where(rows > 0, accepted + 1, 1)


pending_inputs = op(pending_inputs_ref, "specbatch.kernels.drafting.draft_inputs_triton:pending_inputs")
beam_inputs = op(beam_inputs_ref, "specbatch.kernels.drafting.draft_inputs_triton:beam_inputs")
buffer_features = op(buffer_features_ref, "specbatch.kernels.drafting.draft_inputs_triton:buffer_features")
