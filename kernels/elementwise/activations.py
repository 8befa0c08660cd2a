"""Activations of MLPs: SwiGLU (SiLU of the gate times up), GELU in its place, clamped SwiGLU, squared ReLU; and the
sigmoid gate of attention outputs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from specbatch.kernels.common.rowwise import sigmoid, silu
from specbatch.kernels.dispatch import is_deterministic, op


def silu_and_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [T, 2 * I], gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


GATE_SLOPE, GATE_LIMIT = 1.702, 7.0  # of the clamped SwiGLU


def clamped_swiglu_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(1.702 * gate) for gate_up [T, 2 * I], gate first -> [T, I]; the gate is at most 7, up
    within -7 and 7 (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025)."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=GATE_LIMIT), up.clamp(-GATE_LIMIT, GATE_LIMIT)
    return (up + 1) * gate * sigmoid(gate * GATE_SLOPE)


def relu_squared_ref(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 of a contiguous x [T, I], in place (So et al., "Primer", 2021)."""
    return x.relu_().square_()


def gelu_and_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up for gate_up [T, 2 * I], gate first -> [T, I]. GELU by tanh: 0.5 (1 + tanh(z)) = sigmoid(2 z) for
    z = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, 2016)."""
    gate, up = gate_up.chunk(2, -1)
    if not is_deterministic():
        return F.gelu(gate, approximate="tanh") * up
    x = gate.float()
    return (x * sigmoid((x + x * x * x * 0.044715) * (2 * math.sqrt(2 / math.pi)))).to(gate.dtype) * up


def mul_sigmoid_ref(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), both [T, H] and contiguous."""
    return x * sigmoid(gate)


silu_and_mul = op(silu_and_mul_ref, "specbatch.kernels.elementwise.elementwise_triton:silu_and_mul")
gelu_and_mul = op(gelu_and_mul_ref, "specbatch.kernels.elementwise.elementwise_triton:gelu_and_mul")
relu_squared = op(relu_squared_ref, "specbatch.kernels.elementwise.elementwise_triton:relu_squared")
mul_sigmoid = op(mul_sigmoid_ref, "specbatch.kernels.elementwise.elementwise_triton:mul_sigmoid")
