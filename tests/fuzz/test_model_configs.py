"""Mutated config.json and tokenizer files: each opens or is refused in one line, in bounded time and memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

from checkpoints import write_folder
from fuzzing import Fuzz
from limits import limited
from mutate import mutate_bytes, mutate_json_text
from quantized_weights import FORMATS
from targets import SIZES, TARGETS

from specbatch import Engine, EngineConfig, SamplingParams, Speculation
from specbatch.engine.setup.memory_plan import memory_plan
from specbatch.engine.setup.prepare import prepare
from specbatch.errors import SpecbatchError
from specbatch.weights import open_checkpoint

VOCABULARY = {"vocab_size": 264, "eos_token_id": 257, "bos_token_id": 256}
LLAMA = SIZES | VOCABULARY | TARGETS["llama"] | {"model_type": "llama", "rope_theta": 1e4}
BLOCK = {"block_size": 4, "num_target_layers": 4, "dflash_config": {"mask_token_id": 11, "target_layer_ids": [2, 0]}}
DRAFTS = {
    "eagle": LLAMA | {"num_hidden_layers": 1},
    "eagle3": LLAMA
    | {
        "num_hidden_layers": 1, "draft_vocab_size": 100, "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "target_hidden_size": 40,
    },
    "dflash": LLAMA | BLOCK | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2},
    "dflash2": LLAMA
    | BLOCK
    | {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "conv_kernel_size": 2,
        "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5,
    },
    "dspark": LLAMA
    | BLOCK
    | {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2, "markov_rank": 6,
        "markov_head_type": "gated", "enable_confidence_head": True,
    },
    "domino": LLAMA
    | BLOCK
    | {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2,
        "projector_type": "domino", "pure_draft_prefix_len": 1, "gru_hidden_dim": 6, "emb_dim": 5, "shift_label": True,
    },
    "lilicorr": LLAMA
    | BLOCK
    | {
        "architectures": ["LiLiCorrDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2,
        "lilicorr_candidate_topk": 4, "lilicorr_hidden_size": 12, "lilicorr_num_layers": 1, "lilicorr_num_heads": 2,
        "lilicorr_mlp_ratio": 1.5, "lilicorr_factor_dim": 6, "lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 3.0,
    },
    "xpress": LLAMA
    | BLOCK
    | {
        "architectures": ["Qwen3XPressModel"], "model_type": "qwen3", "num_hidden_layers": 2, "xpress_rank": 6,
        "xpress_mlp_hidden": 10, "xpress_num_passes": 2,
    },
    "standalone": LLAMA | {"num_hidden_layers": 2},
}  # fmt: skip
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}},
    *({"quantization_config": FORMATS[form][0]} for form in ("channel", "awq", "symmetric")),
    {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
]  # fmt: skip


def config_of(random: Random) -> dict[str, Any]:
    return SIZES | VOCABULARY | TARGETS[random.choice(list(TARGETS))] | random.choice(ROPES)


NUMBERS = [0, 1, 2, 3, 5, 8, 16, 24, 64, 65, 1_000, 10**6, 2**20, 2**31 - 1, 1e-6, 0.5, 2.0, 1e9]


def mutated(random: Random, config: dict[str, Any]) -> bytes:
    """Hostile values, or other numbers in place of one or two."""
    if random.random() < 0.6:
        keys = [key for key, value in config.items() if isinstance(value, (int, float))]
        changes = {key: random.choice(NUMBERS) for key in random.sample(keys, k=random.randint(1, 2))}
        return json.dumps(config | changes).encode()
    return mutate_json_text(random, json.dumps(config).encode())


def engine_config(model: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=str(model), load_format="dummy", device="cpu", max_running=2, page_size=4, kv_pages=32, **settings
    )


def runs(fuzz: Fuzz, config: EngineConfig) -> None:
    """Prepare an engine. If its weights are small, build it and generate two tokens."""
    prepared = prepare(config, lambda line: None)
    plan = memory_plan(prepared)
    fuzz.outcome("planned")
    if plan.weights + plan.draft_weights < 1 << 22 and fuzz.counts["engines"] < fuzz.counts["rounds"] / 8 + 2:
        fuzz.outcome("engines")
        with Engine(config) as engine:
            engine.generate([[3, 4, 5]], SamplingParams(max_new_tokens=2, temperature=0.0))


def test_configs_of_targets(fuzz: Fuzz, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for random in fuzz.rounds(quick=15):
        path.write_bytes(mutated(random, config_of(random)))
        try:
            with limited(60):
                runs(fuzz, engine_config(path))
        except SpecbatchError as error:
            fuzz.refused(error)


def test_configs_of_drafts(fuzz: Fuzz, tmp_path: Path) -> None:
    target, draft = tmp_path / "target.json", tmp_path / "draft.json"
    target.write_text(json.dumps(LLAMA))
    for random in fuzz.rounds(quick=25):
        algorithm = random.choice(list(DRAFTS))
        draft.write_bytes(mutated(random, DRAFTS[algorithm]))
        try:
            with limited(60):
                runs(fuzz, engine_config(target, speculation=Speculation(algorithm, draft=str(draft))))
            fuzz.outcome(algorithm)
        except SpecbatchError as error:
            fuzz.refused(error)


FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def test_files_of_folders(fuzz: Fuzz, tmp_path: Path) -> None:
    """The weights are those of the original config."""
    original = write_folder(tmp_path / "original")
    shutil.copytree(original, tmp_path / "model")
    for random in fuzz.rounds(quick=60):
        name = random.choice(FILES)
        content = (original / name).read_bytes()
        change = mutate_bytes if name == "tokenizer.json" and random.random() < 0.3 else mutate_json_text
        (tmp_path / "model" / name).write_bytes(change(random, content))
        try:
            with limited():
                checkpoint = open_checkpoint(str(tmp_path / "model"))
                fuzz.outcome("opened")
                tokenizer = checkpoint.tokenizer()
                tokenizer.vocabulary()
                assert isinstance(tokenizer.has_chat_template, bool)
                fuzz.outcome("with tokenizer")
                ids = tokenizer.encode("abc the 12 <|im_end|>")
                tokenizer.decode(ids)
                assert all(type(end) is int for end in tokenizer.eos_ids)
        except SpecbatchError as error:
            fuzz.refused(error)
        finally:
            (tmp_path / "model" / name).write_bytes(content)
