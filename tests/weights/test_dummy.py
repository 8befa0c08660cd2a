from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specbatch.errors import SpecbatchError
from specbatch.weights import open_checkpoint
from specbatch.weights.dummy import SHAPES

# Published parameter counts.
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes(name: str) -> None:
    checkpoint = open_checkpoint(name, "dummy")
    assert checkpoint.config.parameter_count() == PARAMETERS.get(name, checkpoint.config.parameter_count())
    assert checkpoint.bytes == 4 * checkpoint.config.parameter_count()
    assert checkpoint.tokenizer().vocab_size == checkpoint.config.vocab_size
    assert checkpoint.config.rope.source == "rope_theta"


def test_a_tensor_depends_on_its_name_and_the_seed_only() -> None:
    names = list(open_checkpoint("toy", "dummy").names())
    forward = {name: open_checkpoint("toy", "dummy", seed=3).tensor(name) for name in names}
    checkpoint = open_checkpoint("toy", "dummy", seed=3)
    assert all(torch.equal(checkpoint.tensor(name), forward[name]) for name in reversed(names))
    other = open_checkpoint("toy", "dummy", seed=4)
    assert not any(torch.equal(other.tensor(name), forward[name]) for name in names)
    q, k = (forward[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1))
    assert not torch.equal(q, k)


def test_activations_keep_their_size(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    sizes = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 24}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    described = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    checkpoint = open_checkpoint(str(tmp_path), "dummy")
    assert open_checkpoint(str(tmp_path / "config.json"), "dummy").config == checkpoint.config
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(read_all(checkpoint))
    with torch.no_grad():
        found = model(torch.arange(100).unsqueeze(0), output_hidden_states=True)
    assert 0.5 < found.logits.std() < 3
    assert found.hidden_states[-2].abs().max() < 50


def test_what_a_dummy_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(SpecbatchError, match=r"model='gpt-7'.*toy, smollm2-135m"):
        open_checkpoint("gpt-7", "dummy")
    small = {**SHAPES["toy"], "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(small))
    with pytest.raises(SpecbatchError, match="vocab_size=100: a model without a tokenizer needs at least 257"):
        open_checkpoint(str(tmp_path), "dummy").tokenizer()
