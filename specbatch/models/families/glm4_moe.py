"""GLM-4.5, GLM-4.5-Air, GLM-4.6: attention with partial rotation, and a mixture of experts after the first layers.

Names, layout and defaults are those of `Glm4MoeConfig` of transformers. The MTP layer that follows the others in a
checkpoint is that of `layer_mtp`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from specbatch.files.config_values import count_of, flag_of
from specbatch.models.config import ModelConfig, follows_layers
from specbatch.models.families import llama
from specbatch.models.gguf_layout import EXPERT_NAMES, GgufLayout, GgufMetadata, sigmoid_settings
from specbatch.models.layers import partial_rope
from specbatch.models.layers.blocks import Layer
from specbatch.models.layers.deepseek_moe import DeepseekMixture, deepseek_mixture_of, read_deepseek_experts
from specbatch.models.layers.moe import MoeMlp, Shapes
from specbatch.models.weight_reader import Reader, Tables

_PARTIAL = 0.5  # of a config that states none


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(ModelConfig):
    """dense_layers: so many layers, the first ones, have no mixture."""

    module: ClassVar[str] = __name__
    mtp_module: ClassVar[str] = "specbatch.models.heads.layer_mtp"

    mixture: DeepseekMixture
    dense_layers: int

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Glm4MoeConfig:
        plain = ModelConfig.from_dict(
            partial_rope.without_factor(config) | {"architectures": None, "model_type": "llama", "mlp_bias": False}
        )
        turning = partial_rope.turning(config, plain.head_dim, _PARTIAL)
        own = {
            "family": "glm4_moe",
            "o_bias": False,
            "qk_norm": flag_of(config, "use_qk_norm"),
            "rope": replace(plain.rope, rotary_dim=turning),
        }
        dense = count_of(config, "first_k_dense_replace", 1, least=0)
        return cls(**vars(plain) | own, mixture=deepseek_mixture_of(config), dense_layers=min(dense, plain.num_layers))

    def divided(self, ranks: int) -> Self:
        return replace(super().divided(ranks), mixture=self.mixture.divided(ranks, self.input_step))

    def sections(self, name: str) -> tuple[int, ...]:
        return (self.mixture.inner,) * 2 if name.endswith("experts.gate_up_proj") else ()

    def mlp_bytes(self, dtype: torch.dtype) -> int:
        dense = super().mlp_bytes(dtype) if self.dense_layers else 0
        return max(dense, 4 * self.hidden_size + self.mixture.token_bytes(self.hidden_size, dtype))

    def fit(self, found: Shapes) -> Self:
        fused = any(name.endswith("experts.gate_up_proj") for name in found)
        return replace(super().fit(found), mixture=replace(self.mixture, fused=fused))

    def stacked(self) -> Self:
        return replace(self, mixture=replace(self.mixture, fused=True))

    def is_mtp(self, name: str) -> bool:
        return follows_layers(name, self.num_layers)


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    """Layer `index`; tables: cos and sin."""
    config, stem = read.config, f"model.layers.{index}"
    assert isinstance(config, Glm4MoeConfig)
    names = f"{stem}.input_layernorm", f"{stem}.self_attn"
    mixer = partial_rope.attention(read, *names, tables, llama.qkv_rows(config, names[1]))
    if index < config.dense_layers:
        return Layer(mixer, (llama.dense(read, stem),))
    norm = read.norm(f"{stem}.post_attention_layernorm")
    return Layer(mixer, (MoeMlp(norm, read_deepseek_experts(read, f"{stem}.mlp", config.mixture)),))


final_norm = llama.final_norm


def _gguf_settings(file: GgufMetadata, usual: dict[str, Any]) -> dict[str, Any]:
    """The layers of a file include those of the MTP head."""
    extra = file.count(".nextn_predict_layers", 0, least=0)
    return sigmoid_settings(file) | {
        "model_type": "glm4_moe",
        "num_hidden_layers": file.count(".block_count") - extra,
        "num_nextn_predict_layers": extra,
        "n_routed_experts": file.count(".expert_count"),
        "n_shared_experts": file.count(".expert_shared_count", 0, least=0),
        "first_k_dense_replace": file.count(".leading_dense_block_count", 0, least=0),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


GGUF = {
    "glm4moe": GgufLayout(
        "Glm4MoeForCausalLM",
        EXPERT_NAMES
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            "nextn.eh_proj": "eh_proj",
            "nextn.embed_tokens": "embed_tokens",
            "nextn.enorm": "enorm",
            "nextn.hnorm": "hnorm",
            "nextn.shared_head_head": "shared_head.head",
            "nextn.shared_head_norm": "shared_head.norm",
        },
        _gguf_settings,
        is_mixture=True,
        rotates_all=False,
    )
}
