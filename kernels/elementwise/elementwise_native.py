"""RMSNorm and SwiGLU of float32 rows, compiled for the processor: a call takes less time than the several of torch."""

from __future__ import annotations

from functools import cache

import torch

from specbatch.kernels.common.native import LANES, Code, Native


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm_ref` of x [T, H], weight [H], both float32, H a multiple of 16."""
    x, out = x.contiguous(), torch.empty_like(x)
    rows, columns = x.shape
    _rms_norm(eps)(rows, x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, columns)
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul_ref` of gate_up float32 [T, 2 * I], I a multiple of 16."""
    gate_up, rows, columns = gate_up.contiguous(), gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, columns)
    _silu_and_mul()(rows, gate_up.data_ptr(), out.data_ptr(), rows, columns)
    return out


@cache
def _rms_norm(eps: float) -> Native:
    """Arguments: x, weight, out; rows, columns."""

    def build(code: Code) -> None:
        at, word = code.at, code.word
        x, weight, out = (code.pointer(place, code.float) for place in (1, 2, 3))
        rows, columns = code.argument(4), code.argument(5)
        with code.pieces(rows) as row:
            start = at.mul(row, columns)
            end = at.add(start, columns)
            squares = code.variable(code.vector, code.zeros)
            with code.loop(start, end, LANES) as place:
                values = code.load(x, code.vector, place)
                at.store(code.fma(values, values, at.load(squares)), squares)
            mean = at.fdiv(code.sum(at.load(squares)), at.sitofp(columns, code.float))
            scale = at.fdiv(code.float(1.0), code.sqrt(at.fadd(mean, code.float(eps))))
            with code.loop(word(0), columns, LANES) as column:
                place = at.add(start, column)
                found = at.fmul(code.load(x, code.vector, place), code.splat(scale))
                code.store(at.fmul(found, code.load(weight, code.vector, column)), out, place)

    return Native(build)


@cache
def _silu_and_mul() -> Native:
    """Arguments: gate and up, out; rows, columns of out."""

    def build(code: Code) -> None:
        at, word = code.at, code.word
        x, out = (code.pointer(place, code.float) for place in (1, 2))
        rows, columns = code.argument(3), code.argument(4)
        with code.pieces(rows) as row:
            start, target = at.mul(row, at.mul(columns, word(2))), at.mul(row, columns)
            with code.loop(word(0), columns, LANES) as column:
                gate = code.load(x, code.vector, at.add(start, column))
                up = code.load(x, code.vector, at.add(at.add(start, columns), column))
                below = at.fadd(code.exp(at.fsub(code.zeros, gate)), code.ones)
                code.store(at.fmul(at.fdiv(gate, below), up), out, at.add(target, column))

    return Native(build)
