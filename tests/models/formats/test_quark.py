"""AMD Quark's tables of layers: each layer computes what its weights mean, the right entry counts, and what cannot be
read is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import LLAMA, check_model, devices
from quantized_weights import QUARK, Store, Stored, fp4, fp8

from specbatch.errors import SpecbatchError
from specbatch.models.config import ModelConfig

STORES = {
    "fp8": fp8("scalar", "_scale", "input_scale"),
    "fp8 per channel": fp8("channel", "_scale"),
    "mxfp4": fp4("mxfp4", modelopt=True),
}


def quark(layers: dict[str, str], whole: str = "fp8", linear: str | None = None) -> dict[str, Any]:
    found = {"quant_method": "quark", "global_quant_config": QUARK[whole], "exclude": ["lm_head"]}
    found["layer_quant_config"] = {name: QUARK[kind] for name, kind in layers.items()}
    return found | {"layer_type_quant_config": {} if linear is None else {"Linear": QUARK[linear]}}


def store(layers: dict[str, str], rest: str) -> Store:
    def stored(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        module = name.removesuffix(".weight")
        kind = next((kind for pattern, kind in layers.items() if fnmatch(module, pattern)), rest)
        return STORES[kind](name, weight)

    return stored


LAYERS = {
    "attention apart": {"*self_attn*": "fp8 per channel"},
    "within matrices": {"*.[qg]*_proj": "fp8", "*.v_proj": "fp8 per channel", "*0.self_attn.o_proj": "none"},
    "by expert": {"*experts.1.*": "fp8", "model.layers.1.mlp.up_proj": "fp8"},
}
CASES = {
    "attention apart, llama": ("llama", "attention apart", quark(LAYERS["attention apart"], "mxfp4")),
    "within matrices, llama": ("llama", "within matrices", quark(LAYERS["within matrices"], "fp8", "mxfp4")),
    "by expert, moe": ("moe", "by expert", quark(LAYERS["by expert"], "mxfp4")),
}


@devices
@pytest.mark.parametrize("case", CASES)
def test_model_matches_dequantized_model(
    case: str, device: str, keeps: bool, bound: float, tmp_path: Path, stay_quantized: Callable[..., None]
) -> None:
    model, layers, quantization = CASES[case]
    made = store(LAYERS[layers], "mxfp4")
    check_model(tmp_path, model, quantization, made, stay_quantized, device, keeps, bound, splits=True)


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        (quark({"*down_proj": "mxfp4", "*mlp*": "fp8"}), "MXFP4"),
        (quark({"*mlp*": "fp8", "*down_proj": "mxfp4"}), "FP8"),
        (quark({"*mlp*": "fp8", "model.layers.0.mlp.down_proj": "mxfp4"}), "MXFP4"),  # a name before patterns
        (quark({"*down": "mxfp4", "down_proj": "mxfp4"}), "FP8"),  # neither is the whole name
        (quark({}, "fp8", "mxfp4"), "MXFP4"),
        (quark({"*0.mlp.down_pro?": "mxfp4"}), "MXFP4"),
        (quark({"*mlp*": "fp8"}, "mxfp4") | {"kv_cache_quant_config": {"*down_proj": QUARK["mxfp4"]}}, "MXFP4"),
    ],
)
def test_the_first_pattern_that_fits_counts(quantization: dict[str, Any], name: str) -> None:
    found = ModelConfig.from_dict(LLAMA | {"quantization_config": quantization}).quantization
    assert found is not None
    assert found.of("model.layers.0.mlp.down_proj.weight").name == name


def changed(key: str, **changes: Any) -> dict[str, Any]:
    """A layer in FP8 or MXFP4, with other settings of its weight or inputs."""
    layer = QUARK["mxfp4" if "group_size" in changes or "scale_format" in changes else "fp8"]
    return quark({}) | {"layer_quant_config": {"*a": layer | {key: layer[key] | changes}}}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            changed("weight", dtype="int4"),
            r"layer_quant_config.\*a.weight.dtype='int4': it must be 'fp8_e4m3' or 'fp4'",
        ),
        (changed("weight", qscheme="per_group"), r"\*a.weight.qscheme='per_group': it must be 'per_tensor' or"),
        (changed("weight", group_size=16), r"\*a.weight.group_size=16: it must be 32"),
        (changed("weight", scale_format="float32"), r"\*a.weight.scale_format='float32': it must be 'e8m0'"),
        (changed("input_tensors", dtype="fp4"), r"\*a.input_tensors.dtype='fp4': of FP8 weights it must be"),
        (changed("input_tensors", dtype="int8"), r"\*a.input_tensors.dtype='int8': it must be 'fp8_e4m3' or 'fp4'"),
        (
            quark({}) | {"layer_quant_config": {"a": QUARK["fp8"] | {"online": True}}},
            "layer_quant_config.a.online=True: use weight, input_tensors, output_tensors, bias, target_device",
        ),
        (quark({}) | {"layer_type_quant_config": {"Conv2d": QUARK["fp8"]}}, "type_quant_config='Conv2d': .* Linear"),
        (quark({}) | {"algo_config": [{"name": "awq"}]}, "algo_config=.*must be quantized without one"),
        (quark({}) | {"export": {"weight_format": "fake_quantized"}}, "export.weight_format='fake_quantized'"),
        (quark({}, "none"), "global_quant_config.weight.dtype=None: it must be"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecbatchError, match=message):
        ModelConfig.from_dict(LLAMA | {"quantization_config": quantization})
