"""Llama, SmolLM2, Qwen2/2.5 and Qwen3 (dense): layers that differ in biases and q/k norms."""

from __future__ import annotations

from specbatch.kernels.gemm.linear import Norm
from specbatch.models.layers import Attention, Layer, Reader, SwiGlu, Tables


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    """Layer `index`; tables: cos and sin."""
    stem = f"model.layers.{index}"
    return Layer(attention(read, stem, tables), (dense(read, stem),))


def attention(read: Reader, stem: str, tables: Tables) -> Attention:
    config, inner = read.config, f"{stem}.self_attn"
    return Attention(
        norm=read.norm(f"{stem}.input_layernorm"),
        qkv=read.linear(*(f"{inner}.{part}_proj" for part in "qkv"), bias=config.qkv_bias),
        heads=read.heads(inner, tables),
        out=read.linear(f"{inner}.o_proj", bias=config.o_bias),
    )


def dense(read: Reader, stem: str) -> SwiGlu:
    bias, mlp = read.config.mlp_bias, f"{stem}.mlp"
    return SwiGlu(
        norm=read.norm(f"{stem}.post_attention_layernorm"),
        gate_up=read.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=bias),
        down=read.linear(f"{mlp}.down_proj", bias=bias),
    )


def final_norm(read: Reader, stem: str) -> Norm:
    return read.norm(stem)
