from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from crossed import crossed
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer as Backend
from transformers import AutoModelForCausalLM, Qwen2Tokenizer
from watched_calls import Watch

from specbatch.errors import SpecbatchError
from specbatch.files.atomic_file import is_leftover
from specbatch.models.config import ModelConfig
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.weights import gguf_checkpoint, gguf_file, gguf_tensors, known_models, open_checkpoint
from specbatch.weights.cache import file_hash

Make = Callable[..., Any]


@pytest.mark.parametrize(("family", "tied"), crossed(["llama", "qwen2", "qwen3"], [False, True]))
def test_gguf_matches_the_folder(
    tiny_model: Make, save: Make, write_gguf: Make, family: str, tied: bool, read_all: Make
) -> None:
    rope = {"rope_theta": 1e5, "rope_type": "default"}
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    model = tiny_model(family, tie_word_embeddings=tied, rope_parameters=rope, **biases)
    original = open_checkpoint(str(save(model)))
    converted = open_checkpoint(str(write_gguf(model)))
    expected, loaded = read_all(original), read_all(converted)
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name

    ours, theirs = converted.config, original.config
    assert ours.rope.source == "gguf"
    assert torch.equal(ours.rope.inverse_frequencies(), theirs.rope.inverse_frequencies())
    assert tensor_shapes(ours) == tensor_shapes(theirs)
    assert (ours.rms_norm_eps, ours.max_position, ours.tie_embeddings) == (1e-5, 512, tied)
    assert (ours.eos_ids, ours.bos_id) == ((299,), 298)

    # The converted folder is an ordinary one: transformers computes the same logits from it.
    tokens = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(converted.folder).eval()(tokens).logits
        assert torch.equal(logits, model.eval()(tokens).logits)


def test_rope_permutation_is_undone_per_head() -> None:
    """Rows 0..3 of a head are stored as 0, 2, 1, 3: rotation pairs are adjacent."""
    rows = np.array([0, 2, 1, 3, 4, 6, 5, 7])
    assert gguf_tensors.unpermute(rows, 2).tolist() == list(range(8))
    assert gguf_tensors.unpermute(rows.reshape(8, 1), 2).shape == (8, 1)
    assert gguf_tensors.unpermute(rows, 1).tolist() != list(range(8))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_tensor_types_are_kept_or_dequantized_exactly(tiny_model: Make, write_gguf: Make, kind: str) -> None:
    quantized = GGMLQuantizationType[kind]
    model = tiny_model("llama")
    checkpoint = open_checkpoint(str(write_gguf(model, quantized=quantized)))
    kept = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind)
    for name, tensor in model.state_dict().items():
        found = checkpoint.tensor(name)
        if tensor.ndim == 1:
            assert torch.equal(found, tensor)
        elif kept is not None:
            assert torch.equal(found, tensor.to(kept)), name
        else:
            # Quantization works on runs of 32 inputs, so permuting rows before or after makes no difference.
            again = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), quantized), quantized)
            assert found.dtype == torch.float32
            assert torch.equal(found, torch.from_numpy(again)), name


