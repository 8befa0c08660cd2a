"""Parity of every family with transformers on tiny random checkpoints: prefill, chunked prefill, padded batches with
rejected drafts, and trees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from crossed import first_quick, slow_but
from safetensors.torch import load_file, save_file
from targets import SIZES as TARGET_SIZES
from targets import TARGETS
from thread_ranks import on_ranks
from transformers_features import YARN_MSCALE
from uncached import decoder_of, features_of, logits_of

from specbatch.core.attention_metadata import DecodeMetadata, PrefillMetadata, PromptChunk, positions_from
from specbatch.core.embedded_prompt import EmbeddingOverrides
from specbatch.kernels.attention.prefill.prefill_backends import prefill_backend
from specbatch.kernels.common.kv_slots import VerifiedRows
from specbatch.kernels.sampling.tree_verify import ancestor_words, tree_depths
from specbatch.memory.kv_cache import KVCache
from specbatch.memory.recurrent_state import RecurrentStates, state_types
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.full_forward import UncachedContext
from specbatch.models.layers.blocks import Attention
from specbatch.models.registry import family_modules
from specbatch.models.weight_shapes import parameter_count
from specbatch.weights import open_checkpoint

Close = Callable[[torch.Tensor, torch.Tensor], None]
PAGE, PAGES, SLOTS, ROWS, VOCABULARY = 4, 60, 5, 6, 131
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {**MOE, "shared_expert_intermediate_size": 40}
MAMBA = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "linear_attention", "mlp"],
    "ssm_state_size": 8,
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
}
SIGMOID = {
    **MAMBA,
    "layers_block_type": ["full_attention", "moe", "linear_attention", "moe", "mlp"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
LFM = {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3, "norm_eps": 1e-5}
LATENT: dict[str, Any] = {
    **{key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")},
    "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "rms_norm_eps": 1e-3,
}  # fmt: skip
THIRD = {"q_lora_rank": 20, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2}
NO_EPS = {key: value for key, value in SIZES.items() if key not in ("rms_norm_eps", "head_dim")}
DENSE_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DENSE: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(head_dim=16, tie_word_embeddings=True),
    "llama-biases": lambda: llama(head_dim=8, attention_bias=True, mlp_bias=True),
    "llama-llama3": lambda: llama(head_dim=16, rope_parameters=LLAMA3),
    "qwen2": lambda: qwen2(),
    "qwen2-yarn": lambda: qwen2(rope_parameters=YARN),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**DENSE_SIZES, sliding_window=6)),
    "ministral": lambda: hf.MinistralForCausalLM(
        hf.MinistralConfig(
            **DENSE_SIZES | {"head_dim": 16},
            sliding_window=2,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        )
    ),
    "gemma3": lambda: gemma3(rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "gemma4": lambda: gemma4(),
    "gemma4-shared-values": lambda: gemma4(
        attention_k_eq_v=True, num_global_key_value_heads=1, global_head_dim=32, final_logit_softcapping=None
    ),
    "gemma4-kv-heads": lambda: gemma4(
        attention_k_eq_v=True, num_attention_heads=12, num_key_value_heads=4, num_global_key_value_heads=6
    ),
    "gemma4-wide-local": lambda: gemma4(head_dim=32, attention_bias=True, tie_word_embeddings=False),
    "gemma4-e2b": lambda: gemma4(
        **PER_LAYER,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    ),
    "gemma4-e4b": lambda: gemma4(**PER_LAYER, num_kv_shared_layers=1, num_key_value_heads=1, attention_bias=True),
    "gemma3-untied": lambda: gemma3(
        tie_word_embeddings=False, layer_types=["full_attention", "sliding_attention", "sliding_attention"]
    ),
    "phi3": lambda: phi3(sliding_window=6),
    "phi4-longrope": lambda: phi3(
        partial_rotary_factor=0.67,
        num_key_value_heads=6,
        original_max_position_embeddings=64,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.3, 2.0],
            "long_factor": [2.0] * 4,
        },
    ),
    "qwen2-windows": lambda: qwen2(use_sliding_window=True, sliding_window=3, max_window_layers=1),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DENSE_SIZES, head_dim=24, tie_word_embeddings=False)),
}
FAMILIES: dict[str, Callable[[], Any]] = DENSE | {
    "qwen3-moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=True, mlp_only_layers=[2])
    ),
    "qwen3-moe-windows": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**SIZES, **MOE, use_sliding_window=True, sliding_window=6, mlp_only_layers=[1])
    ),
    "qwen3-moe-sparse": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=False, decoder_sparse_step=2)
    ),
    "qwen3-next": lambda: hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**SIZES, **DELTA, **SHARED, norm_topk_prob=True)),
    "qwen3-next-biases": lambda: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(**SIZES, **DELTA, **SHARED, attention_bias=True)
    ),
    "qwen3.5": lambda: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**SIZES, **DELTA)),
    "qwen3.5-moe": lambda: hf.Qwen3_5MoeForCausalLM(
        hf.Qwen3_5MoeTextConfig(**{k: v for k, v in SIZES.items() if k != "intermediate_size"}, **DELTA, **SHARED)
    ),
    "deepseek-v2-lite": lambda: hf.DeepseekV2ForCausalLM(
        hf.DeepseekV2Config(**LATENT, q_lora_rank=None, first_k_dense_replace=1, n_shared_experts=2)
    ),
    "deepseek-v2": lambda: hf.DeepseekV2ForCausalLM(
        hf.DeepseekV2Config(
            **LATENT,
            q_lora_rank=20,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=3.0,
            rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        )
    ),
    "deepseek-v3": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**LATENT, **THIRD)),
    "deepseek-v3-halves": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **LATENT | THIRD | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False},
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
        )
    ),
    "glm4-moe-lite": lambda: glm_lite(),
    "minimax-m2": lambda: minimax(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "minimax-m2-whole-rope": lambda: minimax(num_key_value_heads=1),
    "gemma4-moe": lambda: gemma4(
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=24,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "gemma4-towers": lambda: gemma4_towers(),
    "gpt-oss": lambda: gpt_oss(),
    "gpt-oss-plain": lambda: gpt_oss(attention_bias=False, sliding_window=2, tie_word_embeddings=True),
    "glm4-moe": lambda: glm(attention_bias=True, use_qk_norm=True, n_group=4, topk_group=2, first_k_dense_replace=1),
    "glm4-moe-plain": lambda: glm(n_shared_experts=2, norm_topk_prob=False, first_k_dense_replace=0),
    "nemotron-h": lambda: nemotron(**MAMBA),
    "nemotron-h-biases": lambda: nemotron(**MAMBA, use_bias=True, mlp_bias=True, time_step_limit=(0.3, 0.6)),
    "nemotron-h-moe": lambda: nemotron(**SIGMOID),
    "lfm2": lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**NO_EPS, **LFM, conv_bias=False)),
    "lfm2-moe": lambda: lfm_moe(),
    "lfm2-biases": lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**NO_EPS, **LFM, conv_bias=True)),
}


def of_target(name: str) -> Any:
    """The model of transformers for a target of the lossless matrix."""
    config = TARGET_SIZES | TARGETS[name] | {"vocab_size": VOCABULARY, "pad_token_id": None}
    model = getattr(hf, config.pop("architectures")[0])
    return model(model.config_class(**config))


DENSE |= {name: partial(of_target, name) for name in TARGETS if name not in FAMILIES}
FAMILIES |= DENSE


def llama(**changes: Any) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DENSE_SIZES, **changes))


def gemma3(**changes: Any) -> Any:
    sizes = DENSE_SIZES | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6}
    kinds = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**sizes | kinds | changes))


GEMMA4: dict[str, Any] = {
    "head_dim": 16, "global_head_dim": 24, "sliding_window": 6, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"], "final_logit_softcapping": 2.0,
}  # fmt: skip


PER_LAYER: dict[str, Any] = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
SHARING = ("gemma4-e2b", "gemma4-e4b")


def gemma4(**changes: Any) -> Any:
    model = hf.Gemma4ForCausalLM(hf.Gemma4TextConfig(**DENSE_SIZES | GEMMA4 | changes))
    for layer in model.model.layers:
        layer.layer_scalar.uniform_(0.5, 1.5)
    return model


def gemma4_towers() -> Any:
    """A multimodal checkpoint, of which only the text model is read."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 16,
    }
    text = hf.Gemma4TextConfig(**DENSE_SIZES | GEMMA4 | PER_LAYER, num_kv_shared_layers=1)
    return hf.Gemma4ForConditionalGeneration(hf.Gemma4Config(text_config=text, vision_config=vision))


