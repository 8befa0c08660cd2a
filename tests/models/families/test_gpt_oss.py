"""gpt-oss with experts that are stored one by one, as llm-compressor 0.14.0.1 writes quantized ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from crossed import crossed
from quantized_weights import FORMATS, MORE
from safetensors.torch import load_file, save_file
from thread_ranks import on_ranks
from uncached import decoder_of, logits_of

from specbatch.errors import SpecbatchError
from specbatch.weights import open_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "num_local_experts": 3,
    "num_experts_per_tok": 2, "sliding_window": 6, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
TOKENS = torch.randint(0, 61, (20,), generator=torch.Generator().manual_seed(1))


def write(folder: Path, form: str) -> torch.Tensor:
    """Write such a checkpoint; returns the logits of transformers with its dequantized weights."""
    torch.manual_seed(3)
    model = hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES, attn_implementation="eager"))
    quantization, store = (FORMATS | MORE)[form]
    tensors: dict[str, torch.Tensor] = {}

    def quantized(name: str, weight: torch.Tensor) -> torch.Tensor:
        parts, meant = store(name, weight.contiguous())
        tensors.update(parts)
        return meant

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 1.2 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1.0
            parameter.copy_(torch.randn_like(parameter) * size)
            stem, is_expert = name.partition(".experts.")[:2]
            if is_expert and "gate_up" in name:
                for expert, each in enumerate(parameter):  # [in, 2 * out], or [2 * out]; gate and up alternate
                    for start, part in enumerate(("gate_proj", "up_proj")):
                        own, of = each[..., start::2], f"{stem}.experts.{expert}.{part}"
                        if own.dim() > 1:
                            own.copy_(quantized(f"{of}.weight", own.T).T)
                        else:
                            tensors[f"{of}.bias"] = own.clone()
            elif is_expert:
                for expert, each in enumerate(parameter):
                    of = f"{stem}.experts.{expert}.down_proj"
                    if each.dim() > 1:
                        each.copy_(quantized(f"{of}.weight", each.T).T)
                    else:
                        tensors[f"{of}.bias"] = each.clone()
            elif "_proj.weight" in name:
                parameter.copy_(quantized(name, parameter.clone()))
            else:
                tensors[name] = parameter.clone()
        expected: torch.Tensor = model(TOKENS[None], use_cache=False).logits[0]
    described = model.config.to_dict() | {"quantization_config": quantization, "architectures": ["GptOssForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(described))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return expected


@pytest.mark.parametrize(("form", "keeps"), crossed(["channel", "awq", "NVFP4A16"], [False, True]))
def test_logits_are_those_of_transformers(
    form: str, keeps: bool, tmp_path: Path, stay_quantized: Callable[..., None]
) -> None:
    expected = write(tmp_path, form)
    stay_quantized(keeps)
    ours = logits_of(decoder_of(open_checkpoint(str(tmp_path))), TOKENS)
    assert (ours - expected).abs().max() < 2e-5 * expected.abs().max()
    first, second = on_ranks(
        2, lambda ranks: logits_of(decoder_of(open_checkpoint(str(tmp_path)), ranks=ranks), TOKENS)
    )
    assert torch.equal(first, second)
    torch.testing.assert_close(first, ours, atol=2e-4, rtol=1e-4)


def test_experts_in_one_tensor_are_mxfp4_or_unquantized(tmp_path: Path) -> None:
    write(tmp_path, "channel")
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts."
        kept |= {f"{stem}gate_up_proj": torch.zeros(3, 256, 64).to(torch.float8_e4m3fn)}
        kept |= {f"{stem}gate_up_proj_scale": torch.ones(3, 256, 1)}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(SpecbatchError, match=r"mlp.experts.*in one tensor are 'mxfp4' or unquantized"):
        open_checkpoint(str(tmp_path))
