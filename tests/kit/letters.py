"""A tiny model whose tokens are the characters of ASCII, so that every answer is text and can be JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import CHATML, SPECIAL
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specbatch.config.engine_config import EngineConfig, Speculation
from specbatch.engine.engine import Engine
from specbatch.models.config import ModelConfig
from specbatch.models.weight_shapes import tensor_shapes

LETTERS = [*(chr(code) for code in range(33, 127)), "Ġ", "Ċ"]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(LETTERS) + len(SPECIAL),
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": len(LETTERS),
    "eos_token_id": len(LETTERS) + 1,
}  # fmt: skip
SHARPNESS = 3.5  # of the head: the most likely token has about half of the probability


def write_letters(folder: Path, seed: int = 0, *, template: str = CHATML, marks: Sequence[str] = ()) -> Path:
    """Random weights; `seed` draws them. marks: more tokens, which are not special."""
    folder.mkdir(parents=True)
    config = CONFIG | {"vocab_size": len(LETTERS) + len(SPECIAL) + len(marks)}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(ModelConfig.from_dict(config))
    weights = {
        name: torch.randn(shape, generator=generator) * (1.0 / shape[-1] ** 0.5)
        if len(shape) > 1
        else torch.ones(shape)
        for name, shape in shapes.items()
    }
    weights["lm_head.weight"] *= SHARPNESS
    (folder / "model.safetensors").write_bytes(save(weights))
    found = Tokenizer(models.BPE({token: index for index, token in enumerate([*LETTERS, *SPECIAL])}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(SPECIAL)
    found.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    (folder / "tokenizer.json").write_text(found.to_str())
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    described["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [CONFIG["eos_token_id"]]}))
    return folder


def letters_engine(folder: Path, dtype: str = "float32", **speculation: Any) -> Engine:
    drafts = Speculation("ngram", draft_tokens=3, ngram_min=1, schedule="v1") if not speculation else None
    config = EngineConfig(
        model=str(folder), device="cpu", dtype=dtype, max_running=32, max_model_len=256,
        speculation=drafts or Speculation(**speculation),
    )  # fmt: skip
    return Engine(config)
