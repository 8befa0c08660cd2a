"""Checkpoints in each quantized format compute what their dequantized weights do; damaged ones are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_weights import FORMATS
from safetensors.torch import load_file, save_file

from specbatch.config import EngineConfig
from specbatch.engine.builder import prepare
from specbatch.errors import SpecbatchError
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.full_forward import UncachedContext
from specbatch.runtime.loader import weight_bytes
from specbatch.weights import open_checkpoint

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 41, "hidden_size": 64, "intermediate_size": 96,
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
NAME = "model.layers.1.mlp.down_proj"


def write(folder: Path, described: dict[str, Any], form: str) -> dict[str, torch.Tensor]:
    """Writes a checkpoint in this format; returns its dequantized weights."""
    quantization, store = FORMATS[form]
    described = described | {"quantization_config": quantization}
    config = ModelConfig.from_dict(described)
    if form == "modelopt":  # as its older versions do
        stated = {key: value for key, value in quantization.items() if key != "quant_method"}
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
        del described["quantization_config"]
    (folder / "config.json").write_text(json.dumps(described))
    assert config.quantization is not None
    stored = config.quantization.except_for(config.unquantized_ends)
    generator, tensors, meant = torch.Generator().manual_seed(2), {}, {}
    for name, shape in config.weight_shapes().items():
        weight = torch.randn(shape, generator=generator)
        weight = weight * 1.2 / shape[-1] ** 0.5 if len(shape) > 1 else weight.sigmoid() + 0.5
        parts, meant[name] = store(name, weight) if stored.is_quantized(name, shape) else ({name: weight}, weight)
        tensors |= parts
    save_file(tensors, folder / "model.safetensors")
    return meant


def logits(model: Decoder) -> torch.Tensor:
    count, device = 23, model.device
    tokens = torch.randint(0, model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(4)).to(device)
    with torch.inference_mode():
        features = model.forward(tokens, torch.arange(count, device=device), UncachedContext(model, 1, count))
        return model.logits(features.last)


def load(config: ModelConfig, tensor: Any, device: str = "cpu") -> Decoder:
    return Decoder(config, tensor, dtype=torch.float32, device=torch.device(device), max_positions=64)


NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"))
EVERY = [("llama", form) for form in FORMATS] + [("moe", "channel"), ("moe", "modelopt"), ("next", "channel")]
MODELS = {"llama": LLAMA, "moe": MOE, "next": NEXT}


@pytest.mark.parametrize(
    ("device", "keeps", "bound"),
    [
        pytest.param("cpu", False, 2e-5, id="dequantized"),
        pytest.param("cpu", True, 2e-5, id="kept"),
        pytest.param("cuda", True, 1e-3, id="kernels", marks=NEEDS_GPU),
    ],
)
@pytest.mark.parametrize(("model", "form"), EVERY)
def test_quantized_model_matches_dequantized_model(
    model: str, form: str, device: str, keeps: bool, bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = MODELS[model]
    meant = write(tmp_path, described, form)
    checkpoint = open_checkpoint(str(tmp_path))
    unquantized = ModelConfig.from_dict(described).fit({name: tuple(item.shape) for name, item in meant.items()})
    expected = logits(load(unquantized, meant.__getitem__, device))
    if device == "cpu":
        for module in ("models.layers", "runtime.loader"):
            monkeypatch.setattr(f"specbatch.{module}.keeps_quantized", lambda device: keeps)
    found = load(checkpoint.config, checkpoint.tensor, device)
    assert {name.split(".")[-2] for name in found.dequantized} == (
        {"q_proj", "k_proj", "v_proj"} if keeps and model == "next" else set()
    )
    ours = logits(found)
    assert (ours - expected).abs().max() < bound * expected.abs().max()
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_memory_plan_counts_bytes_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meant = write(tmp_path, LLAMA, "tensor")
    config = open_checkpoint(str(tmp_path)).config
    count = sum(item.numel() for item in meant.values())
    assert weight_bytes(config, torch.bfloat16, CPU) == 2 * count
    monkeypatch.setattr("specbatch.runtime.loader.keeps_quantized", lambda device: True)
    outputs = 2 * (128 + 2 * 64 + 64 + 2 * 96 + 64)
    values = 2 * (64 * (128 + 2 * 64) + 128 * 64 + 3 * 96 * 64)
    assert weight_bytes(config, torch.bfloat16, CPU) == 2 * (count - values) + values + 4 * outputs


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")


@pytest.mark.parametrize(
    ("form", "name", "tensor", "message"),
    [
        ("channel", f"{NAME}.weight_scale", None, "is F8_E4M3 and there is no .*weight_scale_inv or .*weight_scale"),
        (
            "channel",
            f"{NAME}.weight_scale",
            torch.ones(63, 1),
            r"weight_scale is \[63, 1\]; its config requires \[64, 1\]",
        ),
        ("tensor", f"{NAME}.weight_scale", torch.ones(3), r"weight_scale is \[3\]; its config requires \[64, 1\]"),
        ("modelopt", f"{NAME}.weight", torch.ones(64, 96), "weight_scale, but no F8_E4M3 tensor"),
        ("channel", "lm_head.weight_scale", torch.ones(41, 1), "no F8_E4M3 tensor"),
    ],
)
def test_damaged_scales_are_refused(form: str, name: str, tensor: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, LLAMA, form)
    change(tmp_path, name, tensor)
    with pytest.raises(SpecbatchError, match=message):
        open_checkpoint(str(tmp_path))


def test_quantized_output_matrix_is_refused(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, "channel")
    change(tmp_path, "lm_head.weight_scale", torch.ones(41, 1))
    change(tmp_path, "lm_head.weight", torch.ones(41, 64).to(torch.float8_e4m3fn))
    with pytest.raises(SpecbatchError, match=r"lm_head.weight is quantized.*put it on the ignore list"):
        open_checkpoint(str(tmp_path))


def test_scales_of_activations_and_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of activations are not used, which is said; those of a cache must not be ignored by one in FP8."""
    write(tmp_path, LLAMA, "tensor")
    for part in "kv":
        change(tmp_path, f"model.layers.0.self_attn.{part}_scale", torch.tensor(0.02))
    lines: list[str] = []
    checkpoint = open_checkpoint(str(tmp_path), log=lines.append)
    assert any(
        re.search(r"16 scales are not used, such as model\.layers\.0\.mlp\.down_proj\.input_scale", line)
        for line in lines
    )
    assert checkpoint.config.quantization is not None
    assert checkpoint.config.quantization.has_cache_scales
    monkeypatch.setattr("specbatch.engine.builder._check_device", lambda config, device: None)
    with pytest.raises(SpecbatchError, match=r"kv_dtype='fp8': the checkpoint has scales .*use auto"):
        prepare(EngineConfig(model=str(tmp_path), device="cpu", kv_dtype="fp8"), print)


