"""Triton kernels of the causal short convolution, for prefill and verify, one launch each.

A program has all taps of its channels, so that no other program reads the window that it writes. The kernels of prompts
and of short chains read each input once; that of trees and longer chains reads it once for each tap. All of them add
the taps in the same order, newest first, and fuse no multiplication with an addition: the bits of a token do not depend
on which of them computes it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, next_power_of_2
from specbatch.kernels.recurrent.inputs import MOST_TAPS, ConvInputs
from specbatch.kernels.recurrent.state_replay import StateReplay

_TOKENS = MOST_TAPS - 1  # of a program of a prompt pass; as many as a window may have
_PROGRAM = 1024  # elements of a program of a verify
_CHAIN = 8  # chains of up to this many rows count as short
_CHANNELS = 512  # of a program of a prompt pass or a chain


def conv_prefill(inputs: ConvInputs, spans: RaggedBatch, out: torch.Tensor | None = None) -> torch.Tensor:
    """`conv_prefill_ref`."""
    x, weight, bias, window, activation, before, after = inputs
    assert out is None or out.is_contiguous(), "out must be contiguous"
    y, tiles = x.new_empty(x.shape) if out is None else out, spans.tiles(_TOKENS)
    conv_prefill_kernel[(len(tiles), cdiv(x.shape[1], _CHANNELS))](
        x, before, after, weight, bias, window, tiles, spans.table, y,
        x.stride(0), _stride(before), _stride(after), *weight.stride(), window.stride(0), spans.table.stride(0),
        x.shape[1],
        TAPS=weight.shape[1], SILU=activation, TOKENS=_TOKENS, CHANNELS=_CHANNELS, num_warps=4,
        enable_fp_fusion=False, **pdl(x),
    )  # fmt: skip
    return y


def conv_verify(inputs: ConvInputs, pending: torch.Tensor, replay: StateReplay) -> torch.Tensor:
    """`conv_verify_ref`, for window and pending of one type.

    The previous kernel, as a rule a GEMM, must write none of weight, bias, window, pending and the tensors of `replay`:
    the kernel for short chains reads them before the previous one has ended.
    """
    x, weight, bias, window, activation, before, after = inputs
    assert window.dtype == pending.dtype, f"the window is {window.dtype}, pending inputs are {pending.dtype}"
    y, rows = x.new_empty(x.shape), len(x) // len(replay.rows)
    tensors = x, before, after, weight, bias, window, pending, replay.rows, replay.counts, replay.path
    strides = [x.stride(0), _stride(before), _stride(after), *weight.stride(), window.stride(0), pending.stride(0)]
    sizes = {"N": rows, "TAPS": weight.shape[1], "SILU": activation, "enable_fp_fusion": False, **pdl(x)}
    if replay.ancestors is None and rows <= _CHAIN:
        conv_chain_kernel[(cdiv(x.shape[1], _CHANNELS), len(replay.rows))](
            *tensors, y, *strides, _stride(replay.path), x.shape[1], CHANNELS=_CHANNELS, num_warps=4, **sizes
        )
        return y
    block = next_power_of_2(rows)
    channels = min(256, max(32, _PROGRAM // block))
    conv_verify_kernel[(cdiv(x.shape[1], channels), len(replay.rows))](
        *tensors, replay.ancestors, y, *strides, _stride(replay.path), x.shape[1],
        ROWS=block, PAST=next_power_of_2(weight.shape[1] - 1), CHANNELS=channels, num_warps=4, **sizes,
    )  # fmt: skip
    return y


def _stride(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


@triton.jit
def _gated(values, gate):
    """gate * values in the type of values; values alone where there is no gate."""
    if gate is not None:
        values = (values.to(tl.float32) * gate.to(tl.float32)).to(values.dtype)
    return values


@triton.jit
def _rows(x, line, x_stride, channel, mask):
    """Rows `line` ([N, 1] or one) of x; None where there is no x."""
    values = None
    if x is not None:
        values = tl.load(x + line * x_stride + channel, mask, 0.0)
    return values


@triton.jit
def _inputs(x, before, line, x_stride, before_stride, channel, mask):
    """Rows `line` of what is convolved: x, or before * x in its type."""
    return _gated(_rows(x, line, x_stride, channel, mask), _rows(before, line, before_stride, channel, mask))


@triton.jit
def _tap(weight, back, weight_stride, tap_stride, channel, width, TAPS: tl.constexpr):
    """What the input `back` before a token is multiplied with, float32 for each channel."""
    w = tl.load(weight + channel * weight_stride + (TAPS - 1 - back) * tap_stride, channel < width, 0.0)
    return w.to(tl.float32)


@triton.jit
def _finished(sums, bias, gate, dtype: tl.constexpr, SILU: tl.constexpr):
    """y of what the taps add up to; bias and gate of as many dimensions, or None."""
    if bias is not None:
        sums += bias.to(tl.float32)
    if SILU:
        sums = sums / (1 + tl.exp(-sums))
    return _gated(sums.to(dtype), gate)


@triton.jit
def _input(
    x, before, window, first, offset, at, oldest, x_stride, before_stride, channel, width, TAPS: tl.constexpr
):  # fmt: skip
    """Input `at` of a span, float32: those before it, which only its first tile needs, are the window's, from `oldest`
    on."""
    known = channel < tl.where(at >= 0, width, 0)
    u = _inputs(x, before, offset + at, x_stride, before_stride, channel, known).to(tl.float32)
    if first == 0:
        past = channel < tl.where((at < 0) & (at >= oldest), width, 0)
        u += tl.load(window + (at + TAPS - 1) * width + channel, past, 0.0).to(tl.float32)  # one of them is 0
    return u


@triton.jit
def _store(y, sums, after, line, after_stride, bias, channel, width, mask, SILU: tl.constexpr):
    """What the taps add up to, finished: rows `line` [N, 1] of y [T, width]."""
    added = _rows(bias, 0, 0, channel[None, :], (channel < width)[None, :])
    gate = _rows(after, line, after_stride, channel, mask)
    tl.store(y + line * width + channel, _finished(sums, added, gate, y.dtype.element_ty, SILU), mask)


@triton.jit(do_not_specialize=["table_stride"])
def conv_prefill_kernel(
    x, before, after, weight, bias, window, tiles, table, y,
    x_stride, before_stride, after_stride, weight_stride, tap_stride, window_stride, table_stride, width,
    TAPS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some rows of a span, for some channels. Only the first tile of a span sees the window, so it also leaves the new
    one."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < width
    taps = ()
    for back in tl.static_range(TAPS):
        taps += (_tap(weight, back, weight_stride, tap_stride, channel, width, TAPS),)  # type: ignore[assignment]
    added = _rows(bias, 0, 0, channel, inside)
    wait_for_previous_kernel(PDL)
    span = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    start = tl.load(table + span)
    count = tl.load(table + table_stride + span) - start
    if first >= count:
        return
    window += tl.load(table + 2 * table_stride + span) * window_stride
    offset = tl.load(table + 3 * table_stride + span)
    oldest = -tl.minimum(start, TAPS - 1)  # inputs before the span count from -1 down

    inputs = ()
    for slot in tl.static_range(TAPS - 1):
        at = first - (TAPS - 1) + slot
        u = _input(x, before, window, first, offset, at, oldest, x_stride, before_stride, channel, width, TAPS)
        inputs += (u,)  # type: ignore[assignment]
    gates = ()
    for node in tl.static_range(TOKENS):
        line, there = offset + first + node, channel < tl.where(first + node < count, width, 0)
        inputs += (_inputs(x, before, line, x_stride, before_stride, channel, there),)  # type: ignore[assignment]
        if after is not None:
            gates += (_rows(after, line, after_stride, channel, there),)  # type: ignore[assignment]
    for node in tl.static_range(TOKENS):
        sums = tl.zeros([CHANNELS], tl.float32)
        for back in tl.static_range(TAPS):  # as a verify does, which meets a node's ancestors in this order
            sums += taps[back] * inputs[node + TAPS - 1 - back].to(tl.float32)
        gate = None  # type: ignore[var-annotated]
        if after is not None:
            gate = gates[node]
        values = _finished(sums, added, gate, y.dtype.element_ty, SILU)
        there = channel < tl.where(first + node < count, width, 0)
        tl.store(y + (offset + first + node) * width + channel, values, there)

    if first == 0:
        last = ()
        for slot in tl.static_range(TAPS - 1):
            at = count + slot - (TAPS - 1)
            u = _input(x, before, window, first, offset, at, oldest, x_stride, before_stride, channel, width, TAPS)
            last += (u,)  # type: ignore[assignment]
        tl.debug_barrier()  # every thread has read the old window
        for slot in tl.static_range(TAPS - 1):
            tl.store(window + slot * width + channel, last[slot].to(window.dtype.element_ty), inside)


@triton.jit
def _history(window, pending, kept, folded, slot, channel, width, mask, TAPS: tl.constexpr):
    """Inputs `slot` [N] of the window after the `folded` replayed rows of the last verify, float32."""
    at = folded + slot
    old = tl.load(window + at[:, None] * width + channel, mask & (at < TAPS - 1)[:, None], 0.0)
    at -= TAPS - 1
    place = at
    if kept is not None:
        place = tl.load(kept + at, (at >= 0) & (at < folded), 0)
    late = tl.load(pending + place[:, None] * width + channel, mask & (at >= 0)[:, None], 0.0)
    return old.to(tl.float32) + late.to(window.dtype.element_ty).to(tl.float32)  # one of them is 0


@triton.jit
def conv_verify_kernel(
    x, before, after, weight, bias, window, pending, rows, count, kept, ancestors, y,
    x_stride, before_stride, after_stride, weight_stride, tap_stride, window_stride, pending_stride, kept_stride, width,
    N: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, PAST: tl.constexpr, SILU: tl.constexpr,
    CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + sequence)
    folded = tl.load(count + row)
    window += row * window_stride
    pending += row * pending_stride
    if kept is not None:
        kept += row * kept_stride
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (channel < width)[None, :]
    node = tl.arange(0, ROWS)
    live = node < N
    mask = live[:, None] & inside
    depth = node
    if ancestors is not None:
        word = tl.load(ancestors + sequence * N + node, live, 0)
        seen = ((word[:, None] >> node[None, :]) & 1) == 1
        depth = tl.sum(seen.to(tl.int32), 1) - 1
    slot = tl.arange(0, PAST)
    past = (slot < TAPS - 1)[:, None] & inside
    wait_for_previous_kernel(PDL)
    new_window = _history(window, pending, kept, folded, slot, channel, width, past, TAPS)
    line = (sequence * N + node)[:, None]
    sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    for back in tl.static_range(TAPS):
        at = node - back
        if ancestors is not None:
            at = tl.max(tl.where(seen, node[None, :], -1), 1)  # the nearest ancestor left
            seen = seen & (node[None, :] != at[:, None])
        is_row = back <= depth
        u = _inputs(x, before, (sequence * N + at)[:, None], x_stride, before_stride, channel, mask & is_row[:, None])
        slots = TAPS - 1 - (back - depth)
        old = _history(window, pending, kept, folded, slots, channel, width, mask & (back > depth)[:, None], TAPS)
        w = _tap(weight, back, weight_stride, tap_stride, channel, width, TAPS)
        sums += w[None, :] * (u.to(tl.float32) + old)
    _store(y, sums, after, line, after_stride, bias, channel, width, mask, SILU)

    u = _inputs(x, before, line, x_stride, before_stride, channel, mask)
    tl.debug_barrier()  # every thread has read what is replayed
    if row != 0:  # several sequences may be the padding row at once; it stays as it is
        tl.store(window + slot[:, None] * width + channel, new_window.to(window.dtype.element_ty), past)
        tl.store(pending + node[:, None] * width + channel, u.to(pending.dtype.element_ty), mask)


@triton.jit
def conv_chain_kernel(
    x, before, after, weight, bias, window, pending, rows, count, kept, y,
    x_stride, before_stride, after_stride, weight_stride, tap_stride, window_stride, pending_stride, kept_stride, width,
    N: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows of a chain, for some channels. Their inputs, with those of the window, are read once into registers."""
    sequence = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + sequence)
    folded = tl.load(count + row)
    window += row * window_stride
    pending += row * pending_stride
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < width
    inputs = ()
    for slot in tl.static_range(TAPS - 1):
        at = folded + slot
        is_old = at < TAPS - 1
        place = at - (TAPS - 1)
        if kept is not None:
            place = tl.load(kept + row * kept_stride + place, ~is_old, 0)
        source = tl.where(is_old, window + at * width, pending + place * width)
        inputs += (tl.load(source + channel, inside, 0.0),)  # type: ignore[assignment]
    taps = ()
    for back in tl.static_range(TAPS):
        taps += (_tap(weight, back, weight_stride, tap_stride, channel, width, TAPS),)  # type: ignore[assignment]
    added = _rows(bias, 0, 0, channel, inside)
    # Every thread has read what is replayed. Most store what they have loaded themselves, but with a width or strides
    # that are no multiples of 16 the compiler may distribute them among threads differently.
    tl.debug_barrier()
    wait_for_previous_kernel(PDL)

    line = sequence * N
    gates = ()
    for node in tl.static_range(N):
        inputs += (_inputs(x, before, line + node, x_stride, before_stride, channel, inside),)  # type: ignore[assignment]
        if after is not None:
            gates += (_rows(after, line + node, after_stride, channel, inside),)  # type: ignore[assignment]
    for node in tl.static_range(N):
        sums = tl.zeros([CHANNELS], tl.float32)
        for back in tl.static_range(TAPS):
            sums += taps[back] * inputs[node + TAPS - 1 - back].to(tl.float32)
        gate = None  # type: ignore[var-annotated]
        if after is not None:
            gate = gates[node]
        values = _finished(sums, added, gate, y.dtype.element_ty, SILU)
        tl.store(y + (line + node) * width + channel, values, inside)
    if row != 0:  # several sequences may be the padding row at once; it stays as it is
        for slot in tl.static_range(TAPS - 1):
            tl.store(window + slot * width + channel, inputs[slot], inside)
        for node in tl.static_range(N):
            u = inputs[node + TAPS - 1]  # type: ignore[var-annotated]
            tl.store(pending + node * width + channel, u.to(pending.dtype.element_ty), inside)
