"""FP8 checkpoints match the same model with dequantized weights; damaged checkpoints are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crossed import crossed
from quantized_models import CPU, logits, on_devices
from safetensors.torch import load_file, save_file
from uncached import decoder_of

from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.drafters import mtp
from specbatch.errors import SpecbatchError
from specbatch.kernels.gemm.linear import Linear
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Linear, FP8Weight
from specbatch.kernels.gemm.quantized.weight import ConcatLinear
from specbatch.kernels.moe.experts import Experts
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.heads.mtp import Mtp, MtpConfig, mtp_config
from specbatch.models.weight_reader import Reader
from specbatch.models.weight_shapes import tensor_shapes, weight_shapes
from specbatch.runtime.loader import weight_bytes
from specbatch.weights import open_checkpoint
from specbatch.weights.dummy import DummyCheckpoint

SIZES = {
    "vocab_size": 97, "hidden_size": 160, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
QWEN3 = {**SIZES, "architectures": ["Qwen3ForCausalLM"]}
MOE = {
    **SIZES, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "norm_topk_prob": True, "mlp_only_layers": [1],
}  # fmt: skip
NEXT = {
    **MOE, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "mlp_only_layers": [],
    "shared_expert_intermediate_size": 384, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
QWEN35 = {
    **{key: value for key, value in NEXT.items() if key != "norm_topk_prob"},
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "shared_expert_intermediate_size": 128,
}
NEMOTRON = {
    **{key: value for key, value in SIZES.items() if key != "rms_norm_eps"},
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M-*E",
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 256,
}

DEEPSEEK = {
    **{key: value for key, value in SIZES.items() if key != "head_dim"},
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 2,
    "topk_group": 1,
}


def qkv_of(*layers: int) -> set[str]:
    return {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in layers for part in "qkv"}


# Config, modules not converted, whether a layer's experts are one tensor, weights that are always dequantized.
CASES: dict[str, tuple[dict[str, Any], list[str], bool, set[str]]] = {
    "dense": (QWEN3, ["lm_head", "model.layers.1.mlp"], False, set()),
    "dense, mixed": (QWEN3, ["model.layers.0.mlp.up_proj"], False, {"model.layers.0.mlp.gate_proj.weight"}),
    "dense, uneven": ({**QWEN3, "head_dim": 48}, ["lm_head"], False, qkv_of(0, 1)),
    "moe": (MOE, ["lm_head", "model.layers.0.mlp.gate"], False, set()),
    "moe, fused": (MOE, [], True, set()),
    "next": (NEXT, ["linear_attn.in_proj_ba"], False, qkv_of(1)),
    "qwen3.5": (QWEN35, [f"model.layers.0.linear_attn.in_proj_{part}" for part in "ab"], True, qkv_of(1)),
    "nemotron": (NEMOTRON, [], False, set()),
    "deepseek": (DEEPSEEK, [], False, {f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in (0, 1)}),
}


QUANTIZATION = {
    "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
}  # fmt: skip


def quantized(unquantized: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 values in blocks of 128 x 128 whose largest is 448, the FP8 maximum; their scales; and the dequantized
    values."""
    out, inner = unquantized.shape[-2:]
    values, meant = torch.zeros_like(unquantized, dtype=torch.float8_e4m3fn), torch.zeros_like(unquantized)
    scales = torch.zeros(*unquantized.shape[:-2], -(-out // 128), -(-inner // 128), dtype=torch.bfloat16)
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            block = (..., slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale = (unquantized[block].abs().amax((-2, -1)) / 448).bfloat16()
            scales[..., i, j] = scale
            values[block] = (unquantized[block] / scale.float()[..., None, None]).clamp(-448, 448).to(values.dtype)
            meant[block] = values[block].float() * scale.float()[..., None, None]
    return values, scales, meant


def write(folder: Path, described: dict[str, Any], plain: list[str], fused: bool) -> dict[str, torch.Tensor]:
    """Writes an FP8 checkpoint; returns its dequantized weights."""
    described = described | {"quantization_config": QUANTIZATION | {"modules_to_not_convert": plain}}
    (folder / "config.json").write_text(json.dumps(described))
    config = ModelConfig.from_dict(described)
    shapes = tensor_shapes(config.stacked() if fused else config)
    generator = torch.Generator().manual_seed(2)
    stored, meant = {}, {}
    for name, shape in shapes.items():
        if name.endswith("_scale_inv"):
            continue
        unquantized = torch.randn(shape, generator=generator)
        unquantized = unquantized * 1.2 / shape[-1] ** 0.5 if len(shape) > 1 else unquantized.sigmoid() + 0.5
        stored[name] = meant[name] = unquantized
        if f"{name}_scale_inv" in shapes:
            stored[name], stored[f"{name}_scale_inv"], meant[name] = quantized(unquantized)
    save_file(stored, folder / "model.safetensors")
    return meant


def linear_types(model: Decoder) -> set[type]:
    parts = [part for layer in model.layers for part in (layer.mixer, *layer.mlps)]
    items = [item for part in parts for item in vars(part).values()]
    experts = {FP8Linear for item in items if isinstance(item, Experts) and item.weights.up.is_quantized}
    return {type(item) for item in items if isinstance(item, Linear)} | experts


@on_devices(("case",), CASES)
def test_fp8_model_matches_dequantized_model(
    case: str, device: str, keeps: bool, bound: float, tmp_path: Path, stay_quantized: Callable[..., None]
) -> None:
    described, plain, fused, dequantized = CASES[case]
    meant = write(tmp_path, described, plain, fused)
    checkpoint = open_checkpoint(str(tmp_path))
    unquantized = ModelConfig.from_dict(described).fit({name: tuple(item.shape) for name, item in meant.items()})
    sizes = {"dtype": torch.float32, "device": torch.device(device), "max_positions": 64}
    expected = logits(Decoder(unquantized, meant.__getitem__, **sizes))
    if device == "cpu":
        stay_quantized(keeps)
    model = decoder_of(checkpoint, device=torch.device(device))
    assert model.dequantized == (dequantized if keeps else set())
    assert device == "cuda" or (linear_types(model) & {FP8Linear, ConcatLinear} != set()) is keeps
    assert (logits(model) - expected).abs().max() < bound * expected.abs().max()


def write_head(folder: Path, unquantized: set[str]) -> tuple[MtpConfig, dict[str, torch.Tensor]]:
    """Adds an MTP head to the folder, in FP8 except for `unquantized`: its config in the activations' dtype,
    and its dequantized weights."""
    target = open_checkpoint(str(folder)).config
    stored, meant = load_file(folder / "model.safetensors"), {}
    mixture = target.mixture and replace(target.mixture, fused=False)
    config = replace(mtp_config(target), quantization=None, mixture=mixture)
    generator = torch.Generator().manual_seed(5)
    for name, shape in weight_shapes(config).items():
        stored[name] = meant[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        if len(shape) > 1 and name not in unquantized and not name.endswith("gate.weight"):
            stored[name], stored[f"{name}_scale_inv"], meant[name] = quantized(meant[name])
    save_file(stored, folder / "model.safetensors")
    return config, meant


@pytest.mark.parametrize(
    ("case", "changes", "unquantized", "joined", "keeps"),
    crossed(
        [
            ("next", {}, {"mtp.fc.weight"}, False),  # as it is published
            ("next", {"hidden_size": 256}, set(), True),
            ("qwen3.5", {}, set(), False),  # halves of 160 columns
            ("qwen3.5", {}, {f"mtp.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}, False),
        ],
        [False, True],
    ),
)
def test_fp8_mtp_head_matches_dequantized_head(
    case: str,
    changes: Any,
    unquantized: set[str],
    joined: bool,
    keeps: bool,
    tmp_path: Path,
    stay_quantized: Callable[..., None],
) -> None:
    described, plain, fused, _ = CASES[case]
    write(tmp_path, described | changes, plain, fused)
    config, meant = write_head(tmp_path, unquantized)
    stay_quantized(keeps)
    checkpoint = open_checkpoint(str(tmp_path))
    target = decoder_of(checkpoint)
    lines: list[str] = []
    asked = EngineConfig(model=str(tmp_path), speculation=Speculation("mtp"))
    layer = mtp.plan(checkpoint, asked, lines.append).weights
    assert isinstance(layer, MtpConfig)
    assert "M parameters, FP8; 4 heads" in lines[0]
    found = []
    for own, tensor in ((config, meant.__getitem__), (layer, checkpoint.tensor)):
        head = Mtp(Reader(own, tensor, torch.float32, CPU, of_draft=True), target, 64)
        generator = torch.Generator().manual_seed(6)
        embedded, hidden = torch.randn(2, 7, config.hidden_size, generator=generator)
        x, qkv = head.enter(embedded, hidden)
        found.append(head.leave(x, qkv[:, : config.num_heads * config.head_dim]))
    expected, ours = found
    assert (ours - expected).abs().max() < 2e-5 * expected.abs().max()
    types = {type(part) for part in vars(head._layers[0].join).values()}
    assert types == ({FP8Linear} if joined and keeps else {Linear})
    assert isinstance(head._layers[0].layer.mlps[0].experts.weights.up, FP8Weight) is keeps


def test_fp8_mtp_head_takes_half_the_memory(tmp_path: Path, stay_quantized: Callable[..., None]) -> None:
    described, plain, fused, _ = CASES["next"]
    write(tmp_path, {**described, "hidden_size": 256}, plain, fused)
    config, meant = write_head(tmp_path, {"mtp.fc.weight"})
    found = mtp_config(open_checkpoint(str(tmp_path)).config, open_checkpoint(str(tmp_path)).mtp)
    count = sum(item.numel() for item in meant.values())
    assert weight_bytes(found, torch.bfloat16, CPU) == weight_bytes(config, torch.bfloat16, CPU) == 2 * count
    stay_quantized()
    small = [256 * 256, *[128 * 256] * 9, *[384 * 256] * 3]  # o_proj, experts, shared
    scales = 4 * sum(item // 128**2 for item in small)
    assert weight_bytes(found, torch.bfloat16, CPU) == 2 * count - sum(small) + scales


def test_dummy_mtp_head_is_created_on_the_targets_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the target's dtype and with fused experts: 512 experts in float32 on a CPU take minutes."""
    made: dict[str, tuple[str, torch.dtype]] = {}

    def random(name: str, shape: tuple[int, ...], seed: int, device: str, dtype: torch.dtype) -> torch.Tensor:
        made[name] = device, dtype
        return torch.empty(shape, device=device, dtype=dtype)

    monkeypatch.setattr("specbatch.weights.dummy.random_tensor", random)
    monkeypatch.setattr("specbatch.drafters.mtp.feature_chain", lambda head, *_, **__: head)
    monkeypatch.setattr(Reader, "finite", lambda self, name, values: values)  # nothing has a value here
    config = ModelConfig.from_dict(NEXT | {"dtype": "bfloat16"})
    checkpoint = DummyCheckpoint(config, name="next", seed=1, tokenizer=None, device="meta")
    target = decoder_of(checkpoint, dtype=torch.bfloat16, device=torch.device("meta"))
    of_target = set(made.values())
    made.clear()
    asked = EngineConfig(model="next", load_format="dummy", speculation=Speculation("mtp"))

    def read(config: ModelConfig, tensor: Any) -> Reader:
        return Reader(config, tensor, torch.bfloat16, torch.device("meta"), of_draft=True)

    mtp.plan(checkpoint, asked, print).build(target, SimpleNamespace(max_positions=64, draft_reader=read))
    assert set(made.values()) == of_target == {("meta", torch.bfloat16)}
    assert {"mtp.fc.weight", "mtp.layers.0.mlp.experts.gate_up_proj"} <= set(made)


def test_fp8_weights_stay_fp8_in_memory(tmp_path: Path, stay_quantized: Callable[..., None]) -> None:
    meant = write(tmp_path, QWEN3, ["lm_head", "model.layers.1.mlp"], False)
    checkpoint = open_checkpoint(str(tmp_path))
    count = sum(item.numel() for item in meant.values())
    assert weight_bytes(checkpoint.config, torch.bfloat16, CPU) == 2 * count
    stay_quantized()
    # 160 rows may have to be split, and are planned as dequantized; 160 columns are two blocks.
    small = 2 * 160 * (256 + 128 + 128) + 2 * 160 * 256
    scales = 2 * (4 + 2 + 2) + 2 * 4
    assert weight_bytes(checkpoint.config, torch.bfloat16, CPU) == 2 * (count - small) + small + 4 * scales


NAME = "model.layers.1.mlp.down_proj.weight"
SCALES = f"{NAME}_scale_inv"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (SCALES, lambda scales: scales[:1].clone(), f"tensor {SCALES} is [1, 2]; its config requires [2, 2]"),
        (SCALES, None, f"tensor {NAME} is F8_E4M3 and there is no {SCALES}"),
        (NAME, torch.Tensor.bfloat16, f"{SCALES}, but no F8_E4M3 or I8 or U8 tensor"),
    ],
    ids=["shape of scales", "no scales", "no FP8 weight"],
)
def test_fp8_weights_and_scales_must_match(tmp_path: Path, name: str, change: Any, message: str) -> None:
    write(tmp_path, QWEN3, ["lm_head"], False)
    tensors = load_file(tmp_path / "model.safetensors")
    tensor = tensors.pop(name)
    save_file(tensors | ({name: change(tensor)} if change else {}), tmp_path / "model.safetensors")
    with pytest.raises(SpecbatchError, match=re.escape(message)):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("keeps", [False, True], ids=["dequantized", "kept"])
def test_nan_fp8_weights_are_refused(
    keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stay_quantized: Callable[..., None]
) -> None:
    """In any part of a fused tensor; GEMMs would read it as 480."""
    stay_quantized(keeps)
    monkeypatch.setattr("specbatch.kernels.gemm.quantized.fp8_linear._PART", 1000)
    write(tmp_path, QWEN3, ["lm_head"], False)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[NAME].view(torch.uint8)[100, 3] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(SpecbatchError, match=f"{NAME}.* not finite in torch.float8_e4m3fn"):
        decoder_of(checkpoint)


@pytest.mark.parametrize("keeps", [False, True], ids=["dequantized", "kept"])
def test_blocks_of_compressed_tensors(keeps: bool, tmp_path: Path, stay_quantized: Callable[..., None]) -> None:
    """The same scales by another name."""
    stay_quantized(keeps)
    meant = write(tmp_path, QWEN3, ["lm_head"], False)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removesuffix("_inv"): item for name, item in tensors.items()}, tmp_path / "model.safetensors")
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"quantization_config": quantization}))
    found = logits(decoder_of(open_checkpoint(str(tmp_path))))
    sizes = {"dtype": torch.float32, "device": CPU, "max_positions": 64}
    expected = logits(Decoder(ModelConfig.from_dict(QWEN3), meant.__getitem__, **sizes))
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


def test_file_decides_which_weights_are_fp8(tmp_path: Path) -> None:
    meant = write(tmp_path, QWEN3, ["lm_head", "model.layers.1.mlp"], False)
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"]["modules_to_not_convert"] = None
    (tmp_path / "config.json").write_text(json.dumps(described))
    checkpoint = open_checkpoint(str(tmp_path))
    assert f"{NAME}_scale_inv" not in tensor_shapes(checkpoint.config)
    assert f"{NAME.replace('1', '0')}_scale_inv" in tensor_shapes(checkpoint.config)
    assert torch.equal(checkpoint.tensor(NAME), meant[NAME])


def test_unannounced_scales_are_refused(tmp_path: Path) -> None:
    write(tmp_path, QWEN3, [], False)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    with pytest.raises(SpecbatchError, match=r"its config describes no tensor .*_scale_inv"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"weight_block_size": 128}, "weight_block_size=128: it must be .128, 128."),
        ({"weight_block_size": [64, 128]}, "weight_block_size=.64, 128."),
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme='static'"),
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head'"),
    ],
)
def test_other_quantizations_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecbatchError, match=named):
        ModelConfig.from_dict({**QWEN3, "quantization_config": QUANTIZATION | changes})
