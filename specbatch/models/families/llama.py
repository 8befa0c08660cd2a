"""Llama, SmolLM2, Mistral, Ministral, Qwen2/2.5 and Qwen3 (dense): layers that differ in biases, q/k norms, windows."""

from __future__ import annotations

from typing import Any

from specbatch.kernels.gemm.linear import Norm
from specbatch.models.config import ModelConfig
from specbatch.models.gguf_layout import GgufLayout, GgufMetadata, layer_types
from specbatch.models.layers.blocks import Attention, Layer, SwiGlu
from specbatch.models.weight_reader import Reader, Tables


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    """Layer `index`; tables: cos and sin."""
    return decoder_layer(read, f"model.layers.{index}", tables, read.config.window(index))


def decoder_layer(read: Reader, stem: str, tables: Tables, window: int | None = None) -> Layer:
    """The layer whose tensors are named `stem`.*."""
    mixer = attention(read, f"{stem}.input_layernorm", f"{stem}.self_attn", tables, window=window)
    return Layer(mixer, (dense(read, stem),))


def attention(
    read: Reader,
    norm: str,
    stem: str,
    tables: Tables,
    *,
    out: str = "o_proj",
    head_norm: str = "norm",
    window: int | None = None,
) -> Attention:
    """norm: the name of the input norm; stem: prefix of the other names; out: the output projection; head_norm: suffix
    of the norms of q and k; window: see `QKVLayout`."""
    config = read.config
    return Attention(
        norm=read.norm(norm),
        qkv=read.linear(qkv_rows(config, stem), config.hidden_size, config.qkv_bias),
        heads=read.heads(stem, tables, head_norm, window),
        out=read.linear({f"{stem}.{out}": config.hidden_size}, config.num_heads * config.head_dim, config.o_bias),
    )


def qkv_rows(config: ModelConfig, stem: str) -> dict[str, int]:
    """Name, without ".weight" -> number of outputs of the projections of q, k and v."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    return {f"{stem}.{part}_proj": count * config.head_dim for part, count in heads.items()}


def dense(read: Reader, stem: str) -> SwiGlu:
    config, mlp = read.config, f"{stem}.mlp"
    hidden, inner = config.hidden_size, config.intermediate_size
    return SwiGlu(
        norm=read.norm(f"{stem}.post_attention_layernorm"),
        gate_up=read.linear({f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}, hidden, config.mlp_bias),
        down=read.linear({f"{mlp}.down_proj": hidden}, inner, config.mlp_bias),
    )


def final_norm(read: Reader, stem: str) -> Norm:
    return read.norm(stem)


def _gguf_settings(file: GgufMetadata, usual: dict[str, Any]) -> dict[str, Any]:
    """Files of "llama" with windows are of Mistral, in all layers, or of Ministral, in those for which the pattern has
    true."""
    if not file.metadata(".attention.sliding_window"):
        return {"model_type": "llama", "sliding_window": None}
    own = {"sliding_window": file.count(".attention.sliding_window")}
    kinds = layer_types(file)
    if not kinds:
        return own | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    return own | kinds | {"model_type": "ministral", "architectures": ["MinistralForCausalLM"]}


GGUF = {
    "llama": GgufLayout("LlamaForCausalLM", settings=_gguf_settings, has_windows=True, interleaved_qk=True),
    "qwen2": GgufLayout("Qwen2ForCausalLM"),
    "qwen3": GgufLayout("Qwen3ForCausalLM"),
}
