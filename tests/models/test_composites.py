"""Checkpoints with a vision part: the text part is read, and the log names what is skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from quantized_weights import FORMATS
from safetensors.torch import load_file, save_file
from uncached import decoder_of, logits_of

from specbatch.models.config import ModelConfig
from specbatch.models.formats.int4 import Int4Weights
from specbatch.runtime.loader import kept_quantized
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


LATENT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_kimi_k25(tmp_path: Path) -> None:
    """In the names of the published files; transformers 5.23 writes `blocks` for the layers of the text part, as of the
    vision part."""
    torch.manual_seed(1)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = hf.DeepseekV3Config(**LATENT).to_dict()
    model = hf.Kimi_K25ForConditionalGeneration(
        hf.Kimi_K25Config(text_config=text, vision_config=vision | {"patch_size": 4})
    )
    model.eval().float().save_pretrained(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    found = {name.replace("language_model.model.blocks", "language_model.model.layers"): found[name] for name in found}
    save_file(found | {"language_model.lm_head.weight": model.lm_head.weight.detach()}, tmp_path / "model.safetensors")
    described = json.loads((tmp_path / "config.json").read_text())
    described["text_config"] |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    described |= {"architectures": ["KimiK25ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    lines: list[str] = []
    checkpoint = open_checkpoint(str(tmp_path), log=lines.append)
    assert any("not used for text and not read, such as mm_projector." in line for line in lines)
    tokens = torch.randint(0, 61, (20,))
    with torch.no_grad():
        wanted = model(tokens[None]).logits[0]
    torch.testing.assert_close(logits_of(decoder_of(checkpoint), tokens), wanted, rtol=1e-3, atol=1e-4)

    described["text_config"]["quantization_config"] = FORMATS["symmetric"][0] | {"ignore": ["re:.*self_attn.*"]}
    config = ModelConfig.from_dict(described)
    assert isinstance(config.quantization, Int4Weights)
    kept = kept_quantized(config, torch.device("cuda"))
    assert "language_model.model.layers.1.mlp.experts.0.up_proj.weight" in kept
    assert not any("self_attn" in name for name in kept)
