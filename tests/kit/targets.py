"""Tiny targets of every family whose texts half repeat themselves, drafters that know how, and naive decoding."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from opening import opening
from quantized_weights import FORMATS
from safetensors.torch import save_file

from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.core.attention_metadata import PrefillMetadata, PromptChunk
from specbatch.drafters import lilicorr
from specbatch.engine.engine import Engine
from specbatch.kernels.attention.prefill.prefill_backends import prefill_backend
from specbatch.memory.kv_cache import KVCache
from specbatch.memory.recurrent_state import RecurrentStates, state_types
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.heads.eagle import eagle_shapes
from specbatch.models.heads.lilicorr import published_head, published_shape
from specbatch.models.weight_shapes import tensor_shapes, weight_shapes
from specbatch.progress.bars import Report

SIZES: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = {**_MOE, "shared_expert_intermediate_size": 24}
_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4}
_SIGMOID = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], **_MOE, "norm_topk_prob": True, "mlp_only_layers": [2]},
    "qwen3-next": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **_DELTA, **_SHARED},
    "qwen3.5": {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **_DELTA},
    "qwen3.5-moe": {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", **_DELTA, **_SHARED},
    "nemotron-h": {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-M*-M", **_MAMBA},
    "nemotron-h-moe": {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "MEM*EM-",
        **_MAMBA,
        **_SIGMOID,
    },
    "glm4-moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "use_qk_norm": True,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        **_SIGMOID,
    },
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
    },
    "lfm2-moe": {
        "architectures": ["Lfm2MoeForCausalLM"],
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "norm_eps": 1e-5,
        "num_dense_layers": 1,
        **_MOE,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
    },
}

WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 5},
    "ministral": {
        "architectures": ["MinistralForCausalLM"],
        "sliding_window": 3,  # shorter than a path of a tree
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    },
}
WINDOWED["gemma3"] = {
    "architectures": ["Gemma3ForCausalLM"],
    "sliding_window": 4,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 24,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
WINDOWED["gemma4"] = {
    "architectures": ["Gemma4ForCausalLM"],
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 6.0,
}
_GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 16}
WINDOWED["gemma4-moe"] = WINDOWED["gemma4"] | _GEMMA4_MOE
WINDOWED["gemma4-e2b"] = WINDOWED["gemma4"] | {
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 40,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 4,
    "intermediate_size": 32,
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
}  # fmt: skip
WINDOWED["gpt-oss"] = GPT_OSS
_LATENT = {
    "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "num_experts_per_tok": 2,
    "n_routed_experts": 6, "moe_intermediate_size": 16,
}  # fmt: skip
# Multi-head latent attention.
LATENT: dict[str, dict[str, Any]] = {
    "deepseek-v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        **_LATENT,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        **_LATENT,
        "q_lora_rank": 16,
        "first_k_dense_replace": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "rope_scaling": {
            "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.8,
        },
    },
}  # fmt: skip
LONG: dict[str, Any] = {"type": "longrope", "short_factor": [1.0, 1.3, 1.7, 2.0], "long_factor": [4.0] * 4}
PHI: dict[str, Any] = {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5, "rope_scaling": LONG}
PHI["original_max_position_embeddings"] = 16  # of 512: texts get longer
TARGETS: dict[str, dict[str, Any]] = {"llama": {"architectures": ["LlamaForCausalLM"]}, "phi3": PHI}
TARGETS |= {**WINDOWED, **HYBRIDS, **LATENT}

# Llamas by the format of their weights; their widths are whole groups of inputs.
QUANTIZED = {
    name: {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "quantization_config": described,
    }
    for name, (described, _) in FORMATS.items()
}
# Recurrent layers only; pages still count the tokens.
WITHOUT_ATTENTION = {
    f"{name} without attention": TARGETS[name] | layers
    for name, layers in {
        "qwen3.5": {"layer_types": ["linear_attention"] * 4},
        "nemotron-h": {"hybrid_override_pattern": "MM-M"},
        "lfm2": {"layer_types": ["conv"] * 4},
    }.items()
}
DRAFTS = {"drafts": TARGETS["llama"], "recurrent-drafts": TARGETS["qwen3.5"]}
DRAFTS["other-drafts"] = TARGETS["llama"] | {"vocab_size": SIZES["vocab_size"] - 3}

MTP = ("glm4-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe", "deepseek-v3")  # whose checkpoints hold a draft head


class Letters:
    """A tokenizer of single characters."""

    name, bos_id, has_chat_template, vocab_size = "letters", None, False, SIZES["vocab_size"]
    eos_id, eos_ids = 2, frozenset({2})
    byte_tokens: dict[int, int] = {}  # noqa: RUF012
    hidden: dict[str, int] = {}  # noqa: RUF012

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - 64 for letter in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(64 + token) for token in ids)

    def vocabulary(self) -> list[str]:
        return [self.decode([token]) for token in range(self.vocab_size)]

    def token_bytes(self) -> list[bytes | None]:
        return [text.encode() for text in self.vocabulary()]

    @property
    def shown_bytes(self) -> list[bytes | None]:
        return self.token_bytes()


class OtherLetters(Letters):
    """The letters of the target in another order, without some of them, and with one that it lacks."""

    name, vocab_size = "other letters", SIZES["vocab_size"] - 3
    eos_id, eos_ids = 7, frozenset({7})
    of_target = tuple(5 * token % SIZES["vocab_size"] for token in range(vocab_size))

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join("?" if token == 11 else chr(64 + self.of_target[token]) for token in ids)


# Scale of the embedding relative to the layers, so that about every other token is the one it predicts.
STRENGTHS = {
    "llama": 1.2, "mistral": 1.2, "ministral": 1.2, "gemma3": 0.45, "gemma4": 0.45, "gemma4-moe": 0.45,
    "gemma4-e2b": 0.45, "gpt-oss": 1.6,
    "qwen3-moe": 1.0, "qwen3-next": 2.6, "qwen3.5": 2.8, "qwen3.5-moe": 2.8, "nemotron-h": 1.2,
    "nemotron-h-moe": 1.9, "lfm2": 1.3, "lfm2-moe": 1.3, "glm4-moe": 1.8, "minimax-m2": 1.5, "phi3": 1.2, "drafts": 2.0,
    "recurrent-drafts": 2.0, "other-drafts": 2.0, "deepseek-v2": 0.8, "deepseek-v3": 1.0,
}  # fmt: skip


class TargetCheckpoint:
    """One of `TARGETS`, `WITHOUT_ATTENTION` or `DRAFTS`, random. Its texts half repeat themselves: on token 4n + i
    should follow 4n + (i + 1) % 4 by the embedding, and layers make another one of it about as often. Drafts follow the
    embedding: `DRAFTS`, the MTP head beside a target and `eagle_head` have layers of little weight. mtp_layers: of that
    head."""

    origin = "memory"
    grouped = None

    def __init__(self, name: str, mtp_layers: int | None = None) -> None:
        self.name = name
        read = ModelConfig.from_dict(SIZES | (TARGETS | DRAFTS | QUANTIZED | WITHOUT_ATTENTION)[name]).for_length(44)
        self.config = replace(read, mtp_layers=mtp_layers)
        self.tensors = random_weights(weight_shapes(self.config), 0.05 if name in DRAFTS else 1.0)
        vocabulary, hidden = self.config.vocab_size, self.config.hidden_size
        embedding = STRENGTHS.get(name.removesuffix(" without attention"), STRENGTHS["llama"]) * torch.randn(
            vocabulary, hidden, generator=torch.Generator().manual_seed(2)
        )
        last = torch.arange(vocabulary) // 4 * 4 + (torch.arange(vocabulary) - 1) % 4
        head = embedding[last.clamp(max=vocabulary - 1)] / math.sqrt(hidden)
        if name == "other-drafts":
            every = TargetCheckpoint("drafts").tensors
            both = (every[self.config.names.embedding], every[self.config.names.head])
            embedding, head = (tensor[list(OtherLetters.of_target)] for tensor in both)
        self.tensors[self.config.names.embedding], self.tensors[self.config.names.head] = embedding, head
        self.mtp: dict[str, tuple[int, ...]] = {}
        self.cache: dict[str, tuple[int, ...]] = {}
        if name in MTP:
            network = import_module(self.config.mtp_module)
            self.mtp = tensor_shapes(network.mtp_config(self.config, layers=mtp_layers or 1))
            for join in (key for key in self.mtp if key.endswith(("mtp.fc.weight", "eh_proj.weight"))):
                stem = join.removesuffix("eh_proj.weight")  # of a layer, or all of them
                part = {key: shape for key, shape in self.mtp.items() if stem == join or key.startswith(stem)}
                self.tensors |= head_weights(part, join, 0.0 if "eh_proj" in join else -1.0)
        self.meant, quantization = self.tensors, self.config.quantization
        if quantization is not None:  # `tensors` as they are stored, in place of those that are `meant`
            stored = quantization.except_for(self.config.unquantized_ends)
            pairs = {
                name: FORMATS[self.name][1](name, tensor)
                for name, tensor in self.meant.items()
                if stored.is_quantized(name, tensor.shape)
            }
            self.meant = self.tensors | {name: meant for name, (_, meant) in pairs.items()}
            self.tensors = self.tensors | {name: part for parts, _ in pairs.values() for name, part in parts.items()}
            scales = tensor_shapes(self.config)
            for name, shape in scales.items():  # per tensor: a folder spreads them over the outputs
                self.tensors[name] = self.tensors[name].expand(shape)

    def names(self) -> list[str]:
        return list(tensor_shapes(self.config))

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def tokenizer(self) -> Letters:
        return OtherLetters() if self.name == "other-drafts" else Letters()

    def eagle_head(self, folder: Path) -> str:
        """A head of two layers for it in SafeAILab's format, with the target's embedding and output matrix."""
        described = SIZES | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
        described["hidden_size"] = self.config.hidden_size
        shapes = eagle_shapes(ModelConfig.from_dict(described), {})
        (folder / "config.json").write_text(json.dumps(described))
        save_file(head_weights(shapes, "fc.weight", 0.0), folder / "model.safetensors")
        return str(folder)


def random_weights(shapes: dict[str, tuple[int, ...]], scale: float) -> dict[str, torch.Tensor]:
    """Random matrices of `scale`, random vectors, and states that decay slowly."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            found[name] = torch.rand(shape, generator=generator) + (-2.0 if name.endswith("A_log") else 0.5)
        else:
            inputs = shape[2] if len(shape) == 3 and shape[1] == 1 else shape[-1]  # of a convolution its taps
            found[name] = torch.randn(shape, generator=generator) * (scale / math.sqrt(inputs))
    return found


