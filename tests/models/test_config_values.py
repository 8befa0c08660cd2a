"""Configs with wrong values: any value of any key is read or refused in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crossed import first_quick, slow_but
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from limits import limited
from targets import HYBRIDS, LATENT, SIZES, TARGETS, WINDOWED

import specbatch.models
from specbatch.errors import SpecbatchError
from specbatch.models.config import ModelConfig
from specbatch.models.heads.dflash import DFlashConfig
from specbatch.models.heads.dflash2 import DFlash2Config
from specbatch.models.heads.domino import DominoConfig
from specbatch.models.heads.draft_head import layer_config
from specbatch.models.heads.dspark import DSparkConfig
from specbatch.models.heads.eagle3 import Eagle3Config
from specbatch.models.heads.lilicorr import LiLiCorrConfig
from specbatch.models.heads.xpress import XPressConfig
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.weights.folder import check_tensors

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
DFLASH = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_target_layers": 9, "block_size": 4}
DFLASH2 = {"architectures": ["DFlash2DraftModel"], "conv_kernel_size": 2, "conv_group_size": 8}
DFLASH2 |= {"selector_rank": 6, "selector_top_k": 5}
DSPARK = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 8, "enable_confidence_head": True}
DOMINO = {"projector_type": "domino", "pure_draft_prefix_len": 1, "gru_hidden_dim": 6, "emb_dim": 5}
DOMINO |= {"shift_label": True}
LILICORR = {"architectures": ["LiLiCorrDraftModel"], "lilicorr_candidate_topk": 4, "lilicorr_hidden_size": 12}
LILICORR |= {"lilicorr_num_layers": 1, "lilicorr_num_heads": 2, "lilicorr_mlp_ratio": 1.5, "lilicorr_factor_dim": 6}
LILICORR |= {"lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 3.0}
XPRESS = {"architectures": ["Qwen3XPressModel"], "xpress_rank": 6, "xpress_topc": 5}
READS = {"mask_token_id": 3, "target_layer_ids": [1, 2]}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
NESTED = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
INNER = SIZES | {"model_type": "qwen3"}
READERS: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = {
    **{name: (ModelConfig.from_dict, SIZES | described) for name, described in (HYBRIDS | LATENT).items()},
    "gemma3": (ModelConfig.from_dict, SIZES | WINDOWED["gemma3"]),
    "gemma4": (ModelConfig.from_dict, SIZES | WINDOWED["gemma4"]),
    "gemma4-moe": (ModelConfig.from_dict, SIZES | WINDOWED["gemma4-moe"]),
    "gemma4-e2b": (ModelConfig.from_dict, SIZES | WINDOWED["gemma4-e2b"]),
    "phi3": (ModelConfig.from_dict, SIZES | TARGETS["phi3"]),
    "gpt-oss": (ModelConfig.from_dict, SIZES | WINDOWED["gpt-oss"]),
    "llama": (ModelConfig.from_dict, SIZES | {"model_type": "llama", "rope_scaling": YARN}),
    "qwen2": (ModelConfig.from_dict, SIZES | {"model_type": "qwen2", "quantization_config": FP8}),
    "qwen3.5-vl": (ModelConfig.from_dict, NESTED | {"text_config": SIZES | HYBRIDS["qwen3.5"]}),
    "dflash": (DFlashConfig.from_dict, SIZES | DFLASH | SLIDING | {"dflash_config": {"mask_token_id": 3}}),
    "dflash-speculators": (
        DFlashConfig.from_dict,
        DFLASH
        | {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [2, 5], "mask_token_id": 3}
        | {"draft_vocab_size": 9, "transformer_layer_config": INNER},
    ),
    "dflash2": (DFlash2Config.from_dict, SIZES | DFLASH | DFLASH2 | READS),
    "dspark": (DSparkConfig.from_dict, SIZES | DFLASH | DSPARK | READS),
    "domino": (DominoConfig.from_dict, SIZES | DFLASH | {"dflash_config": READS | DOMINO}),
    "lilicorr": (LiLiCorrConfig.from_dict, SIZES | DFLASH | LILICORR | READS),
    "xpress": (XPressConfig.from_dict, SIZES | DFLASH | XPRESS | READS),
    "eagle": (layer_config, SIZES | {"architectures": ["LlamaForCausalLMEagle"]}),
    "eagle3": (
        Eagle3Config.from_dict,
        SIZES | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "eagle_config": {}},
    ),
    "eagle3-speculators": (
        Eagle3Config.from_dict,
        {"speculators_model_type": "eagle3", "transformer_layer_config": INNER | {"num_hidden_layers": 1}},
    ),
}
# Every string literal of the readers, and more.
_SOURCES = Path(specbatch.models.__path__[0]).rglob("*.py")
WORDS = sorted({word for path in _SOURCES for word in re.findall(r'"(\w+)"', path.read_text())} | {"false", "M*-E"})
LEAVES = (
    st.sampled_from([None, True, False, 0, 1, 2, 7, 16, 64, -1, 10**12, 10**400])
    | st.floats()
    | st.sampled_from(WORDS)
    | st.just({"__float__": "Infinity"})
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3)
)


@pytest.mark.parametrize(
    "name", slow_but(["deepseek-v3", "lilicorr"], sorted(READERS.keys() - {"dflash-speculators"}))
)  # loads a transformers config each time
def test_wrong_values_of_every_key_are_read_or_refused(name: str) -> None:
    """Each known or possible key, with values of every kind."""
    reader, valid = READERS[name]
    reader(valid)
    values = [None, False, 0, 1, -1, 10**400, 0.5, float("nan"), "false", [], ["a"], [[]], {"a": 1}]
    for path in _tables(valid):
        for key in {*WORDS, *_at(valid, path)}:
            for value in values:
                _read_or_refused(reader, _changed(valid, path, {key: value}))


@pytest.mark.parametrize("name", first_quick(5, READERS))
@examples(10)
@given(data=st.data())
def test_random_configs_are_read_or_refused(name: str, data: st.DataObject) -> None:
    reader, valid = READERS[name]
    path = data.draw(st.sampled_from(_tables(valid)))
    key = st.sampled_from(sorted(_at(valid, path)) or WORDS) | st.sampled_from(WORDS)
    changes = data.draw(st.dictionaries(key, VALUES, min_size=1, max_size=4))
    _read_or_refused(reader, _changed(valid, path, changes))


def _read_or_refused(reader: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> None:
    message = ""
    try:
        reader(config)
    except SpecbatchError as error:
        message = str(error)
    assert "\n" not in message


def _tables(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """Paths of the table itself and of nested tables."""
    return [(), *((key,) for key, value in config.items() if isinstance(value, dict))]


def _at(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    return config[path[0]] if path else config


def _changed(config: dict[str, Any], path: tuple[str, ...], changes: dict[str, Any]) -> dict[str, Any]:
    return config | {path[0]: config[path[0]] | changes} if path else config | changes


DENSE = {
    family: (ModelConfig.from_dict, SIZES | {"architectures": [f"{family.title()}ForCausalLM"], "model_type": family})
    for family in ("llama", "qwen2", "qwen3")
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3-moe", {"norm_topk_prob": "false"}, "norm_topk_prob='false': use true or false"),
    ("qwen3-moe", {"decoder_sparse_step": -1}, "decoder_sparse_step=-1: the config must give a positive whole number"),
    ("qwen3-moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers=.*must list whole numbers from 0"),
    ("qwen3-moe", {"num_experts": None}, "num_experts=None"),
    ("qwen3-next", {"linear_num_value_heads": 3}, "linear_num_value_heads=3: use a multiple of linear_num_key_heads=2"),
    ("qwen3-next", {"linear_num_key_heads": 8}, "linear_num_value_heads=4: use a multiple of linear_num_key_heads=8"),
    ("qwen3-next", {"linear_conv_kernel_dim": 18}, "linear_conv_kernel_dim=18: .* a whole number from 2 up to 17"),
    ("qwen3-next", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval=0"),
    ("qwen3-next", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "rope_parameters.partial_rotary_factor=1.5"),
    ("qwen3.5-vl", {"text_config": [3]}, r"text_config=\[3\]: the config must give a table"),
    ("nemotron-h", {"n_groups": 3}, "n_groups=3: it must divide mamba_num_heads=4"),
    ("nemotron-h", {"conv_kernel": 1}, "conv_kernel=1: .* a whole number from 2 up to 17"),
    ("nemotron-h", {"use_conv_bias": "no"}, "use_conv_bias='no'"),
    ("nemotron-h", {"mamba_proj_bias": True}, "mamba_proj_bias=True: biases are supported in Mamba2 layers"),
    ("nemotron-h-moe", {"mlp_bias": True}, "mlp_bias=True: .* dense MLPs .mlp_bias without experts"),
    ("nemotron-h", {"time_step_limit": [0.0, {"x": 1}]}, "time_step_limit=.*must list two numbers"),
    ("nemotron-h-moe", {"routed_scaling_factor": "a"}, "routed_scaling_factor='a': the config must give"),
    ("nemotron-h-moe", {"n_group": "x"}, "n_group='x'"),
    ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc': use 'greedy' or 'group_limited_greedy'"),
    ("deepseek-v2", {"topk_method": "group_limited_greedy", "n_group": 4}, "n_group=4: use a divisor of the 6"),
    ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=True: .* use false"),
    ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid': .* 'softmax'"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func='softmax': .* 'sigmoid'"),
    ("deepseek-v3", {"topk_group": 3}, "topk_group=3: use 1 to 2"),
    ("deepseek-v3", {"attention_bias": True}, "attention_bias=True: .* use false"),
    ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq=2: .* use 1"),
    ("deepseek-v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7: .* must be even"),
    ("deepseek-v3", {"kv_lora_rank": 0}, "kv_lora_rank=0"),
    ("deepseek-v3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    ("lfm2", {"hidden_size": None}, "hidden_size=None"),
    ("lfm2", {"num_attention_heads": 0}, "num_attention_heads=0"),
    ("lfm2", {"intermediate_size": None}, "intermediate_size=None"),
    ("lfm2", {"conv_L_cache": 18}, "conv_L_cache=18: .* a whole number from 2 up to 17"),
    ("lfm2", {"conv_bias": "false"}, "conv_bias='false'"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": 5}, "full_attn_idxs=5"),
    ("llama", {"rope_scaling": YARN | {"truncate": "no"}}, "truncate='no'"),
    ("llama", {"rope_scaling": YARN | {"rope_theta": 1.0}}, "rope_theta=1.0: .* above 1"),
    ("llama", {"rms_norm_eps": True}, "rms_norm_eps=True"),
    ("llama", {"num_key_value_heads": True}, "num_key_value_heads=True"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: .* up to 10000"),
    ("qwen2", {"quantization_config": ["x"]}, "quantization_config="),
    ("eagle3", {"eagle_config": {"use_last_layernorm": "no"}}, "use_last_layernorm='no'"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type='longrope'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type='dynamic'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor=None"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fsat": 3}}, "beta_fsat=3"),
    ("llama", {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "sliding_attention"),
    ("llama", {"rope_theta": "1e6"}, "rope_theta='1e6'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("eagle", {"architectures": ["MistralForCausalLMEagle"], "sliding_window": 9}, "sliding_window=9.*draft head"),
    (
        "llama",
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "quantization_config.quant_method=.bitsandbytes.*compressed-tensors",
    ),
    ("llama", {"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None}, "num_attention_heads=3"),
    ("llama", {"head_dim": 15}, "head_dim=15"),
    ("llama", {"hidden_size": None}, "hidden_size=None"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps=None"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
    ("llama", {"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
    ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0: .* 7.0"),
    ("gpt-oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0: .* 1.702"),
    ("gemma4-e2b", {"vocab_size_per_layer_input": 36}, "vocab_size_per_layer_input=36: .*vocab_size=37"),
    ("gemma4-e2b", {"num_kv_shared_layers": 3}, "num_kv_shared_layers=3: .*'full_attention' to share"),
    ("gemma4-e2b", {"num_kv_shared_layers": 5}, "num_kv_shared_layers=5: .*'sliding_attention' to share"),
    ("gemma4-e2b", {"pad_token_id": 40}, "pad_token_id=40: .* up to 39"),
    ("gemma4-moe", {"top_k_experts": 6}, "top_k_experts=6: there are 5 experts"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'.*'vision'"),
    ("gemma4", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    ("gemma4", {"num_global_key_value_heads": 3}, "num_global_key_value_heads=3: it must divide"),
    ("gemma4", {"head_dim": 15}, "head_dim=15: .*even"),
    ("gemma4", {"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config=.* layers, 1, 3, with"),
    ("gemma4", {"per_layer_config": {"1": {"window": 3}, "3": {"window": 3}}}, "per_layer_config.window=3"),
    ("gemma4", {"final_logit_softcapping": -1.0}, r"final_logit_softcapping=-1\.0"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0.*Gemma 2"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    ("gemma3", {"sliding_window": None}, "sliding_window=None"),
    ("qwen3.5", {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
]


@pytest.mark.parametrize(("name", "changes", "named"), REFUSED)
def test_refusals_name_the_key(name: str, changes: dict[str, Any], named: str) -> None:
    reader, valid = (READERS | DENSE)[name]
    with pytest.raises(SpecbatchError, match=named) as refusal:
        reader(valid | changes)
    assert "\n" not in str(refusal.value)


def test_defaults_of_missing_values() -> None:
    """Defaults match the families' own classes."""

    def read(name: str, **changes: Any) -> Any:
        return ModelConfig.from_dict(READERS[name][1] | changes)

    for stored, normalise in ((None, True), (True, True), (False, False)):
        assert read("qwen3-next", norm_topk_prob=stored).mixture.normalise is normalise
    assert not read("qwen3-moe", norm_topk_prob=None).mixture.normalise
    assert read("qwen3.5-moe", norm_topk_prob=False).mixture.normalise  # the family always does
    assert read("nemotron-h-moe", routed_scaling_factor=None).mixture.scale == 1.0
    assert read("nemotron-h", time_step_limit=[0.0, {"__float__": "Infinity"}]) == read("nemotron-h")
    assert read("nemotron-h", time_step_limit=[0, float("inf")]) == read("nemotron-h")
    assert read("nemotron-h").note is None
    note = "time_step_limit=[0.0, 0.1] of the config is not applied, as in transformers and vLLM"
    assert read("nemotron-h", time_step_limit=[0.0, 0.1]).note == note
    assert read("lfm2", tie_word_embeddings=None, tie_embedding=None).tie_embeddings
    assert not read("lfm2", tie_word_embeddings=None, tie_embedding=False).tie_embeddings
    assert read("lfm2", conv_L_cache=17).taps == 17


