"""The gated activation of an MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specbatch.kernels import dispatch


def silu_product_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [T, 2 * I], gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_product_ref`, in one kernel on a CUDA device."""
    if dispatch.runs_kernels(gate_up):
        from specbatch.kernels import elementwise

        return elementwise.silu_product(gate_up)
    return silu_product_ref(gate_up)
