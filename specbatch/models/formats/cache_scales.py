"""Scales of FP8 KV caches in checkpoints: what a quantization_config says of the cache, and how files name its scales.

`self_attn.k_scale` and `v_scale` are those of compressed-tensors (llm-compressor), `self_attn.k_proj.k_scale` those of
ModelOpt, `self_attn.k_proj.output_scale` those of Quark and AutoFP8; `self_attn.attn.k_scale` is vLLM's own spelling,
and `self_attn.kv_scale` an old one for both. Quark's are of keys before rope.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

from specbatch.files.config_values import flag_of, table_of

FP8 = "FP8"
Part = Literal["k", "v"]  # whose scale it is

_SCALE = re.compile(r".*?\.layers\.(\d+)\..*?(?:\.(k|v|kv)_scale|\.([kv])_proj\.output_scale)")
# Of queries and probabilities, which attention here does not quantize, and of projections that no cache stores.
_UNUSED = (".q_scale", ".prob_scale", ".output_scale")
_ZERO_POINTS = (".k_zero_point", ".v_zero_point", ".q_zero_point")


def cache_type(quantization: dict[str, Any]) -> str | None:
    """The type of KV cache for which a checkpoint was made, by its quantization_config: `FP8`, what another is called
    there, or None."""
    scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        is_fp8 = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) and flag_of(scheme, "symmetric", True)
        return FP8 if is_fp8 else f"{scheme.get('type')} {scheme.get('num_bits')}"
    if scheme is not None:
        return FP8 if scheme == "static" else str(scheme).upper()  # AutoFP8's word
    types = {table_of(layer, "output_tensors").get("dtype") for layer in quark_caches(quantization).values()}
    return FP8 if types == {"fp8_e4m3"} else ", ".join(map(str, types)) or None


def quark_caches(quantization: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Patterns of the projections whose outputs Quark quantized for the cache, and their settings. Old versions have
    them in `layer_quant_config`, with `kv_cache_group` in their export settings."""
    group = table_of(quantization, "export").get("kv_cache_group") or []
    layers = table_of(quantization, "layer_quant_config")
    found = table_of(quantization, "kv_cache_quant_config") or {name: layers[name] for name in group if name in layers}
    return {name: table_of(found, name) for name in found}


def is_of_cache(name: str) -> bool:
    """Whether a tensor is a scale or zero point of an FP8 KV cache, or of queries and probabilities beside it."""
    return scale_of(name) is not None or name.endswith((*_UNUSED, *_ZERO_POINTS))


def scale_of(name: str) -> tuple[int, tuple[Part, ...]] | None:
    """The published layer of which `name` is a scale, of keys, values or both; None if it is anything else."""
    found = _SCALE.fullmatch(name)
    if found is None:
        return None
    layer, part, projection = found.groups()
    parts: tuple[Part, ...] = "k", "v"
    return int(layer), tuple(one for one in parts if one in (part or projection))


def zero_points(names: Iterable[str]) -> list[str]:
    """Those of keys and values."""
    return [name for name in names if name.endswith(_ZERO_POINTS[:2])]
