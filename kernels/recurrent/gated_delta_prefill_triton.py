"""Triton kernels of the gated delta rule over prompts; see `gated_delta_triton`.

Operands of `tl.dot` have the type of the inputs, sums are float32, and so is the state from chunk to chunk; only the
inverse of a chunk's matrix takes float16. With float16 inputs no number of a state may exceed 65504.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.common.sizes import cdiv, multiprocessors, tile_side
from specbatch.kernels.recurrent.gated_delta_triton import invert, kernel_sizes, log_decay, normalise, unit
from specbatch.kernels.recurrent.inputs import CHUNK, EXACT_CHUNK, DeltaInputs


def delta_prefill(
    inputs: DeltaInputs,
    spans: RaggedBatch,
    out: torch.Tensor | None = None,
    *,
    chunk: int | None = None,
    processors: int | None = None,
) -> torch.Tensor:
    """`delta_prefill_ref`; `chunk` rows are computed together, by default as many as the type has room for. processors:
    of the device, if None."""
    qkv, _, b, a, heads, state = inputs
    total, exact = len(qkv), qkv.dtype == torch.float32
    chunk = chunk or (EXACT_CHUNK if exact else CHUNK)
    is_small = not exact and heads.key_dim <= 128
    unit_qk = qkv.new_empty(total, 2, heads.keys, heads.key_dim)
    inverse, scores = (qkv.new_empty(total, heads.values, chunk) for _ in range(2))
    sums = torch.empty(total, heads.values, dtype=torch.float32, device=qkv.device)
    o = heads.outputs(qkv, out)
    tiles, sizes = spans.tiles(chunk), kernel_sizes(heads, qkv)
    _chunks[(len(tiles), heads.values)](
        qkv, b, a, heads.a_log, heads.dt_bias, tiles, spans.table, unit_qk, inverse, scores, sums,
        qkv.stride(0), b.stride(0), a.stride(0), spans.table.stride(0),
        CHUNK=chunk, LEVELS=(chunk - 1).bit_length(), num_warps=4,
        maxnreg=168 if is_small else None,  # so that three programs fit on a processor
        **sizes,
    )  # fmt: skip
    columns = min(32, tile_side(heads.value_dim))
    grid = cdiv(heads.value_dim, columns), heads.values, spans.table.shape[1] - 1
    # With three chunks in flight, one program fills most of a processor's shared memory.
    processors = multiprocessors(qkv.device) if processors is None else processors
    stages = 3 if is_small and math.prod(grid) <= processors else 2
    _walk[grid](
        unit_qk, qkv, inverse, scores, sums, spans.table, state, o,
        qkv.stride(0), spans.table.stride(0), state.stride(0),
        CHUNK=chunk, COLUMNS=columns, num_warps=4, num_stages=stages, **sizes,
    )  # fmt: skip
    return normalise(o, inputs)


@triton.jit(do_not_specialize=["table_stride"])
def _chunks(
    qkv, b, a, a_log, dt_bias, tiles, table, unit_qk, inverse, scores, sums,
    qkv_stride, b_stride, a_stride, table_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Of the rows of one chunk and head: (I + A)^-1 with its columns times beta, q k^T D, and G; the first of the value
    heads of a key head also stores its q and k, normalized."""
    head = tl.program_id(1)
    key = head // (VALUES // KEYS)
    span = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    count = tl.load(table + table_stride + span) - tl.load(table + span)
    if first >= count:
        return
    step = tl.arange(0, CHUNK)
    live = first + step < count
    token = tl.load(table + 3 * table_stride + span) + first + step
    column = tl.arange(0, BLOCK_K)
    mask = live[:, None] & (column < K)[None, :]
    heads = qkv + token[:, None] * qkv_stride + key * K + column[None, :]
    q = (unit(heads, mask) * (K**-0.5)).to(qkv.dtype.element_ty)
    k = unit(heads + KEYS * K, mask).to(qkv.dtype.element_ty)
    if head % (VALUES // KEYS) == 0:
        units = unit_qk + (token[:, None] * 2 * KEYS + key) * K + column[None, :]
        tl.store(units, q, mask)
        tl.store(units + KEYS * K, k, mask)
    beta = tl.sigmoid(tl.load(b + token * b_stride + head, live, 0.0).to(tl.float32))
    total = tl.cumsum(
        log_decay(a + token * a_stride + head, a_log + head + step * 0, dt_bias + head + step * 0, live), 0
    )
    sees = step[:, None] >= step[None, :]
    decay = tl.exp(tl.where(sees, total[:, None] - total[None, :], float("-inf")))
    cells = (token[:, None] * VALUES + head) * CHUNK + step[None, :]
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
    tl.store(scores + cells, score.to(scores.dtype.element_ty), live[:, None])
    lower = beta[:, None] * tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay
    lower = tl.where(step[:, None] > step[None, :], lower, 0.0)
    # No entry of the inverse exceeds 1, as keys have length one and beta is at most 1, so float16 has the digits of
    # tf32 here. Tensor cores can transpose operands of 16 bits as they read them, but not those of 32 bits.
    narrow: tl.constexpr = tl.float32 if PRECISION == "ieee" else tl.float16
    solved = invert(lower, narrow, LEVELS, PRECISION) * beta[None, :]
    tl.store(inverse + cells, solved.to(inverse.dtype.element_ty), live[:, None])
    tl.store(sums + token * VALUES + head, total, live)


@triton.jit(do_not_specialize=["table_stride"])
def _walk(
    unit_qk, qkv, inverse, scores, sums, table, state, o, qkv_stride, table_stride, state_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's state from chunk to chunk of a span, and the outputs on the way."""
    head, span = tl.program_id(1), tl.program_id(2)
    kind: tl.constexpr = qkv.dtype.element_ty  # of the operands of tl.dot
    key = head // (VALUES // KEYS)
    start = tl.load(table + span)
    count = (tl.load(table + table_stride + span) - start).to(tl.int32)
    if count == 0:
        return
    row = tl.load(table + 2 * table_stride + span)
    offset = tl.load(table + 3 * table_stride + span)
    step = tl.arange(0, CHUNK)
    k_column = tl.arange(0, BLOCK_K)
    v_column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_k, in_v = (k_column < K)[None, :], (v_column < V)[None, :]
    cells = state + row * state_stride + head * K * V + k_column[:, None] * V + v_column[None, :]
    in_state = (k_column < K)[:, None] & in_v
    s = tl.zeros([BLOCK_K, COLUMNS], tl.float32)
    if start > 0:
        s = tl.load(cells, in_state, 0.0).to(tl.float32)
    for first in tl.range(0, count, CHUNK):
        live = first + step < count
        token = offset + first + step
        mask = live[:, None] & in_v
        units = unit_qk + (token[:, None] * 2 * KEYS + key) * K + k_column[None, :]
        q = tl.load(units, live[:, None] & in_k, 0.0)
        k = tl.load(units + KEYS * K, live[:, None] & in_k, 0.0)
        v = tl.load(qkv + token[:, None] * qkv_stride + 2 * KEYS * K + head * V + v_column[None, :], mask, 0.0)
        matrix = (token[:, None] * VALUES + head) * CHUNK + step[None, :]
        solved = tl.load(inverse + matrix, live[:, None], 0.0)
        score = tl.load(scores + matrix, live[:, None], 0.0)
        total = tl.load(sums + token * VALUES + head, live, 0.0)
        whole = tl.load(sums + (offset + tl.minimum(first + CHUNK, count) - 1) * VALUES + head)
        fade = tl.exp(total)[:, None]
        narrow = s.to(kind)
        rest = v.to(tl.float32) - fade * tl.dot(k, narrow, input_precision=PRECISION)
        u = tl.dot(solved, rest.to(kind), input_precision=PRECISION)
        out = fade * tl.dot(q, narrow, input_precision=PRECISION)
        out = tl.dot(score, u.to(kind), out, input_precision=PRECISION)
        tl.store(o + (token[:, None] * VALUES + head) * V + v_column[None, :], out.to(o.dtype.element_ty), mask)
        u *= tl.exp(tl.where(live, whole - total, 0.0))[:, None]
        s = tl.dot(tl.trans(k), u.to(kind), s * tl.exp(whole), input_precision=PRECISION)
    tl.store(cells, s.to(state.dtype.element_ty), in_state)
