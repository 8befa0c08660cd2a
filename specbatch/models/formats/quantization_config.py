"""Reads the `quantization_config` of a config.json: FP8 (transformers, compressed-tensors, ModelOpt, Quark), AWQ, GPTQ
and auto-round.

compressed-tensors: vllm-project/compressed-tensors, `QuantizationConfig`. ModelOpt: NVIDIA/TensorRT-Model-Optimizer,
whose older files have the same settings in a file of their own, hf_quant_config.json. AWQ: casper-hansen/AutoAWQ. GPTQ:
AutoGPTQ, ModelCloud/GPTQModel. auto-round: intel/auto-round, whose files hold tensors of GPTQ or AWQ.
"""

from __future__ import annotations

import re
from typing import Any

from specbatch.errors import SpecbatchError, refuse
from specbatch.files.config_values import flag_of, names_of, spelled, table_of
from specbatch.kernels.gemm.quantized.weight import INT4_GROUPS, SCALE_BLOCK
from specbatch.models.formats.fp8 import SCALES, FP8Weights
from specbatch.models.formats.int4 import WHOLE, Int4Weights, Packing
from specbatch.models.formats.quantization import PATTERN, Quantization

KEY = "quantization_config"
_UNQUANTIZED = (16, 32)  # bits of what auto-round leaves as it is
_BLOCKS = [SCALE_BLOCK, SCALE_BLOCK]


def quantization_of(config: dict[str, Any]) -> Quantization | None:
    """How the weights of a checkpoint are quantized; None if its config.json has no quantization. Raises SpecbatchError
    for one that is not supported."""
    found = table_of(config, KEY)
    if not found:
        return None
    method = found.get("quant_method")
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise _refuse("quant_method", method, f"use one of {', '.join(_METHODS)}")
    return reader(found)


def _fp8(found: dict[str, Any]) -> Quantization:
    """What transformers calls `FineGrainedFP8Config`; without blocks, one scale per tensor."""
    _expect(found, "fmt", "e4m3", default="e4m3")
    blocks = found.get("weight_block_size")
    if blocks is not None:
        _expect(found, "weight_block_size", _BLOCKS)
    schemes = ("dynamic", "static") if blocks is None else ("dynamic",)
    _expect(found, "activation_scheme", *schemes, default="dynamic")
    return FP8Weights(*_plain(found, "modules_to_not_convert", "ignored_layers"), per_channel=blocks is None)


