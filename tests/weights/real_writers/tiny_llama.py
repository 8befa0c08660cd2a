"""A tiny random Llama that quantization tools read, its calibration data, and the logits of what they wrote.

It runs in the environments of `make.sh`, without specbatch.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 64
TOKENS = torch.arange(3, 36, 3)  # of which the test compares the logits
_CONFIGS = ("config.json", "hf_quant_config.json")
LINEAR = (".q_proj", ".k_proj", ".v_proj", ".o_proj", ".gate_proj", ".up_proj", ".down_proj")


def write_model(folder: Path, dtype: torch.dtype = torch.float16, hidden: int = 64) -> Path:
    """hidden: 64, or 128 for tools with groups or blocks of 128; 256 for several blocks."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.2 / parameter.shape[1] ** 0.5)
    model.to(dtype).save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "w1", "eos_token": "w2", "pad_token": "w2", "unk_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def calibration(count: int = 8, length: int = 64) -> torch.Tensor:
    """Random texts int64 [count, length]."""
    return torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(2))


def keep(written: Path, to: Path, weights: dict[str, torch.Tensor] | None) -> None:
    """Copy what a tool wrote, and beside it the logits of a Llama with its dequantized linear `weights` (name ->
    [out, in]), in float32. None: the config only."""
    copy(written, to, *_CONFIGS)
    if weights is None:
        return
    copy(written, to, "model.safetensors")
    config = LlamaConfig.from_pretrained(written)
    config.quantization_config = None
    del config.quantization_config
    model = LlamaForCausalLM(config).float()
    stored = load_file(written / "model.safetensors")
    plain = {name: tensor for name, tensor in stored.items() if name in model.state_dict()}
    found = {name: tensor.float() for name, tensor in {**plain, **weights}.items()}
    missing = model.state_dict().keys() - found.keys()
    assert not missing, f"no weights {missing}"
    model.load_state_dict(found)
    with torch.inference_mode():
        save_file({"logits": model(TOKENS[None]).logits[0].contiguous()}, to / "reference.safetensors")


def copy(written: Path, to: Path, *names: str) -> None:
    """Copy files that exist, without the names of temporary folders."""
    to.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name.endswith(".json") and (written / name).is_file():
            (to / name).write_text(re.sub(r"/tmp/\w+", "FOLDER", (written / name).read_text()))
        elif (written / name).is_file():
            shutil.copyfile(written / name, to / name)


def by_identity(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a model's quantized linear layers, as they multiply the identity in float32."""

    def weight(layer: Any) -> torch.Tensor:
        inputs = getattr(layer, "in_features", None) or layer.infeatures
        with torch.inference_mode():
            product: torch.Tensor = layer(torch.eye(inputs))
        return product.T

    return each(torch.nn.Module.float(model), weight)


def each(model: Any, weight: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
    """`weight` [out, in] of each linear layer of a model."""
    layers = ((name, module) for name, module in model.named_modules() if name.endswith(LINEAR))
    return {f"{name}.weight": weight(module).contiguous() for name, module in layers}
