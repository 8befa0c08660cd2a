"""LFM2 and LFM2-MoE: gated short convolutions, a few layers of attention, MLPs or mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from specbatch.files.config_values import count_of, flag_of, names_of, places_of, positive_of, spelled
from specbatch.memory.recurrent_state import StateShape
from specbatch.models.config import Ends, ModelConfig, shared_out
from specbatch.models.families.llama import attention, final_norm  # noqa: F401 (`decoder` calls it)
from specbatch.models.gguf_layout import GgufLayout, GgufMetadata, short, sigmoid_settings
from specbatch.models.layer_types import attending
from specbatch.models.layers.blocks import Layer, Mixer, Mlp, SwiGlu
from specbatch.models.layers.deepseek_moe import DeepseekMixture, deepseek_mixture_of, read_deepseek_experts
from specbatch.models.layers.moe import MoeMlp, Shapes
from specbatch.models.layers.recurrent import ShortConv, tap_major, taps_of, window_shapes
from specbatch.models.weight_reader import Reader, Tables

_THETA = 1e6  # if a config has no theta


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(ModelConfig):
    """attends: which layers are attention; taps: of the convolutions; conv_bias: biases of convolutions and of their
    projections; mixture: of LFM2-MoE, whose first `dense` layers have none."""

    module: ClassVar[str] = __name__

    attends: tuple[bool, ...]
    taps: int
    conv_bias: bool
    mixture: DeepseekMixture | None = None
    dense: int = 0

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Lfm2Config:
        is_moe = config.get("model_type") == "lfm2_moe" or config.get("architectures") == ["Lfm2MoeForCausalLM"]
        share = count_of(config, "hidden_size") // count_of(config, "num_attention_heads")
        plain = ModelConfig.from_dict(
            config
            | {
                "architectures": None,
                "model_type": "qwen3",
                "layer_types": None,
                "sliding_window": None,
                "rms_norm_eps": config.get("norm_eps"),
                "intermediate_size": count_of(config, "intermediate_size") if is_moe else _width(config),
                "tie_word_embeddings": flag_of(config, spelled(config, "tie_word_embeddings", "tie_embedding"), True),
                "head_dim": count_of(config, "head_dim", share),
            }
        )
        if plain.rope.source == "class default":
            plain = replace(plain, rope=replace(plain.rope, theta=_THETA))
        attends, taps = _attends(config, plain.num_layers), taps_of(config, "conv_L_cache", 3)
        return cls(
            **vars(plain),
            attends=attends,
            taps=taps,
            conv_bias=flag_of(config, "conv_bias"),
            mixture=deepseek_mixture_of(config) if is_moe else None,
            dense=min(count_of(config, "num_dense_layers", 2, least=0), plain.num_layers) if is_moe else 0,
        )

    @property
    def channels(self) -> int:
        """Of the convolutions."""
        return self.hidden_size // self.ranks

    def divided(self, ranks: int) -> Self:
        shared_out("hidden_size", self.hidden_size, ranks)
        mixture = self.mixture and self.mixture.divided(ranks, self.input_step)
        return replace(super().divided(ranks), mixture=mixture)

    def sections(self, name: str) -> tuple[int, ...]:
        if name.endswith("experts.gate_up_proj"):
            assert self.mixture is not None
            return (self.mixture.inner,) * 2
        return (self.channels,) * 3 if ".conv.in_proj." in name else ()

    @property
    def names(self) -> Ends:
        return Ends(norm="model.embedding_norm")  # despite its name the final norm

    @property
    def has_kv(self) -> tuple[bool, ...]:
        return self.attends

    @property
    def mixer_widths(self) -> tuple[int, int]:
        projected, mixed = super().mixer_widths
        return max(projected, 3 * self.channels), max(mixed, self.channels)

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        return window_shapes(self.channels, self.taps)

    def mlp_bytes(self, dtype: torch.dtype) -> int:
        plain = super().mlp_bytes(dtype)
        return plain if self.mixture is None else max(plain, self.mixture.token_bytes(self.hidden_size, dtype))

    def fit(self, found: Shapes) -> Self:
        """The width of MLPs is taken from their tensors, as configs state it in several ways."""
        shape = found.get("model.layers.0.feed_forward.w1.weight", ())
        width = shape[0] if shape else self.intermediate_size  # other wrong shapes are refused later
        fused = any(name.endswith("experts.gate_up_proj") for name in found)
        mixture = self.mixture and replace(self.mixture, fused=fused)
        return replace(super().fit(found), intermediate_size=width, mixture=mixture)

    def stacked(self) -> Self:
        return replace(self, mixture=self.mixture and replace(self.mixture, fused=True))


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    config, stem = read.config, f"model.layers.{index}"
    assert isinstance(config, Lfm2Config)
    mixer: Mixer
    if config.attends[index]:
        norm, names = f"{stem}.operator_norm", f"{stem}.self_attn"
        mixer = attention(read, norm, names, tables, out="out_proj", head_norm="layernorm")
    else:
        mixer = _conv(read, stem, config)
    return Layer(mixer, (_mlp(read, stem, config, index),))


def _mlp(read: Reader, stem: str, config: Lfm2Config, index: int) -> Mlp:
    norm, mlp = read.norm(f"{stem}.ffn_norm"), f"{stem}.feed_forward"
    if config.mixture is not None and index >= config.dense:
        names = "w1", "w3", "w2"
        experts = read_deepseek_experts(read, mlp, config.mixture, bias="expert_bias", names=names, router=None)
        return MoeMlp(norm, experts)
    hidden, inner = config.hidden_size, config.intermediate_size
    gate_up = read.linear({f"{mlp}.w1": inner, f"{mlp}.w3": inner}, hidden)
    return SwiGlu(norm, gate_up, read.linear({f"{mlp}.w2": hidden}, inner))


def _conv(read: Reader, stem: str, config: Lfm2Config) -> ShortConv:
    inner, hidden, channels, bias = f"{stem}.conv", config.hidden_size, config.channels, config.conv_bias
    return ShortConv(
        norm=read.norm(f"{stem}.operator_norm"),
        inputs=read.linear({f"{inner}.in_proj": 3 * channels}, hidden, bias),
        out=read.linear({f"{inner}.out_proj": hidden}, channels, bias),
        conv=tap_major(read(f"{inner}.conv.weight", channels, 1, config.taps)),
        bias=read(f"{inner}.conv.bias", channels) if bias else None,
    )


def _attends(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    kinds = names_of(config, "layer_types")
    if kinds is None:
        places = places_of(config, "full_attn_idxs") or []
        return tuple(layer in places for layer in range(layers))
    return attending(kinds, layers, ("conv", "full_attention"), "the family has")


def _width(config: dict[str, Any]) -> int:
    width = count_of(config, "intermediate_size" if config.get("block_ff_dim") is None else "block_ff_dim")
    if flag_of(config, "block_auto_adjust_ff_dim", True):
        step = count_of(config, "block_multiple_of", 256)
        width = int(positive_of(config, "block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        width = -(-width // step) * step
    return width


def _gguf_settings(file: GgufMetadata, usual: dict[str, Any]) -> dict[str, Any]:
    kv = file.required(".attention.head_count_kv", list)
    return {
        "model_type": "lfm2",
        "sliding_window": None,
        "layer_types": ["full_attention" if count else "conv" for count in kv],
        "norm_eps": short(file.number(".attention.layer_norm_rms_epsilon")),
        "conv_L_cache": file.count(".shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _gguf_mixture(file: GgufMetadata, usual: dict[str, Any]) -> dict[str, Any]:
    dense = file.count(".leading_dense_block_count", 0, least=0)
    return (
        sigmoid_settings(file)
        | _gguf_settings(file, usual)
        | {
            "model_type": "lfm2_moe",
            "num_experts": file.count(".expert_count"),
            "num_dense_layers": dense,
            "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in file.tensors,
        }
    )


_GGUF_NAMES = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_GGUF_EXPERTS = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.gate_proj",
    "ffn_up_exps": "feed_forward.experts.up_proj",
    "ffn_down_exps": "feed_forward.experts.down_proj",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
GGUF = {
    "lfm2": GgufLayout("Lfm2ForCausalLM", _GGUF_NAMES, _gguf_settings, has_convolutions=True),
    "lfm2moe": GgufLayout(
        "Lfm2MoeForCausalLM", _GGUF_NAMES | _GGUF_EXPERTS, _gguf_mixture, is_mixture=True, has_convolutions=True
    ),
}