def phi3(**changes: Any) -> Any:
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return hf.Phi3ForCausalLM(hf.Phi3Config(**DENSE_SIZES | ends | changes))


def glm(**changes: Any) -> Any:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    described = SIZES | experts | {"routed_scaling_factor": 2.5} | changes
    model = hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**described))
    for layer in model.model.layers[described["first_k_dense_replace"] :]:
        layer.mlp.gate.e_score_correction_bias.normal_()
    return model


def glm_lite(**changes: Any) -> Any:
    own = {"q_lora_rank": 20, "n_shared_experts": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-3}
    model = hf.Glm4MoeLiteForCausalLM(hf.Glm4MoeLiteConfig(**LATENT | own | changes))
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.normal_()
    return model


def minimax(**changes: Any) -> Any:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24}
    model = hf.MiniMaxM2ForCausalLM(hf.MiniMaxM2Config(**SIZES | experts | changes))
    for layer in model.model.layers:
        layer.mlp.e_score_correction_bias.normal_()
    return model


def lfm_moe() -> Any:
    own = MOE | {"num_dense_layers": 1, "routed_scaling_factor": 1.5}
    model = hf.Lfm2MoeForCausalLM(hf.Lfm2MoeConfig(**NO_EPS | LFM | own))
    for layer in model.model.layers[1:]:
        layer.feed_forward.expert_bias.normal_()
    return model


