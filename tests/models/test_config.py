from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from specbatch.errors import SpecbatchError
from specbatch.models.config import ModelConfig

FAMILIES = {
    "llama": (LlamaConfig, "LlamaForCausalLM"),
    "qwen2": (Qwen2Config, "Qwen2ForCausalLM"),
    "qwen3": (Qwen3Config, "Qwen3ForCausalLM"),
}
SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
}  # fmt: skip


def old_spelling(family: str = "llama", **changes: Any) -> dict[str, Any]:
    model_type, architecture = family, FAMILIES[family][1]
    return {"architectures": [architecture], "model_type": model_type, **SIZES, "rope_theta": 5e5, **changes}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("llama", {}),
        ("llama", {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("qwen3", {"head_dim": 32, "attention_bias": True}),
    ],
)
def test_tensor_shapes_match_transformers(family: str, extra: dict[str, Any], tied: bool) -> None:
    config_class, architecture = FAMILIES[family]
    reference = config_class(**SIZES, **extra, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(reference)
    config = ModelConfig.from_dict({**reference.to_dict(), "architectures": [architecture]})
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del expected["lm_head.weight"]
    assert config.tensor_shapes() == expected
    assert config.parameter_count() == sum(parameter.numel() for parameter in model.parameters())


def test_config_defaults() -> None:
    config = old_spelling(num_key_value_heads=None, eos_token_id=[7, 9, 7], bos_token_id=1)
    read = ModelConfig.from_dict(config)
    assert (read.num_kv_heads, read.head_dim, read.eos_ids, read.bos_id) == (4, 12, (7, 9), 1)
    assert (read.tie_embeddings, read.qkv_bias, read.dtype) == (False, False, None)
    assert ModelConfig.from_dict(old_spelling("qwen3")).head_dim == 128
    assert ModelConfig.from_dict(old_spelling("qwen2")).qkv_bias
    assert ModelConfig.from_dict(old_spelling(torch_dtype="bfloat16")).dtype == "bfloat16"
    assert ModelConfig.from_dict(old_spelling(dtype="float16")).dtype == "float16"
    by_type = old_spelling("qwen2")
    del by_type["architectures"]
    assert ModelConfig.from_dict(by_type).family == "qwen2"


def test_disabled_sliding_window_is_ignored() -> None:
    off = {"sliding_window": 4096, "max_window_layers": 1, "use_sliding_window": False}
    assert ModelConfig.from_dict(old_spelling("qwen2", **off)).family == "qwen2"
    beyond = {"sliding_window": 4096, "max_window_layers": 2, "use_sliding_window": True}
    assert ModelConfig.from_dict(old_spelling("qwen2", **beyond)).num_layers == 2
    kinds = ["full_attention", "full_attention"]
    assert ModelConfig.from_dict(old_spelling("qwen3", layer_types=kinds)).num_layers == 2


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        (
            "llama",
            {"architectures": ["MistralForCausalLM"]},
            "architectures=.*MistralForCausalLM.*LlamaForCausalLM",
        ),
        ("llama", {"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
        ("llama", {"architectures": None, "model_type": "mamba"}, "model_type='mamba'"),
        ("llama", {"model_type": "mistral"}, "model_type='mistral'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type='longrope'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type='dynamic'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor=None"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fsat": 3}}, "beta_fsat=3"),
        ("llama", {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "sliding_attention"),
        ("llama", {"rope_theta": "1e6"}, "rope_theta='1e6'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"sliding_window": 4096}, "sliding_window=4096"),
        (
            "qwen2",
            {"sliding_window": 64, "max_window_layers": 1, "use_sliding_window": True},
            "sliding_window=64",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types='sliding_attention'",
        ),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types='1 entries'"),
        (
            "llama",
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config.quant_method=.awq.*\\[128, 128\\]",
        ),
        ("llama", {"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ("llama", {"num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads=5"),
        ("llama", {"head_dim": 15}, "head_dim=15"),
        ("llama", {"hidden_size": None}, "hidden_size=None"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps=None"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
    ],
)
def test_unsupported_values_are_refused_by_name(family: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecbatchError, match=named) as refusal:
        ModelConfig.from_dict(old_spelling(family, **changes))
    assert "\n" not in str(refusal.value)
