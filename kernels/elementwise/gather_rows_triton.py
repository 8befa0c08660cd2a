"""Triton kernels of `gather_rows`, one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv

COLUMNS = 1024  # of a row that one program copies


@triton.jit
def copy_part(source, target, width, COLUMNS: tl.constexpr):
    """This program's part of a row, of which the second side of the grid has one for each program."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(target + column, tl.load(source + column, column < width), column < width)


@triton.jit
def _rows_kernel(
    a, b, rows, taken_a, taken_b, stride_a, stride_b, width_a, width_b, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous_kernel(PDL)
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    copy_part(a + row * stride_a, taken_a + place * width_a, width_a, COLUMNS)
    copy_part(b + row * stride_b, taken_b + place * width_b, width_b, COLUMNS)


@triton.jit
def _put_kernel(ring, turn, item, places, stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous_kernel(PDL)
    place = (tl.load(turn) + 1) % places
    tl.debug_barrier()  # all have read it
    tl.store(turn, place)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(ring + place * stride + at, tl.load(item + at, at < size), at < size)


def gather_rows(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_rows.gather_rows_ref`; each row must be contiguous; there may be gaps between rows."""
    width_a, width_b = a[0].numel(), b[0].numel()
    taken = a.new_empty(len(rows), *a.shape[1:]), b.new_empty(len(rows), *b.shape[1:])
    grid = len(rows), cdiv(max(width_a, width_b), COLUMNS)
    _rows_kernel[grid](a, b, rows, *taken, a.stride(0), b.stride(0), width_a, width_b, **how(a))
    return taken


def ring_push(ring: torch.Tensor, turn: torch.Tensor, item: torch.Tensor) -> None:
    """`gather_rows.ring_push_ref`; one item of the ring is contiguous. A single program writes the turn."""
    _put_kernel[(1,)](
        ring, turn, item, len(ring), ring.stride(0), item.numel(),
        BLOCK=1024, **pdl(item),
    )  # fmt: skip


def how(x: torch.Tensor) -> dict[str, int | bool]:
    """Settings of kernels that copy rows."""
    return {"COLUMNS": COLUMNS, **pdl(x)}