def gpt_oss(**changes: Any) -> Any:
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6}
    rope = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    described = SIZES | experts | {"rope_parameters": rope | {"truncate": False}} | changes
    return hf.GptOssForCausalLM(hf.GptOssConfig(**described, attn_implementation="eager"))


def qwen2(**changes: Any) -> Any:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**DENSE_SIZES | {"num_attention_heads": 4}, **changes))


def nemotron(**sizes: Any) -> Any:
    plain = {key: value for key, value in SIZES.items() if key not in ("rms_norm_eps", "num_hidden_layers")}
    return hf.NemotronHForCausalLM(hf.NemotronHConfig(**plain, **sizes))


def test_every_family_is_in_the_lossless_matrix() -> None:
    found = {ModelConfig.from_dict(TARGET_SIZES | config).module for config in TARGETS.values()}
    assert found == set(family_modules())


SLOW = ("llama-llama3", "qwen2-yarn", "qwen2-windows")  # test_rope.py compares the frequencies
# Differ from others in weights, activations or sizes, which prompts show; slow where passes are divided.
ALIKE = (
    *("llama-biases", "gemma3-untied", "gemma4-wide-local", "gemma4-kv-heads", "gemma4-e4b", "gemma4-towers"),
    *("qwen3-moe-sparse", "qwen3-next-biases", "deepseek-v2-lite", "deepseek-v3-halves", "minimax-m2-whole-rope"),
    *("gpt-oss-plain", "glm4-moe-plain", "nemotron-h-biases", "lfm2-biases"),
)
DIVIDED = slow_but(FAMILIES.keys() - {*SLOW, *ALIKE}, FAMILIES)
# One for each kind of attention and state; of the others, verifies of chains are quick.
MIXERS = slow_but(
    (
        *("llama", "ministral", "phi4-longrope", "gemma4", "gemma4-e2b", "gemma4-shared-values", "gpt-oss"),
        *("deepseek-v2", "qwen3-next", "qwen3.5", "nemotron-h", "lfm2"),
    ),
    FAMILIES,
)


@pytest.fixture(params=slow_but(FAMILIES.keys() - SLOW, FAMILIES), scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    """A transformers model, and ours from its files. All weights are random, so that each matters."""
    if request.param == "deepseek-v2":
        YARN_MSCALE.require()
    torch.manual_seed(5)
    theirs = FAMILIES[request.param]().eval().float()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + (0.5 if "A_log" not in name else 0.0))
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.2 / parameter[0].numel() ** 0.5)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, decoder_of(open_checkpoint(str(folder)))


