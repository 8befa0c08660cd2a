"""Phi-3, Phi-3.5 and Phi-4: Llama layers whose q, k and v, and whose gate and up, are one tensor each; LongRoPE.

Names, layout and defaults are those of `Phi3Config` of transformers. LongRoPE (Ding et al., "LongRoPE", 2024) divides
the frequencies by one list of factors in short texts and by another in long ones. A text that grows past the limit
would need other keys for the tokens that it has already, so one list serves all texts of an engine, as in vLLM: the
short one, or the long one if its `max_model_len` is beyond `original_max_position_embeddings`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, positive_of, positives_of, table_of
from specbatch.models.config import ModelConfig
from specbatch.models.families.llama import final_norm  # noqa: F401 (`decoder` calls it)
from specbatch.models.gguf_layout import GgufLayout, GgufMetadata, short
from specbatch.models.layers import partial_rope
from specbatch.models.layers.blocks import Layer, SwiGlu
from specbatch.models.rope import DEFAULT_THETA, Rope
from specbatch.models.weight_reader import Reader, Tables

_LONGROPE = ("longrope", "su", "yarn")  # its names in configs of this family
_ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "short_factor", "long_factor", "factor",
    "attention_factor", "original_max_position_embeddings",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Phi3Config(ModelConfig):
    """long_rope: LongRoPE's for long texts, None without it. original: the longest short text, beyond which
    `max_model_len` selects it; longest: the longest text of all. rope, max_position: those in use."""

    module: ClassVar[str] = __name__

    long_rope: Rope | None = None
    original: int = 0
    longest: int = 0

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Phi3Config:
        plain = ModelConfig.from_dict(
            {key: value for key, value in config.items() if not key.startswith(("rope_", partial_rope.FACTOR))}
            | {
                "architectures": None,
                "model_type": "mistral",  # whose configs state windows alike
                "sliding_window": config.get("sliding_window"),
            }
        )
        longest = plain.max_position
        rope, long_rope, original = _rope(config, plain.head_dim, longest)
        own = {"family": "phi3", "rope": rope, "max_position": min(original, longest)}
        return cls(**vars(plain) | own, long_rope=long_rope, original=original, longest=longest)

    def for_length(self, max_model_len: int | None) -> Self:
        if self.long_rope is None or max_model_len is None or max_model_len <= self.original:
            return self
        return replace(self, rope=self.long_rope, max_position=self.longest)

    @property
    def note(self) -> str | None:
        if self.long_rope is None or self.longest <= self.original:
            return None
        if self.max_position > self.original:
            return f"LongRoPE: the long factors for all texts, as max_model_len is beyond {self.original}"
        return (
            f"LongRoPE: the short factors, for texts of up to {self.original} tokens; with a max_model_len beyond, "
            f"of up to {self.longest}, the long factors for all texts"
        )

    def divided(self, ranks: int) -> Self:
        if self.num_kv_heads % ranks:
            works = f"q, k and v are one tensor, so it must divide num_key_value_heads={self.num_kv_heads}"
            raise refuse("tensor_parallel", ranks, works)
        return super().divided(ranks)

    def sections(self, name: str) -> tuple[int, ...]:
        if ".qkv_proj." in name:
            return self.num_heads * self.head_dim, *(self.num_kv_heads * self.head_dim,) * 2
        return (self.intermediate_size,) * 2 if ".gate_up_proj." in name else ()


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    """Layer `index`; tables: cos and sin."""
    config, stem = read.config, f"model.layers.{index}"
    attention, mlp = f"{stem}.self_attn", f"{stem}.mlp"
    hidden, inner, queries = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    qkv = {f"{attention}.qkv_proj": queries + 2 * config.num_kv_heads * config.head_dim}
    mixer = partial_rope.attention(read, f"{stem}.input_layernorm", attention, tables, qkv, config.window(index))
    gate_up = read.linear({f"{mlp}.gate_up_proj": 2 * inner}, hidden)
    norm = read.norm(f"{stem}.post_attention_layernorm")
    return Layer(mixer, (SwiGlu(norm, gate_up, read.linear({f"{mlp}.down_proj": hidden}, inner)),))


def _rope(config: dict[str, Any], head_dim: int, max_position: int) -> tuple[Rope, Rope | None, int]:
    """The rope, LongRoPE's for long texts (None without it), and the longest text for the first."""
    source = "rope_scaling" if table_of(config, "rope_scaling") else "rope_parameters"
    table = {key: value for key, value in table_of(config, source).items() if value is not None}
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in ("default", *_LONGROPE):
        raise refuse(f"{source}.rope_type", kind, f"Phi models have {', '.join(('default', *_LONGROPE))}")
    for key in table.keys() - _ROPE_KEYS:
        raise refuse(f"{source}.{key}", table[key], f"rope type {kind!r} has no such value")
    found = table if "rope_theta" in table else config
    theta = positive_of(found, "rope_theta", DEFAULT_THETA)
    turning = partial_rope.turning(config, head_dim)
    rope = Rope(theta=theta, rotary_dim=turning, source=source if found is table else "rope_theta")
    if kind == "default":
        return rope, None, max_position
    key = "original_max_position_embeddings"
    original = count_of(config, key, count_of(table, key, 4096))
    factors = {name: tuple(positives_of(table, name) or ()) for name in ("short_factor", "long_factor")}
    for name, divisors in factors.items():
        if len(divisors) != turning // 2:
            raise refuse(f"{source}.{name}", table.get(name), f"give {turning // 2} positive numbers")
    factor = positive_of(table, "factor", max_position / original, where=source)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    attention = positive_of(table, "attention_factor", usual, where=source)
    short, long = (replace(rope, kind="divisors", divisors=one, attention_factor=attention) for one in factors.values())
    return short, long, original


def _gguf_settings(file: GgufMetadata, usual: dict[str, Any]) -> dict[str, Any]:
    """With LongRoPE the lists of factors are tensors. Files of Phi-4 without a window state 0."""
    own = {"model_type": "phi3", "sliding_window": file.metadata(".attention.sliding_window") or None}
    if file.tensors.keys().isdisjoint(_GGUF_FACTORS):
        return own
    rope = usual["rope_parameters"] | {
        key: [short(factor) for factor in file.vector(name)] for name, key in _GGUF_FACTORS.items()
    }
    rope |= {"rope_type": "longrope", "attention_factor": short(file.number(_GGUF_ATTENTION, 1.0))}
    rope["original_max_position_embeddings"] = file.count(".rope.scaling.original_context_length")
    return own | {"rope_parameters": rope}


_GGUF_FACTORS = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
_GGUF_ATTENTION = ".rope.scaling.attn_factor"
GGUF = {
    "phi3": GgufLayout(
        "Phi3ForCausalLM",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        settings=_gguf_settings,
        has_windows=True,
        rotates_all=False,
        rope_keys=(_GGUF_ATTENTION,),
        rope_tensors=tuple(_GGUF_FACTORS),
    )
}
