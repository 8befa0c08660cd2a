"""Triton kernel of `grammar_mask`: one program for each block of tokens of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["nodes"])
def _mask_kernel(logits, tables, starts, classes, states, nodes, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(states + row)
    inside = token < tl.where(state >= 0, vocabulary, 0)
    table = tables + tl.load(starts + row // nodes)
    kind = tl.load(table + token, inside, other=0).to(tl.int64)
    after = tl.load(table + vocabulary + state * tl.load(classes + row // nodes) + kind, inside, other=0)
    tl.store(logits + row * vocabulary + token, float("-inf"), inside & (after < 0))


def grammar_mask(
    logits: torch.Tensor, tables: torch.Tensor, starts: torch.Tensor, classes: torch.Tensor, states: torch.Tensor
) -> None:
    """`grammar_mask.grammar_mask_ref`."""
    batch, nodes, vocabulary = logits.shape
    assert logits.is_contiguous(), "logits are masked in place"
    assert states.is_contiguous(), "rows have their states in order"
    block = 1024
    grid = (batch * nodes, triton.cdiv(vocabulary, block))
    _mask_kernel[grid](
        logits, tables, starts.contiguous(), classes.contiguous(), states, nodes, vocabulary, BLOCK=block
    )
