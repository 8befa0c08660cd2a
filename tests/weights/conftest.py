"""Tiny random checkpoints in every on-disk format, and a separate cache folder for each test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from specbatch.weights import Checkpoint
from specbatch.weights.known_models import KNOWN_MODELS, KnownModel

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = [
    "Tom has 12  boxes with 345 apples, isn't that   6789?",
    "def f(x):\n    return  x[10:20]\n\n\n",
    "Zürich, naïve café, 日本語 and 🙂 \u212b e\u0301",
    " 1  22   333",
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def backend() -> Tokenizer:
    """A byte-level BPE of 300 tokens after SmolLM2's pattern."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=297, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def _tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random model of a family; every vector differs from its default."""
    extra = {"head_dim": 24} if family == "qwen3" else {}
    config = CONFIGS[family](**{**SIZES, "vocab_size": 300, **extra, **changes})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return model


@pytest.fixture
def tiny_model() -> Callable[..., PreTrainedModel]:
    return _tiny_model


@pytest.fixture
def write_gguf(tmp_path: Path, backend: Tokenizer) -> Callable[..., Path]:
    """`write_gguf(model or family, tokenizer, name=..., **options)`, by default "model.gguf" with `backend`."""

    def write(
        model: PreTrainedModel | str, tokenizer: Tokenizer = backend, *, name: str = "model", **more: Any
    ) -> Path:
        made = _tiny_model(model) if isinstance(model, str) else model
        return _write_gguf(tmp_path / f"{name}.gguf", made, tokenizer, **more)

    return write


@pytest.fixture
def texts() -> list[str]:
    return TEXTS


@pytest.fixture
def save(tmp_path: Path, backend: Tokenizer) -> Callable[..., Path]:
    """Write a model as a folder, `old` in the spelling of transformers 4, with the tokenizer's files."""

    def write(model: PreTrainedModel, *, name: str = "model", old: bool = False, shard: str = "5GB") -> Path:
        folder = tmp_path / name
        model.save_pretrained(folder, max_shard_size=shard)
        backend.save(str(folder / "tokenizer.json"))
        described = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "bos_token": {"content": "<|im_start|>"},
            "chat_template": TEMPLATE,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(described))
        if old:
            config = json.loads((folder / "config.json").read_text())
            rope = config.pop("rope_parameters")
            config["rope_theta"] = rope.pop("rope_theta")
            config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
            config["torch_dtype"] = config.pop("dtype", None)
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "model.embedding_norm": "token_embd_norm",  # LFM2
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",  # Phi-3
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def _write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    *,
    pre: str = "smollm",
    quantized: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Write a model like llama.cpp's converter: matrices in `quantized`, vectors in float32."""
    config = model.config
    arch = "llama" if config.model_type in ("mistral", "ministral") else config.model_type
    writer = GGUFWriter(path, arch)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    kinds = config.layer_types if arch == "lfm2" else ()
    writer.add_head_count_kv([kv_heads * (kind == "full_attention") for kind in kinds] or kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps if arch == "lfm2" else config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch == "qwen3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary] + [f"[PAD{n}]" for n in range(len(vocabulary), config.vocab_size)]
    types = [
        3 if token in SPECIAL else 4 if token == "<tool_call>" else 5 if token.startswith("[PAD") else 1
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_chat_template(TEMPLATE)

    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, tensor in state.items():
        values = (tensor[:, 0] if ".conv.conv." in name else tensor).float().numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            count = heads if ".q_proj." in name else kv_heads
            halves = values.reshape(count, 2, head_dim // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        if values.ndim == 2 and quantized != GGMLQuantizationType.F32:
            packed = gguf.quants.quantize(values, quantized)
            writer.add_tensor(_gguf_name(name), packed, raw_dtype=quantized)
        else:
            writer.add_tensor(_gguf_name(name), values)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def read_all() -> Callable[[Checkpoint], dict[str, torch.Tensor]]:
    """Every tensor of a checkpoint by its name."""
    return lambda checkpoint: {name: checkpoint.tensor(name) for name in checkpoint.names()}


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[KnownModel], None]:
    """`register(model)`: a known model with its name, in place of another one of that name."""
    return lambda model: monkeypatch.setitem(KNOWN_MODELS, model.name, model)


@pytest.fixture
def answer_as_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., str]], None]:
    """`answer_as_hub(download)`: what is asked of the model hub from now on, as of `snapshot_download`."""
    return lambda download: monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
