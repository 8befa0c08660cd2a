"""Weights as quantized checkpoints store them, and what they mean, by the formulas of the formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specbatch.models.formats.format import Format
from specbatch.models.formats.registry import format_of
from specbatch.models.formats.settings import KEY

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


def int4(packing: str, group: int, *, symmetric: bool = False) -> Store:
    """Values are packed one by one into words of 32 bits. group: -1 is all inputs; symmetric: the largest value of a
    group is -8 times its scale, which is negative in half of the groups, as auto-round writes it."""

    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        stem, (out, inner) = name.removesuffix(".weight"), weight.shape
        size = inner if group == -1 else group
        groups = weight.view(out, -1, size)
        if symmetric:
            largest = groups.abs().argmax(2, keepdim=True)
            scales = (groups.gather(2, largest)[..., 0] / -8).half()
            zeros = torch.full(scales.shape, 8)
        else:
            scales = ((groups.amax(2) - groups.amin(2)) / 15).half()
            zeros = (-groups.amin(2) / scales.float()).round().int().clamp(0, 15)
        values = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).int()
        meant = (values - zeros[..., None]) * scales.float()[..., None]
        found = _STORED[packing](stem, values.view(out, inner), zeros, scales, symmetric)
        return {part: tensor.contiguous() for part, tensor in found.items()}, meant.view(out, inner)

    return store


def words(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[n, 8 m] -> int32 [n, m]: in bits 4 i to 4 i + 3 of a word the value `order[i]` of its eight; with an `order` of
    four, in bits 8 i to 8 i + 7 that of its four."""
    rows, count = [], len(order)
    for row in values.tolist():
        each = [row[start : start + count] for start in range(0, len(row), count)]
        word = [sum(values[order[i]] << (32 // count * i) for i in range(count)) for values in each]
        rows.append([one - (1 << 32) if one >= 1 << 31 else one for one in word])
    return torch.tensor(rows, dtype=torch.int32)


def _awq(stem: str, values: Any, zeros: Any, scales: Any, symmetric: bool) -> Stored:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    packed = {f"{stem}.qweight": words(values.t(), order), f"{stem}.qzeros": words(zeros.t(), order)}
    return packed | {f"{stem}.scales": scales.t()}


def _gptq(stem: str, values: Any, zeros: Any, scales: Any, symmetric: bool, less: int = 1) -> Stored:
    packed = {f"{stem}.qweight": words(values).t(), f"{stem}.qzeros": words(zeros.t() - less)}
    order = torch.arange(values.shape[1], dtype=torch.int32) // (values.shape[1] // scales.shape[1])
    return packed | {f"{stem}.scales": scales.t(), f"{stem}.g_idx": order}


def _gptq_v2(*parts: Any) -> Stored:
    return _gptq(*parts, less=0)


def _pack_quantized(stem: str, values: Any, zeros: Any, scales: Any, symmetric: bool) -> Stored:
    packed = {f"{stem}.weight_packed": words(values)}
    packed |= {} if symmetric else {f"{stem}.weight_zero_point": words(zeros.t()).t()}
    return packed | {f"{stem}.weight_scale": scales, f"{stem}.weight_shape": torch.tensor(values.shape)}


def int8(group: int, *, packed: bool = False, symmetric: bool = True, gptq: int | None = None) -> Store:
    """group: -1 is all inputs; gptq: as GPTQ stores it, and what its zero points are less."""

    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        out, inner = weight.shape
        groups = weight.view(out, -1, inner if group == -1 else group)
        least, most = groups.amin(2), groups.amax(2)
        scales = (groups.abs().amax(2) / 127 if symmetric else (most - least) / 255).bfloat16().float()
        zeros = torch.zeros_like(scales) if symmetric else (-128 - least / scales).round().clamp(-128, 127)
        values = (groups / scales[..., None] + zeros[..., None]).round().clamp(-128, 127)
        meant = ((values - zeros[..., None]) * scales[..., None]).view(out, inner)
        values, order = values.view(out, inner).int(), (0, 1, 2, 3)
        if gptq is not None:
            parts = {"qweight": words(values + 128, order).t(), "scales": scales.t()}
            parts |= {"qzeros": words(zeros.int().t() + 128 - gptq, order)}
            parts |= {"g_idx": torch.arange(inner, dtype=torch.int32) // (inner // scales.shape[1])}
            return {name.replace("weight", part): tensor.contiguous() for part, tensor in parts.items()}, meant
        found = {f"{name}_packed": words(values + 128, order)} if packed else {name: values.to(torch.int8)}
        if not symmetric:
            stored = words(zeros.int().t() + 128, order).t().contiguous() if packed else zeros.to(torch.int8)
            found[f"{name}_zero_point"] = stored
        return found | {f"{name}_scale": scales.bfloat16()}, meant

    return store


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def fp4(kind: str, *, modelopt: bool = False) -> Store:
    """kind: "nvfp4" or "mxfp4"."""

    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        groups = weight.unflatten(1, (-1, 16 if kind == "nvfp4" else 32))
        largest = groups.abs().amax(2)
        whole = largest.max() / (6 * 448)
        if kind == "nvfp4":
            stored = (largest / 6 / whole).to(_E4M3)
            scales, second = stored.float() * whole, whole if modelopt else 1 / whole[None]
        else:
            exponents = (largest / 4).log2().floor()
            stored, scales, second = (exponents + 127).to(torch.uint8), exponents.exp2(), None
        bits = ((groups / scales[..., None]).abs()[..., None] - _E2M1).abs().argmin(-1)
        meant = (_E2M1[bits] * groups.sign() * scales[..., None]).flatten(1)
        bits = (bits + 8 * (groups < 0)).flatten(1).to(torch.uint8)
        found = {name if modelopt else f"{name}_packed": bits[:, ::2] | bits[:, 1::2] << 4, f"{name}_scale": stored}
        if second is not None:
            found[f"{name}_scale_2" if modelopt else f"{name}_global_scale"] = second
        return found, meant

    return store


def _int_quantized(stem: str, values: Any, zeros: Any, scales: Any, symmetric: bool) -> Stored:
    found = {} if symmetric else {f"{stem}.weight_zero_point": (zeros - 8).to(torch.int8)}
    return found | {f"{stem}.weight": (values - 8).to(torch.int8), f"{stem}.weight_scale": scales}


def _modelopt(stem: str, values: Any, zeros: Any, scales: Any, symmetric: bool) -> Stored:
    bits = (values - 8 & 15).to(torch.uint8)
    return {f"{stem}.weight": bits[::2] | bits[1::2] << 4, f"{stem}.weight_scale": scales}


_STORED: dict[str, Callable[..., Stored]] = {
    "awq": _awq, "gptq": _gptq, "gptq_v2": _gptq_v2, "pack-quantized": _pack_quantized,
    "int-quantized": _int_quantized, "modelopt": _modelopt,
}  # fmt: skip


def _integers(group: int, *, symmetric: bool) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "GEMM"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}


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


def _packed(form: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def forms_of(form: type[Format]) -> list[str]:
    """The names in `FORMATS` and `MORE` of one format."""
    every = (FORMATS | MORE).items()
    return [name for name, (quantization, _) in every if isinstance(format_of({KEY: quantization}), form)]


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
    "awq": (_AWQ, int4("awq", 32)),
    "gptq": (_GPTQ, int4("gptq", 32)),
    "gptq v2": (_GPTQ | {"checkpoint_format": "gptq_v2"}, int4("gptq_v2", 32)),
    "pack-quantized": (_integers(64, symmetric=False), int4("pack-quantized", 64)),
    "symmetric": (_integers(32, symmetric=True), int4("pack-quantized", 32, symmetric=True)),
}
_INT8: dict[str, Any] = {"type": "int", "num_bits": 8}
_FP4: dict[str, Any] = {"type": "float", "num_bits": 4, "symmetric": True}
_MODELOPT = {"quant_method": "modelopt", "exclude_modules": ["lm_head"]}
# Settings of a layer of Quark.
QUARK: dict[str, dict[str, Any]] = {
    "fp8": {
        "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
        "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
    },
    "fp8 per channel": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}, "input_tensors": None},
    "mxfp4": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
        "input_tensors": {"dtype": "fp4", "is_dynamic": True},
    },
    "none": {"weight": None, "input_tensors": None},
}
# The same of those that no kernel of a GPU reads, or that differ from `FORMATS` in their tensors only.
MORE: dict[str, tuple[dict[str, Any], Store]] = {
    "W8A8": (_packed("int-quantized", {"type": "int", "num_bits": 8}, strategy="channel", **_INT8), int8(-1)),
    "W8A8 asymmetric": (
        _packed("int-quantized", _TOKEN, strategy="group", group_size=32, symmetric=False, **_INT8),
        int8(32, symmetric=False),
    ),
    "W8A16": (_packed("pack-quantized", strategy="group", group_size=16, **_INT8), int8(16, packed=True)),
    "W8A16 asymmetric": (
        _packed("pack-quantized", strategy="channel", symmetric=False, **_INT8),
        int8(-1, packed=True, symmetric=False),
    ),
    "W8A16 of GPTQ": (_GPTQ | {"bits": 8, "sym": True}, int8(32, gptq=1)),
    "W8A16 of GPTQ, asymmetric": (_GPTQ | {"bits": 8, "group_size": -1}, int8(-1, symmetric=False, gptq=1)),
    "NVFP4A16": (_packed("nvfp4-pack-quantized", strategy="tensor_group", group_size=16, **_FP4), fp4("nvfp4")),
    "NVFP4 of ModelOpt": (_MODELOPT | {"quant_algo": "NVFP4"}, fp4("nvfp4", modelopt=True)),
    "MXFP4A16": (_packed("mxfp4-pack-quantized", strategy="group", group_size=32, **_FP4), fp4("mxfp4")),
    "MXFP4 of ModelOpt": (_MODELOPT | {"quant_algo": "mxfp4"}, fp4("mxfp4", modelopt=True)),
    "W4AFP8": (
        _packed("int-quantized", _TOKEN, type="int", num_bits=4, strategy="group", group_size=32),
        int4("int-quantized", 32, symmetric=True),
    ),
    "W4AFP8 asymmetric": (
        _packed("int-quantized", _TOKEN, type="int", num_bits=4, strategy="group", group_size=64, symmetric=False),
        int4("int-quantized", 64),
    ),
    "MXFP4 of Quark": ({"quant_method": "quark", "global_quant_config": QUARK["mxfp4"]}, fp4("mxfp4", modelopt=True)),
    "INT4 of ModelOpt": (
        _MODELOPT | {"quant_algo": "W4A16_AWQ", "group_size": 32},
        int4("modelopt", 32, symmetric=True),
    ),
}
