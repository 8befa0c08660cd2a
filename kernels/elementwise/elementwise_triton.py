"""Triton kernels of elementwise operations: RMSNorm, activations and FP8 quantization.

Each is bound by memory: a program handles some 2048 elements, so that a thread has several 16-byte accesses in flight
and many programs share a processor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import let_next_kernel_start, pdl, wait_for_previous_kernel
from specbatch.kernels.elementwise.fp8_quantize import FP8_MAX, SMALLEST_MAX, FP8Activations
from specbatch.kernels.gemm.weight import SCALE_BLOCK

PROGRAM = 2048  # elements of a program


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm_ref` for x [T, H], weight [H]."""
    rows, width = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    tile = max(1, PROGRAM // block)
    _rms_norm[(triton.cdiv(rows, tile),)](
        x, weight, y, rows, width, eps, TILE=tile, BLOCK=block, num_warps=_warps(tile * block), **pdl(x)
    )
    return y


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up [T, I], computed in float32 and cast once."""
    return _gated(gate_up, gelu=False)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu_and_mul_ref`, computed in float32 and cast once."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, width)
    block = min(triton.next_power_of_2(width), 2 * PROGRAM)
    grid = (rows * triton.cdiv(width, block),)  # one side: the others end at 65535
    _gated_kernel[grid](gate_up, y, width, GELU=gelu, BLOCK=block, num_warps=max(1, block // 512), **pdl(gate_up))
    return y


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 of a contiguous x, in place; computed in float32 and cast once."""
    _relu_squared[(triton.cdiv(x.numel(), PROGRAM),)](x, x.numel(), BLOCK=PROGRAM, num_warps=4, **pdl(x))
    return x


def quantize_fp8(x: torch.Tensor) -> FP8Activations:
    """`quantize_fp8_ref` of x [T, K]."""
    (rows, width), device = x.shape, x.device
    assert x.stride(1) == 1, "the elements of a row of x must be adjacent"
    values = torch.empty(rows, width, device=device, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, triton.cdiv(width, SCALE_BLOCK), device=device)
    tile = PROGRAM // SCALE_BLOCK
    _quantize_fp8[(triton.cdiv(scales.numel(), tile),)](
        x, values, scales, scales.numel(), width, x.stride(0), SCALE_BLOCK=SCALE_BLOCK,
        FP8_MAX=FP8_MAX, SMALLEST_MAX=SMALLEST_MAX,
        TILE=tile, num_warps=4, **pdl(x),
    )  # fmt: skip
    return FP8Activations(values, scales, x.dtype)


def _warps(elements: int) -> int:
    return 4 if elements <= 4096 else 8


@triton.jit(do_not_specialize=["rows"])  # it changes from pass to pass
def _rms_norm(x, weight, y, rows, width, eps, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_kernel_start(PDL)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous_kernel(PDL)
    offsets = row.to(tl.int64)[:, None] * width + column[None, :]
    mask = (row < rows)[:, None] & inside[None, :]
    values = tl.load(x + offsets, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)
    # Rounded twice, as the reference does: before the weight and after.
    normal = (wide * scale[:, None]).to(values.dtype).to(tl.float32)
    tl.store(y + offsets, normal * w[None, :], mask=mask)


@triton.jit
def gelu_slope(x):
    """The s of which x * sigmoid(s) is GELU by tanh (`gelu_and_mul_ref`)."""
    return (x + x * x * x * 0.044715) * 1.5957691216057308  # 2 sqrt(2 / pi)


@triton.jit
def _gated_kernel(gate_up, y, width, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_kernel_start(PDL)
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    wait_for_previous_kernel(PDL)
    source = gate_up + row * 2 * width + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if GELU:
        slope = gelu_slope(gate)
    tl.store(y + row * width + column, gate / (1 + tl.exp(-slope)) * up, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _relu_squared(x, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous_kernel(PDL)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    value = tl.where(value < 0, 0.0, value)  # a maximum would hide NaN
    tl.store(x + at, value * value, mask=at < count)


@triton.jit(do_not_specialize=["lines"])
def _quantize_fp8(
    x, values, scales, lines, width, x_stride, SCALE_BLOCK: tl.constexpr, FP8_MAX: tl.constexpr,
    SMALLEST_MAX: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A line is what shares a scale."""
    blocks = tl.cdiv(width, SCALE_BLOCK)
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = (line // blocks).to(tl.int64)[:, None]
    column = (line % blocks * SCALE_BLOCK)[:, None] + tl.arange(0, SCALE_BLOCK)[None, :]
    mask = (line < lines)[:, None] & (column < width)
    wait_for_previous_kernel(PDL)
    wide = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    # As whole numbers, of which that of NaN is the largest: a maximum of floating point would hide it.
    bits = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    largest = bits.to(tl.float32, bitcast=True)
    largest = tl.where(largest < SMALLEST_MAX, SMALLEST_MAX, largest)
    tl.store(scales + line, tl.div_rn(largest, FP8_MAX), mask=line < lines)
    inverse = tl.div_rn(tl.full([TILE], FP8_MAX, tl.float32), largest)
    tl.store(values + row * width + column, (wide * inverse[:, None]).to(values.dtype.element_ty), mask=mask)
