"""Rows of tables by numbers that are on the device."""

from __future__ import annotations

import torch

from specbatch.kernels import dispatch


def gather_rows_ref(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a [R, ...] and b [R, ...] -> those of rows int64 [n]."""
    return a[rows], b[rows]


def ring_push_ref(ring: torch.Tensor, turn: torch.Tensor, item: torch.Tensor) -> None:
    """Move `turn` int64 [1] on to the next place of ring [n, ...], and put an item [...] there."""
    turn.copy_((turn + 1) % len(ring))
    ring.index_copy_(0, turn, item[None])


def gather_rows(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_rows_ref`, in one launch on a CUDA device."""
    if dispatch.runs_kernels(rows):
        from specbatch.kernels.elementwise import gather_rows_triton

        return gather_rows_triton.gather_rows(a, b, rows)
    return gather_rows_ref(a, b, rows)


def ring_push(ring: torch.Tensor, turn: torch.Tensor, item: torch.Tensor) -> None:
    """`ring_push_ref`, in one launch on a CUDA device."""
    if dispatch.runs_kernels(item):
        from specbatch.kernels.elementwise import gather_rows_triton

        gather_rows_triton.ring_push(ring, turn, item)
    else:
        ring_push_ref(ring, turn, item)
