"""Triton kernel of `prompt_inputs`: one launch before a prefill pass, in place of an upload and ten operations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.queries import PromptInputs
from specbatch.kernels.common.kv_slots_triton import kv_slot
from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv

_ROWS = 128  # per program


def prompt_inputs(
    table: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    tokens: torch.Tensor | None,
    out: PromptInputs,
    given: torch.Tensor | None = None,
) -> None:
    """`prompt_inputs_ref`; rows of the tables are contiguous."""
    rows, spans = len(out.positions), table.shape[1] - 1
    _prompt_inputs_kernel[(cdiv(rows, _ROWS),)](
        table, page_table, tokens, given, *out, rows, spans, spans.bit_length(), table.stride(0), page_table.stride(0),
        0 if tokens is None else tokens.stride(0), PAGE=page_size, ROWS=_ROWS, **pdl(table),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "spans", "bits", "table_stride"])  # they change from pass to pass
def _prompt_inputs_kernel(
    table, page_table, tokens, given, out_tokens, out_positions, out_slots, out_kv_slots, rows, spans, bits,
    table_stride, page_stride, token_stride, PAGE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    owners, offsets = table + 2 * table_stride, table + 3 * table_stride
    wait_for_previous_kernel(PDL)
    span, after = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32) + spans
    for _ in range(bits):  # binary search, until the two are adjacent
        middle = (span + after) // 2
        is_right = tl.load(offsets + middle) <= row
        span, after = tl.where(is_right, middle, span), tl.where(is_right, after, middle)
    end = tl.load(offsets + spans)
    exists = row < end
    owner = tl.load(owners + span, exists, other=0)
    position = tl.where(exists, tl.load(table + span) + row - tl.load(offsets + span), 0)
    inside = row < rows
    if tokens is None:
        tl.store(out_tokens + row, tl.zeros([ROWS], tl.int64), inside)
    else:
        reads, writes = exists, inside
        if given is not None:
            first = tl.where(tl.load(given) == 0, 0, end)  # row to write: with given tokens, the padding after them
            reads, writes = exists & (row >= first), inside & (row >= first)
        tl.store(out_tokens + row, tl.load(tokens + owner * token_stride + position, reads, other=0), writes)
    tl.store(out_positions + row, position, inside)
    tl.store(out_slots + row, owner, inside)
    tl.store(out_kv_slots + row, kv_slot(page_table + owner * page_stride, position, PAGE, exists), inside)
