"""Gemma 4 (text): Gemma 3's layers with wider heads in global layers, normalized values, scaled layers; experts
(26B-A4B); per-layer embeddings and shared keys and values (E2B, E4B).

Local and global layers differ in the channels of a head and in the number of KV heads. Here all layers have the larger
`head_dim`, and the least common multiple as `num_kv_heads`: the narrower heads are padded with zeros, and KV heads are
repeated. So one KV cache and one set of kernels serve all layers, and a page takes more memory than the model needs.
Layers of the 26B-A4B have a mixture of experts beside the MLP. The last layers of E2B and E4B have queries only: they
attend to the keys and values of the last layer of their kind before them. Layout and defaults are those of
`Gemma4TextConfig` of transformers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, flag_of, names_of, positive_of, spelled, table_of
from specbatch.kernels.attention.queries import QKVLayout
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.moe.experts import Experts
from specbatch.kernels.moe.routing import Routing
from specbatch.models.config import DEEPEST, Ends, ModelConfig
from specbatch.models.families.gemma3 import NormedGeGlu
from specbatch.models.families.llama import final_norm  # noqa: F401 (`decoder` calls it)
from specbatch.models.families.padded_attention import Heads, PaddedAttention
from specbatch.models.families.per_layer_embedding import (
    LayerInputs,
    PerLayerSizes,
    gated,
    read_layer_inputs,
    table_name,
)
from specbatch.models.layer_types import FULL, SLIDING
from specbatch.models.layers.blocks import Layer, Mlp
from specbatch.models.layers.moe import Mixture, mixture_of, read_routed
from specbatch.models.rope import Rope, read_rope
from specbatch.models.weight_reader import Reader, Tables

_ROPES: dict[str, dict[str, Any]] = {  # of a config that states none
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_PROPORTIONAL = {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}
_PATTERN = 6
_SPARE = tuple(f"model.{part}_{kind}." for part, kind in (("vision", "tower"), ("audio", "tower")))
_SPARE += ("model.embed_vision.", "model.embed_audio.")


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(ModelConfig):
    """local: which layers are; local_rope: theirs; local_heads, global_heads: see `Heads`; shares: whether the values
    of global layers are their keys before norm and rope; cap: logits are cap * tanh(logits / cap); mixture: of all
    layers, None in a dense model; sources: per layer, the one whose keys and values it attends to; double_wide: whether
    the MLPs of layers that attend to another's are twice as wide; per_layer: embeddings, None in a model without them;
    prefix: of the names of layers."""

    module: ClassVar[str] = __name__

    local: tuple[bool, ...]
    local_rope: Rope
    local_heads: Heads
    global_heads: Heads
    shares: bool
    cap: float | None
    mixture: Mixture | None
    sources: tuple[int, ...]
    double_wide: bool
    per_layer: PerLayerSizes | None
    prefix: str

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Gemma4Config:
        """Read a config.json. Those of multimodal models contain the text model as a nested table."""
        text = table_of(config, "text_config") or None
        if text is not None:
            tied = flag_of(config, "tie_word_embeddings", True)
            ends = {key: text[key] if text.get(key) is not None else config.get(key) for key in _ENDS}
            return replace(cls.from_dict(text | ends | {"tie_word_embeddings": tied}), prefix="model.language_model.")
        _refuse_others(config)
        depth = count_of(config, "num_hidden_layers", 30, most=DEEPEST)
        kinds = list(names_of(config, "layer_types") or ())
        kinds = kinds or [FULL if index % _PATTERN == 0 else SLIDING for index in range(1, depth + 1)]
        kinds[-1:] = [FULL]  # as in transformers, whatever the config states
        own = Heads(count_of(config, "head_dim", 256), count_of(config, "num_key_value_heads", 4))
        wide, shares = _global_heads(config, own, kinds), flag_of(config, "attention_k_eq_v")
        for one in (own, wide):
            if one.dim % 2:
                raise refuse("head_dim", one.dim, "rope rotates pairs of channels; it must be even")
        heads = count_of(config, "num_attention_heads")
        if heads % wide.kv:
            raise refuse("num_global_key_value_heads", wide.kv, f"it must divide num_attention_heads={heads}")
        ropes = table_of(config, "rope_parameters") or _ROPES
        plain = ModelConfig.from_dict(
            {key: value for key, value in config.items() if not key.startswith("rope_")}
            | {
                "architectures": None,
                "model_type": "ministral",  # whose configs state windows alike
                "hidden_act": None,
                "layer_types": kinds,
                "num_hidden_layers": depth,
                "head_dim": max(own.dim, wide.dim),
                "num_key_value_heads": math.lcm(own.kv, wide.kv),
                "sliding_window": config.get("sliding_window", 512),
                "max_position_embeddings": count_of(config, "max_position_embeddings", 131072),
                "rms_norm_eps": positive_of(config, "rms_norm_eps", 1e-6),
                "tie_word_embeddings": flag_of(config, "tie_word_embeddings", True),
            }
        )
        cap = config.get("final_logit_softcapping")
        local = {"rope_parameters": table_of(ropes, SLIDING)}
        return cls(
            **vars(plain)
            | {"family": "gemma4", "qk_norm": True, "rope": _global_rope(ropes, wide.dim, plain.max_position)},
            local=tuple(kind == SLIDING for kind in kinds),
            local_rope=read_rope(local, own.dim, plain.max_position),
            local_heads=own,
            global_heads=wide,
            shares=shares,
            cap=None if cap is None else positive_of(config, "final_logit_softcapping"),
            mixture=mixture_of(config, normalise=True) if flag_of(config, "enable_moe_block") else None,
            sources=_sources(config, kinds),
            double_wide=flag_of(config, "use_double_wide_mlp"),
            per_layer=_per_layer(config, plain.vocab_size),
            prefix="model.",
        )

    def divided(self, ranks: int) -> Self:
        local, wide = (
            one._replace(kv=self.heads_per_rank(*one, ranks)[1]) for one in (self.local_heads, self.global_heads)
        )
        mixture = self.mixture and self.mixture.divided(ranks, self.input_step)
        return replace(super().divided(ranks), local_heads=local, global_heads=wide, mixture=mixture)

    def sections(self, name: str) -> tuple[int, ...]:
        if self.mixture is None or not name.endswith("experts.gate_up_proj"):
            return ()
        return (self.mixture.inner,) * 2

    @property
    def names(self) -> Ends:
        return Ends(f"{self.prefix}embed_tokens.weight", f"{self.prefix}norm")

    @property
    def lookups(self) -> frozenset[str]:
        return super().lookups | (frozenset() if self.per_layer is None else {table_name(self.prefix)})

    @property
    def layer_inputs(self) -> int:
        return 0 if self.per_layer is None else self.num_layers * self.per_layer.width

    def kv_layer(self, layer: int) -> int:
        return self.sources[layer]

    def is_spare(self, name: str) -> bool:
        """Layers without keys and values of their own may have the weights of some."""
        found = re.match(rf"{re.escape(self.prefix)}layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.", name)
        is_shared = found is not None and any(
            int(found[1]) == layer != source for layer, source in enumerate(self.sources)
        )
        return is_shared or name.startswith(_SPARE)

    def rope_of(self, layer: int) -> Rope:
        return self.local_rope if self.local[layer] else self.rope

    def inner_of(self, layer: int) -> int:
        """Width of the MLP."""
        return self.intermediate_size * (2 if self.double_wide and self.sources[layer] != layer else 1)

    @property
    def _widest(self) -> int:
        return max(map(self.inner_of, range(self.num_layers)))

    @property
    def input_widths(self) -> tuple[int, ...]:
        return *super().input_widths, self._widest

    def heads_of(self, layer: int) -> Heads:
        return self.local_heads if self.local[layer] else self.global_heads

    @property
    def embedding_scale(self) -> float | None:
        return math.sqrt(self.hidden_size)

    @property
    def logit_cap(self) -> float | None:
        return self.cap

    def mixing_bytes(self, dtype: torch.dtype) -> int:
        # The stream of before, and the next layer's projection, padded too, with values normalized and keys repeated.
        projected, _ = self.mixer_widths
        entering = self.hidden_size + 2 * projected + 2 * self.num_kv_heads * self.head_dim
        return max(super().mixing_bytes(dtype), entering * dtype.itemsize)

    def mlp_bytes(self, dtype: torch.dtype) -> int:
        # norm(x) and the output, gate, up, and gelu(gate) * up
        dense = (2 * self.hidden_size + 3 * self._widest) * dtype.itemsize
        if self.per_layer is not None:  # the stream before, the gate and twice it with the input, the output and norm
            dense = max(dense, (4 * self.hidden_size + 3 * self.per_layer.width) * dtype.itemsize)
        if self.mixture is None:
            return dense
        # The mixture's output waits for that of the MLP.
        return max(dense + self.hidden_size * dtype.itemsize, self.mixture.token_bytes(self.hidden_size, dtype))


_ENDS = ("eos_token_id", "bos_token_id", "dtype", "torch_dtype")


def _refuse_others(config: dict[str, Any]) -> None:
    """Refuse what a config of Gemma 4 can state and these layers do not have."""
    if config.get("use_bidirectional_attention") not in (None, "vision"):
        works = "text is generated with causal attention; use null or 'vision'"
        raise refuse("use_bidirectional_attention", config["use_bidirectional_attention"], works)
    key = spelled(config, "hidden_activation", "hidden_act")
    if config.get(key) not in (None, "gelu_pytorch_tanh"):
        raise refuse(key, config[key], "the MLPs of Gemma 4 here use 'gelu_pytorch_tanh'")


def _sources(config: dict[str, Any], kinds: list[str]) -> tuple[int, ...]:
    """The last num_kv_shared_layers have the keys and values of the last layer of their kind before them."""
    shared = count_of(config, "num_kv_shared_layers", 0, least=0)
    own = max(0, len(kinds) - shared)
    last = {kind: layer for layer, kind in enumerate(kinds[:own])}
    for kind in kinds[own:]:
        if kind not in last:
            raise refuse(
                "num_kv_shared_layers", shared, f"no layer before those has {kind!r} to share; use a smaller one"
            )
    return *range(own), *(last[kind] for kind in kinds[own:])


def _per_layer(config: dict[str, Any], vocabulary: int) -> PerLayerSizes | None:
    width = count_of(config, "hidden_size_per_layer_input", 256, least=0)
    rows = count_of(config, "vocab_size_per_layer_input", 262144)
    if width and rows < vocabulary:
        raise refuse("vocab_size_per_layer_input", rows, f"each of the vocab_size={vocabulary} tokens needs a row")
    padding = count_of(config, "pad_token_id", 0, least=0, most=rows - 1)
    return PerLayerSizes(width, rows, padding) if width else None


def _global_heads(config: dict[str, Any], own: Heads, kinds: list[str]) -> Heads:
    """The heads of global layers, which transformers writes as settings of each layer and others as two keys."""
    layers = table_of(config, "per_layer_config")
    if not layers:
        kv = own.kv
        if flag_of(config, "attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
            kv = count_of(config, "num_global_key_value_heads")
        return Heads(count_of(config, "global_head_dim", 512), kv)
    described = [table_of(layers, name) for name in layers]
    wanted = {str(index) for index, kind in enumerate(kinds) if kind == FULL}
    if set(layers) != wanted or any(one != described[0] for one in described):
        works = f"it must list the full_attention layers, {', '.join(sorted(wanted))}, with equal settings"
        raise refuse("per_layer_config", layers, works)
    for key in described[0]:
        if key not in ("head_dim", "num_key_value_heads"):
            raise refuse(f"per_layer_config.{key}", described[0][key], "layers differ in head_dim, num_key_value_heads")
    where = described[0]
    return Heads(count_of(where, "head_dim", own.dim), count_of(where, "num_key_value_heads", own.kv))


def _global_rope(ropes: dict[str, Any], dim: int, max_position: int) -> Rope:
    """Proportional rope: frequencies as of whole heads, of which those after the first are zero."""
    found = table_of(ropes, FULL)
    if found.get("rope_type") != "proportional":
        return read_rope({"rope_parameters": found}, dim, max_position)
    for key in found.keys() - _PROPORTIONAL:
        raise refuse(f"rope_parameters.{key}", found[key], "rope type 'proportional' has no such value")
    partial = positive_of(found, "partial_rotary_factor", 1.0, most=1, where="rope_parameters")
    turning, factor = int(partial * dim // 2), positive_of(found, "factor", 1.0, where="rope_parameters")
    divisors = (factor,) * turning + (math.inf,) * (dim // 2 - turning)
    theta = positive_of(found, "rope_theta", where="rope_parameters")
    return Rope(theta=theta, rotary_dim=dim, kind="divisors", source="rope_parameters", divisors=divisors)


@dataclass(frozen=True)
class ScaledMlp:
    """scale * (x + mlp(x)): the end of a layer."""

    mlp: Mlp
    scale: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) * self.scale


@dataclass(frozen=True)
class WithExperts:
    """x + post(mlp(x) + post_experts(experts(x))). mlp: without residual; norm, router_norm: of the experts' and of the
    router's input."""

    mlp: NormedGeGlu
    norm: Norm
    router_norm: Norm
    experts: Experts
    post_experts: Norm
    post: Norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mixed = rms_norm(self.experts(x, norm=self.norm, router_norm=self.router_norm), *self.post_experts)
        return x + rms_norm(mixed + self.mlp.change(x), *self.post)


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    """Layer `index`; tables: cos and sin of its rope."""
    config = read.config
    assert isinstance(config, Gemma4Config)
    stem, hidden, inner = f"{config.prefix}layers.{index}", config.hidden_size, config.inner_of(index)
    post, mixture = f"{stem}.post_feedforward_layernorm", config.mixture
    mlp: Mlp
    mlp = dense = NormedGeGlu(
        norm=read.norm(f"{stem}.pre_feedforward_layernorm"),
        gate_up=read.linear({f"{stem}.mlp.{part}_proj": inner for part in ("gate", "up")}, hidden),
        down=read.linear({f"{stem}.mlp.down_proj": hidden}, inner),
        post=read.norm(post if mixture is None else f"{post}_1"),
    )
    if mixture is not None:
        mlp = WithExperts(
            mlp=dense,
            norm=read.norm(f"{stem}.pre_feedforward_layernorm_2"),
            router_norm=Norm(read(f"{stem}.router.scale", hidden) * hidden**-0.5, config.rms_norm_eps),
            experts=_experts(read, stem, mixture),
            post_experts=read.norm(f"{post}_2"),
            post=read.norm(post),
        )
    attention, scale = _attention(read, stem, index, tables), read(f"{stem}.layer_scalar", 1)
    if config.per_layer is None:
        return Layer(attention, (ScaledMlp(mlp, scale),))
    return gated(read, stem, index, config.per_layer, Layer(attention, (mlp,)), scale)


