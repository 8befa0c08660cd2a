"""Checkpoints with several formats compute what their dequantized weights do; each layer has its own format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import LLAMA, MODELS, change, check_model, devices, write
from quantized_weights import FORMATS, MORE, Store, Stored

from specbatch.errors import SpecbatchError
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Weight
from specbatch.kernels.gemm.quantized.weight import Weight, concat_outputs, stack_experts
from specbatch.models.config import ModelConfig
from specbatch.models.weight_shapes import weight_shapes
from specbatch.runtime.loader import kept_quantized, quantizes_activations
from specbatch.weights import open_checkpoint

ALGORITHMS: dict[str, tuple[dict[str, Any], Store]] = {
    "fp8": ({"quant_algo": "FP8"}, FORMATS["modelopt"][1]),
    "nvfp4": ({"quant_algo": "NVFP4", "group_size": 16}, MORE["NVFP4 of ModelOpt"][1]),
    "mxfp4": ({"quant_algo": "MXFP4", "group_size": 32}, MORE["MXFP4 of ModelOpt"][1]),
    "int4": (
        {"quant_algo": "W4A16_AWQ", "group_size": 32, "has_zero_point": False, "pre_quant_scale": True},
        MORE["INT4 of ModelOpt"][1],
    ),
}  # fmt: skip
# By parts of names, the first that fits; weights of one matrix have one format or several.
LAYOUTS = {
    "attention apart": {"self_attn": "fp8", "linear_attn": "fp8", "": "nvfp4"},
    "by layer": {"layers.0": "int4", "": "fp8"},
    "within matrices": {"q_proj": "fp8", "v_proj": "mxfp4", "up_proj": "int4", "": "nvfp4"},
    "by expert": {"experts.0": "nvfp4", "experts": "int4", "": "fp8"},
}


def modelopt(model: str, layout: dict[str, str]) -> tuple[dict[str, Any], Store]:
    """A table of ModelOpt for all matrices of a model, and what stores them."""

    def kind(name: str) -> str:
        return next(kind for part, kind in layout.items() if part in name)

    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        return ALGORITHMS[kind(name)][1](name, weight)

    plain = ModelConfig.from_dict(MODELS[model] | {"quantization_config": MORE["NVFP4 of ModelOpt"][0]})
    modules = [name for name, shape in weight_shapes(plain).items() if plain.is_stored_quantized(name, shape)]
    table = {name.removesuffix(".weight"): ALGORITHMS[kind(name)][0] for name in modules}
    found = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": table}
    return found | {"exclude_modules": ["lm_head"], "kv_cache_quant_algo": None}, store


def compressed(model: str) -> tuple[dict[str, Any], Store]:
    """FP8 by name, INT8 by pattern, INT4 for all others."""
    stores = {"fp8": FORMATS["channel"], "int8": MORE["W8A8"], "int4": FORMATS["pack-quantized"]}
    targets = {"fp8": ["model.layers.0.mlp.down_proj"], "int8": [r"re:.*self_attn\.[qkv]_proj$"], "int4": ["Linear"]}
    groups = {}
    for name in ("int4", "int8", "fp8"):
        config = stores[name][0]
        group = config["config_groups"]["group_0"]
        groups[name] = {"format": config.get("format"), **group, "targets": targets[name]}

    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        is_fp8, is_int8 = name.endswith("0.mlp.down_proj.weight"), name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
        return stores["fp8" if is_fp8 else "int8" if is_int8 else "int4"][1](name, weight)

    found = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    return found | {"ignore": ["lm_head"]}, store


CASES = {
    **{f"{name}, {model}": (model, lambda m=model, n=name: modelopt(m, LAYOUTS[n])) for model, name in (
        ("llama", "attention apart"), ("llama", "by layer"), ("llama", "within matrices"), ("moe", "attention apart"),
        ("moe", "by expert"), ("e2b", "by layer"),
    )},
    "compressed-tensors, llama": ("llama", lambda: compressed("llama")),
}  # fmt: skip


@devices
@pytest.mark.parametrize("case", CASES)
def test_model_matches_dequantized_model(
    case: str, device: str, keeps: bool, bound: float, tmp_path: Path, stay_quantized: Callable[..., None]
) -> None:
    model, made = CASES[case]
    splits = "within" in case or "by expert" in case
    check_model(tmp_path, model, *made(), stay_quantized, device, keeps, bound, splits=splits)


def test_each_layer_has_its_own_format(tmp_path: Path) -> None:
    """Also where the table names a module around it, and in config.json, as newer versions have it."""
    quantization, store = modelopt("llama", {"self_attn": "fp8", "layers.0": "int4", "": "nvfp4"})
    write(tmp_path, LLAMA, quantization, store)
    found = open_checkpoint(str(tmp_path)).config
    table = {"model.layers.0": ALGORITHMS["int4"][0], "model.layers": ALGORITHMS["nvfp4"][0]}
    table |= {f"model.layers.{layer}.self_attn": ALGORITHMS["fp8"][0] for layer in range(2)}
    groups: dict[str, Any] = {"config_groups": {}, "ignore": ["lm_head"]}
    stated = quantization | groups | {"quantized_layers": table}
    (tmp_path / "hf_quant_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": stated}))
    again = open_checkpoint(str(tmp_path)).config
    wanted = {"layers.0.mlp.up_proj": "INT4", "layers.1.mlp.up_proj": "NVFP4", "layers.1.self_attn.q_proj": "FP8"}
    for config in (found, again):
        assert config.quantization is not None
        assert {name: config.quantization.of(f"model.{name}.weight").name for name in wanted} == wanted
        assert {form.name for form in config.quantization.forms} == {"FP8", "INT4", "NVFP4"}
        assert quantizes_activations(True, torch.bfloat16, torch.device("cuda"), config)
    kept = {".".join(name.split(".")[2:4]) for name in kept_quantized(found, torch.device("cuda"))}
    assert kept == {"0.self_attn", "1.self_attn", "0.mlp"}  # not NVFP4


def test_a_table_with_one_format_is_that_format() -> None:
    quantization, _ = modelopt("llama", {"": "fp8"})
    config = ModelConfig.from_dict(LLAMA | {"quantization_config": quantization})
    assert config.quantization is not None
    assert config.quantization.forms == (config.quantization,)


def _groups(**targets: list[str]) -> dict[str, Any]:
    """A config of compressed-tensors: of groups whose names begin with that of a format, the targets."""
    settings = {"fp8": FORMATS["channel"][0], "int4": FORMATS["pack-quantized"][0]}
    found = {name: settings[name.partition("_")[0]] for name in targets}
    groups = {
        name: {"format": config.get("format"), **config["config_groups"]["group_0"], "targets": targets[name]}
        for name, config in found.items()
    }
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}


def test_the_first_pattern_of_the_config_counts() -> None:
    """Also where a later group has the format of an earlier one."""
    groups = _groups(int4_attention=["re:.*self_attn"], fp8=["re:.*down_proj"], int4_rest=["re:.*"])
    config = ModelConfig.from_dict(LLAMA | {"quantization_config": groups})
    assert config.quantization is not None
    of = {
        name: config.quantization.of(f"model.layers.0.{name}.weight").name for name in ("mlp.down_proj", "mlp.up_proj")
    }
    assert of == {"mlp.down_proj": "FP8", "mlp.up_proj": "INT4"}


def test_a_target_with_two_formats_is_refused() -> None:
    groups = _groups(int4=["Linear"], fp8=["re:.*down_proj", "Linear"])
    with pytest.raises(SpecbatchError, match=r"groups\.fp8\.targets='Linear': another group gives it another format"):
        ModelConfig.from_dict(LLAMA | {"quantization_config": groups})


def test_random_weights_have_the_formats_of_the_table(tmp_path: Path) -> None:
    quantization, _ = modelopt("llama", LAYOUTS["attention apart"])
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": quantization}))
    checkpoint = open_checkpoint(str(tmp_path), "dummy")
    types = {name.split(".")[-2]: checkpoint.tensor(name).dtype for name in checkpoint.names() if name.endswith("t")}
    assert types["q_proj"] == torch.float8_e4m3fn
    assert types["up_proj"] == torch.uint8


@pytest.mark.parametrize(
    ("change_config", "message"),
    [
        (
            {"model.layers.1.mlp.up_proj": {"quant_algo": "W4A8_AWQ", "group_size": 128}},
            "quantized_layers.model.layers.1.mlp.up_proj.quant_algo='W4A8_AWQ': it must be 'FP8' or",
        ),
        (
            {"model.layers.1.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 32}},
            "quantized_layers.model.layers.1.mlp.up_proj.group_size=32: it must be 16; else use",
        ),
        ({"model.layers.1.mlp.up_proj": None}, "model.layers.1.mlp.up_proj.weight has scales, and the config has no"),
        (None, r"quantized_layers=\{\}: MIXED_PRECISION needs the format of each layer"),
    ],
)
def test_what_the_table_lacks_or_cannot_be_read_is_named(
    change_config: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    quantization, store = modelopt("llama", LAYOUTS["attention apart"])
    write(tmp_path, LLAMA, quantization, store)
    table = {} if change_config is None else quantization["quantized_layers"] | change_config
    stated = quantization | {"quantized_layers": {name: layer for name, layer in table.items() if layer is not None}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
    with pytest.raises(SpecbatchError, match=message):
        open_checkpoint(str(tmp_path))


def test_a_part_of_another_format_is_refused(tmp_path: Path) -> None:
    quantization, store = modelopt("llama", LAYOUTS["attention apart"])
    write(tmp_path, LLAMA, quantization, store)
    change(tmp_path, "model.layers.1.mlp.up_proj.weight_scale_2", None)
    with pytest.raises(SpecbatchError, match=r"up_proj\.weight_scale_2 is missing"):
        open_checkpoint(str(tmp_path))
    write(tmp_path, LLAMA, quantization, store)
    change(tmp_path, "model.layers.1.self_attn.q_proj.weight", torch.zeros(128, 64, dtype=torch.uint8))
    with pytest.raises(SpecbatchError, match=r"q_proj.weight is U8; FP8 has it in F8_E4M3"):
        open_checkpoint(str(tmp_path))


def test_weights_with_other_blocks_form_no_matrix() -> None:
    values = torch.ones(128, 256).to(torch.float8_e4m3fn)
    per_channel, blocks = FP8Weight(values, torch.ones(128, 1)), FP8Weight(values, torch.ones(1, 2))
    assert concat_outputs([per_channel, blocks]) is None
    assert stack_experts([per_channel, blocks]) is None
    found = stack_experts([blocks, blocks])
    assert isinstance(found, Weight)
