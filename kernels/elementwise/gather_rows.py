"""Rows of tables by numbers that are on the device."""

from __future__ import annotations

import torch

from specbatch.kernels import dispatch


def rows_of_both_ref(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a [R, ...] and b [R, ...] -> those of rows int64 [n]."""
    return a[rows], b[rows]


def put_next_ref(ring: torch.Tensor, turn: torch.Tensor, item: torch.Tensor) -> None:
    """Move `turn` int64 [1] on to the next place of ring [n, ...], and put an item [...] there."""
    turn.copy_((turn + 1) % len(ring))
    ring.index_copy_(0, turn, item[None])


def rows_of_both(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows_of_both_ref`, in one launch on a CUDA device."""
    if dispatch.runs_kernels(rows):
        from specbatch.kernels.elementwise import gather_rows_triton

        return gather_rows_triton.rows_of_both(a, b, rows)
    return rows_of_both_ref(a, b, rows)


def put_next(ring: torch.Tensor, turn: torch.Tensor, item: torch.Tensor) -> None:
    """`put_next_ref`, in one launch on a CUDA device."""
    if dispatch.runs_kernels(item):
        from specbatch.kernels.elementwise import gather_rows_triton

        gather_rows_triton.put_next(ring, turn, item)
    else:
        put_next_ref(ring, turn, item)
