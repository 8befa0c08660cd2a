"""RoPE settings in both config.json spellings give the frequencies of transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from specbatch.models.config import ModelConfig
from specbatch.models.rope import Rope

FAMILIES = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
SIZES = {
    "hidden_size": 256, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
}  # fmt: skip
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn, ratio of mscales, no rounding": {
        "rope_type": "yarn", "factor": 40.0, "beta_fast": 16.0, "mscale": 1.0, "mscale_all_dim": 0.8,
        "truncate": False,
    },
    "yarn, own attention factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3},
}  # fmt: skip


def old_spelling(family: str = "llama", **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, "rope_theta": 5e5, **changes}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_match_transformers_in_both_spellings(family: str, scaling: str) -> None:
    import transformers  # here, because collecting the tests would take seconds longer
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    head_dim = {} if family == "qwen2" else {"head_dim": 64}
    sizes = {**SIZES, **head_dim}
    reference = getattr(transformers, FAMILIES[family])(
        **sizes, rope_parameters={"rope_theta": 5e5, "rope_type": "default", **SCALINGS[scaling]}
    )
    new = reference.to_dict()
    old = {**old_spelling(family, **head_dim), "rope_scaling": SCALINGS[scaling] or None}
    assert "rope_theta" not in new
    assert "rope_parameters" not in old

    rotary = LlamaRotaryEmbedding(copy.deepcopy(reference))
    for spelling in (new, old):
        rope = ModelConfig.from_dict(spelling).rope
        assert torch.equal(rope.inverse_frequencies(), rotary.inv_freq)
        assert rope.inverse_frequencies().dtype == torch.float32
        assert rope.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-12)
        assert rope.theta == 5e5
    assert ModelConfig.from_dict(old).rope.source == "rope_theta"
    assert ModelConfig.from_dict(new).rope.source == "rope_parameters"


def test_theta_source() -> None:
    legacy = {"type": "linear", "factor": 2.0}
    assert ModelConfig.from_dict(old_spelling(rope_scaling=legacy)).rope.kind == "linear"
    assert ModelConfig.from_dict(old_spelling(rope_scaling=legacy)).rope.source == "rope_theta"
    inside = ModelConfig.from_dict(old_spelling(rope_scaling={**legacy, "rope_theta": 7e4})).rope
    assert (inside.theta, inside.source) == (7e4, "rope_scaling")
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    config = old_spelling(rope_parameters=nested)
    del config["rope_theta"]
    assert ModelConfig.from_dict(config).rope.theta == 1e6
    del config["rope_parameters"]
    silent = ModelConfig.from_dict(config).rope
    assert (silent.theta, silent.source) == (10000.0, "class default")


def test_yarn_extends_the_context_and_defaults_its_original_length() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = ModelConfig.from_dict(old_spelling(rope_scaling=scaling, max_position_embeddings=32768))
    assert config.max_position == 131072
    without = ModelConfig.from_dict(old_spelling(rope_scaling={"type": "yarn", "factor": 4.0}))
    assert without.rope.original_max_position == 16384


def test_gguf_frequency_divisors() -> None:
    plain = Rope(theta=5e5, rotary_dim=8)
    divided = Rope(theta=5e5, rotary_dim=8, kind="divisors", divisors=(1.0, 1.0, 2.0, 8.0), source="gguf")
    ratio = plain.inverse_frequencies() / divided.inverse_frequencies()
    assert torch.allclose(ratio, torch.tensor([1.0, 1.0, 2.0, 8.0]))
