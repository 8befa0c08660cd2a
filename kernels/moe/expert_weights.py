"""Weights of the experts of a mixture: both GEMMs, the activation between them, and biases."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from specbatch.kernels.gemm.quantized.weight import Weight

Activation = Literal["swiglu", "clamped_swiglu", "geglu", "relu2"]
GATED: tuple[Activation, ...] = ("swiglu", "clamped_swiglu", "geglu")  # which halve the width


class Biases(NamedTuple):
    """Of experts: up [E, N], as many as up has rows, and down [E, H]; None is none."""

    up: torch.Tensor | None = None
    down: torch.Tensor | None = None


class ExpertWeights(NamedTuple):
    """Expert e computes down_e(activation(up_e(x))).

    up    [E, 2 * I, H], the rows of the gate first, for swiglu (silu(gate) * up), clamped_swiglu (`clamped_swiglu_ref`)
          and geglu (`gelu_and_mul_ref`); [E, I, H] for relu2 (relu squared)
    down  [E, H, I]
    """

    up: Weight
    down: Weight
    activation: Activation
    biases: Biases = Biases()