def test_k_quants_match_the_gguf_package(tmp_path: Path) -> None:
    """The package cannot make these types; any bytes with finite scales are valid."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 144), dtype=np.uint8)
    blocks[:, :4] = np.array([0.01, 0.02], dtype=np.float16).view(np.uint8)
    writer = GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = gguf_file.GgufFile(tmp_path / "k.gguf").tensors["token_embd.weight"]
    expected = gguf.quants.dequantize(blocks, GGMLQuantizationType.Q4_K)
    assert torch.equal(gguf_tensors.dequantize_tensor(tensor, None), torch.from_numpy(expected))


def test_conversion_is_cached_in_bounded_files(
    tmp_path: Path, write_gguf: Make, monkeypatch: pytest.MonkeyPatch, cache: Path, read_all: Make
) -> None:
    monkeypatch.setattr(gguf_checkpoint, "SHARD_BYTES", 20_000)
    path = write_gguf("llama")
    lines: list[str] = []
    first = open_checkpoint(str(path), log=lines.append)
    assert len(lines) == 1
    assert len(list(first.folder.glob("*.safetensors"))) > 2
    assert len(read_all(first)) == len(tensor_shapes(first.config))
    again = open_checkpoint(str(path.rename(tmp_path / "other.gguf")), log=lines.append)
    assert (again.folder, again.name, len(lines)) == (first.folder, "other", 1)
    assert first.folder.parent.parent == cache
    assert not any(map(is_leftover, cache.iterdir()))


def test_a_file_is_hashed_once_until_it_changes(write_gguf: Make, watch: Watch) -> None:
    hashed = watch(gguf_checkpoint, "file_hash", before=lambda path: path)
    path = write_gguf("llama")
    first, again = (open_checkpoint(str(path)) for _ in range(2))
    assert again.folder == first.folder
    assert hashed == [path]
    path.write_bytes(write_gguf("qwen2").read_bytes())
    assert open_checkpoint(str(path)).folder != first.folder
    assert hashed == [path] * 2


def test_rope_scaling_is_converted(tiny_model: Make, write_gguf: Make) -> None:
    llama3 = {
        "rope_theta": 5e5,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = tiny_model("llama", rope_parameters=llama3, head_dim=32)
    reference = ModelConfig.from_dict({**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}).rope
    plain = 1.0 / 5e5 ** (np.arange(0, 32, 2, dtype=np.float32) / 32)
    divisors = (plain / reference.inverse_frequencies().numpy()).astype(np.float32)
    assert divisors.max() == pytest.approx(8.0)
    extra = {"rope_freqs.weight": divisors}
    keys = {"llama.rope.dimension_count": 32, "llama.attention.key_length": 32}
    path = write_gguf(model, name="scaled", extra_tensors=extra, metadata=keys)
    rope = open_checkpoint(str(path)).config.rope
    assert rope.kind == "divisors"
    torch.testing.assert_close(rope.inverse_frequencies(), reference.inverse_frequencies(), rtol=1e-6, atol=0)

    yarn = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 512,
    }
    path = write_gguf("qwen2", name="yarn", metadata=yarn)
    config = open_checkpoint(str(path)).config
    assert (config.rope.kind, config.rope.factor, config.max_position) == ("yarn", 4.0, 2048)

    path = write_gguf("qwen2", name="linear", metadata={"qwen2.rope.scaling.factor": 4.0})
    rope = open_checkpoint(str(path)).config.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)  # which a factor without a type is in llama.cpp


def test_per_layer_values_must_be_equal(tiny_model: Make, write_gguf: Make) -> None:
    model = tiny_model("llama")
    equal = write_gguf(model, name="equal", metadata={"llama.feed_forward_length": [96, 96]})
    assert open_checkpoint(str(equal)).config.intermediate_size == 96
    mixed = write_gguf(model, name="mixed", metadata={"llama.feed_forward_length": [96, 0]})
    assert r"feed_forward_length=[96, 0]" in refusal(mixed)
    path = write_gguf("qwen2", name="window", metadata={"qwen2.attention.sliding_window": 128})
    assert "qwen2.attention.sliding_window=128: of GGUF files those of llama, " in refusal(path)


def refusal(path: Path) -> str:
    with pytest.raises(SpecbatchError) as error:
        open_checkpoint(str(path))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_truncated_or_invalid_files_are_refused(write_gguf: Make, cache: Path) -> None:
    path = write_gguf("llama")
    whole = path.read_bytes()
    for size in (0, 3, 20, 200, 3000, len(whole) - 1000):
        path.write_bytes(whole[:size])
        assert "not a complete GGUF file" in refusal(path), size
    path.write_bytes(b"GGML" + whole[4:])
    assert "magic invalid" in refusal(path)
    path.write_bytes(whole[:4] + b"\x09\0\0\0" + whole[8:])
    assert "version 9" in refusal(path)
    assert not list(cache.glob("gguf-*/*"))


def test_unsupported_features_are_refused_by_name(tiny_model: Make, write_gguf: Make) -> None:
    llama = tiny_model("llama")

    def refusal_of(model: Any = llama, **options: Any) -> str:
        return refusal(write_gguf(model, **options))

    extra = np.ones(4, dtype=np.float32)
    assert "blk.0.attn_sinks.weight" in refusal_of(extra_tensors={"blk.0.attn_sinks.weight": extra})
    assert "expert_count=8" in refusal_of(metadata={"llama.expert_count": 8})
    assert "rope.dimension_count=8" in refusal_of(metadata={"llama.rope.dimension_count": 8})
    assert "rope.scaling.type='longrope'" in refusal_of(metadata={"llama.rope.scaling.type": "longrope"})
    assert "rope.scaling.attn_factor=2.0" in refusal_of(metadata={"llama.rope.scaling.attn_factor": 2.0})
    assert "one part of several" in refusal_of(metadata={"split.count": 3})
    unequal = {"llama.attention.key_length": 16, "llama.attention.value_length": 8}
    assert "value_length=8" in refusal_of(metadata=unequal)
    wider = {"llama.attention.key_length": 32}
    assert "q_proj.weight is [64, 64]; its config requires [128, 64]" in refusal_of(metadata=wider)

    other = tiny_model("llama")
    other.config.model_type = "gemma2"
    assert "general.architecture='gemma2'" in refusal_of(other)
    short = tiny_model("qwen2", num_hidden_layers=1)
    short.config.num_hidden_layers = 2
    assert "model.layers.1.input_layernorm.weight is missing" in refusal_of(short)


def test_tokenizer_matches_the_original(
    tiny_model: Make, save: Make, write_gguf: Make, backend: Backend, texts: list[str]
) -> None:
    model = tiny_model("llama", vocab_size=310)
    path = write_gguf(model)
    ours, original = open_checkpoint(str(path)).tokenizer(), open_checkpoint(str(save(model))).tokenizer()
    for text in [*texts, "<|im_start|>user\nhi<|im_end|>"]:
        assert ours.encode(text) == original.encode(text) == backend.encode(text).ids
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.vocabulary() == original.vocabulary()
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (300, 298, {297, 299})
    assert ours.decode([305]) == ""
    assert ours.decode(ours.encode("<|im_start|>user")) == "user"
    message = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(message) == "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"
    assert json.loads((open_checkpoint(str(path)).folder / "config.json").read_text())["vocab_size"] == 310


def test_user_defined_tokens_are_atomic_and_visible(tiny_model: Make, write_gguf: Make, backend: Backend) -> None:
    with_tool = Backend.from_str(backend.to_str())
    with_tool.add_tokens(["<tool_call>"])
    path = write_gguf(tiny_model("llama", vocab_size=301), with_tool)
    tokenizer = open_checkpoint(str(path)).tokenizer()
    assert tokenizer.encode("<tool_call>") == [300]
    assert tokenizer.decode([300]) == "<tool_call>"


def test_pre_tokenizer_rules(tiny_model: Make, write_gguf: Make, backend: Backend, texts: list[str]) -> None:
    model = json.loads(backend.to_str())["model"]
    qwen = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    path = write_gguf("qwen2", name="qwen", pre="qwen2")
    tokenizer = open_checkpoint(str(path)).tokenizer()
    for text in texts:
        assert tokenizer.encode(text) == qwen.encode(text)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")

    # Llama 3 starts every text with its first token unless the file overrides it.
    path = write_gguf("llama", name="llama", pre="llama-bpe")
    tokenizer = open_checkpoint(str(path)).tokenizer()
    assert tokenizer.encode("Tom")[0] == 298
    assert tokenizer.encode("e\u0301") != tokenizer.encode("\u00e9")
    # It also takes a known word whole, even where no merges lead to it.
    described = json.loads(backend.to_str())
    described["model"]["vocab"]["zebra"] = 297
    special = [token["content"] for token in described["added_tokens"]]
    words = Backend.from_str(json.dumps({**described, "added_tokens": []}))
    words.add_special_tokens(special)
    model = tiny_model("llama", vocab_size=301)
    keys = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.eot_token_id": 17}
    path = write_gguf(model, words, pre="llama-bpe", metadata=keys)
    tokenizer = open_checkpoint(str(path)).tokenizer()
    assert tokenizer.encode("zebra") == [297]
    assert tokenizer.eos_ids == {17, 298, 300}


def test_known_name_provides_a_tokenizer_without_weights(
    cache: Path, write_gguf: Make, texts: list[str], monkeypatch: pytest.MonkeyPatch, register: Callable[..., None]
) -> None:
    (cache / "models").mkdir(parents=True)
    path = write_gguf("llama", name="cache/models/tiny")
    source = known_models.HubFile("someone/tiny", "0", path.name)
    known = known_models.KnownModel(
        "tiny", "someone", path.name, 0, file_hash(path), "Apache-2.0", "F32", "unknown", source
    )
    register(known)
    (cache / "tiny").mkdir()  # as for models, a known name counts before a folder
    monkeypatch.chdir(cache)
    found = open_checkpoint("toy", "dummy", tokenizer="tiny").tokenizer()
    assert [item.name for item in cache.iterdir() if item.name != "tiny"] == ["models"]  # nothing was converted
    own = open_checkpoint("tiny").tokenizer()
    lines = [{"role": "user", "content": texts[0]}]
    assert [found.encode(text) for text in texts] == [own.encode(text) for text in texts]
    assert found.apply_chat_template(lines) == own.apply_chat_template(lines)
    assert (found.name, found.eos_ids, found.bos_id) == ("tiny", own.eos_ids, own.bos_id) == (own.name, {297, 299}, 298)
    with pytest.raises(
        SpecbatchError, match=r"tokenizer='tinny': no such name, file or folder; .*smollm2-135m.* hub id"
    ):
        open_checkpoint("toy", "dummy", tokenizer="tinny")


def test_unknown_pre_tokenizer_needs_an_explicit_tokenizer(
    tiny_model: Make, save: Make, write_gguf: Make, backend: Backend
) -> None:
    model = tiny_model("llama")
    path = write_gguf(model, pre="newfangled")
    with pytest.raises(SpecbatchError, match=r"tokenizer.ggml.pre='newfangled'"):
        open_checkpoint(str(path)).tokenizer()
    replaced = open_checkpoint(str(path), tokenizer=str(save(model))).tokenizer()
    assert replaced.encode("hi") == backend.encode("hi").ids
