"""Qwen3.6 and Qwen3.8: published configs name the classes of Qwen3.5, and are read as that family."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.models.config import ModelConfig
from specbatch.models.families.qwen3_next import Qwen3NextConfig
from specbatch.models.weight_shapes import weight_shapes
from specbatch.weights.shapes import SHAPES

# The text part of the config.json of Qwen3.6-27B, and what all say beside it. That of Qwen3.8-27B has the same sizes.
TEXT: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "bos_token_id": 248044,
    "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17408,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24,
    "num_hidden_layers": 64, "num_key_value_heads": 4, "output_gate_type": "swish", "pad_token_id": None,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "language_model_only": False,
    "model_type": "qwen3_5", "text_config": TEXT, "tie_word_embeddings": False, "transformers_version": "4.57.1",
    "video_token_id": 248057, "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
    "vision_end_token_id": 248054, "vision_start_token_id": 248053,
}  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen3.8-27b"])
def test_published_config(name: str) -> None:
    config, shape = ModelConfig.from_dict(PUBLISHED), ModelConfig.from_dict(SHAPES[name])
    assert isinstance(config, Qwen3NextConfig)
    assert weight_shapes(config) == weight_shapes(shape)
    assert (config.rope, config.attends, config.delta) == (shape.rope, shape.attends, shape.delta)  # type: ignore[attr-defined]
    assert (config.mtp_layers, config.prefix) == (1, "model.language_model.")


def test_shapes_of_the_later_mixtures() -> None:
    for name in ("qwen3.6-35b-a3b", "qwen3.6-35b-a3b-fp8"):
        config = ModelConfig.from_dict(SHAPES[name])
        assert isinstance(config, Qwen3NextConfig)
        assert config.chosen == (256, 8)
