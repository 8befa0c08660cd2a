"""The inputs of a verify: root and drafts of every sequence, and their positions."""

from __future__ import annotations

import torch

from specbatch.kernels.dispatch import op
from specbatch.kernels.sampling.tree_verify import tree_depths


def verify_inputs_ref(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    drafts: torch.Tensor,
    ancestors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that a verify of drafts int64 [B, N-1] computes, root and drafts, and their positions: int64 [B * N].

    tokens int64 [R, W] and lengths int64 [R] of all device rows; rows int64 [B]; ancestors int64 [B, N] contiguous: the
    words of a tree, whose nodes have positions by their depth. None is a chain.
    """
    start = lengths[rows]
    nodes = torch.cat([tokens[rows, start][:, None], drafts], 1)
    depth = torch.arange(nodes.shape[1], device=rows.device) if ancestors is None else tree_depths(ancestors)
    return nodes.flatten(), (start[:, None] + depth).flatten()


verify_inputs = op(verify_inputs_ref, "specbatch.kernels.sampling.accept_triton:verify_inputs")
