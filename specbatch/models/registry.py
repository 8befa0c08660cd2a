"""Registry of model families: the module of each, and which one reads a config.json (architectures, model_type)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from specbatch.errors import refuse
from specbatch.files.config_values import names_of

FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
FAMILIES |= {"MistralForCausalLM": "mistral", "MinistralForCausalLM": "ministral"}
# Families with a config class of their own: architecture -> (model_type, module, class).
_OTHERS = {
    "Qwen3MoeForCausalLM": ("qwen3_moe", "qwen3_moe", "Qwen3MoeConfig"),
    "Qwen3NextForCausalLM": ("qwen3_next", "qwen3_next", "Qwen3NextConfig"),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", "qwen3_next", "Qwen3NextConfig"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", "qwen3_next", "Qwen3NextConfig"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen3_next", "Qwen3NextConfig"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "qwen3_next", "Qwen3NextConfig"),
    "NemotronHForCausalLM": ("nemotron_h", "nemotron_h", "NemotronHConfig"),
    "Gemma3ForCausalLM": ("gemma3_text", "gemma3", "Gemma3Config"),
    "Gemma4ForCausalLM": ("gemma4_text", "gemma4", "Gemma4Config"),
    "Gemma4ForConditionalGeneration": ("gemma4", "gemma4", "Gemma4Config"),
    "GptOssForCausalLM": ("gpt_oss", "gpt_oss", "GptOssConfig"),
    "DeepseekV2ForCausalLM": ("deepseek_v2", "deepseek", "DeepseekConfig"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "deepseek", "DeepseekConfig"),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", "deepseek", "DeepseekConfig"),
    "KimiK25ForConditionalGeneration": ("kimi_k25", "deepseek", "DeepseekConfig"),
    "Kimi_K25ForConditionalGeneration": ("kimi_k25", "deepseek", "DeepseekConfig"),
    "MiniMaxM2ForCausalLM": ("minimax_m2", "minimax_m2", "MiniMaxM2Config"),
    "Phi3ForCausalLM": ("phi3", "phi3", "Phi3Config"),
    "Glm4MoeForCausalLM": ("glm4_moe", "glm4_moe", "Glm4MoeConfig"),
    "Lfm2ForCausalLM": ("lfm2", "lfm2", "Lfm2Config"),
    "Lfm2MoeForCausalLM": ("lfm2_moe", "lfm2", "Lfm2Config"),
}
_SAME = {"kimi_k2": "deepseek_v3"}  # other values of model_type
_INDEXER = "sparse attention, for which an indexer chooses the keys"
_CHANNEL_DECAY = "linear attention with a decay per channel (KDA)"
# What is missing here to run a model of the field: architecture -> (model_type, missing part).
_MISSING = {
    "DeepseekV32ForCausalLM": ("deepseek_v32", _INDEXER),
    "DeepseekV4ForCausalLM": ("deepseek_v4", "attention to compressed keys, and hyper-connections"),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", _INDEXER),
    "Glm5NextForConditionalGeneration": ("glm5_next", f"{_INDEXER}, {_CHANNEL_DECAY}, and hyper-connections"),
    "KimiLinearForCausalLM": ("kimi_linear", _CHANNEL_DECAY),
    "KimiK3ForConditionalGeneration": ("kimi_k3", _CHANNEL_DECAY),
    "MiniMaxForCausalLM": ("minimax", "lightning attention"),
    "MiniMaxText01ForCausalLM": ("minimax_text_01", "lightning attention"),
    "MiniMaxM1ForCausalLM": ("minimax_m1", "lightning attention"),
    "MiniMaxM3SparseForConditionalGeneration": ("minimax_m3_vl", _INDEXER),
    "MiniMaxM3VLForCausalLM": ("minimax_m3_vl_text", _INDEXER),
}


def family_modules() -> tuple[str, ...]:
    """The modules of all families, in the order of the registry."""
    names = dict.fromkeys(("llama", *(module for _, module, _ in _OTHERS.values())))
    return tuple(f"specbatch.models.families.{name}" for name in names)


def own_reader(config: dict[str, Any]) -> type[Any] | None:
    """The config class of a family that has its own; None: `ModelConfig` reads it."""
    names, model_type = names_of(config, "architectures"), _model_type(config)
    for architecture, (kind, module, name) in _OTHERS.items():
        if names == [architecture] if names else model_type == kind:
            if model_type not in (None, kind):
                raise refuse("model_type", model_type, f"architectures={names!r} goes with {kind!r}")
            found: type[Any] = getattr(import_module(f"specbatch.models.families.{module}"), name)
            return found
    return None


def _model_type(config: dict[str, Any]) -> Any:
    found = config.get("model_type")
    return _SAME.get(found, found) if isinstance(found, str) else found


def dense_family(config: dict[str, Any]) -> str:
    """The family of a config that `ModelConfig` reads. Raises SpecbatchError for a model that is not supported."""
    names, model_type = names_of(config, "architectures"), config.get("model_type")
    works = f"supported are {', '.join([*FAMILIES, *_OTHERS])}"
    for architecture, (kind, part) in _MISSING.items():
        if names == [architecture] if names else model_type == kind:
            key, value = ("architectures", names) if names else ("model_type", model_type)
            raise refuse(key, value, f"such models need {part}, which this engine does not have")
    if names:
        family = FAMILIES.get(names[0]) if len(names) == 1 else None
        if family is None:
            raise refuse("architectures", names, works)
        if model_type not in (None, family):
            raise refuse("model_type", model_type, f"architectures={names!r} goes with {family!r}")
        return family
    if model_type not in FAMILIES.values():
        raise refuse("model_type", model_type, works)
    return str(model_type)
