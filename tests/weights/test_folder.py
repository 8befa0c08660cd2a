from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import crossed
from safetensors.torch import load_file, save_file

from specbatch.errors import SpecbatchError
from specbatch.models.weight_shapes import parameter_count
from specbatch.weights import open_checkpoint

Make = Callable[..., Any]


def edit(path: Path, **changes: Any) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("family", "tied", "old"),
    crossed(["llama", "qwen2", "qwen3"], [(False, True), (True, False), (True, True), (False, False)]),
)
def test_saved_model_round_trips(
    tiny_model: Make, save: Make, family: str, tied: bool, old: bool, read_all: Make
) -> None:
    rope = {"rope_theta": 3e4, "rope_type": "linear", "factor": 2.0}
    model = tiny_model(family, tie_word_embeddings=tied, rope_parameters=rope, eos_token_id=[299, 297])
    checkpoint = open_checkpoint(str(save(model, old=old)))
    expected = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    loaded = read_all(checkpoint)
    assert set(loaded) == set(expected) == set(checkpoint.names())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    config = checkpoint.config
    assert (config.family, config.rope.theta, config.rope.kind) == (family, 3e4, "linear")
    assert config.tie_embeddings == tied
    assert config.eos_ids == (299, 297)
    assert checkpoint.bytes == 4 * parameter_count(config)
    assert checkpoint.name == "model"


def test_sharded_checkpoint(tiny_model: Make, save: Make, read_all: Make) -> None:
    model = tiny_model("qwen2", dtype=torch.bfloat16).to(torch.bfloat16)
    folder = save(model, shard="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    checkpoint = open_checkpoint(str(folder))
    loaded = read_all(checkpoint)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    assert checkpoint.config.dtype == "bfloat16"
    assert checkpoint.bytes == 2 * parameter_count(checkpoint.config)


def test_explicit_head_overrides_tied_embeddings(tiny_model: Make, save: Make) -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    folder = save(model)
    edit(folder / "config.json", tie_word_embeddings=True)
    checkpoint = open_checkpoint(str(folder))
    assert not checkpoint.config.tie_embeddings
    assert torch.equal(checkpoint.tensor("lm_head.weight"), model.lm_head.weight)


def test_stored_rope_tables_are_ignored(tiny_model: Make, save: Make) -> None:
    folder = save(tiny_model("llama"))
    path = folder / "model.safetensors"
    save_file({**load_file(path), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, path)
    checkpoint = open_checkpoint(str(folder))
    assert not any("inv_freq" in name for name in checkpoint.names())


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(SpecbatchError) as error:
        open_checkpoint(str(folder), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_damaged_files_are_refused(tiny_model: Make, save: Make) -> None:
    model = tiny_model("llama")
    folder = save(model, name="cut")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert "cut/model.safetensors" in refusal(folder)
    assert "damaged or truncated" in refusal(folder)
    path.write_bytes(whole[:4])
    assert "damaged or truncated" in refusal(folder)
    path.write_bytes(b"")
    assert "damaged or truncated" in refusal(folder)


def test_missing_shards_and_bad_indices_are_refused(tiny_model: Make, save: Make) -> None:
    folder = save(tiny_model("llama"), shard="40KB")
    shards = sorted(folder.glob("*.safetensors"))
    moved = shards[1].rename(folder / "moved.bin")
    assert shards[1].name in refusal(folder)
    assert "missing" in refusal(folder)
    moved.rename(shards[1])
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    names = list(found["weight_map"])
    found["weight_map"][names[0]] = found["weight_map"][names[-1]]
    index.write_text(json.dumps(found))
    assert f"lists {names[0]}" in refusal(folder)
    index.write_text(json.dumps({"weight_map": {names[0]: 5}}))
    assert "must name a file" in refusal(folder)
    index.write_text("{")
    assert "index.json" in refusal(folder)
    assert "not JSON" in refusal(folder)
    index.write_text("{}")
    assert "weight_map" in refusal(folder)
    index.unlink()
    assert "no model.safetensors.index.json" in refusal(folder)


def test_config_and_weights_must_agree(tiny_model: Make, save: Make) -> None:
    folder = save(tiny_model("llama"))
    config, path = folder / "config.json", folder / "model.safetensors"
    right, tensors = config.read_text(), load_file(path)
    edit(config, intermediate_size=95)
    assert "mlp.gate_proj.weight is [96, 64]; its config requires [95, 64]" in refusal(folder)
    edit(config, intermediate_size=96, num_hidden_layers=3)
    assert "model.layers.2.input_layernorm.weight is missing" in refusal(folder)
    edit(config, num_hidden_layers=1)
    assert "describes no tensor model.layers.1." in refusal(folder)
    config.write_text(right)
    save_file({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, path)
    assert "tie_word_embeddings" in refusal(folder)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].to(torch.float64)}, path)
    assert "model.norm.weight is F64" in refusal(folder)
    config.write_text("[1]")
    assert "a JSON object" in refusal(folder)
    config.unlink()
    assert "no config.json" in refusal(folder)


def test_invalid_folders_are_refused(tmp_path: Path, tiny_model: Make, save: Make) -> None:
    assert "no such file" in refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no safetensors" in refusal(tmp_path / "empty")
    (tmp_path / "notes.txt").write_text("hello")
    assert "not a model" in refusal(tmp_path / "notes.txt")
    folder = save(tiny_model("llama"))
    assert "holds no gguf" in refusal(folder, load_format="gguf")
    (folder / "a.gguf").write_bytes(b"")
    (folder / "b.gguf").write_bytes(b"")
    assert "a.gguf, b.gguf" in refusal(folder, load_format="gguf")


def test_tokens_beyond_the_embeddings_are_left_out_and_reported(tiny_model: Make, save: Make) -> None:
    """Old fine-tunes name a padding token that their model does not have."""
    folder = save(tiny_model("llama"))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "[PAD]", "eos_token": "<|endoftext|>"}))
    lines: list[str] = []
    tokenizer = open_checkpoint(str(folder), log=lines.append).tokenizer()
    assert lines == ["tokenizer model: '[PAD]' is not a token: it would have id 300, and the model has 300 ids"]
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (300, {2, 297})  # 2 of config.json
    roomy = save(tiny_model("llama", vocab_size=301), name="roomy")
    (roomy / "special_tokens_map.json").write_text(json.dumps({"pad_token": "[PAD]"}))
    assert open_checkpoint(str(roomy)).tokenizer().encode("[PAD]") == [300]


def test_a_class_that_replaces_the_pre_tokenizer_is_reported_once(tiny_model: Make, save: Make) -> None:
    folder = save(tiny_model("llama"))
    described = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"tokenizer_class": "Qwen2Tokenizer"}))
    lines: list[str] = []
    checkpoint = open_checkpoint(str(folder), log=lines.append)
    for _ in range(2):
        checkpoint.tokenizer()
    assert [line for line in lines if "Qwen2Tokenizer" in line] == lines
    assert len(lines) == 1


def test_the_tokenizer_must_fit_the_model(tiny_model: Make, save: Make) -> None:
    checkpoint = open_checkpoint(str(save(tiny_model("llama", vocab_size=299))))
    with pytest.raises(SpecbatchError, match="300 ids and model has embeddings for 299"):
        checkpoint.tokenizer()
    other = save(tiny_model("llama"), name="other")
    replaced = open_checkpoint(str(save(tiny_model("llama"), name="third")), tokenizer=str(other)).tokenizer()
    assert replaced.name == str(other)
    with pytest.raises(SpecbatchError, match=r"tokenizer='./nothing'"):
        open_checkpoint(str(other), tokenizer="./nothing")