def layer_inputs(read: Reader) -> LayerInputs:
    config = read.config
    assert isinstance(config, Gemma4Config)
    assert config.per_layer is not None
    return read_layer_inputs(read, config.prefix, config.per_layer)


def _experts(read: Reader, stem: str, mixture: Mixture) -> Experts:
    count, hidden = mixture.experts, read.config.hidden_size
    factors = read(f"{stem}.router.per_expert_scale", count, dtype=torch.float32)
    return Experts(
        Routing(count, mixture.top_k, factors=factors),
        read(f"{stem}.router.proj.weight", count, hidden),
        *read_routed(read, stem, replace(mixture, fused=True)),
        "geglu",
        ranks=read.ranks,
    )


def _attention(read: Reader, stem: str, index: int, tables: Tables) -> PaddedAttention:
    config = read.config
    assert isinstance(config, Gemma4Config)
    own, dim, hidden = config.heads_of(index), config.head_dim, config.hidden_size
    is_shared = config.kv_layer(index) != index
    rows = {"q": config.num_heads}
    if not is_shared:
        rows |= {"k": own.kv} | ({"v": own.kv} if config.local[index] or not config.shares else {})
    share = own.dim / dim  # the mean square of a padded head is this much of its own

    def norm(part: str, scale: float) -> torch.Tensor:
        # In FP32: in BF16 or FP16 the scaled weight would be rounded once more, differently in each channel.
        weight = read(f"{stem}.self_attn.{part}_norm.weight", own.dim, dtype=torch.float32)
        weight = weight * (scale * math.sqrt(share))
        padded, low = weight.new_zeros(2, dim // 2), own.dim // 2
        padded[:, :low] = weight.view(2, low)
        return padded.flatten()

    q_norm = norm("q", math.sqrt(dim))  # attention multiplies scores by dim ** -0.5, and Gemma 4 by nothing
    return PaddedAttention(
        norm=read.norm(f"{stem}.input_layernorm"),
        qkv=read.linear(
            {f"{stem}.self_attn.{part}_proj": count * own.dim for part, count in rows.items()}, hidden, config.qkv_bias
        ),
        heads=QKVLayout(
            config.num_heads,
            config.num_kv_heads,
            dim,
            q_norm,
            q_norm if is_shared else norm("k", 1.0),
            config.rms_norm_eps * share,
            *tables,
            config.window(index),
            shared=is_shared,
        ),
        out=read.linear({f"{stem}.self_attn.o_proj": hidden}, config.num_heads * own.dim, config.o_bias),
        post=read.norm(f"{stem}.post_attention_layernorm"),
        own=own,
        value_norm=Norm(tables[0].new_ones(own.dim), config.rms_norm_eps),
    )