def read_dense(family: str = "llama", **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(DENSE[family][1] | changes)


@pytest.mark.parametrize("shape", [(), (48,), (48, 40, 1)])
def test_a_matrix_of_other_dimensions_is_refused(shape: tuple[int, ...]) -> None:
    """The width of LFM2's MLPs is taken from the shape of one."""
    config = ModelConfig.from_dict(SIZES | TARGETS["lfm2"])
    shapes = tensor_shapes(config) | {"model.layers.0.feed_forward.w1.weight": shape}
    with pytest.raises(SpecbatchError, match=r"feed_forward\.w1\.weight is"):
        check_tensors(tensor_shapes(config.fit(shapes)), shapes, "model.gguf")


def test_defaults_of_dense_families() -> None:
    config = read_dense(num_key_value_heads=None, head_dim=None, eos_token_id=[7, 9, 7], bos_token_id=1)
    heads, size = SIZES["num_attention_heads"], SIZES["hidden_size"]
    assert (config.num_kv_heads, config.head_dim) == (heads, size // heads)
    assert (config.eos_ids, config.bos_id) == ((7, 9), 1)
    assert (config.qkv_bias, config.dtype) == (False, None)
    assert not read_dense(tie_word_embeddings=None).tie_embeddings
    assert read_dense("qwen3", head_dim=None).head_dim == 128
    assert read_dense("qwen2").qkv_bias
    assert read_dense(torch_dtype="bfloat16").dtype == "bfloat16"
    assert read_dense(dtype="float16").dtype == "float16"
    assert read_dense("qwen2", architectures=None).family == "qwen2"


def test_ropes_of_configs_with_some_of_the_keys() -> None:
    scaling, other = ({"rope_type": "linear", "factor": factor} for factor in (2.0, 3.0))
    rope = ModelConfig.from_dict(SIZES | TARGETS["lfm2"] | {"rope_scaling": scaling}).rope
    assert (rope.theta, rope.kind, rope.factor) == (1e6, "linear", 2.0)
    for name in ("gpt-oss", "llama"):  # as in transformers, the older key takes precedence
        described = TARGETS.get(name, {"model_type": "llama"})
        rope = ModelConfig.from_dict(SIZES | described | {"rope_scaling": scaling, "rope_parameters": other}).rope
        assert rope.factor == 2.0
    for name, value in (("deepseek-v2", True), ("deepseek-v3", False)):
        config = ModelConfig.from_dict(SIZES | TARGETS[name] | {"rope_interleave": False})
        assert getattr(config, "interleaved") is value  # noqa: B009


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_size": 2**31 - 2, "head_dim": 2}),
        ("llama", {"intermediate_size": 2**31 - 1, "hidden_size": 2**20}),
        ("llama", {"num_hidden_layers": 10_000, "vocab_size": 2**31 - 1, "hidden_size": 2**12}),
        ("llama", {"vocab_size": 2**23}),
        ("gemma3", {"num_hidden_layers": 2**31 - 1}),
        ("lfm2", {"hidden_size": 2**31 - 4}),
        ("qwen3-moe", {"num_experts": 2**31 - 1}),
        pytest.param("qwen3-moe", {"num_experts": 2**16, "num_hidden_layers": 10_000}, marks=pytest.mark.slow),
        ("nemotron-h-moe", {"n_routed_experts": 10**6}),
        ("deepseek-v3", {"kv_lora_rank": 2**31 - 1}),
        ("deepseek-v3", {"n_routed_experts": 2**16, "num_hidden_layers": 10_000}),
    ],
)
def test_sizes_that_no_model_has_are_refused_without_memory_for_them(family: str, changes: dict[str, Any]) -> None:
    config = SIZES | TARGETS[family] | changes
    with limited(20, 1 << 29), pytest.raises(SpecbatchError):
        tensor_shapes(ModelConfig.from_dict(config))
