"""Mixture of experts of the Qwen families (Qwen3-MoE, Qwen3-Next, Qwen3.5): config, tensors and MLP block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, places_of, spelled
from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.gemm.quantized.int4 import pack_int4, unpack_int4
from specbatch.kernels.gemm.quantized.weight import SCALE_BLOCK, Weight, concat_experts
from specbatch.kernels.moe.expert_weights import Activation
from specbatch.kernels.moe.experts import Experts, shared_slices, token_bytes
from specbatch.kernels.moe.routing import Routing
from specbatch.models.config import shared_out
from specbatch.models.layers.blocks import Reader

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
    """Append the shared expert to the routed ones, as slices of their width (see `shared_slices`). Returns up and down
    of all experts of the mixture `stem`, and the number of these slices."""
    inner, width = routed[1].shape[2], shared[1].shape[1]
    (more_up, more_down), scaled = shared, [weight.scales is not None for weight in (*routed, *shared)]
    is_int4 = {weight.is_int4 for weight in (*routed, *shared)}
    step = 1 if is_int4 == {True} else more_up.scale_rows
    if is_int4 == {True} and (groups := _groups(more_down, inner)):
        sliced = _int4_slices(more_up, more_down, inner, groups, activation)
    elif all(scaled) and not any(is_int4) and width % step == 0 == inner % step:
        assert more_up.scales is not None
        assert more_down.scales is not None
        up, down = more_up.values.view(torch.uint8), more_down.values.view(torch.uint8)
        values = shared_slices(up, down, inner, activation)
        if more_up.is_per_channel:  # each slice has some of the inputs of down, and all of its outputs
            of_up, _ = shared_slices(more_up.scales, more_up.scales[:width].t(), inner, activation)
            scales = of_up, more_down.scales.expand(len(of_up), -1, -1)
        else:
            scales = shared_slices(more_up.scales, more_down.scales, inner // SCALE_BLOCK, activation)
        sliced = [Weight(one.view(torch.float8_e4m3fn), its) for one, its in zip(values, scales, strict=True)]
    elif any(scaled[:2]):  # they are most of a model, so they are not dequantized to twice the size
        if read.to_fp8:
            works = f"{stem} has experts of widths {inner} and {width}, which must be multiples of {SCALE_BLOCK}"
            raise refuse("draft_quantization", "fp8", f"{works}; leave it out")
        kind = "INT4" if routed[0].is_int4 else "FP8"
        works = f"{stem} is {kind}: its shared expert must be {kind}, too, and both widths whole numbers of groups"
        raise refuse("shared expert", f"widths {inner} and {width}", works)
    else:
        name = f"{stem}.shared_expert"
        wide = shared_slices(read.dequantize(name, more_up), read.dequantize(name, more_down), inner, activation)
        sliced = [Weight(one) for one in wide]
    ups, downs = (concat_experts(*pair) for pair in zip(routed, sliced, strict=True))
    return ups, downs, len(sliced[0].values)


def _groups(down: Weight, inner: int) -> int:
    """Groups of INT4 inputs in a slice of width `inner`; 0 if it would cut one."""
    assert down.scales is not None
    size = down.shape[1] // down.scales.shape[1]
    return 0 if inner % size else inner // size


def _int4_slices(up: Weight, down: Weight, inner: int, groups: int, activation: Activation) -> list[Weight]:
    """Up and down of an INT4 shared expert as stacks of slices (`shared_slices`), each with its groups."""
    values = shared_slices(unpack_int4(up.values), unpack_int4(down.values), inner, activation)
    found = []
    for of_up, of_down in ((up.scales, down.scales), (up.zeros, down.zeros)):
        assert of_up is not None
        assert of_down is not None
        rows, _ = shared_slices(of_up, of_up[: down.shape[1]].t(), inner, activation)
        _, columns = shared_slices(of_down.t().repeat(2, 1), of_down, groups, activation)
        found.append((rows.contiguous(), columns.contiguous()))
    return [Weight(pack_int4(value), *parts) for value, *parts in zip(values, *found, strict=True)]


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
