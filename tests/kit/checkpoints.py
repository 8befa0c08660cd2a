"""Tiny checkpoints with random weights, written without transformers: folders and GGUF files of any metadata."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf.constants import GGUFValueType
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specbatch.models.config import ModelConfig
from specbatch.models.gguf_layout import LAYER_NAMES
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.weights.gguf_file import NAMES

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 264, "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "bos_token_id": 256, "eos_token_id": 257,
}  # fmt: skip
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<s>", "<|im_end|>", "<|im_start|>"]


def tokenizer() -> Tokenizer:
    """A byte-level BPE of 264 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "t"), ("Ġt", "h"), ("1", "2")]
    vocabulary = alphabet + SPECIAL + ["".join(pair) for pair in merges]
    found = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(SPECIAL)
    return found


def random_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}


def write_folder(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A checkpoint folder of `config`, by default `TINY`, with a tokenizer and a chat template."""
    folder.mkdir(parents=True)
    config = config or TINY
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(save(random_weights(tensor_shapes(ModelConfig.from_dict(config)))))
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    described["chat_template"] = CHATML
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257]}))
    return folder


class Field(NamedTuple):
    """A value of GGUF metadata: its type, that of the items of a list, and the value."""

    kind: GGUFValueType
    items: GGUFValueType | None
    value: Any


def metadata() -> dict[str, Field]:
    """The metadata of `TINY` as a GGUF file."""
    tokens = [token for token, _ in sorted(tokenizer().get_vocab().items(), key=lambda item: item[1])]
    types = [3 if token in SPECIAL else 1 for token in tokens]
    merges = [" ".join(pair) for pair in json.loads(tokenizer().to_str())["model"]["merges"]]
    text, whole, real = GGUFValueType.STRING, GGUFValueType.UINT32, GGUFValueType.FLOAT32
    many = GGUFValueType.ARRAY
    return {
        "general.architecture": Field(text, None, "llama"),
        "general.alignment": Field(whole, None, 32),
        "llama.block_count": Field(whole, None, 1),
        "llama.context_length": Field(whole, None, 64),
        "llama.embedding_length": Field(whole, None, 32),
        "llama.feed_forward_length": Field(whole, None, 32),
        "llama.attention.head_count": Field(whole, None, 2),
        "llama.attention.head_count_kv": Field(many, whole, [1]),
        "llama.attention.key_length": Field(whole, None, 16),
        "llama.attention.layer_norm_rms_epsilon": Field(real, None, 1e-5),
        "llama.rope.freq_base": Field(real, None, 10000.0),
        "llama.rope.dimension_count": Field(whole, None, 16),
        "llama.rope.scaling.type": Field(text, None, "linear"),
        "llama.rope.scaling.factor": Field(real, None, 2.0),
        "tokenizer.ggml.model": Field(text, None, "gpt2"),
        "tokenizer.ggml.pre": Field(text, None, "smollm"),
        "tokenizer.ggml.tokens": Field(many, text, tokens),
        "tokenizer.ggml.token_type": Field(many, GGUFValueType.INT32, types),
        "tokenizer.ggml.merges": Field(many, text, merges),
        "tokenizer.ggml.bos_token_id": Field(whole, None, 256),
        "tokenizer.ggml.eos_token_id": Field(whole, None, 257),
        "tokenizer.ggml.add_bos_token": Field(GGUFValueType.BOOL, None, False),
        "tokenizer.chat_template": Field(text, None, CHATML),
    }


def gguf_tensors() -> dict[str, torch.Tensor]:
    """The tensors of `TINY` under their names in GGUF files."""
    ours = {name: theirs for theirs, name in NAMES.items()}
    layer = {name: theirs for theirs, name in LAYER_NAMES.items()}
    found = {}
    for name, tensor in random_weights(tensor_shapes(ModelConfig.from_dict(TINY))).items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, number, part = stem.split(".", 3)
            found[f"blk.{number}.{layer[part]}.{kind}"] = tensor
        else:
            found[f"{ours[stem]}.{kind}"] = tensor
    return found


_FORMS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f", GGUFValueType.FLOAT64: "d", GGUFValueType.BOOL: "?",
}  # fmt: skip


def gguf_bytes(
    fields: Mapping[str, Field] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    changes: Mapping[str, tuple[int, tuple[int, ...], int, int]] | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file. changes: by tensor, other values for its number of dimensions, its dimensions (fastest first), type
    and offset."""
    fields = metadata() if fields is None else fields
    tensors = gguf_tensors() if tensors is None else tensors
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for key, field in fields.items():
        header += text_bytes(key) + struct.pack("<I", field.kind) + _value_bytes(field)
    data = b""
    for name, tensor in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        dims, kind, offset = tuple(tensor.shape)[::-1], 0, len(data)
        count = len(dims)
        if changes and name in changes:
            count, dims, kind, offset = changes[name]
        header += text_bytes(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)
        data += tensor.numpy().tobytes()
    return header + b"\0" * (-len(header) % alignment) + data


def text_bytes(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(encoded)) + encoded


def _value_bytes(field: Field) -> bytes:
    if field.kind == GGUFValueType.STRING:
        return text_bytes(field.value)
    if field.kind != GGUFValueType.ARRAY:
        return struct.pack(f"<{_FORMS[field.kind]}", field.value)
    assert field.items is not None
    start = struct.pack("<IQ", field.items, len(field.value))
    return start + b"".join(_value_bytes(Field(field.items, None, item)) for item in field.value)
