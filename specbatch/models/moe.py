"""Mixtures of experts as checkpoints of the Qwen family hold them (Qwen3-MoE, Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specbatch.errors import refuse
from specbatch.kernels.experts import Experts, shared_slices
from specbatch.kernels.linear import Norm
from specbatch.kernels.routing import Routing
from specbatch.kernels.weight import Weight
from specbatch.models.layers import Reader

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Mixture:
    """`experts` of width `inner`, of which a token goes to `top_k`, and a shared one of width `shared` (0: none) with a
    gate of its own. normalise: the chosen ones' weights are divided by their sum. fused: a file holds all experts in
    two tensors."""

    experts: int
    top_k: int
    inner: int
    normalise: bool = True
    shared: int = 0
    fused: bool = False

    def shapes(self, stem: str, hidden: int) -> Shapes:
        """Name -> shape of the tensors behind `stem`."""
        shapes: Shapes = {f"{stem}.gate.weight": (self.experts, hidden)}
        if self.fused:
            shapes[f"{stem}.experts.gate_up_proj"] = (self.experts, 2 * self.inner, hidden)
            shapes[f"{stem}.experts.down_proj"] = (self.experts, hidden, self.inner)
        else:
            for expert in range(self.experts):
                shapes |= swiglu_shapes(f"{stem}.experts.{expert}", hidden, self.inner)
        if self.shared:
            shapes |= swiglu_shapes(f"{stem}.shared_expert", hidden, self.shared)
            shapes[f"{stem}.shared_expert_gate.weight"] = (1, hidden)
        return shapes


@dataclass(frozen=True)
class MoeMlp:
    """A mixture in a layer."""

    norm: Norm
    experts: Experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, norm=self.norm, residual=x)


def swiglu_shapes(stem: str, hidden: int, inner: int) -> Shapes:
    shapes = {f"{stem}.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
    return {**shapes, f"{stem}.down_proj.weight": (hidden, inner)}


def read_experts(read: Reader, stem: str, mixture: Mixture) -> Experts:
    """The mixture behind `stem`."""
    if mixture.fused:
        up, down = read(f"{stem}.experts.gate_up_proj"), read(f"{stem}.experts.down_proj")
    else:
        stems = [f"{stem}.experts.{expert}" for expert in range(mixture.experts)]
        names = [f"{one}.{part}_proj.weight" for one in stems for part in ("gate", "up")]
        up = read(*names).view(mixture.experts, 2 * mixture.inner, -1)
        down = torch.stack([read(f"{one}.down_proj.weight") for one in stems])
    router, slices = read(f"{stem}.gate.weight"), 0
    if mixture.shared:
        shared = f"{stem}.shared_expert"
        ups = read(f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")
        more = shared_slices(ups, read(f"{shared}.down_proj.weight"), mixture.inner, "swiglu")
        up, down, slices = torch.cat([up, more[0]]), torch.cat([down, more[1]]), len(more[0])
        router = torch.cat([router, read(f"{shared}_gate.weight")])
    rule = Routing(
        mixture.experts, mixture.top_k, normalise=mixture.normalise, shared=slices, gated=bool(mixture.shared)
    )
    return Experts(rule, router, Weight(up), Weight(down))


def mixture_of(config: dict[str, Any], *, normalise: bool | None = None) -> Mixture:
    """What a config.json says of its experts; normalise: where the family decides."""

    def number(*keys: str, least: int = 1) -> int:
        for key in keys:
            value = config.get(key)
            if value is not None:
                if type(value) is not int or value < least:
                    raise refuse(key, value, f"the config must give a whole number from {least}")
                return value
        raise refuse(keys[0], None, "the config must give it")

    experts = number("num_experts", "num_local_experts")
    chosen = number("num_experts_per_tok")
    if chosen > experts:
        raise refuse("num_experts_per_tok", chosen, f"there are {experts} experts")
    if normalise is None:
        normalise = bool(config.get("norm_topk_prob", False))
    shared = config.get("shared_expert_intermediate_size")
    width = number("shared_expert_intermediate_size", least=0) if shared is not None else 0
    return Mixture(experts, chosen, number("moe_intermediate_size"), normalise, width)


def sparse_layers(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers hold a mixture; the others a dense MLP of intermediate_size."""
    dense, every = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    return tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(layers))
