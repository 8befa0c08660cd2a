"""Inputs of a prefill pass: tokens, positions and KV slots of the rows of a ragged batch, from its table of spans."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.common.sizes import cdiv
from specbatch.kernels.dispatch import op


class PromptInputs(NamedTuple):
    """int64 [N] each: tokens, positions in their sequences, the slots of these, and KV slots. Padding rows hold 0
    throughout, so their keys go to the padding page."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_slots: torch.Tensor

    @classmethod
    def empty(cls, count: int, device: torch.device) -> PromptInputs:
        """Uninitialized. Parts start at aligned addresses whatever the count, so no pass compiles a kernel again."""
        whole = cdiv(count, 16) * 16
        return cls(*torch.empty(len(cls._fields), whole, dtype=torch.int64, device=device)[:, :count])

    def first(self, count: int) -> PromptInputs:
        """The inputs of the first `count` rows."""
        return PromptInputs(*(part[:count] for part in self))


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
