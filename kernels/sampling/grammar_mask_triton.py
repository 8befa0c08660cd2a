"""Triton kernels of `grammar_mask`: one program for each block of tokens of a row, or for each block of states."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.sizes import cdiv

_BLOCK = 1024  # tokens of a row
_STATES = 128


@triton.jit(do_not_specialize=["nodes"])
def _mask_kernel(
    logits, ids, tables, grammars, states, value, nodes, vocabulary, stride, node_stride, ids_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request, node = row // nodes, row % nodes
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(states + row)
    inside = column < tl.where(state >= 0, vocabulary, 0)
    token = column
    if ids is not None:
        token = tl.load(ids + request * ids_stride + column, inside, other=0)
    grammar = grammars + request * 3
    kind = tl.load(tables + tl.load(grammar) + token, inside, other=0).to(tl.int64)
    after = tl.load(tables + tl.load(grammar + 1) + state * tl.load(grammar + 2) + kind, inside, other=0)
    tl.store(logits + request * stride + node * node_stride + column, value, inside & (after < 0))


@triton.jit(do_not_specialize=["nodes", "total", "stride"], do_not_specialize_on_alignment=["tokens"])
def _step_kernel(states, tokens, tables, grammars, out, nodes, total, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    request = (index // nodes).to(tl.int64)
    state = tl.load(states + index, inside, other=-1)
    is_bound = state >= 0  # false past the end
    token = tl.load(tokens + request * stride + index % nodes, is_bound, other=0)
    grammar = grammars + request * 3
    start, rows = tl.load(grammar, is_bound, other=0), tl.load(grammar + 1, is_bound, other=0)
    kind = tl.load(tables + start + token, is_bound, other=0).to(tl.int64)
    place = rows + state * tl.load(grammar + 2, is_bound, other=0) + kind
    tl.store(out + index, tl.load(tables + place, is_bound, other=-1).to(tl.int64), inside)


def grammar_mask(
    logits: torch.Tensor,
    tables: torch.Tensor,
    grammars: torch.Tensor,
    states: torch.Tensor,
    value: float = -torch.inf,
    ids: torch.Tensor | None = None,
) -> None:
    """`grammar_mask.grammar_mask_ref`."""
    batch, nodes, vocabulary = logits.shape
    assert logits.stride(2) == 1, "the logits of a row must be adjacent"
    assert states.is_contiguous(), "rows have their states in order"
    assert ids is None or ids.stride(-1) == 1, "the ids of a row must be adjacent"
    grid = (batch * nodes, cdiv(vocabulary, _BLOCK))
    _mask_kernel[grid](
        logits, ids, tables, grammars, states, value, nodes, vocabulary, logits.stride(0), logits.stride(1),
        ids.stride(0) if ids is not None and ids.dim() == 2 else 0,
        BLOCK=_BLOCK,
    )  # fmt: skip


def grammar_step(
    states: torch.Tensor, tokens: torch.Tensor, tables: torch.Tensor, grammars: torch.Tensor
) -> torch.Tensor:
    """`grammar_mask.grammar_step_ref`."""
    batch, nodes = states.shape
    assert tokens.stride(1) == 1 or nodes == 1, "the tokens of a request must be adjacent"
    states = states.contiguous()
    out = torch.empty_like(states)
    _step_kernel[(cdiv(batch * nodes, _STATES),)](
        states, tokens, tables, grammars, out, nodes, batch * nodes, tokens.stride(0), BLOCK=_STATES
    )
    return out
