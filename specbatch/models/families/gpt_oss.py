"""gpt-oss: attention with learned sinks and alternating windows; experts with biases.

OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025); names, layout and defaults are those of `GptOssConfig` of
transformers. Published checkpoints have the experts of a layer in two tensors, in MXFP4 or unquantized, where rows of
gate and up alternate; here all of the gate come first. Tools that quantize to other formats (llm-compressor) write each
expert on its own, as `mlp.experts.N.gate_proj`, `up_proj` and `down_proj`, with a weight and a bias each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, flag_of, positive_of, table_of
from specbatch.kernels.elementwise.activations import GATE_LIMIT, GATE_SLOPE
from specbatch.kernels.gemm.quantized.weight import Weight
from specbatch.kernels.moe.expert_weights import Biases
from specbatch.kernels.moe.experts import Experts
from specbatch.kernels.moe.routing import Routing
from specbatch.models.config import DEEPEST, ModelConfig, shared_out
from specbatch.models.families import llama
from specbatch.models.formats.format import Shapes
from specbatch.models.formats.mxfp4 import METHOD, Mxfp4Weights, check_width
from specbatch.models.gguf_layout import (
    EXPERT_NAMES,
    GgufLayout,
    GgufMetadata,
    has_mxfp4,
    layer_types,
    mixture_settings,
)
from specbatch.models.layer_types import FULL, SLIDING
from specbatch.models.layers.blocks import Layer
from specbatch.models.layers.moe import Mixture, MoeMlp, mixture_of, read_routed
from specbatch.models.weight_reader import Reader, Tables

# Of a config that states none.
_THETA, _WINDOW, _LAYERS = 150000.0, 128, 36
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(ModelConfig):
    """mixture.fused: the experts of a layer are two tensors; the only format that they can have then is MXFP4, and
    other weights have none."""

    module: ClassVar[str] = __name__
    methods: ClassVar[tuple[str, ...]] = (METHOD,)

    mixture: Mixture

    def __post_init__(self) -> None:
        if isinstance(self.quantization, Mxfp4Weights):
            check_width("hidden_size", self.hidden_size)
            check_width("intermediate_size", self.intermediate_size)
        elif self.quantization is not None:
            object.__setattr__(self, "mixture", replace(self.mixture, fused=False))

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> GptOssConfig:
        for key, works in (("swiglu_alpha", GATE_SLOPE), ("swiglu_limit", GATE_LIMIT)):
            if config.get(key) not in (None, works):
                raise refuse(key, config[key], f"the experts of gpt-oss here have {works}")
        layers = count_of(config, "num_hidden_layers", _LAYERS, most=DEEPEST)
        rope = table_of(config, "rope_scaling") or table_of(config, "rope_parameters") or _YARN
        plain = ModelConfig.from_dict(
            config
            | {
                "architectures": None,
                "model_type": "ministral",  # whose configs state windows alike
                "num_hidden_layers": layers,
                "head_dim": count_of(config, "head_dim", 64),
                "attention_bias": flag_of(config, "attention_bias", True),
                "sliding_window": config.get("sliding_window", _WINDOW),
                "layer_types": config.get("layer_types") or [FULL if layer % 2 else SLIDING for layer in range(layers)],
                "rms_norm_eps": positive_of(config, "rms_norm_eps", 1e-5),
                "rope_scaling": None,
                "rope_parameters": rope,
                "rope_theta": positive_of(config, "rope_theta", _THETA),
            }
        )
        experts = config | {"moe_intermediate_size": plain.intermediate_size}
        mixture = replace(mixture_of(experts, normalise=True), fused=True)
        return cls(**vars(plain) | {"family": "gpt_oss"}, mixture=mixture)

    @property
    def has_sinks(self) -> bool:
        return True

    @property
    def input_step(self) -> int:
        return 1 if self.mixture.fused else super().input_step  # but for experts

    def fit(self, found: Shapes) -> Self:
        fused = not any(".experts.0." in name for name in found)
        if fused and not self.mixture.fused:
            works = f"experts in one tensor are {METHOD!r} or unquantized; others must be stored one by one"
            raise refuse("model", "mlp.experts", works)
        return replace(super().fit(found), mixture=replace(self.mixture, fused=fused))

    def divided(self, ranks: int) -> Self:
        step = 1 if self.quantization is None else self.quantization.input_step
        inner = shared_out("intermediate_size", self.intermediate_size, ranks, step)
        return replace(super().divided(ranks), mixture=replace(self.mixture, inner=inner))

    def mlp_bytes(self, dtype: torch.dtype) -> int:
        return self.mixture.token_bytes(self.hidden_size, dtype)


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    """Layer `index`; tables: cos and sin."""
    config, stem = read.config, f"model.layers.{index}"
    assert isinstance(config, GptOssConfig)
    mixer = llama.attention(read, f"{stem}.input_layernorm", f"{stem}.self_attn", tables, window=config.window(index))
    sinks = read(f"{stem}.self_attn.sinks", config.num_heads, dtype=torch.float32)
    mixer = replace(mixer, heads=replace(mixer.heads, sinks=sinks))
    norm = read.norm(f"{stem}.post_attention_layernorm")
    return Layer(mixer, (MoeMlp(norm, _experts(read, f"{stem}.mlp", config)),))


def _experts(read: Reader, stem: str, config: GptOssConfig) -> Experts:
    count, inner, hidden = config.mixture.experts, config.mixture.inner, config.hidden_size
    if config.mixture.fused:
        up = _matrices(read, f"{stem}.experts.gate_up_proj", (count, 2 * inner, hidden), _gate_first)
        down = _matrices(read, f"{stem}.experts.down_proj", (count, hidden, inner), torch.Tensor.contiguous)
        up_bias = _gate_first(read(f"{stem}.experts.gate_up_proj_bias", count, 2 * inner))
        down_bias = read(f"{stem}.experts.down_proj_bias", count, hidden)
    else:
        up, down = read_routed(read, stem, config.mixture)
        each = [f"{stem}.experts.{expert}" for expert in range(count)]
        gates = (torch.cat([read(f"{one}.{part}_proj.bias", inner) for part in ("gate", "up")]) for one in each)
        up_bias = torch.stack([*gates])
        down_bias = torch.stack([read(f"{one}.down_proj.bias", hidden) for one in each])
    return Experts(
        Routing(count, config.mixture.top_k),
        read(f"{stem}.router.weight", count, hidden),
        up,
        down,
        "clamped_swiglu",
        router_bias=read(f"{stem}.router.bias", count),
        biases=Biases(up_bias, down_bias if read.ranks is None or read.ranks.rank == 0 else None),
        ranks=read.ranks,
    )


def _matrices(
    read: Reader, name: str, shape: tuple[int, int, int], order: Callable[[torch.Tensor], torch.Tensor]
) -> Weight:
    """The experts' matrices [count, outputs, inputs]; unquantized ones are stored transposed. order: applied to the
    outputs."""
    count, outputs, inputs = shape
    if read.config.is_stored_quantized(name, shape):
        return read.fused(name, count, outputs, inputs, order=order)
    return Weight(order(read(name, count, inputs, outputs).transpose(1, 2)))


def _gate_first(x: torch.Tensor) -> torch.Tensor:
    """[E, 2 * I, ...] whose rows are gate, up, gate, up, ..., with all rows of the gate first."""
    sorted_: torch.Tensor = x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return sorted_


final_norm = llama.final_norm


def _gguf_settings(file: GgufMetadata, usual: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {
        "sliding_window": file.count(".attention.sliding_window"),
        "num_local_experts": file.count(".expert_count"),
    }
    if has_mxfp4(file):
        own |= {"quantization_config": {"quant_method": METHOD}}
    rope = usual["rope_parameters"] | {"truncate": False}  # which no file states
    own |= {"model_type": "gpt_oss", "rope_parameters": rope}
    return mixture_settings(file) | own | layer_types(file, unstated=2)


GGUF = {
    "gpt-oss": GgufLayout(
        "GptOssForCausalLM",
        EXPERT_NAMES
        | {
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
        },
        _gguf_settings,
        has_windows=True,
        is_mixture=True,
        interleaved_experts=True,
    )
}
