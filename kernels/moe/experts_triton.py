"""Triton kernels of a mixture of experts: two grouped GEMMs and the weighted sum of their outputs.

The grid has as many blocks of rows as any routing may need; a block finds its expert and its rows in the plan of
`routing_triton`, and those that the routing does not fill end at once. With few rows an expert has one block, and its
weights are read once: the speed is that of the memory. With many, the blocks of an expert are neighbours, and all but
the first find its weights in the L2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.block_sizes import SCALE_BLOCK
from specbatch.kernels.common.pdl_triton import let_next_kernel_start, pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, next_power_of_2
from specbatch.kernels.elementwise.activations import GATE_LIMIT, GATE_SLOPE
from specbatch.kernels.elementwise.elementwise_triton import gelu_slope
from specbatch.kernels.gemm.gemm_mainloop_triton import (
    gemm_mainloop,
    gemm_mainloop_e4m3,
    gemm_mainloop_fp8,
)
from specbatch.kernels.gemm.quantized.four_bits import CHUNK
from specbatch.kernels.gemm.quantized.four_bits_mainloop_triton import gemm_mainloop_int4, gemm_mainloop_mxfp4
from specbatch.kernels.gemm.quantized.fp8_activations import FP8Activations
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Weight
from specbatch.kernels.gemm.quantized.fp8_quantize import quantize_fp8
from specbatch.kernels.gemm.quantized.fragments_triton import fragment_rows
from specbatch.kernels.gemm.quantized.int4 import Int4Tiles
from specbatch.kernels.gemm.quantized.int4_tiles_triton import first_of_row
from specbatch.kernels.gemm.quantized.mxfp4 import Mxfp4Weight
from specbatch.kernels.gemm.quantized.weight import Weight
from specbatch.kernels.moe.expert_weights import GATED, Activation, ExpertWeights
from specbatch.kernels.moe.routing import Routing
from specbatch.kernels.moe.routing_triton import Plan, most_blocks, route


class Tile(NamedTuple):
    """n rows of the weight by k columns per step; stages: steps under way at once, plus one; per_program: tiles that a
    program computes in one loop, so that the weights of the next tile are under way while one is stored."""

    n: int
    k: int
    warps: int
    stages: int
    per_program: int = 1


_TILES = {  # rows of a block: for weights of two bytes a value, and of one
    16: (Tile(64, 128, 4, 4), Tile(64, 128, 4, 3)),
    32: (Tile(64, 128, 4, 3), Tile(64, 128, 4, 3)),
    64: (Tile(128, 64, 4, 4), Tile(128, 64, 4, 4)),
    128: (Tile(256, 64, 8, 4), Tile(128, 64, 8, 4)),
}
FOUR_BITS_TILES = {
    16: Tile(64, CHUNK, 4, 5),
    32: Tile(64, CHUNK, 4, 4),
    64: Tile(128, CHUNK, 8, 4),
    128: Tile(128, CHUNK, 8, 3),
}
_SLOPE, _LIMIT = tl.constexpr(GATE_SLOPE), tl.constexpr(GATE_LIMIT)
# A program of 128 rows computes so many tiles if each has no more steps than these and if enough programs are left.
_TOGETHER, _SHORT, _ENOUGH = 4, 8, 1024
_FP8_ROWS, _FP8_TILE = 64, Tile(128, SCALE_BLOCK, 4, 4)  # for FP8 x: the least a warpgroup takes; 128 are slower


def rows_for(tokens: int, rule: Routing, *, quantize: bool = False, is_stored_whole: bool = False) -> int:
    """Rows of a block: about as many as an expert gets of so many tokens.

    is_stored_whole: weights have the type of the rows and are not dequantized; larger blocks cost such a GEMM less than
    reading a weight twice.
    """
    if quantize:
        return _FP8_ROWS
    mean = tokens * rule.top_k / rule.experts
    few, some = (5, 13) if is_stored_whole else (12, 24)
    return 16 if mean <= few else 32 if mean <= some else 64 if mean <= 96 else 128


def tile_for(rows: int, weight: Weight, item: int, pairs: int) -> Tile:
    """The tile of a grouped GEMM of so many pairs, in blocks of `rows` rows of `item` bytes a value."""
    if item == 4:
        return Tile(32, 32, 4, 2)
    if item == 1:
        return _FP8_TILE
    if isinstance(weight, (Int4Tiles, Mxfp4Weight)):
        return FOUR_BITS_TILES[rows]
    tile = _TILES[rows][weight.is_quantized]
    experts, outer, k = weight.shape
    steps = k // tile.k
    if rows == 128 and not weight.is_quantized and steps <= _SHORT:
        is_whole = k % tile.k == 0 and outer % (_TOGETHER * tile.n) == 0
        blocks = pairs // rows + experts // 2  # the last one of an expert is half full on average
        if is_whole and blocks * outer // (_TOGETHER * tile.n) >= _ENOUGH:
            tile = tile._replace(per_program=_TOGETHER)
    # More stages than steps hide no latency and take shared memory from the next program.
    return tile._replace(stages=max(2, min(tile.stages, steps * tile.per_program - 1)))


def fused_moe(
    x: torch.Tensor,
    logits: torch.Tensor,
    rule: Routing,
    mlp: ExpertWeights,
    residual: torch.Tensor | None = None,
    *,
    quantize: bool = False,
) -> torch.Tensor:
    """`fused_moe_ref`."""
    up, down, activation, biases = mlp
    is_stored_whole = not up.is_quantized
    rows = rows_for(len(x), rule, quantize=quantize, is_stored_whole=is_stored_whole)
    weights, _, plan = route(logits, rule, rows)
    h: torch.Tensor | FP8Activations = grouped(
        quantize_fp8(x) if quantize else x, up, plan, rule, rows, activation, bias=biases.up
    )
    if quantize and isinstance(h, torch.Tensor):
        h = quantize_fp8(h)  # replaces h: the second GEMM needs its memory
    return weighted_sum(grouped(h, down, plan, rule, rows, bias=biases.down), weights, residual)


def grouped(
    x: torch.Tensor | FP8Activations,
    weight: Weight,
    plan: Plan,
    rule: Routing,
    rows: int,
    activation: Activation | None = None,
    tile: Tile | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(x_p @ weight[e].T + bias[e]) for every pair p of the plan and its expert e.

    x [T, K], each row of which is that of its token's pairs, with an activation (the first GEMM); or [pairs, K]
    without (the second). weight [E, N, K] contiguous, bias [E, N] -> [pairs, N], or [pairs, N / 2] where gated.
    """
    x_scales, dtype = None, x.dtype
    if isinstance(x, FP8Activations):
        x, x_scales, _ = x
        assert x_scales.stride(0) == 1, "the scales of x must be column-major"
    tokens = len(plan.order) // rule.width
    gated, (_, outer, k) = activation in GATED, weight.shape
    n = outer // (2 if gated else 1)
    assert x.shape == (len(plan.order) if activation is None else tokens, k), f"x {tuple(x.shape)} is not [rows, {k}]"
    assert x.stride(1) == 1, "the elements of a row of x must be adjacent"
    tile = tile or tile_for(rows, weight, x.element_size(), len(plan.order))
    values, scales, layout = _stored(weight)
    assert values.is_contiguous(), "the weight must be contiguous"
    assert scales is None or scales.is_contiguous(), "the scales must be contiguous"
    is_fp8, per_channel = layout["FP8"], layout["PER_CHANNEL"]
    assert not is_fp8 or SCALE_BLOCK % tile.k == 0, f"steps of {tile.k} columns cross the {SCALE_BLOCK} of a scale"
    if x_scales is not None:
        assert tile.k == SCALE_BLOCK, f"steps are of the {SCALE_BLOCK} columns that share a scale, not {tile.k}"
        width = tile.n // 2 if gated else tile.n
        assert per_channel or SCALE_BLOCK % width == 0, f"tiles of {width} columns cross the {SCALE_BLOCK} of a scale"
        is_whole = per_channel or not gated or n % SCALE_BLOCK == 0
        assert is_whole, f"a scale of gate and up, {n} rows each, would be that of both"
    if tile.per_program > 1:
        assert scales is None, "several tiles of a program need a weight that is not dequantized"
        assert rows > 16, "several tiles of a program need blocks of at least 32 rows"
        assert k % tile.k == 0, "several tiles of a program must have whole steps"
        assert outer % (tile.n * tile.per_program) == 0, "several tiles of a program must be whole"
    y = torch.empty(len(plan.order), n, device=x.device, dtype=dtype)
    grid = most_blocks(tokens, rule, rows) * cdiv(outer, tile.n * tile.per_program)
    grouped_kernel[(grid,)](
        x, x_scales, values, scales, bias, *plan, y, n, k, x.stride(0), 0 if x_scales is None else x_scales.stride(1),
        QUANTIZED=x_scales is not None, SHARE=1 if activation is None else rule.width, GATED=gated,
        CLAMPED=activation == "clamped_swiglu", GELU=activation == "geglu", SQUARED=activation == "relu2", **layout,
        SCALE_BLOCK=SCALE_BLOCK, ONCE=tokens <= rows, EARLY=activation is None and rows == 16 and scales is None,
        TILES=tile.per_program, EVEN_K=k % (CHUNK if layout["MXFP4"] else tile.k) == 0,
        BM=rows, HALVES=rows == 128, BN=tile.n, BK=tile.k, WARPS=min(tile.warps, tile.n // 16), **pdl(x),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def _stored(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
    """Values and scales as the kernel reads them, and the constants that tell it their format."""
    layout: dict[str, Any] = {"SCALED": False, "PER_CHANNEL": False, "FP8": False, "MXFP4": False}
    layout |= {"INT4": 0, "CHUNK": CHUNK, "UNIT": 1, "BF16": False}
    if isinstance(weight, Int4Tiles):
        layout |= {"INT4": weight.group, "CHUNK": weight.chunk, "UNIT": weight.unit}
        return *weight.words(), layout | {"BF16": weight.scales.dtype == torch.bfloat16}
    if isinstance(weight, Mxfp4Weight):
        bytes_of_row = cdiv(weight.shape[-1], CHUNK) * CHUNK // 2
        values = weight.values
        assert values.shape[-1] == bytes_of_row, f"a row of the weight has {values.shape[-1]} bytes, not {bytes_of_row}"
        return values.view(torch.int32), weight.scales, layout | {"MXFP4": True}
    if not isinstance(weight, FP8Weight):
        assert not weight.is_quantized, f"a {type(weight).__name__} is not in the layout of GEMMs"
        return weight.values, None, layout
    per_channel = weight.is_per_channel
    return weight.values, weight.scales, layout | {"FP8": True, "PER_CHANNEL": per_channel, "SCALED": not per_channel}


@triton.jit(do_not_specialize=["scale_stride"])
def grouped_kernel(
    x, x_scales, weight, scales, bias, order, blocks, used, y, N, K, x_stride, scale_stride, QUANTIZED: tl.constexpr,
    SHARE: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr, SQUARED: tl.constexpr,
    SCALED: tl.constexpr, PER_CHANNEL: tl.constexpr, FP8: tl.constexpr, MXFP4: tl.constexpr,
    INT4: tl.constexpr,  # inputs of a group, or 0
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr, BF16: tl.constexpr,  # of `Int4Tiles`: outputs of a tile, and the type of the scales
    SCALE_BLOCK: tl.constexpr,
    ONCE: tl.constexpr,  # no expert has a second block
    EARLY: tl.constexpr,  # fetch weights before what the kernel before wrote; it did not write the plan
    TILES: tl.constexpr,  # of a program; several are whole, and the weight is not dequantized
    EVEN_K: tl.constexpr, BM: tl.constexpr,
    HALVES: tl.constexpr,  # a block of at most BM / 2 rows is computed as one of BM / 2
    BN: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    OUTER = N * 2 if GATED else N  # rows of an expert's weight
    tiles = tl.cdiv(OUTER, BN * TILES)
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if not EARLY:
        wait_for_previous_kernel(PDL)
    expert = tl.load(blocks + block * 3).to(tl.int64)
    first, end = tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
    if block >= tl.load(used):
        return
    if HALVES and end - first <= BM // 2:  # the last block of an expert is half empty on average
        _block(
            x, x_scales, weight, scales, bias, order, y, N, K, x_stride, scale_stride, expert, first, end, tile,
            QUANTIZED, SHARE, GATED, CLAMPED, GELU, SQUARED, SCALED, PER_CHANNEL, FP8, MXFP4, INT4, CHUNK, UNIT, BF16,
            SCALE_BLOCK, ONCE, EARLY, TILES, EVEN_K, BM // 2, BN, BK, WARPS, PDL,
        )  # fmt: skip
        return
    _block(
        x, x_scales, weight, scales, bias, order, y, N, K, x_stride, scale_stride, expert, first, end, tile,
        QUANTIZED, SHARE, GATED, CLAMPED, GELU, SQUARED, SCALED, PER_CHANNEL, FP8, MXFP4, INT4, CHUNK, UNIT, BF16,
        SCALE_BLOCK, ONCE, EARLY, TILES, EVEN_K, BM, BN, BK, WARPS, PDL,
    )  # fmt: skip


@triton.jit
def _block(
    x, x_scales, weight, scales, bias, order, y, N, K, x_stride, scale_stride, expert, first, end, tile,
    QUANTIZED: tl.constexpr,
    SHARE: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr, SQUARED: tl.constexpr,
    SCALED: tl.constexpr, PER_CHANNEL: tl.constexpr, FP8: tl.constexpr, MXFP4: tl.constexpr, INT4: tl.constexpr,
    CHUNK: tl.constexpr, UNIT: tl.constexpr, BF16: tl.constexpr, SCALE_BLOCK: tl.constexpr, ONCE: tl.constexpr,
    EARLY: tl.constexpr, TILES: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Columns of one tile, or TILES, for rows `first` to `end`, at most BM, of one expert."""
    OUTER = N * 2 if GATED else N
    place = first + tl.arange(0, BM)
    exists = place < end
    pair = tl.load(order + place, exists, other=0).to(tl.int64)

    column = tile * TILES * BN + tl.arange(0, BN)
    TO: tl.constexpr = BN // 2 if GATED else BN  # columns of y
    inner = _weight_rows(column, N, OUTER, GATED)
    ks = tl.arange(0, BK)
    x_tile = x + (pair // SHARE)[:, None] * x_stride + ks[None, :]
    weight_tile = weight + expert * OUTER * K + inner.to(tl.int64)[None, :] * K + ks[:, None]
    scale_row = scales
    if SCALED:
        scale_row += (expert * tl.cdiv(OUTER, SCALE_BLOCK) + inner // SCALE_BLOCK) * tl.cdiv(K, SCALE_BLOCK)
    if QUANTIZED:
        x_scale = x_scales + pair // SHARE
        even_scale = scales + (expert * tl.cdiv(OUTER, SCALE_BLOCK) + tile * TO // SCALE_BLOCK) * tl.cdiv(
            K, SCALE_BLOCK
        )
        odd_scale = even_scale
        if GATED:
            odd_scale += N // SCALE_BLOCK * tl.cdiv(K, SCALE_BLOCK)
        total = gemm_mainloop_fp8(
            x_tile, exists, x_scale, scale_stride, weight_tile, even_scale, odd_scale, K, SCALED, EVEN_K, BM, BN,
            SCALE_BLOCK,
        )  # fmt: skip
    elif MXFP4:
        stored = expert * OUTER + _weight_rows(tile * BN + fragment_rows(BN, WARPS), N, OUTER, GATED)
        first_word = tl.multiple_of(stored * (tl.cdiv(K, CHUNK) * CHUNK // 8), 4)
        scale_row = scales + (expert * OUTER + inner) * (K // 32)
        total = gemm_mainloop_mxfp4(
            x + (pair // SHARE) * x_stride,
            exists,
            weight + first_word,
            scale_row,
            K,
            ONCE,
            EVEN_K,
            CHUNK,
            BM,
            BN,
            WARPS,
        ).T
    elif INT4 > 0:
        stored = expert * OUTER + _weight_rows(tile * BN + fragment_rows(BN, WARPS), N, OUTER, GATED)
        first_word = first_of_row(stored, K // CHUNK, CHUNK // 8, UNIT)
        first_scale = first_of_row(expert * OUTER + inner, K // CHUNK, CHUNK // INT4, UNIT)
        total = gemm_mainloop_int4(
            x + (pair // SHARE) * x_stride, exists, weight + first_word, scales + first_scale, 0, K // CHUNK, ONCE,
            INT4, CHUNK, UNIT, BF16, BM, BN, WARPS,
        ).T  # fmt: skip
    elif FP8:
        total = gemm_mainloop_e4m3(
            x + (pair // SHARE) * x_stride, exists, weight + (expert * OUTER + inner) * K, scale_row, K, SCALED,
            SCALE_BLOCK, ONCE, EVEN_K, BM, BN, BK,
        ).T  # fmt: skip
    elif TILES > 1:
        policy: tl.constexpr = "evict_first" if ONCE else ""
        total = tl.zeros([BM, BN], tl.float32)
        steps = K // BK
        for step in tl.range(0, TILES * steps):
            at = step // steps
            k = (step - at * steps) * BK
            a = tl.load(x_tile + k, exists[:, None], other=0.0)
            b = tl.load(weight_tile + at * TO * K + k, eviction_policy=policy)
            total = tl.dot(a, b, total, input_precision="ieee")
            if k == K - BK:
                _store(
                    total, y, scales, bias, pair, exists, expert, tile * TILES + at, N, GATED, CLAMPED, GELU, SQUARED,
                    PER_CHANNEL, BM, BN,
                )  # fmt: skip
                total = tl.zeros([BM, BN], tl.float32)
        return
    else:
        total = gemm_mainloop(x_tile, exists, weight_tile, K, ONCE, EARLY, EVEN_K, BM, BN, BK, PDL)
    _store(total, y, scales, bias, pair, exists, expert, tile, N, GATED, CLAMPED, GELU, SQUARED, PER_CHANNEL, BM, BN)


@triton.jit
def _store(
    total, y, scales, bias, pair, exists, expert, tile, N, GATED: tl.constexpr, CLAMPED: tl.constexpr,
    GELU: tl.constexpr, SQUARED: tl.constexpr, PER_CHANNEL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The outputs of a tile from its sums [BM, BN]: scales, bias and activation, then to the rows `pair` of y."""
    OUTER = N * 2 if GATED else N
    column = tile * BN + tl.arange(0, BN)
    TO: tl.constexpr = BN // 2 if GATED else BN  # columns of y
    inner = _weight_rows(column, N, OUTER, GATED)
    if PER_CHANNEL:
        total *= tl.load(scales + expert * OUTER + inner).to(tl.float32)[None, :]
    if bias is not None:
        total += tl.load(bias + expert * OUTER + inner).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(total, [BM, BN // 2, 2]))
        if CLAMPED:  # a minimum would hide NaN
            gate = tl.where(gate > _LIMIT, _LIMIT, gate)
            up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
            result = gate * tl.sigmoid(gate * _SLOPE) * (up + 1)
        elif GELU:
            result = gate * tl.sigmoid(gelu_slope(gate)) * up
        else:
            result = gate * tl.sigmoid(gate) * up
        to = tile * TO + tl.arange(0, TO)
    else:
        result = total
        to = column
        if SQUARED:
            result = tl.where(result < 0, 0.0, result)  # a maximum would hide NaN
            result *= result
    tl.store(y + pair[:, None] * N + to[None, :], result.to(y.dtype.element_ty), exists[:, None] & (to < N)[None, :])


@triton.jit
def _weight_rows(column, N, OUTER, GATED: tl.constexpr):
    """The rows of an expert's weight for columns of a tile; of gate and up, N rows each, in turn."""
    row = tl.minimum(column, OUTER - 1)
    return row % 2 * N + row // 2 if GATED else row


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """residual [T, H] + sum over j of weights[t, j] * outputs[t * width + j], in float32 and in the order of j.

    outputs [T * width, H], weights float32 [T, width] -> [T, H], in the type of outputs.
    """
    (tokens, width), hidden = weights.shape, outputs.shape[1]
    assert residual is None or residual.stride(1) == 1, "the elements of a row of the residual must be adjacent"
    y = torch.empty(tokens, hidden, device=outputs.device, dtype=outputs.dtype)
    block = min(512, next_power_of_2(hidden))
    _weighted_sum_kernel[(tokens * cdiv(hidden, block),)](
        outputs, weights, residual, y, hidden, 0 if residual is None else residual.stride(0),
        WIDTH=width, HAS_RESIDUAL=residual is not None, BLOCK=block, **pdl(outputs),
        num_warps=2,
    )  # fmt: skip
    return y


@triton.jit
def _weighted_sum_kernel(
    outputs, weights, residual, y, H, residual_stride,
    WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_kernel_start(PDL)
    blocks = tl.cdiv(H, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    wait_for_previous_kernel(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(WIDTH):
        output = tl.load(outputs + (token * WIDTH + j) * H + column, inside, other=0.0).to(tl.float32)
        total += tl.load(weights + token * WIDTH + j) * output
    if HAS_RESIDUAL:
        total += tl.load(residual + token * residual_stride + column, inside, other=0.0).to(tl.float32)
    tl.store(y + token * H + column, total.to(y.dtype.element_ty), inside)
