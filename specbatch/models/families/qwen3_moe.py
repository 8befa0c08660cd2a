"""Qwen3-MoE: Qwen3 with a mixture of experts in most layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from specbatch.files.config_values import flag_of
from specbatch.models.config import ModelConfig
from specbatch.models.families import llama
from specbatch.models.gguf_layout import EXPERT_NAMES, GgufLayout, GgufMetadata, mixture_settings, normalises
from specbatch.models.layers.blocks import Layer
from specbatch.models.layers.moe import Mixture, MoeMlp, Shapes, mixture_of, read_experts, sparse_layers
from specbatch.models.weight_reader import Reader, Tables


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(ModelConfig):
    """sparse: which layers hold the mixture."""

    module: ClassVar[str] = __name__

    mixture: Mixture
    sparse: tuple[bool, ...]

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Qwen3MoeConfig:
        windows = {"layer_types": None, "max_window_layers": 0}  # with use_sliding_window, of all layers
        plain = ModelConfig.from_dict(config | {"architectures": None, "model_type": "qwen3"} | windows)
        mixture = mixture_of(config, normalise=flag_of(config, "norm_topk_prob"))
        return cls(**vars(plain), mixture=mixture, sparse=sparse_layers(config, plain.num_layers))

    def divided(self, ranks: int) -> Self:
        return replace(super().divided(ranks), mixture=self.mixture.divided(ranks, self.input_step))

    def sections(self, name: str) -> tuple[int, ...]:
        return (self.mixture.inner,) * 2 if name.endswith("experts.gate_up_proj") else ()

    def mlp_bytes(self, dtype: torch.dtype) -> int:
        dense = 0 if all(self.sparse) else super().mlp_bytes(dtype)
        return max(dense, self.mixture.token_bytes(self.hidden_size, dtype))

    def fit(self, found: Shapes) -> Self:
        fused = any(name.endswith("experts.gate_up_proj") for name in found)
        return replace(super().fit(found), mixture=replace(self.mixture, fused=fused))

    def stacked(self) -> Self:
        return replace(self, mixture=replace(self.mixture, fused=True))


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    config, stem = read.config, f"model.layers.{index}"
    assert isinstance(config, Qwen3MoeConfig)
    if not config.sparse[index]:
        return llama.layer(read, index, tables)
    norm = read.norm(f"{stem}.post_attention_layernorm")
    experts = read_experts(read, f"{stem}.mlp", config.mixture)
    window = config.window(index)
    attention = llama.attention(read, f"{stem}.input_layernorm", f"{stem}.self_attn", tables, window=window)
    return Layer(attention, (MoeMlp(norm, experts),))


final_norm = llama.final_norm


def _gguf_settings(file: GgufMetadata, usual: dict[str, Any]) -> dict[str, Any]:
    own = {"num_experts": file.count(".expert_count"), "norm_topk_prob": normalises(file)}
    return mixture_settings(file) | own | {"model_type": "qwen3_moe"}


GGUF = {"qwen3moe": GgufLayout("Qwen3MoeForCausalLM", EXPERT_NAMES, _gguf_settings, is_mixture=True)}
