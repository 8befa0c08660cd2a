"""Triton kernels of elementwise operations: RMSNorm and activations.

Each is bound by memory: a program handles some 2048 elements, so that a thread has several 16-byte accesses in flight
and many programs share a processor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import let_next_kernel_start, pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, next_power_of_2

PROGRAM = 2048  # elements of a program


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm_ref` for x [T, H], weight [H]."""
    rows, width = x.shape
    y = torch.empty_like(x)
    block = next_power_of_2(width)
    tile = max(1, PROGRAM // block)
    _rms_norm[(cdiv(rows, tile),)](
        x, weight, y, rows, width, eps, TILE=tile, BLOCK=block, num_warps=warps_for(tile * block), **pdl(x)
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
    block = min(next_power_of_2(width), 2 * PROGRAM)
    grid = (rows * cdiv(width, block),)  # one side: the others end at 65535
    _gated_kernel[grid](gate_up, y, width, GELU=gelu, BLOCK=block, num_warps=max(1, block // 512), **pdl(gate_up))
    return y


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 of a contiguous x [T, I], in place; computed in float32 and cast once."""
    _relu_squared[(cdiv(x.numel(), PROGRAM),)](x, *x.shape, BLOCK=PROGRAM, num_warps=4, **pdl(x))
    return x


def mul_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`mul_sigmoid_ref`, computed in float32 and cast once."""
    assert x.is_contiguous(), "x must be contiguous"
    assert gate.is_contiguous(), "the gate must be contiguous"
    y = torch.empty_like(x)
    _mul_sigmoid[(cdiv(x.numel(), PROGRAM),)](x, gate, y, *x.shape, BLOCK=PROGRAM, num_warps=4, **pdl(x))
    return y


def warps_for(elements: int) -> int:
    return 4 if elements <= 4096 else 8


@triton.jit
def normalized_rows(x, weight, rows, width, eps, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A program's rows of x [TILE, BLOCK], and their RMSNorm float32; waits for the previous kernel."""
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
    # Rounded twice, as the reference does: before the weight and, by the caller, after.
    normal = (wide * scale[:, None]).to(values.dtype).to(tl.float32)
    return values, normal * w[None, :]


@triton.jit(do_not_specialize=["rows"])  # it changes from pass to pass
def _rms_norm(x, weight, y, rows, width, eps, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_kernel_start(PDL)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    _, normal = normalized_rows(x, weight, rows, width, eps, TILE, BLOCK, PDL)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    tl.store(y + row.to(tl.int64)[:, None] * width + column[None, :], normal, mask=mask)


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


@triton.jit(do_not_specialize=["rows"])
def _relu_squared(x, rows, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    count = rows.to(tl.int64) * width  # to the compiler a multiple of 16 if the width is one: it vectorizes
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous_kernel(PDL)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    value = tl.where(value < 0, 0.0, value)  # a maximum would hide NaN
    tl.store(x + at, value * value, mask=at < count)


@triton.jit(do_not_specialize=["rows"])
def _mul_sigmoid(x, gate, y, rows, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_kernel_start(PDL)
    count = rows.to(tl.int64) * width  # as in _relu_squared
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous_kernel(PDL)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(y + at, value * tl.sigmoid(tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)), mask=at < count)
