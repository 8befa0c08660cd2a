"""Nemotron-H: Mamba2 layers, few attention layers without rope, and MLPs (squared ReLU) or mixtures of experts.

A published layer is one of these. Here a layer is a mixer with the MLPs that follow it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, flag_of, limits_of, names_of, positive_of, spelled
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.moe.experts import Experts, token_bytes
from specbatch.kernels.moe.routing import Routing
from specbatch.kernels.recurrent.inputs import SsdHeads
from specbatch.memory.recurrent_state import StateShape
from specbatch.models.config import Ends, ModelConfig, shared_out
from specbatch.models.families.llama import attention, final_norm  # noqa: F401 (`decoder` calls it)
from specbatch.models.layers.blocks import Layer, Mixer, Mlp
from specbatch.models.layers.moe import MOST_EXPERTS, MoeMlp, with_shared
from specbatch.models.layers.recurrent import Mamba2, tap_major, taps_of, window_shapes
from specbatch.models.rope import Rope
from specbatch.models.weight_reader import Reader, Tables

MAMBA, ATTENTION, MLP, MOE = "M", "*", "-", "E"
_KINDS = {
    "mamba": MAMBA,
    "linear_attention": MAMBA,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": MOE,
}


@dataclass(frozen=True)
class SsdSizes:
    """Sizes of a Mamba2 layer: heads, head size, groups of B and C, state size, taps of the convolution and its
    bias."""

    count: int
    dim: int
    groups: int
    state: int
    taps: int
    bias: bool

    @property
    def inner(self) -> int:
        return self.count * self.dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True)
class Relu2Mixture:
    """Experts without a gate projection, selected by sigmoid scores with a bias, and a shared expert of width
    `shared`."""

    experts: int
    top_k: int
    inner: int
    shared: int
    normalise: bool
    scale: float
    groups: int
    top_groups: int

    def token_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        """Peak bytes of activations per token."""
        width = self.top_k + -(-self.shared // self.inner)
        return 4 * hidden + token_bytes(self.experts, width, self.inner, hidden, dtype)  # the router is float32


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(ModelConfig):
    """pattern: the kind of every published layer; num_layers counts the mixers, `depth` all published layers.
    mamba_bias: whether the projections of Mamba2 layers have biases. time_limits: lower and upper one of the time
    step, which are not applied: transformers 5.23 and vLLM 0.33 ignore them, too."""

    module: ClassVar[str] = __name__

    pattern: str
    mamba: SsdSizes
    mixture: Relu2Mixture | None
    mamba_bias: bool = False
    time_limits: tuple[float, float] | None = None
    embedding: str = "backbone.embeddings.weight"

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> NemotronHConfig:
        pattern = _pattern(config)
        mixers = sum(kind in (MAMBA, ATTENTION) for kind in pattern)
        for key, works in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu"), ("moe_latent_size", None)):
            if config.get(key, works) not in (works, None):
                raise refuse(key, config[key], f"only {works!r} is supported")
        for key in ("mamba_proj_bias", "attention_bias", *["mlp_bias"] * (MOE in pattern)):
            if flag_of(config, key):
                works = "biases are supported in Mamba2 layers (use_bias) and dense MLPs (mlp_bias without experts)"
                raise refuse(key, config[key], works)
        limits = limits_of(config, "time_step_limit")
        plain = ModelConfig.from_dict(
            {key: value for key, value in config.items() if not key.startswith(("rope", "hidden_act", "sliding"))}
            | {
                "architectures": None,
                "model_type": "llama",
                "layer_types": None,
                "num_hidden_layers": mixers,
                "rms_norm_eps": config.get(spelled(config, "layer_norm_epsilon", "rms_norm_eps")),
            }
        )
        return cls(
            **vars(plain) | {"rope": Rope(theta=1.0, rotary_dim=0, source="the family")},
            pattern=pattern,
            mamba=_ssd_sizes(config),
            mixture=_mixture(config) if MOE in pattern else None,
            mamba_bias=flag_of(config, "use_bias"),
            time_limits=limits if limits is not None and (limits[0] > 0 or limits[1] < math.inf) else None,
        )

    @property
    def note(self) -> str | None:
        if self.time_limits is None:
            return None
        return f"time_step_limit={list(self.time_limits)} of the config is not applied, as in transformers and vLLM"

    def divided(self, ranks: int) -> Self:
        mamba, mixture, step = self.mamba, self.mixture, self.input_step
        groups = shared_out("n_groups", mamba.groups, ranks)
        mamba = replace(mamba, count=mamba.count // mamba.groups * groups, groups=groups)
        if mixture is not None:
            inner = shared_out("moe_intermediate_size", mixture.inner, ranks, step)
            shared = shared_out("moe_shared_expert_intermediate_size", mixture.shared, ranks, step)
            mixture = replace(mixture, inner=inner, shared=shared)
        return replace(super().divided(ranks), mamba=mamba, mixture=mixture)

    def sections(self, name: str) -> tuple[int, ...]:
        mamba = self.mamba
        xbc = mamba.inner, mamba.groups * mamba.state, mamba.groups * mamba.state
        if name.endswith(("mixer.in_proj.weight", "mixer.in_proj.bias")):
            return mamba.inner, *xbc, mamba.count
        return xbc if ".conv1d." in name else ()

    @property
    def names(self) -> Ends:
        return Ends(self.embedding, "backbone.norm_f")

    def fit(self, found: dict[str, tuple[int, ...]]) -> Self:
        """transformers before 5.16 saves the embedding under another name."""
        saved = "backbone.embedding.weight"
        return replace(super().fit(found), embedding=saved if saved in found else self.embedding)

    @property
    def depth(self) -> int:
        return len(self.pattern)

    def published(self, index: int) -> tuple[int, ...]:
        """A mixer and the MLPs up to the next mixer."""
        mixers = [place for place, kind in enumerate(self.pattern) if kind in (MAMBA, ATTENTION)]
        return tuple(range(mixers[index], [*mixers, self.depth][index + 1]))

    @property
    def has_kv(self) -> tuple[bool, ...]:
        return tuple(kind == ATTENTION for kind in self.pattern if kind in (MAMBA, ATTENTION))

    @property
    def mixer_widths(self) -> tuple[int, int]:
        mamba, (projected, mixed) = self.mamba, super().mixer_widths
        return max(projected, mamba.inner + mamba.channels + mamba.count), max(mixed, mamba.inner)

    def mixing_bytes(self, dtype: torch.dtype) -> int:
        return max(super().mixing_bytes(dtype), self.mamba.channels * dtype.itemsize)

    def mlp_bytes(self, dtype: torch.dtype) -> int:
        mixture, hidden = self.mixture, self.hidden_size
        dense = (hidden + self.intermediate_size) * dtype.itemsize
        return dense if mixture is None else max(dense, mixture.token_bytes(hidden, dtype))

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        mamba = self.mamba
        return (
            *window_shapes(mamba.channels, mamba.taps),
            StateShape("matrix", (mamba.count, mamba.dim, mamba.state), "state"),
            StateShape("tokens", (mamba.inner + mamba.groups * mamba.state + mamba.count,), pending=True),
        )


@dataclass(frozen=True)
class Relu2:
    """down(relu(up)^2)."""

    norm: Norm
    up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up.squared(x, self.norm), residual=x)


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    config = read.config
    assert isinstance(config, NemotronHConfig)
    place, *mlps = config.published(index)
    stem = f"backbone.layers.{place}"
    mixer: Mixer = (
        _mamba(read, stem, config)
        if config.pattern[place] == MAMBA
        else attention(read, f"{stem}.norm", f"{stem}.mixer", tables)
    )
    return Layer(mixer, tuple(_mlp(read, other) for other in mlps))


def _mamba(read: Reader, stem: str, config: NemotronHConfig) -> Mamba2:
    inner, sizes, hidden = f"{stem}.mixer", config.mamba, config.hidden_size
    return Mamba2(
        norm=read.norm(f"{stem}.norm"),
        inputs=read.linear({f"{inner}.in_proj": sizes.inner + sizes.channels + sizes.count}, hidden, config.mamba_bias),
        out=read.linear({f"{inner}.out_proj": hidden}, sizes.inner, config.mamba_bias),
        conv=tap_major(read(f"{inner}.conv1d.weight", sizes.channels, 1, sizes.taps)),
        bias=read(f"{inner}.conv1d.bias", sizes.channels) if sizes.bias else None,
        heads=SsdHeads(
            sizes.count,
            sizes.dim,
            sizes.groups,
            sizes.state,
            a_log=read(f"{inner}.A_log", sizes.count, dtype=torch.float32),
            d=read(f"{inner}.D", sizes.count, dtype=torch.float32),
            dt_bias=read(f"{inner}.dt_bias", sizes.count, dtype=torch.float32),
            norm=read.norm(f"{inner}.norm", sizes.inner),
        ),
    )


def _mlp(read: Reader, place: int) -> Mlp:
    config, stem = read.config, f"backbone.layers.{place}"
    assert isinstance(config, NemotronHConfig)
    norm, inner, hidden = read.norm(f"{stem}.norm"), f"{stem}.mixer", config.hidden_size
    if config.pattern[place] == MLP:
        width = config.intermediate_size
        up_proj = read.linear({f"{inner}.up_proj": width}, hidden, config.mlp_bias)
        return Relu2(norm, up_proj, read.linear({f"{inner}.down_proj": hidden}, width, config.mlp_bias))
    mixture = config.mixture
    assert mixture is not None
    stems = [f"{inner}.experts.{expert}" for expert in range(mixture.experts)]
    up = read.stack([{f"{one}.up_proj.weight": mixture.inner} for one in stems], hidden)
    down = read.stack([{f"{one}.down_proj.weight": hidden} for one in stems], mixture.inner)
    shared = f"{inner}.shared_experts"
    more_up = read.weight({f"{shared}.up_proj.weight": mixture.shared}, hidden)
    more_down = read.weight({f"{shared}.down_proj.weight": hidden}, mixture.shared)
    up, down, slices = with_shared(read, inner, (up, down), (more_up, more_down), "relu2")
    rule = Routing(
        mixture.experts,
        mixture.top_k,
        score="sigmoid",
        normalise=mixture.normalise,
        scale=mixture.scale,
        bias=read(f"{inner}.gate.e_score_correction_bias", mixture.experts, dtype=torch.float32),
        groups=mixture.groups,
        top_groups=mixture.top_groups,
        shared=slices,
    )
    router = read(f"{inner}.gate.weight", mixture.experts, hidden, dtype=torch.float32)
    return MoeMlp(norm, Experts(rule, router, up, down, "relu2", ranks=read.ranks))


def _pattern(config: dict[str, Any]) -> str:
    """The kinds of layers, from hybrid_override_pattern or from layers_block_type in either of its spellings."""
    pattern, kinds = config.get("hybrid_override_pattern"), names_of(config, "layers_block_type")
    if pattern is None:
        for kind in kinds or ():
            if kind not in _KINDS:
                raise refuse("layers_block_type", kind, f"layers are {', '.join(_KINDS)}")
        pattern = "".join(_KINDS[kind] for kind in kinds or ())
    if not isinstance(pattern, str):
        raise refuse("hybrid_override_pattern", pattern, "the config must give a string")
    for kind in pattern:
        if kind not in (MAMBA, ATTENTION, MLP, MOE):
            raise refuse("hybrid_override_pattern", pattern, f"layers are {MAMBA}, {ATTENTION}, {MLP} and {MOE}")
    if not pattern or pattern[0] not in (MAMBA, ATTENTION):
        raise refuse("hybrid_override_pattern", pattern, f"the first layer must be {MAMBA} or {ATTENTION}")
    return pattern


def _ssd_sizes(config: dict[str, Any]) -> SsdSizes:
    count, groups = count_of(config, "mamba_num_heads"), count_of(config, "n_groups")
    if count % groups:
        raise refuse("n_groups", groups, f"it must divide mamba_num_heads={count}")
    return SsdSizes(
        count=count,
        dim=count_of(config, "mamba_head_dim"),
        groups=groups,
        state=count_of(config, "ssm_state_size"),
        taps=taps_of(config, "conv_kernel"),
        bias=flag_of(config, "use_conv_bias", True),
    )


def _mixture(config: dict[str, Any]) -> Relu2Mixture:
    inner, shares = count_of(config, "moe_intermediate_size"), count_of(config, "n_shared_experts", 1, least=0)
    if shares != 1:
        raise refuse("n_shared_experts", shares, "one shared expert is supported")
    return Relu2Mixture(
        experts=count_of(config, "n_routed_experts", most=MOST_EXPERTS),
        top_k=count_of(config, "num_experts_per_tok"),
        inner=inner,
        shared=count_of(config, "moe_shared_expert_intermediate_size", inner),
        normalise=flag_of(config, "norm_topk_prob", True),
        scale=positive_of(config, "routed_scaling_factor", 1.0),
        groups=count_of(config, "n_group", 1),
        top_groups=count_of(config, "topk_group", 1),
    )
