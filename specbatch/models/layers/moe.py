"""Mixture of experts of the Qwen families (Qwen3-MoE, Qwen3-Next, Qwen3.5): config, tensors and MLP block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, places_of, spelled
from specbatch.kernels.common.block_sizes import SCALE_BLOCK
from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.gemm.quantized.weight import Weight, concat_experts
from specbatch.kernels.moe.expert_weights import Activation
from specbatch.kernels.moe.experts import Experts, slices_of_down, slices_of_up, token_bytes
from specbatch.kernels.moe.routing import Routing
from specbatch.models.config import shared_out
from specbatch.models.weight_reader import Reader

MOST_EXPERTS = 1 << 16  # of a layer
SWIGLU_NAMES = ("gate_proj", "up_proj", "down_proj")
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Mixture:
    """`experts` experts of width `inner`, `top_k` of them per token, and a shared expert of width `shared` (0: none)
    with its own gate. normalise: the weights of the selected experts are divided by their sum. fused: the checkpoint
    has all experts of a layer in two tensors."""

    experts: int
    top_k: int
    inner: int
    normalise: bool = True
    shared: int = 0
    fused: bool = False

    def divided(self, ranks: int, step: int = 1) -> Self:
        """A rank's share of every expert, each a multiple of `step` wide."""
        inner = shared_out("moe_intermediate_size", self.inner, ranks, step)
        shared = shared_out("shared_expert_intermediate_size", self.shared, ranks, step)
        return replace(self, inner=inner, shared=shared)

    def token_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        """Peak bytes of activations per token."""
        return token_bytes(self.experts, self.top_k + -(-self.shared // self.inner), self.inner, hidden, dtype)


@dataclass(frozen=True)
class MoeMlp:
    """A mixture of experts as the MLP of a layer."""

    norm: Norm
    experts: Experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, norm=self.norm, residual=x)


def read_experts(read: Reader, stem: str, mixture: Mixture) -> Experts:
    """Read the mixture under the prefix `stem`."""
    count, hidden = mixture.experts, read.config.hidden_size
    up, down = read_routed(read, stem, mixture)
    router, slices = read(f"{stem}.gate.weight", count, hidden), 0
    if mixture.shared:
        shared = f"{stem}.shared_expert"
        ups = read.weight(swiglu_rows(shared, mixture.shared), hidden)
        downs = read.weight({f"{shared}.down_proj.weight": hidden}, mixture.shared)
        up, down, slices = with_shared(read, stem, (up, down), (ups, downs), "swiglu")
        router = torch.cat([router, read(f"{shared}_gate.weight", 1, hidden)])
    rule = Routing(
        mixture.experts, mixture.top_k, normalise=mixture.normalise, shared=slices, gated=bool(mixture.shared)
    )
    return Experts(rule, router, up, down, ranks=read.ranks)


def read_routed(
    read: Reader, stem: str, mixture: Mixture, names: tuple[str, str, str] = SWIGLU_NAMES
) -> tuple[Weight, Weight]:
    """The routed experts of the mixture `stem`: gate and up as one matrix each, and down. names: of these three."""
    count, inner, hidden = mixture.experts, mixture.inner, read.config.hidden_size
    if mixture.fused:
        up = read.fused(f"{stem}.experts.gate_up_proj", count, 2 * inner, hidden)
        return up, read.fused(f"{stem}.experts.down_proj", count, hidden, inner)
    stems = [f"{stem}.experts.{expert}" for expert in range(count)]
    up = read.stack([swiglu_rows(one, inner, names) for one in stems], hidden)
    return up, read.stack([{f"{one}.{names[2]}.weight": hidden} for one in stems], inner)


def swiglu_rows(stem: str, inner: int, names: tuple[str, str, str] = SWIGLU_NAMES) -> dict[str, int]:
    return {f"{stem}.{name}.weight": inner for name in names[:2]}


def with_shared(
    read: Reader, stem: str, routed: tuple[Weight, Weight], shared: tuple[Weight, Weight], activation: Activation
) -> tuple[Weight, Weight, int]:
    """Append the shared expert to the routed ones, as slices of their width (see `slices_of_up`). Returns up and down
    of all experts of the mixture `stem`, and the number of these slices."""
    inner, width = routed[1].shape[2], shared[1].shape[1]
    weights = (*routed, *shared)
    sliced = _slices(*shared, inner, activation) if len({(type(one), one.block) for one in weights}) == 1 else None
    if sliced is None and any(weight.is_quantized for weight in routed):
        # They are most of a model, so they are not dequantized to twice the size.
        if read.to_fp8:
            works = f"{stem} has experts of widths {inner} and {width}, which must be multiples of {SCALE_BLOCK}"
            raise refuse("draft_quantization", "fp8", f"{works}; leave it out")
        assert read.config.quantization is not None
        kind = " and ".join(form.name for form in read.config.quantization.forms)
        works = f"{stem} is {kind}: its shared expert must be {kind}, too, and both widths whole numbers of groups"
        raise refuse("shared expert", f"widths {inner} and {width}", works)
    if sliced is None:
        wide = [Weight(read.dequantize(f"{stem}.shared_expert", weight)) for weight in shared]
        sliced = _slices(wide[0], wide[1], inner, activation)
    assert sliced is not None
    ups, downs = (concat_experts(*pair) for pair in zip(routed, sliced, strict=True))
    return ups, downs, len(sliced[0].values)


def _slices(up: Weight, down: Weight, inner: int, activation: Activation) -> tuple[Weight, Weight] | None:
    """Up and down of a shared expert as stacks of slices (`slices_of_up`); None if these would cut blocks of scales."""
    rows, columns = up.block[0], down.block[1] or 1
    if down.shape[1] % rows or inner % rows or inner % columns:
        return None
    return (
        up.map_outputs(lambda part, step: slices_of_up(part, inner // step, activation)),
        down.map_inputs(lambda part, step: slices_of_down(part, inner // step)),
    )


def mixture_of(config: dict[str, Any], *, normalise: bool) -> Mixture:
    """Read the experts of a config.json."""
    experts = count_of(config, spelled(config, "num_experts", "num_local_experts"), most=MOST_EXPERTS)
    key = spelled(config, "num_experts_per_tok", "top_k_experts")
    chosen = count_of(config, key)
    if chosen > experts:
        raise refuse(key, chosen, f"there are {experts} experts")
    shared = count_of(config, "shared_expert_intermediate_size", 0, least=0)
    return Mixture(experts, chosen, count_of(config, "moe_intermediate_size"), normalise, shared)


def sparse_layers(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers have a mixture of experts; the others have a dense MLP of intermediate_size."""
    dense, every = places_of(config, "mlp_only_layers") or [], count_of(config, "decoder_sparse_step", 1)
    return tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(layers))
