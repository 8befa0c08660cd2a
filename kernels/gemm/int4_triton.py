"""Triton kernels for INT4 weights: a GEMM that unpacks them in registers, for few rows, and dequantization for many."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.gemm.weight import Weight

_PROGRAMS = 132  # multiprocessors of an H200
_MANY = 256  # rows from which to write and read a dequantized weight takes less time than to unpack it for each tile
_DEQUANTIZED = 32, 4  # rows and groups of a program

# The lower or higher 4 bits of four bytes become the lowest bits of the fraction of 128 (bfloat16) or 1024 (float16),
# whose last place is 1: the value is that number plus the 4 bits, exactly.
_WIDEN: tl.constexpr = tl.constexpr("""{
.reg .b32 x, high;
SHIFT
and.b32 x, x, 0x0f0f0f0f;
mov.b32 high, ONES;
prmt.b32 $0, x, high, 0x4140;
prmt.b32 $1, x, high, 0x4342;
}""")
_LOW: tl.constexpr = tl.constexpr(_WIDEN.value.replace("SHIFT", "mov.b32 x, $2;"))
_HIGH: tl.constexpr = tl.constexpr(_WIDEN.value.replace("SHIFT", "shr.b32 x, $2, 4;"))
_LOW_BF16: tl.constexpr = tl.constexpr(_LOW.value.replace("ONES", "0x43434343"))
_HIGH_BF16: tl.constexpr = tl.constexpr(_HIGH.value.replace("ONES", "0x43434343"))
_LOW_FP16: tl.constexpr = tl.constexpr(_LOW.value.replace("ONES", "0x64646464"))
_HIGH_FP16: tl.constexpr = tl.constexpr(_HIGH.value.replace("ONES", "0x64646464"))


@triton.jit
def _less(x, y, INSTRUCTION: tl.constexpr):
    """x - y of two values at once, which the compiler does not do by itself."""
    return tl.inline_asm_elementwise(INSTRUCTION, "=r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=2)


@triton.jit
def unpack_int4(values, zeros, kind: tl.constexpr):
    """values uint8 [N, K] of `pack_int4` of one group and zeros uint8 [N] -> its first half and its second one, less
    the zeros, both [N, K] and exact."""
    zero = zeros[:, None]
    if kind == tl.bfloat16:
        low = tl.inline_asm_elementwise(_LOW_BF16, "=r,=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(_HIGH_BF16, "=r,=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=4)
        base = tl.broadcast_to((zero.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True), low.shape)
        return _less(low, base, "sub.rn.bf16x2 $0, $1, $2;"), _less(high, base, "sub.rn.bf16x2 $0, $1, $2;")
    if kind == tl.float16:
        low = tl.inline_asm_elementwise(_LOW_FP16, "=r,=r,r", [values], dtype=tl.float16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(_HIGH_FP16, "=r,=r,r", [values], dtype=tl.float16, is_pure=True, pack=4)
        base = tl.broadcast_to((zero.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True), low.shape)
        return _less(low, base, "sub.rn.f16x2 $0, $1, $2;"), _less(high, base, "sub.rn.f16x2 $0, $1, $2;")
    return (values & 15).to(kind) - zero.to(kind), (values >> 4).to(kind) - zero.to(kind)


def int4_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`int4_linear_ref`: x [T, K], weight [N, K] -> [T, N], in `out` if given. Rows of x, residual and out may be
    apart."""
    (rows, k), n, scales, zeros = x.shape, weight.shape[0], weight.scales, weight.zeros
    assert scales is not None, "an INT4 weight has scales"
    assert zeros is not None, "an INT4 weight has zero points"
    assert x.stride(1) == 1, "the elements of a row of x must be adjacent"
    assert residual is None or residual.stride(1) == 1, "the elements of a row of the residual must be adjacent"
    for part in (weight.values, scales, zeros):
        assert part.is_contiguous(), "the weight must be contiguous"
    y = torch.empty(rows, n, device=x.device, dtype=x.dtype) if out is None else out
    assert y.shape == (rows, n), f"out {tuple(y.shape)} is not {(rows, n)}"
    assert y.stride(1) == 1, "the elements of a row of out must be adjacent"
    if rows >= _MANY:
        matrix = dequantize(weight, x.dtype).t()
        torch.mm(x, matrix, out=y) if bias is None else torch.addmm(bias, x, matrix, out=y)
        return y if residual is None else y.add_(residual)
    group = k // scales.shape[1]
    block, columns, warps, stages = tile_for(rows, n, x.element_size())
    grid = triton.cdiv(rows, block) * triton.cdiv(n, columns)
    _int4_linear_kernel[(grid,)](
        x, weight.values, scales, zeros, bias, residual, y, rows, n, k, x.stride(0),
        0 if residual is None else residual.stride(0), y.stride(0), HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, GROUP=group, BM=block, BN=columns, **pdl(x), num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return y


def tile_for(rows: int, n: int, item: int) -> tuple[int, int, int, int]:
    """Rows and outputs of a tile, warps, and stages of the pipeline, for x of `item` bytes a value."""
    block = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    if item == 4:
        return min(block, 32), 32, 4, 2
    if block == 16:  # the widest tile that gives every processor one
        columns = next((width for width in (64, 32) if n >= width * _PROGRAMS), 16)
        return block, columns, 4, {64: 6, 32: 8, 16: 12}[columns]
    return (block, 64, 4, 4) if block == 32 else (block, 128, block // 16, 4)


@triton.jit(do_not_specialize=["M"])
def _int4_linear_kernel(
    x, weight, scales, zeros, bias, residual, y, M, N, K, x_stride, residual_stride, y_stride, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs that share rows of the weight are neighbours. A step of the loop is a group: the products with its
    whole numbers are exact, and their sums are scaled, so no value is rounded on the way."""
    HALF: tl.constexpr = GROUP // 2
    blocks = tl.cdiv(M, BM)
    row = (tl.program_id(0) % blocks * BM + tl.arange(0, BM)).to(tl.int64)
    column = tl.program_id(0) // blocks * BN + tl.arange(0, BN)
    outer, pairs = tl.minimum(column, N - 1).to(tl.int64), tl.arange(0, HALF)
    exists = (row < M)[:, None]
    policy: tl.constexpr = "evict_first" if BM == 16 else ""
    x_tile = x + row[:, None] * x_stride + pairs[None, :]
    weight_tile = weight + tl.multiple_of(outer * (K // 2), 16)[:, None] + pairs[None, :]
    groups = K // GROUP
    # Too narrow for the compiler's pipeline: they are loaded a step ahead.
    next_scale, next_zero = tl.load(scales + outer * groups), tl.load(zeros + outer * groups)
    total = tl.zeros([BM, BN], tl.float32)
    wait_for_previous_kernel(PDL)
    for group in tl.range(0, groups):
        scale, zero = next_scale, next_zero
        place = outer * groups + tl.minimum(group + 1, groups - 1)
        next_scale, next_zero = tl.load(scales + place), tl.load(zeros + place)
        first = tl.load(x_tile + group * GROUP, exists, other=0.0)
        second = tl.load(x_tile + group * GROUP + HALF, exists, other=0.0)
        packed = tl.load(weight_tile + group * HALF, eviction_policy=policy)
        low, high = unpack_int4(packed, zero, first.dtype)
        part = tl.dot(first, low.T, input_precision="ieee")
        part = tl.dot(second, high.T, part, input_precision="ieee")
        total += part * scale.to(tl.float32)[None, :]
    inside = exists & (column < N)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, column < N, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + row[:, None] * residual_stride + column[None, :], inside, other=0.0).to(tl.float32)
    tl.store(y + row[:, None] * y_stride + column[None, :], total.to(y.dtype.element_ty), inside)


def dequantize(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """`dequantize_int4` of a whole weight [N, K]."""
    (n, k), scales = weight.shape, weight.scales
    assert scales is not None
    found = torch.empty(n, k, device=weight.values.device, dtype=dtype)
    rows, groups = _DEQUANTIZED
    grid = triton.cdiv(n, rows) * triton.cdiv(scales.shape[1], groups)
    _dequantize_kernel[(grid,)](
        weight.values, scales, weight.zeros, found, n, scales.shape[1], HALF=k // scales.shape[1] // 2, ROWS=rows,
        GROUPS=groups, **pdl(scales), num_warps=4,
    )  # fmt: skip
    return found


@triton.jit
def _dequantize_kernel(
    values, scales, zeros, found, N, groups, HALF: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """found [N, groups, 2, HALF]."""
    tiles = tl.cdiv(groups, GROUPS)
    row = (tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    group = tl.program_id(0) % tiles * GROUPS + tl.arange(0, GROUPS)
    place = row[:, None] * groups + group[None, :]
    exists = (row < N)[:, None] & (group < groups)[None, :]
    inner = tl.arange(0, HALF)[None, None, :]
    packed = tl.load(values + place[:, :, None] * HALF + inner, exists[:, :, None], other=0)
    scale = tl.load(scales + place, exists, other=0.0).to(tl.float32)[:, :, None]
    zero = tl.load(zeros + place, exists, other=0).to(tl.float32)[:, :, None]
    to = found + place[:, :, None] * (2 * HALF) + inner
    wait_for_previous_kernel(PDL)  # which may still read this memory
    tl.store(to, (((packed & 15).to(tl.float32) - zero) * scale).to(found.dtype.element_ty), exists[:, :, None])
    tl.store(to + HALF, (((packed >> 4).to(tl.float32) - zero) * scale).to(found.dtype.element_ty), exists[:, :, None])