def scheme(**changes: Any) -> dict[str, Any]:
    """The quantization_config of "channel"; changes: of its weights."""
    found: dict[str, Any] = json.loads(json.dumps(FORMATS["channel"][0]))
    found["config_groups"]["group_0"]["weights"] |= changes
    return found


def with_group(**changes: Any) -> dict[str, Any]:
    found = scheme()
    found["config_groups"]["group_0"] |= changes
    return found


TWO = scheme()
TWO["config_groups"]["group_1"] = {"weights": {"num_bits": 8, "type": "float", "strategy": "block"}}
IGNORING = scheme() | {"ignore": ["re:.*mlp.(gate|up)_proj", "lm_head", "model.layers.1.self_attn"]}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            scheme(strategy="group"),
            "config_groups.group_0.weights.strategy='group': it must be 'tensor' or 'channel' or 'block'",
        ),
        (scheme(type="int"), r"config_groups.group_0.weights=\('int', 8\): use FP8"),
        (scheme(symmetric=False), "weights.symmetric=False"),
        (scheme(strategy="block", block_structure=[64, 64]), r"block_structure=\[64, 64\]"),
        (with_group(input_activations={"type": "int", "num_bits": 8}), "input_activations"),
        (TWO, "config_groups=.*quantized in one way"),
        (scheme() | {"config_groups": {}}, "config_groups"),
        (scheme() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
        (scheme() | {"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
        (scheme() | {"ignore": ["re:("]}, r"ignore='re:\(': it is no regular expression"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4': it must be 'FP8'"),
    ],
)
def test_other_schemes_are_refused(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecbatchError, match=message):
        ModelConfig.from_dict(LLAMA | {"quantization_config": quantization})


def test_ignored_modules_are_not_quantized() -> None:
    config = ModelConfig.from_dict(LLAMA | {"quantization_config": IGNORING})
    scaled = {name for name in config.tensor_shapes() if name.endswith("_scale")}
    attention = {f"model.layers.0.self_attn.{part}_proj.weight_scale" for part in "qkvo"}
    assert scaled == attention | {f"model.layers.{layer}.mlp.down_proj.weight_scale" for layer in range(2)}
