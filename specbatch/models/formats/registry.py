"""All quantization formats, and the reader of the `quantization_config` of a config.json, which chooses one.

compressed-tensors: vllm-project/compressed-tensors, `QuantizationConfig`. ModelOpt: NVIDIA/TensorRT-Model-Optimizer,
whose older files have the same settings in a file of their own, hf_quant_config.json. The other methods are those of
one format each, and are read in its module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbatch.files.config_values import names_of, table_of
from specbatch.models.formats.cache_scales import cache_type
from specbatch.models.formats.eight_bits import Int8Weights
from specbatch.models.formats.format import Format, Group
from specbatch.models.formats.fp4 import Mxfp4Matrices, Nvfp4Weights
from specbatch.models.formats.fp8 import FP8Weights
from specbatch.models.formats.gptq import read_auto_round, read_awq, read_gptq
from specbatch.models.formats.int4 import Int4Weights
from specbatch.models.formats.mixed import MixedWeights
from specbatch.models.formats.mxfp4 import Mxfp4Weights
from specbatch.models.formats.quark import read_quark
from specbatch.models.formats.settings import KEY, check_patterns, expect, of_entry, refuse_setting, unquantized

# What describes quantized weights, of methods that may quantize the KV cache alone.
_MIXED, _LAYERS = "MIXED_PRECISION", "quantized_layers"
_OF_ALL = ("quant_algo", "group_size", _LAYERS)  # settings of layers, and not of a mixed config
_OF_WEIGHTS = {"compressed-tensors": "config_groups", "modelopt": "quant_algo"}
FORMATS: tuple[type[Format], ...] = (
    FP8Weights,
    Int4Weights,
    Int8Weights,
    Nvfp4Weights,
    Mxfp4Weights,
    Mxfp4Matrices,
)
# Of quantized weights that keep their name.
FILE_TYPES = tuple(dict.fromkeys(kind for form in FORMATS for kind in form.file_types))


def format_of(config: dict[str, Any], own: tuple[str, ...] = ()) -> Format | None:
    """How the weights of a checkpoint are quantized; None if its config.json has no quantization, or that of a KV cache
    only. own: methods that only this family reads. Raises SpecbatchError for one that is not supported."""
    found = table_of(config, KEY)
    method = found.get("quant_method")
    weights = _OF_WEIGHTS.get(method) if isinstance(method, str) else None
    if not found or (weights and not found.get(weights) and cache_type(found)):
        return None
    readers: dict[str, Callable[[dict[str, Any]], Format]] = {
        "compressed-tensors": _compressed_tensors,
        "modelopt": _modelopt,
        "awq": read_awq,
        "gptq": read_gptq,
        "auto-round": read_auto_round,
        "intel/auto-round": read_auto_round,  # of older versions
        "quark": read_quark,
    }
    for form in FORMATS:
        readers |= {name: read for name, read in form.methods().items() if name in own or not form.is_of_family}
    reader = readers.get(method) if isinstance(method, str) else None
    if reader is None:
        raise refuse_setting("quant_method", method, f"use one of {', '.join(readers)}")
    return reader(found)


def _compressed_tensors(found: dict[str, Any]) -> Format:
    if table_of(found, "transform_config").get("config_groups"):
        raise refuse_setting("transform_config", found["transform_config"], "weights must not need rotated activations")
    sparsity = table_of(found, "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise refuse_setting("sparsity_config.format", sparsity, "it must be 'dense'")
    groups, modules = table_of(found, "config_groups"), unquantized(found, "ignore")
    if not groups:
        raise refuse_setting("config_groups", groups, "it must describe how weights are quantized")
    formats = []
    for name in groups:
        group = Group(f"config_groups.{name}", table_of(groups, name), found, modules)
        targets = names_of(group.settings, "targets") or []
        check_patterns(f"{group.where}.targets", targets)
        formats.append((_of_group(group), targets))
    mixed = MixedWeights.of_targets(formats)
    described = dict[str, Format]()
    for (form, targets), name in zip(formats, groups, strict=True):
        where = f"config_groups.{name}.targets"
        if len(mixed.forms) > 1 and not targets:
            raise refuse_setting(where, targets, "beside other groups it must name layers")
        for target in targets:
            if described.setdefault(target, form) != form:
                raise refuse_setting(where, target, "another group gives it another format")
    return mixed


def _modelopt(found: dict[str, Any]) -> Format:
    if str(found.get("quant_algo")).upper() == _MIXED:
        layers = table_of(found, _LAYERS)
        if not layers:
            works = f"{_MIXED} needs the format of each layer, in hf_quant_config.json or config.json"
            raise refuse_setting(_LAYERS, layers, works)
        return MixedWeights.of_targets([(_of_layer(name, table_of(layers, name), found), [name]) for name in layers])
    readers = {name: read for form in FORMATS for name, read in form.algorithms().items()}
    algorithm = str(found.get("quant_algo")).upper()  # versions differ
    expect(found | {"quant_algo": algorithm} if algorithm in readers else found, "quant_algo", *readers)
    return readers[algorithm](found | {"quant_algo": algorithm})


def _of_layer(name: str, layer: dict[str, Any], found: dict[str, Any]) -> Format:
    """The format of an entry of `quantized_layers`, which has the keys of a whole config."""
    whole = {key: value for key, value in found.items() if key not in _OF_ALL}
    return of_entry(f"{_LAYERS}.{name}", _modelopt, whole | layer)


def _of_group(group: Group) -> Format:
    weights = table_of(group.settings, "weights")
    kind = (weights.get("type"), weights.get("num_bits"))
    readers = {key: (form.name, read) for form in FORMATS for key, read in form.groups().items()}
    if kind not in list(readers):  # of any type
        known = [f"{name} (type {key[0]!r} with num_bits {key[1]})" for key, (name, _) in readers.items()]
        raise refuse_setting(f"{group.where}.weights", kind, f"use {' or '.join(known)}")
    return readers[kind][1](group)
