"""Activations of MLPs: SwiGLU (SiLU of the gate times up) and squared ReLU."""

from __future__ import annotations

import torch

from specbatch.kernels.common.rowwise import silu
from specbatch.kernels.dispatch import op


def silu_and_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [T, 2 * I], gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


def relu_squared_ref(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 of a contiguous x, in place (So et al., "Primer", 2021)."""
    return x.relu_().square_()


silu_and_mul = op(silu_and_mul_ref, "specbatch.kernels.elementwise.elementwise_triton:silu_and_mul")
relu_squared = op(relu_squared_ref, "specbatch.kernels.elementwise.elementwise_triton:relu_squared")
