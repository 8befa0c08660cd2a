"""Gemma 3 in a GGUF file: its tensors, its settings and its SentencePiece tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from gguf import GGUFWriter

from specbatch.errors import SpecbatchError
from specbatch.models.gguf_layout import LAYER_NAMES
from specbatch.weights import open_checkpoint
from specbatch.weights.gguf_file import NAMES, layouts

CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["ab", "bc", "abc", "\u2581a", "a", "b", "c", "\u2581"]  # the highest score first
TOKENS, TYPES = [*CONTROL, *BYTES, "\u2581\u2581", *PIECES], [3] * 4 + [6] * 256 + [4] + [1] * len(PIECES)
SCORES = [0.0] * 261 + [-float(index) for index in range(len(PIECES))]


def write(path: Path, model: Any, unknown: int = 3, pattern: int | list[bool] | None = None, **more: Any) -> str:
    config, ours = (
        model.config,
        {theirs: name for name, theirs in (NAMES | LAYER_NAMES | layouts()["gemma3"].names).items()},
    )
    writer = GGUFWriter(path, "gemma3")
    sizes = {
        "context_length": 512, "embedding_length": 32, "block_count": 2, "feed_forward_length": 48,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 16,
        "attention.value_length": 16, "attention.sliding_window": config.sliding_window,
    }  # fmt: skip
    for key, value in sizes.items():
        writer.add_uint32(f"gemma3.{key}", value)
    for key, number in {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, **more}.items():
        writer.add_float32(f"gemma3.{key}", number)
    if pattern is not None:
        writer.add_sliding_window_pattern(pattern)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores(SCORES)
    writer.add_token_types(TYPES)
    for key, index in {"eos": 1, "bos": 2, "unknown": unknown}.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", index)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            stem, layer = name.removesuffix(".weight"), ""
            if stem.startswith("model.layers."):
                _, _, number, stem = stem.split(".", 3)
                layer = f"blk.{number}."
            stored = tensor + 1 if "norm" in name else tensor
            writer.add_tensor(f"{layer}{ours[stem]}.weight", stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": len(TOKENS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 16}
    config = hf.Gemma3TextConfig(**sizes, **heads, max_position_embeddings=512, sliding_window=8)
    return hf.Gemma3ForCausalLM(config)


def test_the_converted_folder_is_the_model(tmp_path: Path, model: Any) -> None:
    found = open_checkpoint(write(tmp_path / "model.gguf", model))
    assert found.config.windows == (8, 8)
    assert found.config.tie_embeddings
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            torch.testing.assert_close(found.tensor(name), tensor, rtol=0, atol=1e-6)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        logits = hf.AutoModelForCausalLM.from_pretrained(found.folder).eval()(tokens).logits
        torch.testing.assert_close(logits, model.eval()(tokens).logits, rtol=0, atol=1e-5)


def test_tokenizer(tmp_path: Path, model: Any) -> None:
    tokenizer = open_checkpoint(write(tmp_path / "model.gguf", model)).tokenizer()

    def pieces(text: str) -> list[str]:
        ids = tokenizer.encode(text)
        assert ids[0] == 2
        assert tokenizer.decode(ids) == text
        return [TOKENS[index] for index in ids[1:]]

    assert pieces("abc") == ["abc"]
    assert pieces("aabcb") == ["a", "abc", "b"]
    assert pieces("bc a") == ["bc", "\u2581a"]
    assert pieces(" ab") == ["\u2581", "ab"]  # "ab" has a higher score than " a"
    assert pieces("a  b") == ["a", "\u2581\u2581", "b"]
    assert pieces("\u00e9") == ["<0xC3>", "<0xA9>"]


def test_windows_and_ropes_that_a_file_states(tmp_path: Path, model: Any) -> None:
    """Current converters write the theta of local layers, and llama.cpp reads which layers are local."""

    def read(name: str, **how: Any) -> Any:
        return open_checkpoint(write(tmp_path / f"{name}.gguf", model, **how)).config

    plain = read("plain")
    assert (plain.windows, plain.local_rope.theta, plain.rope.theta) == ((8, 8), 1e4, 1e6)
    assert read("theta", **{"rope.freq_base_swa": 2e4}).local_rope.theta == 2e4
    assert read("period", pattern=2).windows == (8, None)
    assert read("list", pattern=[False, True]).windows == (None, 8)
    with pytest.raises(SpecbatchError, match="sliding_window_pattern=0"):
        read("none", pattern=0)


def test_the_unknown_token_is_one_of_the_vocabulary(tmp_path: Path, model: Any) -> None:
    with pytest.raises(SpecbatchError, match="unknown_token_id=999: it must be the id of one of"):
        open_checkpoint(write(tmp_path / "model.gguf", model, unknown=999)).tokenizer()


def test_soft_caps_are_refused(tmp_path: Path, model: Any) -> None:
    with pytest.raises(SpecbatchError, match=r"final_logit_softcapping=30\.0"):
        open_checkpoint(write(tmp_path / "model.gguf", model, final_logit_softcapping=30.0))