def _modelopt(found: dict[str, Any]) -> Quantization:
    _expect(found, "quant_algo", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")
    return FP8Weights(*_plain(found, "ignore", "exclude_modules"), per_channel=True, suffix=SCALES[1])


def _quark(found: dict[str, Any]) -> Quantization:
    """AMD Quark's own method, in FP8."""
    for key in ("layer_quant_config", "layer_type_quant_config", "algo_config"):
        if found.get(key):
            raise _refuse(key, found[key], "all weights must be quantized in one way")
    _expect(table_of(found, "export"), "weight_format", "real_quantized", default="real_quantized", where="export")
    scheme = table_of(found, "global_quant_config")
    weights, inputs, where = table_of(scheme, "weight"), table_of(scheme, "input_tensors"), "global_quant_config"
    _expect(weights, "dtype", "fp8_e4m3", where=f"{where}.weight")
    _expect(weights, "qscheme", "per_tensor", "per_channel", where=f"{where}.weight")
    _expect(inputs, "dtype", "fp8_e4m3", default="fp8_e4m3", where=f"{where}.input_tensors")
    return FP8Weights(*_plain(found, "exclude"), per_channel=True, suffix=SCALES[1], quantizes_inputs=bool(inputs))


def _awq(found: dict[str, Any]) -> Quantization:
    _expect(found, "bits", 4)
    key = spelled(found, "version", "format")
    version = found.get(key) or "gemm"
    if str(version).lower() != "gemm":
        raise _refuse(key, version, "it must be 'gemm'")
    plain, has_zeros = _plain(found, "modules_to_not_convert"), flag_of(found, "zero_point", True)
    return Int4Weights(*plain, packing="awq", group=_group(found), has_zeros=has_zeros)


def _gptq(found: dict[str, Any]) -> Quantization:
    _expect(found, "bits", 4)
    key = spelled(found, "checkpoint_format", "format")  # GPTQModel 7.7 and transformers 5.23 read both
    _expect(found, key, "gptq", "gptq_v2", default="gptq")
    _expect(found, "pack_dtype", "int32", default="int32")
    others = [name for name in table_of(found, "dynamic") if not name.startswith("-:")]  # those are not quantized
    if others:
        raise _refuse("dynamic", others, "all weights must be quantized in one way")
    packing: Packing = "gptq_v2" if found.get(key) == "gptq_v2" else "gptq"
    return _grouped(found, packing, _plain(found, "modules_to_not_convert"))


def _auto_round(found: dict[str, Any]) -> Quantization:
    """auto-round's own method: tensors of GPTQ or AWQ, with settings of single layers in `extra_config`."""
    _expect(found, "bits", 4)
    _expect(found, "data_type", "int", default="int")
    _expect(found, "packing_format", *_AUTO_ROUND)
    if found.get("rotation_config"):
        raise _refuse("rotation_config", found["rotation_config"], "weights must not need rotated activations")
    _expect(found, "act_bits", *_UNQUANTIZED, default=16)
    layers = table_of(found, "extra_config")
    for name in layers:  # or a regular expression
        _expect(table_of(layers, name), "bits", *_UNQUANTIZED, where=f"extra_config.{name}")
    names = [name if re.fullmatch(r"[\w.]+", name) else PATTERN + name for name in layers]
    return _grouped(found, _AUTO_ROUND[found["packing_format"]], _plain({"extra_config": names}, "extra_config"))


def _grouped(found: dict[str, Any], packing: Packing, plain: tuple[frozenset[str], tuple[str, ...]]) -> Quantization:
    """Symmetric weights (`sym`) have the zero point 8, whatever their `qzeros` hold: 7, 8 or nothing. A config without
    `sym` means symmetric ones, as for GPTQModel 7.7 and transformers 5.23; vLLM 0.33 refuses it for GPTQ."""
    return Int4Weights(*plain, packing=packing, group=_group(found), has_zeros=not flag_of(found, "sym", True))


def _group(found: dict[str, Any], where: str = "") -> int:
    _expect(found, "group_size", *INT4_GROUPS, WHOLE, where=where)
    return int(found["group_size"])


def _compressed_tensors(found: dict[str, Any]) -> Quantization:
    if table_of(found, "transform_config").get("config_groups"):
        raise _refuse("transform_config", found["transform_config"], "weights must not need rotated activations")
    sparsity = table_of(found, "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise _refuse("sparsity_config.format", sparsity, "it must be 'dense'")
    groups = table_of(found, "config_groups")
    plain = _plain(found, "ignore")
    schemes = [_scheme(f"config_groups.{name}", table_of(groups, name), found, plain) for name in groups]
    if not schemes:
        raise _refuse("config_groups", groups, "it must describe how weights are quantized")
    if any(scheme != schemes[0] for scheme in schemes):
        raise _refuse("config_groups", sorted(groups), "weights must be quantized in one way; leave others out")
    return schemes[0]


def _scheme(
    where: str, group: dict[str, Any], found: dict[str, Any], plain: tuple[frozenset[str], tuple[str, ...]]
) -> Quantization:
    """A group of compressed-tensors."""
    weights, inputs = table_of(group, "weights"), table_of(group, "input_activations")
    kind = (weights.get("type"), weights.get("num_bits"))
    if kind == ("int", 4):
        return _packed(where, group, found, plain)
    if kind != ("float", 8):
        works = "use FP8 (type 'float' with num_bits 8) or INT4 (type 'int' with num_bits 4)"
        raise _refuse(f"{where}.weights", kind, works)
    _expect(group, "format", "float-quantized", default=found.get("format", "float-quantized"), where=where)
    if not flag_of(weights, "symmetric", True):
        raise _refuse(f"{where}.weights.symmetric", False, "FP8 has no zero points; it must be true")
    _expect(weights, "strategy", "tensor", "channel", "block", where=f"{where}.weights")
    per_channel = weights["strategy"] != "block"
    if not per_channel:
        _expect(weights, "block_structure", _BLOCKS, default=_BLOCKS, where=f"{where}.weights")
    if inputs and (inputs.get("type"), inputs.get("num_bits")) != ("float", 8):
        kind = (inputs.get("type"), inputs.get("num_bits"))
        raise _refuse(f"{where}.input_activations", kind, "activations must be in FP8 or not quantized")
    return FP8Weights(*plain, per_channel=per_channel, suffix=SCALES[1], quantizes_inputs=bool(inputs))


def _packed(
    where: str, group: dict[str, Any], found: dict[str, Any], plain: tuple[frozenset[str], tuple[str, ...]]
) -> Quantization:
    """A group of compressed-tensors in INT4."""
    weights, inside = table_of(group, "weights"), f"{where}.weights"
    _expect(group, "format", "pack-quantized", default=found.get("format", "pack-quantized"), where=where)
    if table_of(group, "input_activations"):
        raise _refuse(f"{where}.input_activations", group["input_activations"], "INT4 weights need unquantized ones")
    _expect(weights, "strategy", "group", "channel", where=inside)
    _expect(weights, "actorder", "static", "weight", False, default=False, where=inside)
    size = WHOLE if weights["strategy"] == "channel" else _group(weights, inside)
    has_zeros = not flag_of(weights, "symmetric", True)
    return Int4Weights(*plain, packing="compressed-tensors", group=size, has_zeros=has_zeros)


_METHODS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "quark": _quark,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,  # of older versions
}
# Packing formats of auto-round 0.16.1, and the tensors that they are. Only those of auto_gptq have zero points less 1.
_AUTO_ROUND: dict[str, Packing] = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
}


def _plain(found: dict[str, Any], *keys: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Names and patterns of the modules that are not quantized, listed under one of these keys."""
    key = spelled(found, *keys)
    listed = names_of(found, key) or []
    patterns = [name for name in listed if name.startswith(PATTERN) or "*" in name]
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix(PATTERN) if pattern.startswith(PATTERN) else "")
        except re.error as error:
            raise _refuse(key, pattern, f"it is no regular expression ({error})") from None
    return frozenset(listed) - set(patterns), tuple(patterns)


def _expect(found: dict[str, Any], key: str, *works: Any, default: Any = None, where: str = "") -> None:
    value = found.get(key)
    value = default if value is None else value
    if value not in works:
        wanted = " or ".join(repr(one) for one in works)
        raise _refuse(f"{where}.{key}".lstrip("."), value, f"it must be {wanted}")


def _refuse(key: str, value: Any, works: str) -> SpecbatchError:
    return refuse(f"{KEY}.{key}", value, f"{works}; else use unquantized weights or a GGUF file")
