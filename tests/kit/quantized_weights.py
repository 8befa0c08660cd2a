"""Weights as quantized checkpoints store them, and what they mean, by the formulas of the formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Stored = dict[str, torch.Tensor]
Store = Callable[[str, torch.Tensor], tuple[Stored, torch.Tensor]]  # name, weight -> tensors, dequantized weight
_E4M3 = torch.float8_e4m3fn


def fp8(scales: str, suffix: str, inputs: str | None = None) -> Store:
    """scales: "scalar" [], "tensor" [1] or "channel" [out, 1]; inputs: name of a static scale of activations."""

    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        largest = weight.abs().amax(1, keepdim=True) if scales == "channel" else weight.abs().max()
        scale = (largest / 448).bfloat16().float()
        values = (weight / scale).clamp(-448, 448).to(_E4M3)
        shaped = scale.view({"scalar": (), "tensor": (1,), "channel": (-1, 1)}[scales])
        found = {name: values, name + suffix: shaped}
        if inputs is not None:
            found[f"{name.removesuffix('.weight')}.{inputs}"] = torch.tensor(0.37)
        return found, values.float() * scale

    return store


def _floats(strategy: str, inputs: dict[str, Any] | None) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
# Name -> quantization_config and how a weight is stored.
FORMATS: dict[str, tuple[dict[str, Any], Store]] = {
    "channel": (_floats("channel", _TOKEN), fp8("channel", "_scale")),
    "tensor": (_floats("tensor", _STATIC), fp8("tensor", "_scale", "input_scale")),
    "weights only": (_floats("channel", None), fp8("channel", "_scale")),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        fp8("scalar", "_scale", "input_scale"),
    ),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["lm_head"]},
        fp8("scalar", "_scale_inv", "activation_scale"),
    ),
}
