"""Gemma 3 (text): local and global layers with a rope each, norms before and after attention and MLP, GELU.

Norms multiply by 1 + weight, embeddings are scaled by sqrt(hidden_size), and scores by query_pre_attn_scalar ** -0.5.
Gemma Team, "Gemma 3 Technical Report" (2025); layout and defaults are those of `Gemma3TextConfig` of transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, flag_of, names_of, positive_of, spelled, table_of
from specbatch.kernels.attention.queries import QKVLayout
from specbatch.kernels.elementwise.activations import gelu_and_mul
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.models.config import DEEPEST, ModelConfig
from specbatch.models.families.llama import qkv_rows
from specbatch.models.families.qwen3_next import centred
from specbatch.models.gguf_layout import GgufLayout, GgufMetadata, layer_types, short
from specbatch.models.layer_types import FULL, SLIDING
from specbatch.models.layers.blocks import Attention, Layer
from specbatch.models.rope import Rope, read_rope
from specbatch.models.weight_reader import Reader, Tables

_LOCAL_THETA, _GLOBAL_THETA = 1e4, 1e6  # if a config has none


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(ModelConfig):
    """local: which layers are; local_rope: theirs; query_scalar: scores are multiplied by its root's inverse."""

    module: ClassVar[str] = __name__

    local: tuple[bool, ...]
    local_rope: Rope
    query_scalar: float

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Gemma3Config:
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.get(key) is not None:
                raise refuse(key, config[key], "soft caps (Gemma 2) are not supported; it must be null")
        if flag_of(config, "use_bidirectional_attention"):
            raise refuse("use_bidirectional_attention", True, "text is generated with causal attention; use false")
        key = spelled(config, "hidden_activation", "hidden_act")
        if config.get(key) not in (None, "gelu_pytorch_tanh"):
            raise refuse(key, config[key], "the MLPs of Gemma 3 here use 'gelu_pytorch_tanh'")
        dim = count_of(config, "head_dim", 256)
        pattern = count_of(config, "sliding_window_pattern", count_of(config, "_sliding_window_pattern", 6))
        depth = count_of(config, "num_hidden_layers", 26, most=DEEPEST)
        kinds = names_of(config, "layer_types")
        kinds = kinds or [SLIDING if layer % pattern else FULL for layer in range(1, depth + 1)]
        tables = table_of(config, "rope_parameters") or {}
        ropes = {kind: table_of(tables, kind) for kind in (FULL, SLIDING)} if FULL in tables else {FULL: tables}
        plain = ModelConfig.from_dict(
            {key: value for key, value in config.items() if not key.startswith("rope_") or key == "rope_scaling"}
            | {
                "architectures": None,
                "model_type": "ministral",  # whose configs state windows alike
                "hidden_act": None,
                "layer_types": kinds,
                "head_dim": dim,
                "rms_norm_eps": positive_of(config, "rms_norm_eps", 1e-6),
                "rope_parameters": ropes[FULL],
                "rope_theta": positive_of(config, "rope_theta", _GLOBAL_THETA),
                "tie_word_embeddings": flag_of(config, "tie_word_embeddings", True),
            }
        )
        local_theta = positive_of(config, "rope_local_base_freq", _LOCAL_THETA)
        local = {"rope_parameters": ropes.get(SLIDING), "rope_theta": local_theta}
        return cls(
            **vars(plain) | {"family": "gemma3", "qk_norm": True},
            local=tuple(kind == SLIDING for kind in kinds),
            local_rope=read_rope(local, dim, plain.max_position),
            query_scalar=positive_of(config, "query_pre_attn_scalar", 256),
        )

    def rope_of(self, layer: int) -> Rope:
        return self.local_rope if self.local[layer] else self.rope

    @property
    def embedding_scale(self) -> float | None:
        return math.sqrt(self.hidden_size)

    def mlp_bytes(self, dtype: torch.dtype) -> int:
        # norm(x) and the output, gate, up, gelu(gate) and gelu(gate) * up
        return (2 * self.hidden_size + 4 * self.intermediate_size) * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class NormedAttention(Attention):
    """Attention with a norm after the output projection."""

    post: Norm

    def leave(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return x + rms_norm(self.out(mixed), *self.post)


@dataclass(frozen=True)
class NormedGeGlu:
    """x + post(down(gelu(gate) * up)). gate and up are one matrix."""

    norm: Norm
    gate_up: Linear
    down: Linear
    post: Norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.change(x)

    def change(self, x: torch.Tensor) -> torch.Tensor:
        """Without the residual stream."""
        return rms_norm(self.down(gelu_and_mul(self.gate_up(x, norm=self.norm))), *self.post)


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    """Layer `index`; tables: cos and sin of its rope."""
    config, stem = read.config, f"model.layers.{index}"
    assert isinstance(config, Gemma3Config)
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_norm, k_norm = (centred(read, f"{stem}.self_attn.{part}_norm", dim).weight for part in "qk")
    # Attention multiplies scores by dim ** -0.5; the rest of the factor is the queries'.
    q_norm = q_norm * (dim / config.query_scalar) ** 0.5
    counts = config.num_heads, config.num_kv_heads, dim
    attention = NormedAttention(
        norm=centred(read, f"{stem}.input_layernorm"),
        qkv=read.linear(qkv_rows(config, f"{stem}.self_attn"), hidden, config.qkv_bias),
        heads=QKVLayout(*counts, q_norm, k_norm, config.rms_norm_eps, *tables, config.window(index)),
        out=read.linear({f"{stem}.self_attn.o_proj": hidden}, config.num_heads * dim, config.o_bias),
        post=centred(read, f"{stem}.post_attention_layernorm"),
    )
    mlp = NormedGeGlu(
        norm=centred(read, f"{stem}.pre_feedforward_layernorm"),
        gate_up=read.linear({f"{stem}.mlp.{part}_proj": inner for part in ("gate", "up")}, hidden),
        down=read.linear({f"{stem}.mlp.down_proj": hidden}, inner),
        post=centred(read, f"{stem}.post_feedforward_layernorm"),
    )
    return Layer(attention, (mlp,))


def final_norm(read: Reader, stem: str) -> Norm:
    return centred(read, stem)


def _gguf_settings(file: GgufMetadata, usual: dict[str, Any]) -> dict[str, Any]:
    """Most files do not state the pattern of the layers, which is the default, and none the factor of scores: llama.cpp
    takes that of the 27B, which differs, for models of 62 layers."""
    for key in (".attn_logit_softcapping", ".final_logit_softcapping"):
        if file.metadata(key):
            raise refuse(file.full(key), file.metadata(key), "soft caps are not supported")
    ropes = {FULL: usual["rope_parameters"]}
    if file.metadata(_GGUF_THETA) is not None:  # files of old converters leave it to the default
        ropes[SLIDING] = {"rope_type": "default", "rope_theta": short(file.number(_GGUF_THETA))}
    share = usual["hidden_size"] // usual["num_attention_heads"]
    return {
        "model_type": "gemma3_text",
        "sliding_window": file.count(".attention.sliding_window"),
        "query_pre_attn_scalar": share if file.required(".block_count") == 62 else usual["head_dim"],
        "rope_parameters": ropes,
    } | layer_types(file, counts=True)


_GGUF_THETA = ".rope.freq_base_swa"  # of local layers
GGUF = {
    "gemma3": GgufLayout(
        "Gemma3ForCausalLM",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        settings=_gguf_settings,
        has_windows=True,
        rope_keys=(_GGUF_THETA,),
        norm_offset=1.0,
        sentencepiece=True,
    )
}
