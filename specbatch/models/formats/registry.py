"""All quantization formats, and the reader of the `quantization_config` of a config.json, which chooses one.

compressed-tensors: vllm-project/compressed-tensors, `QuantizationConfig`. ModelOpt: NVIDIA/TensorRT-Model-Optimizer,
whose older files have the same settings in a file of their own, hf_quant_config.json. The other methods are those of
one format each, and are read in its module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbatch.files.config_values import table_of
from specbatch.models.formats.cache_scales import cache_type
from specbatch.models.formats.eight_bits import Int8Weights
from specbatch.models.formats.format import Format, Group
from specbatch.models.formats.fp4 import Mxfp4Matrices, Nvfp4Weights
from specbatch.models.formats.fp8 import FP8Weights
from specbatch.models.formats.int4 import Int4Weights
from specbatch.models.formats.mxfp4 import Mxfp4Weights
from specbatch.models.formats.settings import KEY, expect, refuse_setting, unquantized

# What describes quantized weights, of methods that may quantize the KV cache alone.
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
    formats = [_of_group(Group(f"config_groups.{name}", table_of(groups, name), found, modules)) for name in groups]
    if not formats:
        raise refuse_setting("config_groups", groups, "it must describe how weights are quantized")
    if any(form != formats[0] for form in formats):
        works = "weights must be quantized in one way; leave others out"
        raise refuse_setting("config_groups", sorted(groups), works)
    return formats[0]


def _modelopt(found: dict[str, Any]) -> Format:
    readers = {name: read for form in FORMATS for name, read in form.algorithms().items()}
    algorithm = str(found.get("quant_algo")).upper()  # versions differ
    expect(found | {"quant_algo": algorithm} if algorithm in readers else found, "quant_algo", *readers)
    return readers[algorithm](found | {"quant_algo": algorithm})


def _of_group(group: Group) -> Format:
    weights = table_of(group.settings, "weights")
    kind = (weights.get("type"), weights.get("num_bits"))
    readers = {key: (form.name, read) for form in FORMATS for key, read in form.groups().items()}
    if kind not in list(readers):  # of any type
        known = [f"{name} (type {key[0]!r} with num_bits {key[1]})" for key, (name, _) in readers.items()]
        raise refuse_setting(f"{group.where}.weights", kind, f"use {' or '.join(known)}")
    return readers[kind][1](group)
