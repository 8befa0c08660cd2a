"""A mixture of experts: every token goes through the few experts that its router chose, and through the shared ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specbatch.errors import refuse
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.kernels.dispatch import op
from specbatch.kernels.elementwise.activations import clamped_swiglu_ref, gelu_and_mul_ref, silu_and_mul_ref
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.gemm.quantized import fp8_activations
from specbatch.kernels.gemm.quantized.fp8_quantize import quantize_fp8_ref
from specbatch.kernels.gemm.quantized.weight import Weight, quantized_linear_ref
from specbatch.kernels.moe.expert_weights import GATED, Activation, Biases, ExpertWeights
from specbatch.kernels.moe.routing import Routing, route_ref

_GATED = {"swiglu": silu_and_mul_ref, "clamped_swiglu": clamped_swiglu_ref, "geglu": gelu_and_mul_ref}


def experts_ref(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, mlp: ExpertWeights, *, quantize: bool = False
) -> torch.Tensor:
    """sum over j of weights[t, j] * down_e(activation(up_e(x[t]))) with e = experts[t, j].

    x [T, H], weights float32 [T, width], experts int [T, width], those of a token all different. Summed in float32 in
    the order of j -> [T, H], in the type of x. quantize: activations are quantized to FP8 before each GEMM, see
    `quantize_fp8_ref`.
    """
    up, down, activation, biases = mlp

    def gemm(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        y = quantized_linear_ref(quantize_fp8_ref(x) if quantize else x, weight)
        return y if bias is None else y + bias[expert]

    outputs = x.new_empty(*experts.shape, x.shape[1])
    for expert in experts.unique().tolist():
        token, place = (experts == expert).nonzero(as_tuple=True)
        h = _activated(gemm(x[token], up.of(expert), biases.up), activation)
        outputs[token, place] = gemm(h, down.of(expert), biases.down)
    y = weights[:, :1] * outputs[:, 0].float()
    for place in range(1, experts.shape[1]):
        y = y + weights[:, place, None] * outputs[:, place].float()
    return y.to(x.dtype)


def _activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    return _GATED[activation](x) if activation in _GATED else x.relu().square()


def fused_moe_ref(
    x: torch.Tensor,
    logits: torch.Tensor,
    rule: Routing,
    mlp: ExpertWeights,
    residual: torch.Tensor | None = None,
    *,
    quantize: bool = False,
) -> torch.Tensor:
    """residual + `experts_ref` of x [T, H] with the routing of logits [T, rule.logits]; residual [T, H] or None."""
    y = experts_ref(x, *route_ref(logits, rule), mlp, quantize=quantize)
    return y if residual is None else residual + y


fused_moe = op(fused_moe_ref, "specbatch.kernels.moe.experts_triton:fused_moe")


def slices_of_up(up: torch.Tensor, inner: int, activation: Activation) -> torch.Tensor:
    """The first matrices of a shared expert as those of experts of width `inner`, whose sum it is: up [2 * I, H]
    (swiglu) or [I, H] -> [n, (2 *) inner, H]. What is missing to a multiple of `inner` is filled up with zeros."""
    halves = up.unflatten(0, (2 if activation in GATED else 1, -1))
    slices = F.pad(halves, (0, 0, 0, -halves.shape[1] % inner)).unflatten(1, (-1, inner))
    found: torch.Tensor = slices.transpose(0, 1).flatten(1, 2)
    return found


def slices_of_down(down: torch.Tensor, inner: int) -> torch.Tensor:
    """The last matrix of such an expert: down [H, I] -> [n, H, inner]."""
    slices: torch.Tensor = F.pad(down, (0, -down.shape[1] % inner)).unflatten(1, (-1, inner)).transpose(0, 1)
    return slices


def token_bytes(experts: int, width: int, inner: int, hidden: int, dtype: torch.dtype) -> int:
    """The most that a token on its way through `width` of `experts` takes in kernels, in bytes."""
    pairs = width * ((inner + hidden) * dtype.itemsize + 12)  # both GEMMs; weight, expert and place in the order
    return 2 * hidden * dtype.itemsize + 7 * experts + pairs  # norm and sum; float32 logits, counts, choices


class Experts:
    """`residual + mixture(norm(x))` for x [T, H]: router, routed and shared experts.

    router [rule.logits, H], router_bias [rule.logits] or None: a row for each routed expert and, if gated, the shared
    expert's gate after them; its type is that of the logits (Nemotron-H: float32). up and down as in `experts_ref` with
    rule.experts + rule.shared experts, the shared ones last (`slices_of_up`).
    """

    def __init__(
        self,
        rule: Routing,
        router: torch.Tensor,
        up: Weight,
        down: Weight,
        activation: Activation = "swiglu",
        *,
        router_bias: torch.Tensor | None = None,
        biases: Biases = Biases(),  # noqa: B008
        ranks: Communicator | None = None,
    ) -> None:
        """ranks: of a group in which each has a part of every expert; None if this is the whole mixture. Their outputs
        are summed, so that only one of them has the biases of down."""
        self._ranks = ranks
        count, hidden, inner = down.shape
        if activation in GATED:
            inner *= 2
        if count != rule.experts + rule.shared:
            raise refuse("experts", count, f"use {rule.experts} and {rule.shared} shared ones")
        if up.shape != (count, inner, hidden):
            raise refuse("up", up.shape, f"use {(count, inner, hidden)}, as down and {activation} say")
        if router.shape != (rule.logits, hidden):
            raise refuse("router", tuple(router.shape), f"use {(rule.logits, hidden)}")
        self.rule = rule
        self.weights = ExpertWeights(up.for_experts(), down.for_experts(), activation, biases)
        # Else a block that shares a scale could have rows of the gate and of what it multiplies.
        is_whole = activation not in GATED or down.shape[2] % up.block[0] == 0
        self._may_quantize = all(one.values.dtype == torch.float8_e4m3fn for one in (up, down)) and is_whole
        self._router_dtype = router.dtype
        # cuBLAS is at its best where a row of logits begins at 16 bytes.
        padding = -rule.logits % 8
        bias = None if router_bias is None else F.pad(router_bias, (0, padding))
        self._router = Linear(F.pad(router, (0, 0, 0, padding)), bias)

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        router_norm: Norm | None = None,
    ) -> torch.Tensor:
        """x [T, H], residual [T, H] -> [T, H]. router_norm: that of x for the router, if it is not `norm`."""
        entering, x = x, x if norm is None else rms_norm(x, *norm)
        routed = x if router_norm is None else rms_norm(entering, *router_norm)
        logits = self._router(routed.to(self._router_dtype))[:, : self.rule.logits]
        del entering, routed
        quantize = self._may_quantize and fp8_activations.quantizes(x)
        if self._ranks is None:
            return fused_moe(x, logits, self.rule, self.weights, residual, quantize=quantize)
        part = fused_moe(x, logits, self.rule, self.weights, quantize=quantize)
        return self._ranks.all_reduce(part, residual)
