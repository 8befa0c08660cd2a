"""Row gathers and ring buffers with indices on the device."""

from __future__ import annotations

import torch

from specbatch.kernels.dispatch import op


def gather_rows_ref(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a [R, ...] and b [R, ...] -> those of rows int64 [n]."""
    return a[rows], b[rows]


def ring_push_ref(ring: torch.Tensor, turn: torch.Tensor, item: torch.Tensor) -> None:
    """Move `turn` int64 [1] on to the next place of ring [n, ...], and put an item [...] there."""
    turn.copy_((turn + 1) % len(ring))
    ring.index_copy_(0, turn, item[None])


gather_rows = op(gather_rows_ref, "specbatch.kernels.elementwise.gather_rows_triton:gather_rows")
ring_push = op(ring_push_ref, "specbatch.kernels.elementwise.gather_rows_triton:ring_push")
