"""Inputs of a prefill pass: tokens, positions and KV slots of the rows of a ragged batch, from its table of spans."""

from __future__ import annotations

import torch

from specbatch.kernels.attention.queries import PromptInputs
from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.dispatch import op


def prompt_inputs_ref(
    table: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    tokens: torch.Tensor | None,
    out: PromptInputs,
    given: torch.Tensor | None = None,
) -> None:
    """Fill `out` [N] for the spans of a `RaggedBatch.table`; rows after the last span are padding.

    page_table int64 [R, P]. tokens int64 [R, W]: those of all sequences; None fills them with 0. given int64 [1]:
    nonzero if `out` has the tokens already."""
    starts, _, owners, offsets = table
    row = torch.arange(len(out.positions), device=table.device)
    span = torch.searchsorted(offsets[1:], row, right=True).clamp_(max=len(offsets) - 2)
    exists = row < offsets[-1]
    out.slots.copy_(owners[span] * exists)
    out.positions.copy_((starts[span] + row - offsets[span]) * exists)
    out.kv_slots.copy_(kv_slots(page_table, out.slots, out.positions, page_size) * exists)
    found = out.tokens.zero_() if tokens is None else tokens[out.slots, out.positions]
    found = found if given is None else torch.where(given != 0, out.tokens, found)
    out.tokens.copy_(found * exists)


prompt_inputs = op(prompt_inputs_ref, "specbatch.kernels.attention.prefill.prompt_inputs_triton:prompt_inputs")
