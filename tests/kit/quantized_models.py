"""Small models with quantized weights, written as checkpoints, which must compute what their dequantized weights do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_weights import Store
from safetensors.torch import load_file, save_file
from uncached import logits_of

from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.weight_shapes import weight_shapes
from specbatch.weights import open_checkpoint

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 41, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "mlp_only_layers": [1],
}  # fmt: skip
NEXT = MOE | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "mlp_only_layers": [],
    "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
E2B = LLAMA | {
    "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 4, "global_head_dim": 64, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7, "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 41, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {"llama": LLAMA, "moe": MOE, "next": NEXT, "e2b": E2B}
NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"))
IDS = {False: "dequantized", True: "kept"}
# Weights are dequantized at load, or kept: on a CPU as on a GPU.
devices = pytest.mark.parametrize(
    ("device", "keeps", "bound"),
    [
        pytest.param("cpu", False, 2e-5, id=IDS[False]),
        pytest.param("cpu", True, 2e-5, id=IDS[True]),
        pytest.param("cuda", True, 1e-3, id="kernels", marks=NEEDS_GPU),
    ],
)


def on_devices(names: tuple[str, ...], cases: Iterable[Any]) -> pytest.MarkDecorator:
    """As `devices`, for all cases of `names`. Quick: every other one dequantized, and every other one kept."""
    return pytest.mark.parametrize((*names, "device", "keeps", "bound"), [*_on_devices(cases)])


def _on_devices(cases: Iterable[Any]) -> Iterator[Any]:
    for place, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        name = "-".join(map(str, values))
        for number, keeps in enumerate((False, True)):
            marks = () if place % 2 == number else (pytest.mark.slow,)
            yield pytest.param(*values, "cpu", keeps, 2e-5, id=f"{name}-{IDS[keeps]}", marks=marks)
        yield pytest.param(*values, "cuda", True, 1e-3, id=f"{name}-kernels", marks=NEEDS_GPU)


def write(
    folder: Path, described: dict[str, Any], quantization: dict[str, Any], store: Store
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint; returns its dequantized weights."""
    described = described | {"quantization_config": quantization}
    config = ModelConfig.from_dict(described)
    if quantization["quant_method"] == "modelopt":  # as its older versions do
        stated = {key: value for key, value in quantization.items() if key != "quant_method"}
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
        del described["quantization_config"]
    (folder / "config.json").write_text(json.dumps(described))
    stored = config.format_except_ends
    assert stored is not None
    generator, tensors, meant = torch.Generator().manual_seed(2), {}, {}
    for name, shape in weight_shapes(config).items():
        weight = torch.randn(shape, generator=generator)
        weight = weight * 1.2 / shape[-1] ** 0.5 if len(shape) > 1 else weight.sigmoid() + 0.5
        parts, meant[name] = store(name, weight) if stored.is_quantized(name, shape) else ({name: weight}, weight)
        tensors |= parts
    save_file(tensors, folder / "model.safetensors")
    return meant


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replaces a tensor of a checkpoint, or removes it."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")


def logits(model: Decoder) -> torch.Tensor:
    tokens = torch.randint(0, model.config.vocab_size, (23,), generator=torch.Generator().manual_seed(4))
    return logits_of(model, tokens.to(model.device))


def load(config: ModelConfig, tensor: Callable[[str], torch.Tensor], device: str = "cpu") -> Decoder:
    return Decoder(config, tensor, dtype=torch.float32, device=torch.device(device), max_positions=64)


def check_model(
    folder: Path,
    model: str,
    quantization: dict[str, Any],
    store: Store,
    stay_quantized: Callable[..., None],
    device: str,
    keeps: bool,
    bound: float,
    *,
    splits: bool = False,
) -> None:
    """A quantized model has the logits of one with its dequantized weights, and only matrices of "next" that are
    reordered by rows may be dequantized at load. splits: or matrices with parts of several formats."""
    described = MODELS[model]
    meant = write(folder, described, quantization, store)
    checkpoint = open_checkpoint(str(folder))
    unquantized = ModelConfig.from_dict(described).fit({name: tuple(item.shape) for name, item in meant.items()})
    expected = logits(load(unquantized, meant.__getitem__, device))
    if device == "cpu":
        stay_quantized(keeps)
    found = load(checkpoint.config, checkpoint.tensor, device)
    attention = {name for name in found.dequantized if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")}
    stored = checkpoint.config.quantization
    assert stored is not None
    if len(stored.forms) == 1:
        stays = stored.runs_on(torch.device(device)) or stored.keeps_groups("", torch.device(device))
        assert bool(attention) == (stays and model == "next")
    if not splits:
        assert not found.dequantized - attention
    ours = logits(found)
    assert (ours - expected).abs().max() < bound * expected.abs().max()
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))
