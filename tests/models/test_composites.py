"""Qwen3.5 checkpoints with a vision part: the text part is read, and the log names what is skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from uncached import decoder_of, logits_of

from specbatch.weights import open_checkpoint

TEXT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "num_hidden_layers": 1, "layer_types": ["full_attention"], "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
}  # fmt: skip


def save(folder: Path, **changes: Any) -> Any:
    """A model whose outer config ties the embeddings while the default of its text part does not."""
    torch.manual_seed(1)
    vision = VISION | {"patch_size": 4, "num_position_embeddings": 16}
    config = hf.Qwen3_5Config(text_config=TEXT | changes, vision_config=vision, tie_word_embeddings=True)
    model = hf.Qwen3_5ForConditionalGeneration(config).eval().float()
    model.save_pretrained(folder)
    return model


def test_outer_tied_embeddings_and_partial_rotary_yarn(tmp_path: Path) -> None:
    theirs, lines = save(tmp_path, rope_parameters=YARN), []
    checkpoint = open_checkpoint(str(tmp_path), log=lines.append)
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["tie_word_embeddings"] is False
    assert checkpoint.config.tie_embeddings
    assert checkpoint.config.rope.attention_factor > 1
    assert [line for line in lines if "tensors are not used for text and not read, such as model.visual." in line]
    tokens = torch.randint(0, 61, (90,))
    with torch.no_grad():
        wanted = theirs(tokens[None]).logits[0]
    torch.testing.assert_close(logits_of(decoder_of(checkpoint), tokens), wanted, rtol=1e-3, atol=1e-4)
