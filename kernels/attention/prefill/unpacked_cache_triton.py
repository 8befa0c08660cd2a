"""Keys and values of an FP8 cache in the type of the queries, for prefill attention of long chunks after a prefix.

A tile of queries would convert all keys before it by itself. Here each key is converted once for all of them, to memory
that layers use in turn: 3 bytes a value, where attention takes 4 operations for each of hundreds of queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.queries import PrefillInputs
from specbatch.kernels.attention.ragged_batch import RaggedBatch, StaticRaggedBatch
from specbatch.kernels.attention.stored_kv_triton import from_stored
from specbatch.kernels.common.sizes import cdiv, next_power_of_2

QUERIES = 64  # for each key, that are worth it
MOST = 512 << 20  # bytes of keys and values; with more, attention converts them itself
_PROGRAM = 4096  # elements of a program


def unpacked(inputs: PrefillInputs) -> PrefillInputs:
    """The same keys and values as a 16-bit cache of these spans alone, without scales. Where there is no FP8 cache, or
    it would not pay, for few queries or a window, or not fit, and for recordings: `inputs`."""
    spans, cache = inputs.spans, inputs.k_cache
    if cache.element_size() > 1 or inputs.q.element_size() != 2 or inputs.window:
        return inputs
    if isinstance(spans, StaticRaggedBatch) or (spans.fresh and inputs.k_new is not None):
        return inputs
    if spans.scores < QUERIES * sum(spans.ends) or 4 * spans.padded_keys * cache.stride(1) > MOST:
        return inputs
    slots, alone = spans.alone
    k, v = (_unpack(x, slots, alone, scale, inputs.q.dtype)
            for x, scale in ((cache, inputs.k_scale), (inputs.v_cache, inputs.v_scale)))  # fmt: skip
    return inputs._replace(k_cache=k, v_cache=v, spans=alone, k_scale=None, v_scale=None)


def _unpack(
    cache: torch.Tensor, slots: torch.Tensor, spans: RaggedBatch, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """What is at flat `slots` of the cache [pages, page_size, kv, dim] -> the pages of `spans`."""
    kv, dim = cache.shape[2:]
    out = torch.empty(len(slots) // spans.page_size, spans.page_size, kv, dim, dtype=dtype, device=cache.device)
    lines, block = len(slots) * kv, next_power_of_2(dim)
    rows = max(1, _PROGRAM // block)
    _unpack_kernel[(cdiv(lines, rows),)](
        cache, slots, scale, out, lines, KV=kv, DIM=dim, BLOCK_D=block, ROWS=rows, num_warps=4
    )
    return out


@triton.jit(do_not_specialize=["lines"])
def _unpack_kernel(
    cache, slots, scale, out, lines, KV: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):
    """A line is one head of one token."""
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    mask = (line < lines)[:, None] & (column < DIM)[None, :]
    source = tl.load(slots + line // KV, line < lines, 0) * KV + line % KV
    values = tl.load(cache + source[:, None] * DIM + column[None, :], mask, 0.0)
    by = scale
    if scale is not None:
        by = tl.load(scale + line % KV)[:, None]
    tl.store(out + line[:, None] * DIM + column[None, :], from_stored(values, by, out.dtype.element_ty), mask)
