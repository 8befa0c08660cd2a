"""Triton kernels of tree verification: accept and commit a path, and move its keys and values in the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.kv_slots import VerifiedRows
from specbatch.kernels.common.kv_slots_triton import kv_slot
from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import next_power_of_2
from specbatch.kernels.sampling.accept import BatchRows, Proposal
from specbatch.kernels.sampling.accept_triton import Chosen, load_chosen, popcount
from specbatch.kernels.sampling.rng_triton import simulated_accept


@triton.jit
def _commit_tree_kernel(
    partials,  # of `accept_triton.load_chosen`
    finite,
    drafts,
    drafted,
    ancestors,
    seeds,
    thresholds,
    tokens,
    lengths,
    rows,
    packed,
    path,
    width,
    chunks,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr,  # how many of the thresholds are used; 0: acceptance is not simulated
    WIDTH: tl.constexpr,  # of `simulated_accept`
    PDL: tl.constexpr,
):
    wait_for_previous_kernel(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_N)
    chosen, is_finite = load_chosen(partials, finite, sequence, node, chunks, N, BLOCK_CHUNKS)
    row = tl.load(rows + sequence)
    length = tl.load(lengths + row)
    limit = tl.load(drafted + sequence)
    one = tl.full([BLOCK_N], 1, tl.int64)
    bit = one << node
    word = tl.load(ancestors + sequence * N + node, node < N, other=0)
    if DEPTH:
        good = tl.sum(tl.where((node <= limit) & (node < N), bit, 0), 0)
    else:
        draft = tl.load(drafts + sequence * (N - 1) + node - 1, (node > 0) & (node < N), other=-1)
        # The parent is the highest bit but the own one.
        is_parent = ((word ^ bit)[:, None] >> node[None, :]) == 1
        agrees = is_parent & (draft[:, None] == chosen[None, :])
        right = (tl.sum(agrees.to(tl.int32), 1) > 0) & (node <= limit) | (node == 0)
        good = tl.sum(tl.where(right & (node < N), bit, 0), 0)
    reached = ((word & ~good) == 0) & (node < N)
    best = tl.max(tl.where(reached, popcount(word) * BLOCK_N + BLOCK_N - 1 - node, 0), 0)
    taken = tl.sum(tl.where(node == BLOCK_N - 1 - best % BLOCK_N, word, 0), 0)
    count = best // BLOCK_N - 1
    length_of_path = count + 1
    if DEPTH:
        count = simulated_accept(tl.load(seeds + sequence), length, limit, thresholds, DEPTH, WIDTH, BLOCK_N)
        taken = tl.where(count < length_of_path, taken, 1)  # the root alone: nodes stay in their order
        length_of_path = tl.where(count < length_of_path, length_of_path, 1)
    before = popcount(taken & (bit - 1))
    rank = tl.where(((taken >> node) & 1) == 1, before, length_of_path + node - before)

    tl.store(tokens + row * width + length + 1 + rank, chosen, node < N)
    # Several sequences may be the padding row at once; it must stay as it is.
    tl.store(lengths + row, length + count + 1, row != 0)
    packed += sequence * (N + 3)
    tl.store(packed + rank, chosen, node < N)
    tl.store(packed + N, count)
    tl.store(packed + N + 1, limit)
    tl.store(packed + N + 2, is_finite)
    tl.store(path + sequence * N + rank, node.to(tl.int64), node < N)


def commit_tree(
    chosen: Chosen, proposal: Proposal, rows: BatchRows, seeds: torch.Tensor, simulate: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`walk_tree_ref` of the tokens chosen at every node, or `simulated_path_ref` if acceptance is simulated, and
    `accept_triton.commit` in path order.

    Returns packed int64 [B, N + 3] and path int64 [B, N].
    """
    (drafts, drafted, _, ancestors, *_), (tokens, lengths, slots) = proposal, rows
    assert ancestors is not None, "the drafts are not a tree"
    batch, n = ancestors.shape
    packed = torch.empty(batch, n + 3, dtype=torch.int64, device=slots.device)
    path = torch.empty_like(ancestors)
    _commit_tree_kernel[(batch,)](
        drafts=drafts, drafted=drafted, ancestors=ancestors, seeds=seeds, tokens=tokens, lengths=lengths, rows=slots,
        packed=packed, path=path, width=tokens.shape[1], **chosen.launch(n, simulate),
    )  # fmt: skip
    return packed, path


@triton.jit
def _move_kernel(
    keys, values, page_table, rows, lengths, path, accepted, key_layer, value_layer, accepted_stride, width,
    N: tl.constexpr, PAGE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    sequence, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    pages = page_table + tl.load(rows + sequence) * width
    length = tl.load(lengths + sequence)
    column = tl.arange(0, BLOCK)
    of_keys, of_values = column < KEY, column < VALUE
    keys += layer * key_layer + column
    values += layer * value_layer + column
    count = tl.load(accepted + sequence * accepted_stride).to(tl.int32)
    # A node is never before its place: going up, none is written over before it was read.
    for place in range(1, count + 1):
        source = length + tl.load(path + sequence * N + place)
        home = length + place
        at, to = kv_slot(pages, source, PAGE), kv_slot(pages, home, PAGE)
        tl.store(keys + to * KEY, tl.load(keys + at * KEY, of_keys), of_keys)
        tl.store(values + to * VALUE, tl.load(values + at * VALUE, of_values), of_values)


def move_accepted_kv(keys: torch.Tensor, values: torch.Tensor, verified: VerifiedRows, path: torch.Tensor) -> None:
    """`move_accepted_kv_ref` in one launch over all layers."""
    layers, _, page_size, kv_heads, dim = keys.shape
    bits = torch.uint8 if keys.itemsize == 1 else keys.dtype
    sizes = kv_heads * dim, kv_heads * values.shape[4]
    _move_kernel[(len(path), layers)](
        keys.view(bits), values.view(bits), verified.page_table, verified.slots, verified.lengths, path,
        verified.accepted, keys.stride(0), values.stride(0), verified.accepted.stride(0), verified.page_table.shape[1],
        N=path.shape[1], PAGE=page_size, KEY=sizes[0], VALUE=sizes[1], BLOCK=next_power_of_2(max(sizes)), **pdl(path),
    )  # fmt: skip
