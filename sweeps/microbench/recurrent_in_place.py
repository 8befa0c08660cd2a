"""Decode kernels of recurrent layers that update the state in place: the cost of a state without rollback.

A comparison for the `recurrent` benchmark; the engine does not use them. Equations and norm are those of `gated_delta`
and `mamba2`, and nothing is kept for a later verify. Sizes must be powers of two, or multiples of 8 for the rows of
Mamba2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.recurrent.gated_delta_triton import log_decay, normalise
from specbatch.kernels.recurrent.inputs import DeltaInputs, SsdInputs
from specbatch.kernels.recurrent.mamba2_triton import finish_rows


def delta_in_place(inputs: DeltaInputs) -> torch.Tensor:
    """One token of each of B sequences, in the layout of `delta_verify`; the state is float32, without padding."""
    qkv, _, b, a, heads, state = inputs
    out = heads.outputs(qkv, None)
    _delta[(heads.value_dim // 32, heads.values, len(qkv))](
        qkv, b, a, heads.a_log, heads.dt_bias, state, out,
        KEYS=heads.keys, VALUES=heads.values, DIM=heads.value_dim, num_warps=1,
    )  # fmt: skip
    return normalise(out, inputs)


def mamba_in_place(inputs: SsdInputs) -> torch.Tensor:
    """One token of each of B sequences, in the layout of `ssd_verify`; the state is float32, without padding."""
    xbc, dt, _, heads, (state, _) = inputs
    out = heads.outputs(xbc, None)
    _mamba[(heads.dim // 8 * heads.count, len(xbc))](
        xbc, dt, out, state, heads.a_log, heads.d, heads.dt_bias,
        HEADS=heads.count, DIM=heads.dim, GROUPS=heads.groups, STATE=heads.state, num_warps=1,
    )  # fmt: skip
    return finish_rows(out, inputs)


@triton.jit
def _delta(
    qkv, b, a, a_log, dt_bias, state, o,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """One token of each sequence; the new state overwrites the old one."""
    head, token = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_column, v_column = tl.arange(0, DIM), tl.program_id(0) * 32 + tl.arange(0, 32)
    cells = state + ((token * VALUES + head) * DIM + k_column[:, None]) * DIM + v_column[None, :]
    s = tl.load(cells)
    heads = qkv + token * (2 * KEYS + VALUES) * DIM
    key = head // (VALUES // KEYS)
    q = tl.load(heads + key * DIM + k_column).to(tl.float32)
    k = tl.load(heads + (KEYS + key) * DIM + k_column).to(tl.float32)
    v = tl.load(heads + (2 * KEYS + head) * DIM + v_column).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * (DIM**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    fade = tl.exp(log_decay(a + token * VALUES + head, a_log + head, dt_bias + head, True))
    u = tl.sigmoid(tl.load(b + token * VALUES + head).to(tl.float32)) * (v - fade * tl.sum(s * k[:, None], 0))
    s = s * fade + k[:, None] * u[None, :]
    tl.store(cells, s)
    out = tl.sum(s * q[:, None], 0)
    tl.store(o + (token * VALUES + head) * DIM + v_column, out.to(o.dtype.element_ty))


@triton.jit
def _mamba(
    xbc, dt, y, state, a_log, d, dt_bias,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """One token of each sequence; the new state overwrites the old one."""
    head, token = tl.program_id(0) // (DIM // 8), tl.program_id(1).to(tl.int64)
    row, column = tl.program_id(0) % (DIM // 8) * 8 + tl.arange(0, 8), tl.arange(0, STATE)
    cells = state + ((token * HEADS + head) * DIM + row[:, None]) * STATE + column[None, :]
    h = tl.load(cells)
    line = xbc + token * (HEADS * DIM + 2 * GROUPS * STATE)
    sides = line + HEADS * DIM + head // (HEADS // GROUPS) * STATE + column
    x = tl.load(line + head * DIM + row).to(tl.float32)
    b, c = tl.load(sides).to(tl.float32), tl.load(sides + GROUPS * STATE).to(tl.float32)
    raw = tl.load(dt + token * HEADS + head).to(tl.float32) + tl.load(dt_bias + head)
    step = tl.maximum(raw, 0.0) + tl.log(1 + tl.exp(-tl.abs(raw)))
    h = h * tl.exp(-step * tl.exp(tl.load(a_log + head))) + (x * step)[:, None] * b[None, :]
    tl.store(cells, h)
    out = tl.sum(h * c[None, :], 1) + tl.load(d + head) * x
    tl.store(y + token * (HEADS * DIM) + head * DIM + row, out.to(y.dtype.element_ty))