def memory_of(ours: Decoder) -> KVCache:
    """Filled with NaN where possible: the previous content of a slot must not matter."""
    config: ModelConfig = ours.config
    states = None
    if ours.recurrent_layers:
        types = state_types(torch.float32, "fp32")
        states = RecurrentStates(config.state_shapes, ours.recurrent_layers, SLOTS + 1, ROWS, types, CPU)
        for layer in states.layers:
            for tensor in layer.values():
                tensor[1:] = torch.nan
    backend = prefill_backend("torch", CPU)
    return KVCache(config, ours.kv_layers, PAGES, PAGE, torch.float32, CPU, backend, states)


def sequences(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


def page_table(width: int) -> torch.Tensor:
    """Scattered pages for each device row except row 0."""
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3)) + 1
    width = -(-width // PAGE)
    table = torch.zeros(SLOTS + 1, width, dtype=torch.int64)
    table[1:] = pages[: SLOTS * width].view(SLOTS, width)
    return table


def expected(theirs: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = theirs(tokens[None], use_cache=False).logits[0]
    return logits


@pytest.fixture
def close(request: pytest.FixtureRequest) -> Close:
    name = request.node.callspec.params["pair"]
    bound = 2e-5 if name in SHARING else 1e-5 if name in DENSE else 3e-4

    def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error < bound, f"relative error {error:.2e}"

    return check


def prompt(
    ours: Decoder, cache: KVCache, table: torch.Tensor, spans: list[PromptChunk], tokens: torch.Tensor
) -> torch.Tensor:
    metadata = PrefillMetadata(table, spans, PAGE)
    cache.begin(metadata.spans)
    return ours.logits(ours.forward(tokens, metadata.positions, metadata.bind(cache)).last)


def test_prefill_of_a_ragged_batch(pair: tuple[Any, Decoder], close: Close) -> None:
    theirs, ours = pair
    batch = sequences(41, 1, 9)
    spans = [PromptChunk(slot, 0, len(item)) for slot, item in zip((3, 1, 5), batch, strict=True)]
    logits = prompt(ours, memory_of(ours), page_table(41), spans, torch.cat(batch))
    for part, item in zip(logits.split([41, 1, 9]), batch, strict=True):
        close(part, expected(theirs, item))


def test_features_match_hidden_states_of_transformers(pair: tuple[Any, Decoder], close: Close) -> None:
    """Draft heads count layers like transformers, including those without a mixer."""
    theirs, ours = pair
    (tokens,) = sequences(9)
    depth = ours.config.depth
    aux = features_of(ours.with_aux(tuple(range(depth - 1))), tokens).aux
    assert aux is not None
    with torch.no_grad():
        wanted = theirs(tokens[None], use_cache=False, output_hidden_states=True).hidden_states
    assert len(wanted) == depth + 1
    for part, item in zip(aux.chunk(depth - 1, 1), wanted[1:-1], strict=True):
        close(part, item[0])


def test_features_with_selected_rows(pair: tuple[Any, Decoder], close: Close) -> None:
    """Rows select hidden states, not features; features keep the order in which they are requested."""
    theirs, ours = pair
    (tokens,) = sequences(9)

    def forward(model: Decoder, *rows: torch.Tensor) -> Any:
        return model.forward(tokens, torch.arange(9), UncachedContext(model, 1, 9), *rows)

    with torch.no_grad():
        states = theirs(tokens[None], use_cache=False, output_hidden_states=True).hidden_states
    assert forward(ours).aux is None
    last, aux = forward(ours.with_aux((1, 0)))
    close(last, states[-1][0])  # both after the final norm
    close(aux, torch.cat([states[2][0], states[1][0]], -1))
    some = forward(ours.with_aux((1, 0)), torch.tensor([8, 3]))
    close(some.last, last[[8, 3]])
    close(some.aux, aux)
    with pytest.raises(AssertionError, match="of all tokens"):
        forward(ours.with_aux((0, ours.config.depth - 1)), torch.tensor([8]))


@pytest.mark.parametrize("pair", DENSE, indirect=True)
def test_parameter_count(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    scalars = [buffer for name, buffer in theirs.named_buffers() if name.endswith("layer_scalar")]
    assert parameter_count(ours.config) == sum(one.numel() for one in [*theirs.parameters(), *scalars])


@pytest.mark.parametrize("pair", [name for name in DENSE if name not in SHARING], indirect=True)
def test_skipped_layers_share_weights(pair: tuple[Any, Decoder], close: Close) -> None:
    theirs, ours = pair
    view = ours.without({1})
    assert view.layers == (ours.layers[0], *ours.layers[2:])
    (tokens,) = sequences(9)
    logits = prompt(view, memory_of(view), page_table(9), [PromptChunk(1, 0, 9)], tokens)
    layers = theirs.model.layers
    theirs.model.layers = torch.nn.ModuleList([layers[0], *layers[2:]])
    try:
        close(logits, expected(theirs, tokens))
    finally:
        theirs.model.layers = layers


@pytest.mark.parametrize("pair", MIXERS, indirect=True, scope="module")
@pytest.mark.parametrize("chunk", first_quick(1, [3, 1, 4, 7]))
def test_chunked_prefill(pair: tuple[Any, Decoder], close: Close, chunk: int) -> None:
    theirs, ours = pair
    (tokens,) = sequences(22)
    table, cache, parts = page_table(22), memory_of(ours), []
    for start in range(0, 22, chunk):
        end = min(start + chunk, 22)
        parts.append(prompt(ours, cache, table, [PromptChunk(2, start, end)], tokens[start:end]))
    close(torch.cat(parts), expected(theirs, tokens))


@pytest.mark.parametrize("pair", DIVIDED, indirect=True, scope="module")
@pytest.mark.parametrize("rows", first_quick(1, [4, 1, 6]))
def test_verify_of_a_padded_batch(pair: tuple[Any, Decoder], close: Close, rows: int) -> None:
    """Each sequence accepts a varying number of its drafts; rejected drafts were wrong."""
    theirs, ours = pair
    batch = sequences(40, 33, 25)
    table, cache, slots = page_table(40 + ROWS), memory_of(ours), torch.tensor([4, 1, 2, 0])
    heads = [9, 2, 5]
    spans = [PromptChunk(slot, 0, head) for slot, head in zip((4, 1, 2), heads, strict=True)]
    prompt(ours, cache, table, spans, torch.cat([item[:head] for item, head in zip(batch, heads, strict=True)]))
    lengths, generator = torch.tensor([*heads, 1]), torch.Generator().manual_seed(rows)
    wanted = [expected(theirs, item) for item in batch]
    for _ in range(6):
        accepted = torch.randint(0, rows, (4,), generator=generator)
        tokens = torch.randint(0, VOCABULARY, (4, rows), generator=generator)
        for index, item in enumerate(batch):
            there = item[lengths[index] : lengths[index] + accepted[index] + 1]
            accepted[index] = len(there) - 1
            tokens[index, : len(there)] = there
        verify = DecodeMetadata(table, slots, lengths, rows, PAGE)
        hidden = ours.forward(tokens.flatten(), positions_from(lengths, rows).flatten(), verify.bind(cache)).last
        logits = ours.logits(hidden).view(4, rows, -1)
        for index in range(3):
            start, count = int(lengths[index]), int(accepted[index]) + 1
            close(logits[index, :count], wanted[index][start : start + count])
        cache.commit(VerifiedRows(table, slots, lengths, accepted), None)
        lengths = torch.where(slots > 0, lengths + accepted + 1, lengths)
        if (lengths[:3] >= torch.tensor([len(item) - 1 for item in batch])).any():
            break


@pytest.mark.parametrize("pair", MIXERS, indirect=True, scope="module")
def test_tree_verify(pair: tuple[Any, Decoder], close: Close) -> None:
    """Every node of a tree has the logits of its ancestors' text, and decoding continues from the accepted path."""
    theirs, ours = pair
    (text,) = sequences(8)
    table, cache, slots = page_table(40), memory_of(ours), torch.tensor([3])
    prompt(ours, cache, table, [PromptChunk(3, 0, 8)], text)
    known, generator = text.tolist(), torch.Generator().manual_seed(1)
    parents = torch.tensor([[0, 0, 1, 1, 3]])  # of nodes 1..5
    words = ancestor_words(parents, 4)
    for path in ([0, 2], [0, 1, 3, 5], [0]):
        lengths = torch.tensor([len(known)])
        tokens = torch.randint(0, VOCABULARY, (6,), generator=generator)
        positions = (lengths[:, None] + tree_depths(words)).flatten()
        verify = DecodeMetadata(table, slots, lengths, 6, PAGE, ancestors=words)
        logits = ours.logits(ours.forward(tokens, positions, verify.bind(cache)).last)
        texts = [known + [int(tokens[n]) for n in range(6) if int(words[0, node]) >> n & 1] for node in range(6)]
        longest = max(map(len, texts))
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        with torch.no_grad():
            wanted = theirs(padded, use_cache=False).logits
        for node, text in enumerate(texts):
            close(logits[node], wanted[node, len(text) - 1])
        order = path + [node for node in range(6) if node not in path]
        verified = VerifiedRows(table, slots, lengths, torch.tensor([len(path) - 1]))
        cache.commit(verified, torch.tensor([order]))
        known += [int(tokens[node]) for node in path]


def test_given_embeddings_have_the_per_layer_row_of_the_padding_token(tmp_path: Path) -> None:
    """As transformers has it for images. Only the text model's weights are read, also where it has unused ones."""
    theirs = gemma4(**PER_LAYER, num_kv_shared_layers=1, pad_token_id=5).eval()
    theirs.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    unused = {f"model.layers.2.self_attn.{part}.weight": torch.ones(3) for part in ("k_proj", "v_proj", "k_norm")}
    save_file(weights | unused, tmp_path / "model.safetensors")
    ours = decoder_of(open_checkpoint(str(tmp_path)))
    (tokens,), places = sequences(9), torch.tensor([2, 3, 7])
    values = torch.randn(3, DENSE_SIZES["hidden_size"])
    given = EmbeddingOverrides(places, values)
    found = ours.forward(tokens, torch.arange(9), UncachedContext(ours, 1, 9), overrides=given).last
    embeddings = theirs.model.embed_tokens(tokens).index_copy(0, places, values)
    of_tokens = theirs.model.get_per_layer_inputs(tokens.index_fill(0, places, 5)[None], None)
    with torch.no_grad():
        wanted = theirs.model(inputs_embeds=embeddings[None], per_layer_inputs=of_tokens).last_hidden_state[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["backbone.embeddings.weight", "backbone.embedding.weight"])
def test_embedding_of_nemotron_h_has_two_names(name: str, tmp_path: Path) -> None:
    """Published checkpoints have the first, transformers before 5.16 saves the second."""
    nemotron(**MAMBA).float().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (saved,) = (other for other in weights if other.startswith("backbone.embedding"))
    embedding = weights[name] = weights.pop(saved)
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert sorted(checkpoint.names()) == sorted(weights)
    assert torch.equal(decoder_of(checkpoint).embedding, embedding)


def test_weights_of_padded_norms_are_not_rounded_again(tmp_path: Path) -> None:
    """Gemma 4 in BF16: the norms of narrow heads are scaled for their padding, by the root of 16 / 24."""
    gemma4().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    local = decoder_of(checkpoint, dtype=torch.bfloat16).layers[0].mixer
    assert isinstance(local, Attention)
    weight = checkpoint.tensor("model.layers.0.self_attn.k_norm.weight").bfloat16().double()
    found = local.heads.k_norm
    assert found is not None
    assert torch.allclose(found[found != 0].double(), weight * (16 / 24) ** 0.5, rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["gemma4-kv-heads", "nemotron-h-biases", "qwen3-next-biases", "minimax-m2", "minimax-m2-whole-rope"]
)
def test_biases_and_norms_and_repeated_heads_on_two_ranks(name: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    theirs = FAMILIES[name]().eval().float()
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "bias" in key:
                parameter.uniform_(0.5, 1.5)
    theirs.save_pretrained(tmp_path)
    checkpoint, tokens = open_checkpoint(str(tmp_path)), sequences(9)[0]
    whole = logits_of(decoder_of(checkpoint), tokens)
    for part in on_ranks(2, lambda ranks: logits_of(decoder_of(checkpoint, ranks=ranks), tokens)):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)


def test_defaults_of_glm4_moe_lite() -> None:
    described = hf.Glm4MoeLiteConfig(n_shared_experts=1).to_dict() | {"architectures": ["Glm4MoeLiteForCausalLM"]}
    stated = ("q_lora_rank", "qk_nope_head_dim", "v_head_dim", "n_group", "topk_group", "routed_scaling_factor")
    less = {key: value for key, value in described.items() if key not in (*stated, "mlp_layer_types")}
    found = ModelConfig.from_dict(less)
    assert found == ModelConfig.from_dict(described)
    assert getattr(found, "dense_layers", None) == 1
