"""Triton kernels of `draft_inputs`, one launch each: a program copies part of a row, the first one also its indices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv
from specbatch.kernels.drafting.draft_inputs import PendingInputs
from specbatch.kernels.elementwise.gather_rows_triton import COLUMNS, copy_part, how


@triton.jit
def _due_kernel(
    tokens, rows, lengths, waiting, ready, embedding, embedded, hidden, positions, start, newest, places,
    length_of_tokens, spacing, room, width,
    MOST: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(0).to(tl.int64)
    sequence, place = pair // MOST, pair % MOST
    row = tl.load(rows + sequence)
    length, count = tl.load(lengths + sequence), tl.load(ready + row)
    position = length - count + place
    token = tl.load(tokens + row * length_of_tokens + position + 1)
    copy_part(embedding + token * width, embedded + pair * width, width, COLUMNS)
    copy_part(waiting + (row * room + place) * width, hidden + pair * width, width, COLUMNS)
    if tl.program_id(1) == 0:
        tl.store(positions + pair, position)
        tl.store(places + place * spacing + sequence, length - 1 + place)
        tl.store(start + sequence, length - count, place == 0)
        tl.store(newest + sequence, pair + count - 1, place == 0)


@triton.jit(do_not_specialize=["depth"])
def _beam_kernel(
    tokens, origin, before, root, depth, embedding, embedded, hidden, positions, parents, width,
    TOPK: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(0).to(tl.int64)
    sequence = pair // TOPK
    parent = sequence * parents + tl.load(origin + pair)
    copy_part(embedding + tl.load(tokens + pair) * width, embedded + pair * width, width, COLUMNS)
    copy_part(before + parent * width, hidden + pair * width, width, COLUMNS)
    tl.store(positions + pair, tl.load(root + sequence) + depth, tl.program_id(1) == 0)


@triton.jit
def _wait_kernel(
    hidden, rows, accepted, path, waiting, ready, nodes, room, spacing, width,
    MOST: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(0).to(tl.int64)
    sequence, place = pair // MOST, pair % MOST
    row = tl.load(rows + sequence)
    node = place
    if path is not None:
        node = tl.load(path + sequence * nodes + place)
    copy_part(hidden + (sequence * nodes + node) * width, waiting + (row * room + place) * width, width, COLUMNS)
    # Several sequences may be the padding row at once; it must stay as it is.
    count = tl.load(accepted + sequence * spacing) + 1
    tl.store(ready + row, count, (row != 0) & (place == 0) & (tl.program_id(1) == 0))


def pending_inputs(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    waiting: torch.Tensor,
    ready: torch.Tensor,
    embedding: torch.Tensor,
    most: int,
) -> PendingInputs:
    """`draft_inputs.pending_inputs_ref`."""
    batch, (_, room, width) = len(rows), waiting.shape
    hidden = waiting.new_empty(batch * most, width)
    due = PendingInputs(
        embedded=torch.empty_like(hidden),
        hidden=hidden,
        positions=rows.new_empty(batch * most),
        start=torch.empty_like(rows),
        newest=torch.empty_like(rows),
        # Each row begins where 16 bytes do, as other tensors: else Triton would compile all that reads it once more.
        places=rows.new_empty(most, batch + batch % 2)[:, :batch],
    )
    _due_kernel[(batch * most, cdiv(width, COLUMNS))](
        tokens, rows, lengths, waiting, ready, embedding, *due, tokens.shape[1], due.places.stride(0), room, width,
        MOST=most, **how(rows),
    )  # fmt: skip
    return due


def beam_inputs(
    tokens: torch.Tensor,
    origin: torch.Tensor,
    before: torch.Tensor,
    root: torch.Tensor,
    depth: int,
    embedding: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`draft_inputs.beam_inputs_ref`."""
    count, (_, parents, width) = tokens.numel(), before.shape
    embedded, hidden = before.new_empty(count, width), before.new_empty(count, width)
    positions = tokens.new_empty(count)
    _beam_kernel[(count, cdiv(width, COLUMNS))](
        tokens, origin, before, root, depth, embedding, embedded, hidden, positions, parents, width,
        TOPK=tokens.shape[1], **how(tokens),
    )  # fmt: skip
    return embedded, hidden, positions


def buffer_features(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    accepted: torch.Tensor,
    path: torch.Tensor | None,
    waiting: torch.Tensor,
    ready: torch.Tensor,
) -> None:
    """`draft_inputs.buffer_features_ref`; of padding rows `ready` is 1 before and stays."""
    batch, (_, room, width) = len(rows), waiting.shape
    nodes = len(hidden) // batch
    most = min(room, nodes)
    _wait_kernel[(batch * most, cdiv(width, COLUMNS))](
        hidden, rows, accepted, path, waiting, ready, nodes, room, accepted.stride(0), width,
        MOST=most, **how(hidden),
    )  # fmt: skip
