"""Which family reads a config: by its architecture, or by model_type alone."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from specbatch.errors import SpecbatchError
from specbatch.models.registry import dense_family, family_modules, own_reader


@pytest.mark.parametrize("config", [{"architectures": ["MinistralForCausalLM"]}, {"model_type": "ministral"}])
def test_dense_families(config: dict[str, Any]) -> None:
    assert own_reader(config) is None
    assert dense_family(config) == "ministral"


@pytest.mark.parametrize(
    ("architecture", "model_type", "name"),
    [
        ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", "Qwen3NextConfig"),
        ("Gemma4ForConditionalGeneration", "gemma4", "Gemma4Config"),
        ("Lfm2ForCausalLM", "lfm2", "Lfm2Config"),
        ("DeepseekV3ForCausalLM", "kimi_k2", "DeepseekConfig"),
        ("Glm4MoeLiteForCausalLM", "glm4_moe_lite", "DeepseekConfig"),
        ("KimiK25ForConditionalGeneration", "kimi_k25", "DeepseekConfig"),
    ],
)
def test_families_with_a_config_of_their_own(architecture: str, model_type: str, name: str) -> None:
    by_architecture, by_type = {"architectures": [architecture]}, {"model_type": model_type}
    for config in (by_architecture, by_type, by_architecture | by_type):
        found = own_reader(config)
        assert found is not None
        assert found.__name__ == name


def test_every_family_builds_layers() -> None:
    for name in family_modules():
        family = import_module(name)
        assert callable(family.layer)
        assert callable(family.final_norm)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {"architectures": ["PhiForCausalLM"]},
            "architectures=.*PhiForCausalLM.*LlamaForCausalLM.*MistralForCausalLM.*Lfm2ForCausalLM",
        ),
        ({"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, "architectures="),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
        ({"model_type": "mamba"}, "model_type='mamba'"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "mistral"}, "model_type='mistral'.*goes with 'llama'"),
    ],
)
def test_other_models_are_refused(config: dict[str, Any], named: str) -> None:
    assert own_reader(config) is None
    with pytest.raises(SpecbatchError, match=named):
        dense_family(config)


@pytest.mark.parametrize(
    ("architecture", "model_type", "part"),
    [
        ("DeepseekV32ForCausalLM", "deepseek_v32", "sparse attention, for which an indexer chooses the keys"),
        ("DeepseekV4ForCausalLM", "deepseek_v4", "attention to compressed keys, and hyper-connections"),
        ("GlmMoeDsaForCausalLM", "glm_moe_dsa", "sparse attention"),
        ("KimiLinearForCausalLM", "kimi_linear", "linear attention with a decay per channel"),
        ("MiniMaxM1ForCausalLM", "minimax_m1", "lightning attention"),
        ("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", "sparse attention"),
    ],
)
def test_known_models_are_refused_with_the_missing_part(architecture: str, model_type: str, part: str) -> None:
    for config in ({"architectures": [architecture], "model_type": model_type}, {"model_type": model_type}):
        assert own_reader(config) is None
        with pytest.raises(SpecbatchError, match=f"such models need {part}.*which this engine does not have"):
            dense_family(config)


def test_a_family_with_its_own_config_refuses_another_model_type() -> None:
    with pytest.raises(SpecbatchError, match=r"model_type='llama'.*goes with 'gpt_oss'"):
        own_reader({"architectures": ["GptOssForCausalLM"], "model_type": "llama"})
