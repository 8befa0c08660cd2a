"""Causal depthwise convolution over the last few tokens, with a window as its state (gated delta nets, Mamba2, LFM2).

y_t = sum over j of weight[:, j] * u_{t - K + 1 + j} + bias, then silu if `activation`. u is x, or where a gate `before`
is given (LFM2) before * x in the type of x; `after` multiplies what comes out, likewise.

A window holds the last K - 1 inputs u, oldest first, not yet activated. Rows may be columns of a wider GEMM output: x
and the gates [T, C] have any row stride, as windows and pending inputs have any between device rows. Sums are float32,
cast once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.common.rowwise import silu
from specbatch.kernels.dispatch import op
from specbatch.kernels.recurrent.inputs import ConvInputs
from specbatch.kernels.recurrent.state_replay import StateReplay


def conv_prefill_ref(inputs: ConvInputs, spans: RaggedBatch, out: torch.Tensor | None = None) -> torch.Tensor:
    """Inputs of the tokens of `spans` -> [T, C], in `out` if given, which is contiguous.

    The window is read where a span continues from one, then set to that after its last token."""
    x, weight, bias, window, activation, before, after = inputs
    taps, y = weight.shape[1], x.new_empty(x.shape)
    u = x if before is None else before * x
    for begin, end, start, row in zip(spans.offsets, spans.offsets[1:], spans.starts, spans.rows, strict=False):
        old = window[row] if start else torch.zeros_like(window[row])
        known = torch.cat([old.float(), u[begin:end].float()])
        at_taps = (known[tap : tap + end - begin] for tap in range(taps))
        y[begin:end] = _convolve(at_taps, weight, bias, activation)
        window[row] = known[end - begin :]
    y = y if after is None else after * y
    return y if out is None else out.copy_(y)


def conv_verify_ref(inputs: ConvInputs, pending: torch.Tensor, replay: StateReplay) -> torch.Tensor:
    """Inputs of N rows of each sequence -> [B * N, C], after the accepted inputs of the last verify.

    The window takes those in; pending [R, M, C], N <= M: inputs of a row's last verify, of which `replay.counts` are
    kept, then those of this one. Device row 0 is left alone.
    """
    x, weight, bias, window, activation, before, after = inputs
    taps, batch, device = weight.shape[1], len(replay.rows), x.device
    u = (x if before is None else before * x).unflatten(0, (batch, -1))
    count = u.shape[1]
    order, there = replay.replayed_rows(pending.shape[1])
    late = pending[replay.rows[:, None], order.where(there, 0)]
    history = torch.cat([window[replay.rows], late.to(window.dtype)], 1)
    # The window ends after the last accepted row.
    places = there.sum(1, keepdim=True) + torch.arange(taps - 1, device=device)
    recent = history.gather(1, places[..., None].expand(-1, -1, x.shape[1]))
    known = torch.cat([recent.float(), u.float()], 1)
    sequence = torch.arange(batch, device=device)[:, None, None]
    at_taps = known[sequence, _lineage(replay, count, taps)].unbind(2)
    real = replay.rows != 0
    window[replay.rows[real]] = recent[real]
    pending[replay.rows[real], :count] = u[real].to(pending.dtype)
    y = _convolve(at_taps, weight, bias, activation).flatten(0, 1).to(x.dtype)
    return y if after is None else after * y


def _lineage(replay: StateReplay, rows: int, taps: int) -> torch.Tensor:
    """int64 [B, rows, taps]: the inputs of each row, oldest first, among the window's (0..taps - 2) and the rows'."""
    node = torch.arange(rows, device=replay.rows.device)
    # A row's ancestors, nearest first, each as its place after the window.
    nearest = torch.where(replay.sees(rows), node + taps - 1, -1).sort(-1, descending=True).values
    nearest = F.pad(nearest, (0, taps), value=-1)[..., :taps]
    back = torch.arange(taps, device=node.device)
    beyond = taps - 1 - (back - replay.depths(rows)[..., None])
    return torch.where(nearest >= 0, nearest, beyond).flip(-1)


def _convolve(
    inputs: Iterable[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, activation: bool
) -> torch.Tensor:
    """inputs: float32 [..., C] for each tap, oldest first. They are added in this order."""
    first, *others = (x * taps for x, taps in zip(inputs, weight.T.float(), strict=True))
    sums = first
    for product in others:
        sums += product
    sums = sums if bias is None else sums + bias.float()
    return silu(sums) if activation else sums


conv_prefill = op(conv_prefill_ref, "specbatch.kernels.recurrent.short_conv_triton:conv_prefill")
conv_verify = op(conv_verify_ref, "specbatch.kernels.recurrent.short_conv_triton:conv_verify")
