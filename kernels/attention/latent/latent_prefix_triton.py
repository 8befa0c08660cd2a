"""Triton kernel of attention to latents that sequences share: a block of them serves the queries of all.

`latent_attention` attends to what follows the prefix of each sequence, and `merge_prefixes` adds both. A tile's rows
are those of a group's sequences, side by side: their tokens with all of their heads. See `prefix_attention_triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.latent.attend_latents_triton import attend_latents
from specbatch.kernels.attention.queries import LOG2E, AttentionInputs, DecodeQueries, LatentLayout
from specbatch.kernels.attention.verify.prefix_attention_configs import PrefixLaunch, PrefixWork
from specbatch.kernels.attention.verify.prefix_attention_triton import PrefixPartials
from specbatch.kernels.common.sizes import tile_side


@triton.jit(do_not_specialize=["n"])
def latent_prefix_kernel(
    q, k_cache, v_cache, k_scale, v_scale, page_table, slots, prefix_members, items, items_end, outputs, sums, n, width,
    scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program for each item that there may be; see `PrefixWork`."""
    item = tl.program_id(0)
    if item >= tl.load(items_end):
        return
    members, count = prefix_members + tl.load(items + item * 5), tl.load(items + item * 5 + 1)
    low, high = tl.load(items + item * 5 + 3), tl.load(items + item * 5 + 4)
    row = tl.load(items + item * 5 + 2) * BLOCK_M + tl.arange(0, BLOCK_M)
    own = n * HEADS  # rows of a sequence
    place, rest = row // own, row % own
    live = place < count
    token = tl.load(members + place, live, 0).to(tl.int64) * n + rest // HEADS
    column, turning = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    inside, turns = column < RANK, turning < ROPE
    query = q + (token * (HEADS + 1) + rest % HEADS)[:, None] * (RANK + ROPE)
    q_latent = tl.load(query + column[None, :], live[:, None] & inside[None, :], 0.0)
    q_turned = tl.load(query + RANK + turning[None, :], live[:, None] & turns[None, :], 0.0)
    pages = page_table + tl.load(slots + tl.load(members)) * width
    average, log = attend_latents(
        q_latent, q_turned, k_cache, v_cache, k_scale, v_scale, pages, low, high, scale, None, None, None, RANK, ROPE,
        PAGE, BLOCK_N,
    )  # fmt: skip
    line = item.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    half: tl.constexpr = RANK // 2  # `merge_prefixes` reads halves, each padded for itself
    cell = line[:, None] * BLOCK_R + (column // half * (BLOCK_R // 2) + column % half)[None, :]
    tl.store(outputs + cell, average, live[:, None] & inside[None, :])
    tl.store(sums + line, log, live)


def latent_prefix_attention(
    q: torch.Tensor, queries: DecodeQueries, inputs: AttentionInputs, launch: PrefixLaunch, work: PrefixWork
) -> PrefixPartials:
    """Attention of `queries` to the latents of their `prefixes`; it leaves sequences without one out. q: from
    `write_latent` of `inputs`."""
    _, heads, _, k_cache, v_cache, k_scale, v_scale = inputs
    assert isinstance(heads, LatentLayout)
    assert queries.prefixes is not None
    tile, block, rope = launch.tile, 2 * tile_side(heads.rank // 2), heads.dim - heads.rank
    outputs = torch.empty(1, launch.lines, block, dtype=torch.float32, device=q.device)
    sums = torch.empty(1, launch.lines, dtype=torch.float32, device=q.device)
    latent_prefix_kernel[(launch.lines // tile.block_m,)](
        q, k_cache, v_cache, k_scale, v_scale, queries.page_table, queries.slots, queries.prefixes.members, work.items,
        work.end, outputs, sums, queries.num_queries, queries.page_table.shape[1], heads.scale * LOG2E,
        HEADS=heads.count, RANK=heads.rank, ROPE=rope, BLOCK_R=block, BLOCK_P=tile_side(rope), PAGE=k_cache.shape[1],
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return PrefixPartials(outputs, sums)
