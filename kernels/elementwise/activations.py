"""What an MLP has between its products: SiLU times up, or relu squared."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specbatch.kernels import dispatch


def silu_and_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [T, 2 * I], gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul_ref`, in one kernel on a CUDA device."""
    if dispatch.runs_kernels(gate_up):
        from specbatch.kernels.elementwise import elementwise_triton

        return elementwise_triton.silu_and_mul(gate_up)
    return silu_and_mul_ref(gate_up)


def relu_squared_ref(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 in the place of x (So et al., "Primer", 2021)."""
    return x.relu_().square_()


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """`relu_squared_ref` of x [T, I], contiguous, in one kernel on a CUDA device."""
    if dispatch.runs_kernels(x):
        from specbatch.kernels.elementwise import elementwise_triton

        return elementwise_triton.relu_squared(x)
    return relu_squared_ref(x)
