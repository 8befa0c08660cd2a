"""Llama, SmolLM2, Qwen2/2.5 and Qwen3 (dense): layers that differ in biases and q/k norms."""

from __future__ import annotations

from specbatch.models.layers import Attention, Layer, Reader, SwiGlu, Tables


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    """Layer `index`; tables: cos and sin."""
    config, stem = read.config, f"model.layers.{index}"
    attention, mlp = f"{stem}.self_attn", f"{stem}.mlp"
    mixer = Attention(
        norm=read.norm(f"{stem}.input_layernorm"),
        qkv=read.linear(*(f"{attention}.{part}_proj" for part in "qkv"), bias=config.qkv_bias),
        heads=read.heads(attention, tables),
        out=read.linear(f"{attention}.o_proj", bias=config.o_bias),
    )
    dense = SwiGlu(
        norm=read.norm(f"{stem}.post_attention_layernorm"),
        gate_up=read.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=config.mlp_bias),
        down=read.linear(f"{mlp}.down_proj", bias=config.mlp_bias),
    )
    return Layer(mixer, (dense,))
