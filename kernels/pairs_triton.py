"""`pairs.py`, one launch each: a program copies part of a row, and the first of a row's programs its numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.pairs import Due

_COLUMNS = 1024  # that one program copies


@triton.jit
def _copy(source, target, width, COLUMNS: tl.constexpr):
    """This program's part of a row."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(target + column, tl.load(source + column, column < width), column < width)


@triton.jit
def _due_kernel(
    tokens,
    rows,
    lengths,
    waiting,
    ready,
    embedding,
    embedded,
    hidden,
    positions,
    start,
    newest,
    places,
    length_of_tokens,
    batch,
    width,
    MOST: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    sequence, place = pair // MOST, pair % MOST
    row = tl.load(rows + sequence)
    length, count = tl.load(lengths + sequence), tl.load(ready + row)
    position = length - count + place
    token = tl.load(tokens + row * length_of_tokens + position + 1)
    _copy(embedding + token * width, embedded + pair * width, width, COLUMNS)
    _copy(waiting + (row * MOST + place) * width, hidden + pair * width, width, COLUMNS)
    if tl.program_id(1) == 0:
        tl.store(positions + pair, position)
        tl.store(places + place * batch + sequence, length - 1 + place)
        tl.store(start + sequence, length - count, place == 0)
        tl.store(newest + sequence, pair + count - 1, place == 0)


@triton.jit(do_not_specialize=["depth"])
def _beam_kernel(
    tokens,
    origin,
    before,
    root,
    depth,
    embedding,
    embedded,
    hidden,
    positions,
    parents,
    width,
    TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    sequence = pair // TOPK
    parent = sequence * parents + tl.load(origin + pair)
    _copy(embedding + tl.load(tokens + pair) * width, embedded + pair * width, width, COLUMNS)
    _copy(before + parent * width, hidden + pair * width, width, COLUMNS)
    tl.store(positions + pair, tl.load(root + sequence) + depth, tl.program_id(1) == 0)


@triton.jit
def _rows_kernel(a, b, rows, taken_a, taken_b, width_a, width_b, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    _copy(a + row * width_a, taken_a + place * width_a, width_a, COLUMNS)
    _copy(b + row * width_b, taken_b + place * width_b, width_b, COLUMNS)


@triton.jit
def _wait_kernel(
    hidden,
    rows,
    accepted,
    path,
    waiting,
    ready,
    nodes,
    spacing,
    width,
    MOST: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    sequence, place = pair // MOST, pair % MOST
    row = tl.load(rows + sequence)
    node = place
    if path is not None:
        node = tl.load(path + sequence * nodes + place)
    _copy(hidden + (sequence * nodes + node) * width, waiting + (row * MOST + place) * width, width, COLUMNS)
    # Several sequences may be the padding row at once; it must stay as it is.
    count = tl.load(accepted + sequence * spacing) + 1
    tl.store(ready + row, count, (row != 0) & (place == 0) & (tl.program_id(1) == 0))


def due_pairs(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    waiting: torch.Tensor,
    ready: torch.Tensor,
    embedding: torch.Tensor,
) -> Due:
    """`pairs.due_pairs_ref`."""
    batch, (_, most, width) = len(rows), waiting.shape
    hidden = waiting.new_empty(batch * most, width)
    positions, start = rows.new_empty(batch * most), torch.empty_like(rows)
    due = Due(
        torch.empty_like(hidden), hidden, positions, start, torch.empty_like(start), rows.new_empty(most, batch)
    )
    _due_kernel[(batch * most, triton.cdiv(width, _COLUMNS))](
        tokens, rows, lengths, waiting, ready, embedding, *due, tokens.shape[1], batch, width, MOST=most, **_how(rows)
    )
    return due


def beam_pairs(
    tokens: torch.Tensor,
    origin: torch.Tensor,
    before: torch.Tensor,
    root: torch.Tensor,
    depth: int,
    embedding: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`pairs.beam_pairs_ref`."""
    count, (_, parents, width) = tokens.numel(), before.shape
    embedded, hidden = before.new_empty(count, width), before.new_empty(count, width)
    positions = tokens.new_empty(count)
    _beam_kernel[(count, triton.cdiv(width, _COLUMNS))](
        tokens, origin, before, root, depth, embedding, embedded, hidden, positions, parents, width,
        TOPK=tokens.shape[1], **_how(tokens),
    )  # fmt: skip
    return embedded, hidden, positions


def rows_of_both(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`pairs.rows_of_both_ref`."""
    width_a, width_b = a.shape[1], b.shape[1]
    taken = a.new_empty(len(rows), width_a), b.new_empty(len(rows), width_b)
    grid = len(rows), triton.cdiv(max(width_a, width_b), _COLUMNS)
    _rows_kernel[grid](a, b, rows, *taken, width_a, width_b, **_how(a))
    return taken


def keep_waiting(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    accepted: torch.Tensor,
    path: torch.Tensor | None,
    waiting: torch.Tensor,
    ready: torch.Tensor,
) -> None:
    """`pairs.keep_waiting_ref`; of padding rows `ready` is 1 before and stays."""
    batch, (_, most, width) = len(rows), waiting.shape
    _wait_kernel[(batch * most, triton.cdiv(width, _COLUMNS))](
        hidden, rows, accepted, path, waiting, ready, len(hidden) // batch, accepted.stride(0), width,
        MOST=most, **_how(hidden),
    )  # fmt: skip


def _how(x: torch.Tensor) -> dict[str, int | bool]:
    return {"COLUMNS": _COLUMNS, "PDL": x.is_cuda, "launch_pdl": x.is_cuda}