def head_weights(shapes: dict[str, tuple[int, ...]], join: str, shift: float) -> dict[str, torch.Tensor]:
    """Weights of a head whose `join` mostly copies the token's embedding; shift: added to vectors."""
    found = random_weights(shapes, 0.1)
    hidden = shapes[join][0]
    found[join][:, :hidden] += torch.eye(hidden)
    return {name: tensor + shift if tensor.dim() == 1 else tensor for name, tensor in found.items()}


LONGEST = 20


def _guessed(start: list[int], length: int) -> list[int]:
    """A text that goes on as the embedding of `TargetCheckpoint` predicts."""
    text = [*start]
    while len(text) < length:
        text.append(min(text[-1] // 4 * 4 + (text[-1] + 1) % 4, SIZES["vocab_size"] - 1))
    return text


def _narrow_lilicorr(target: ModelConfig) -> dict[str, Any]:
    """The published shape, but for the width of its head."""
    shape = published_shape(target)
    return shape | {"dflash_config": shape["dflash_config"] | published_head(target, 64)}


class Targets:
    """`TARGETS` with naive decoding, and engines over them."""

    checkpoint = staticmethod(cache(TargetCheckpoint))

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prompts(self, name: str) -> list[list[int]]:
        """Six prompts, two of which share a prefix of 9 tokens."""
        return [prompt for prompt, _ in self._decoded(name)]

    def greedy(self, name: str, count: int) -> list[list[int]]:
        """The greedy continuation of each prompt, up to `LONGEST` tokens."""
        assert count <= LONGEST
        return [tokens[:count] for _, tokens in self._decoded(name)]

    def logits(self, name: str, texts: list[list[int]]) -> list[torch.Tensor]:
        """float64 [len(text), V] for each text: all of them in one pass, without a cache."""
        found, cpu = self.checkpoint(name), torch.device("cpu")
        config = found.config
        model = self._reference(name)
        types = dict.fromkeys(state_types(torch.float64, "fp32"), torch.float64)
        attention = prefill_backend("torch", cpu)
        table = torch.arange(len(texts) + 1)[:, None]
        states = RecurrentStates(config.state_shapes, max(model.recurrent_layers, 1), len(table), 1, types, cpu)
        kv = KVCache(config, model.kv_layers, len(texts), 64, torch.float64, cpu, attention, states)
        metadata = PrefillMetadata(table, [PromptChunk(row + 1, 0, len(text)) for row, text in enumerate(texts)], 64)
        tokens = torch.tensor([token for text in texts for token in text])
        hidden = model.forward(tokens, metadata.positions, metadata.bind(kv)).last
        return list(model.logits(hidden).split([len(text) for text in texts]))

    @cache  # noqa: B019
    def _reference(self, name: str) -> Decoder:
        found, cpu = self.checkpoint(name), torch.device("cpu")
        config = replace(found.config, quantization=None)
        return Decoder(config, found.meant.__getitem__, dtype=torch.float64, device=cpu, max_positions=64)

    @cache  # noqa: B019
    def _decoded(self, name: str) -> list[tuple[list[int], list[int]]]:
        """Keeps prompts where no two tokens are almost tied."""
        generator = torch.Generator().manual_seed(3)
        shared = torch.randint(3, 37, (9,), generator=generator).tolist()
        drawn = [torch.randint(3, 37, (n,), generator=generator).tolist() for n in (11, 10, 5, 8, 1, 3, 7, 2)]
        starts = [*([*shared, 5 * n, 9] for n in range(5)), *drawn]
        kept: tuple[list[Any], list[Any]] = [], []
        for some in ([0, 1, 2, 5, 6, 7, 8, 9], [3, 4, 10, 11, 12]):  # the second half where too few of the first are
            for place, (tokens, is_clear) in zip(some, self._continued(name, [starts[at] for at in some]), strict=True):
                if is_clear:
                    kept[place >= 5].append((starts[place], tokens))
            if len(kept[0]) >= 2 and len(kept[1]) >= 4:
                return [*kept[1][:2], *kept[0][:2], *kept[1][2:4]]
        raise AssertionError(f"{name}: too few prompts without tokens that are almost tied")

    def _continued(self, name: str, starts: list[list[int]]) -> list[tuple[list[int], bool]]:
        """The greedy continuation of each text by `LONGEST` tokens, and whether all of its tokens are clear. Guesses
        how texts go on, and corrects the first wrong token of each until a pass over the whole texts confirms all."""
        texts, known = [_guessed(start, len(start) + LONGEST) for start in starts], list(map(len, starts))
        while True:
            found = [
                logits[len(start) - 1 : -1] for start, logits in zip(starts, self.logits(name, texts), strict=True)
            ]
            if all(count == len(text) for count, text in zip(known, texts, strict=True)):
                margins = [-logits.topk(2).values.diff()[:, 0] for logits in found]
                ends = zip(starts, texts, margins, strict=True)
                return [(text[len(start) :], bool((margin > 0.005).all())) for start, text, margin in ends]
            for place, (start, logits) in enumerate(zip(starts, found, strict=True)):
                text, best = texts[place], [*start, *logits.argmax(-1).tolist()]
                right = next((at for at in range(len(text)) if text[at] != best[at]), len(text) - 1)
                known[place] = right + 1  # the first wrong one is corrected
                texts[place] = _guessed([*text[:right], best[right]], len(text))

    def engine(
        self,
        name: str,
        algorithm: str = "none",
        schedule: str = "v2",
        more: dict[str, Any] | None = None,
        log: Callable[[str], None] | None = None,
        report: Report | None = None,
        **changes: Any,
    ) -> Engine:
        """algorithm: one of SPECULATIONS; more: of its settings; changes: settings of EngineConfig."""
        settings = SPECULATIONS[algorithm] | (more or {})
        if settings.get("algorithm") == "eagle":
            settings["draft"] = self.eagle(name)
        config = {"max_running": 4, "max_model_len": 44, "page_size": 4, "device": "cpu", "graphs": Graphs()} | changes
        config.setdefault("load_format", "dummy" if settings.get("draft") == "dummy" else "auto")
        config = {"speculation": Speculation(**settings, schedule=schedule)} | config

        def opened(model: str, *_: Any, **__: Any) -> TargetCheckpoint:
            return self.checkpoint(model, 3) if algorithm.startswith("mtp-layers") else self.checkpoint(model)

        with opening(opened), pytest.MonkeyPatch.context() as patch:
            if config["device"] == "cpu":  # a head of width 1024 takes most of the time of such a test
                patch.setattr(lilicorr, "published_shape", _narrow_lilicorr)
            return Engine(EngineConfig(model=name, **config), log=log, report=report)

    @cache  # noqa: B019
    def eagle(self, name: str) -> str:
        folder = self._folder / name
        folder.mkdir()
        return self.checkpoint(name).eagle_head(folder)


_MODEL = {"algorithm": "standalone", "draft": "drafts"}
_TREE = {"draft_steps": 3, "draft_topk": 2, "draft_tokens": 5}
SPECULATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"algorithm": "ngram", "draft_tokens": 3, "ngram_min": 1},
    "ngram-auto": {"algorithm": "ngram", "draft_tokens": "auto", "draft_steps": 6, "ngram_min": 1},
    "ngram-tree": {"algorithm": "ngram", "draft_steps": 3, "draft_topk": 2, "ngram_min": 1},
    "ngram-budget": {"algorithm": "ngram", "draft_tokens": 5, "ngram_min": 1, "verify_budget": 2.2},
    "ngram-budget-auto": {"algorithm": "ngram", "draft_tokens": 5, "ngram_min": 1, "verify_budget": "auto"},
    "ngram-corpus": {"algorithm": "ngram", "draft_tokens": 3, "ngram_min": 1, "corpus": "run", "corpus_min": 1},
    "model": {**_MODEL, "draft_tokens": 3},
    "model-corpus-auto": {
        **_MODEL, "draft_tokens": "auto", "draft_steps": 3, "corpus": "run", "corpus_min": 1,
    },
    "model-block": {**_MODEL, "draft_tokens": 3, "verification": "block"},
    "model-budget": {**_MODEL, "draft_tokens": 4, "verify_budget": 2.5},
    "model-budget-auto": {**_MODEL, "draft_tokens": 4, "verify_budget": "auto"},
    "model-auto-budget-auto": {**_MODEL, "draft_tokens": "auto", "draft_steps": 3, "verify_budget": "auto"},
    "model-recurrent": {"algorithm": "standalone", "draft": "recurrent-drafts", "draft_tokens": 3},
    "model-auto": {**_MODEL, "draft_tokens": "auto", "draft_steps": 3},
    "model-other": {"algorithm": "standalone", "draft": "other-drafts", "draft_tokens": 3},  # another vocabulary
    "model-other-tree": {"algorithm": "standalone", "draft": "other-drafts", **_TREE},
    "model-tree": {**_MODEL, "draft_steps": 5, "draft_topk": 3, "draft_tokens": 7},
    "model-tree-pruned": {**_MODEL, "draft_steps": 4, "draft_topk": 4, "draft_tokens": 4},  # runs more than it verifies
    "eagle": {"algorithm": "eagle"},
    "eagle-tree": {"algorithm": "eagle", **_TREE},
    "eagle3": {"algorithm": "eagle3", "draft": "dummy"},
    "eagle3-auto": {"algorithm": "eagle3", "draft": "dummy", "draft_tokens": "auto"},
    "eagle3-corpus-budget": {
        "algorithm": "eagle3", "draft": "dummy", "corpus": "run", "corpus_min": 1, "verify_budget": 2,
    },
    "eagle3-budget-auto": {"algorithm": "eagle3", "draft": "dummy", "draft_tokens": "auto", "verify_budget": "auto"},
    "eagle3-corpus": {"algorithm": "eagle3", "draft": "dummy", "corpus": "run", "corpus_min": 1},
    "peagle": {"algorithm": "peagle", "draft": "dummy", "draft_tokens": 3},
    "peagle-auto": {"algorithm": "peagle", "draft": "dummy", "draft_tokens": "auto", "draft_steps": 4},
    "mtp": {"algorithm": "mtp"},
    "mtp-budget": {"algorithm": "mtp", "verify_budget": 1.5},
    "mtp-budget-auto": {"algorithm": "mtp", "verify_budget": "auto"},
    "mtp-layers": {"algorithm": "mtp"},  # one for each draft
    "mtp-layers-auto": {"algorithm": "mtp", "draft_tokens": "auto"},
    "mtp-tree": {"algorithm": "mtp", **_TREE},
    "dflash": {"algorithm": "dflash", "draft": "dummy", "draft_tokens": 3},
    "dflash-tree": {"algorithm": "dflash", "draft": "dummy", **_TREE},
    "dflash-auto": {"algorithm": "dflash", "draft": "dummy", "draft_tokens": "auto", "draft_steps": 3},
    "dflash-budget": {"algorithm": "dflash", "draft": "dummy", "draft_tokens": 3, "verify_budget": 2.5},
    "dflash-corpus": {"algorithm": "dflash", "draft": "dummy", "draft_tokens": 3, "corpus": "run", "corpus_min": 1},
    "dflash2": {"algorithm": "dflash2", "draft": "dummy", "draft_tokens": 3},
    "dflash2-tree": {"algorithm": "dflash2", "draft": "dummy", **_TREE},
    "dspark": {"algorithm": "dspark", "draft": "dummy", "draft_tokens": 3},
    "dspark-budget": {"algorithm": "dspark", "draft": "dummy", "draft_tokens": 4, "verify_budget": 3},
    "dspark-budget-auto": {"algorithm": "dspark", "draft": "dummy", "draft_tokens": 4, "verify_budget": "auto"},
    "dspark-tree": {"algorithm": "dspark", "draft": "dummy", **_TREE},
    "domino": {"algorithm": "domino", "draft": "dummy", "draft_tokens": 3},
    "domino-tree": {"algorithm": "domino", "draft": "dummy", **_TREE},
    "lilicorr": {"algorithm": "lilicorr", "draft": "dummy", "draft_tokens": 3},
    "lilicorr-tree": {"algorithm": "lilicorr", "draft": "dummy", **_TREE},
    "lilicorr-auto": {"algorithm": "lilicorr", "draft": "dummy", "draft_tokens": "auto", "draft_steps": 3},
    "uno": {"algorithm": "uno", "draft": "dummy", "draft_tokens": 3},
    "uno-tree": {"algorithm": "uno", "draft": "dummy", **_TREE},
    "xpress": {"algorithm": "xpress", "draft": "dummy", "draft_tokens": 3},
    "xpress-tree": {"algorithm": "xpress", "draft": "dummy", **_TREE},
    "dspark-block-auto": {
        "algorithm": "dspark", "draft": "dummy", "draft_tokens": "auto", "draft_steps": 3, "verification": "block",
    },
}  # fmt: skip
