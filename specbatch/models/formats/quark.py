"""AMD Quark's own method: FP8 and MXFP4 weights, and tables of layers that have other settings than all.

`kv_cache_quant_config` (for projections whose outputs are cached) and `layer_quant_config` have the settings of layers
by name or pattern with wildcards: exact names count before patterns, of which the first counts.
`layer_type_quant_config` has those of classes, `global_quant_config` of all other layers; without `weight` a layer is
not quantized. FP8 is as in `fp8`, MXFP4 as ModelOpt has it (`fp4`). AMD Quark, `setup_config_per_layer`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbatch.files.config_values import names_of, table_of
from specbatch.kernels.common.block_sizes import MX_BLOCK
from specbatch.models.formats.cache_scales import FP8, quark_caches
from specbatch.models.formats.format import SCALES, Format, Modules
from specbatch.models.formats.fp4 import Mxfp4Matrices
from specbatch.models.formats.fp8 import FP8Weights
from specbatch.models.formats.mixed import CLASSES, MixedWeights
from specbatch.models.formats.settings import check_patterns, entries, expect, of_entry, refuse_setting, unquantized

_LAYER = ("weight", "input_tensors", "output_tensors", "bias", "target_device")
_BY_NAME, _BY_CLASS, _GLOBAL = "layer_quant_config", "layer_type_quant_config", "global_quant_config"
_TYPES = {"fp8_e4m3": FP8, "fp4": Mxfp4Matrices.name}


def read_quark(found: dict[str, Any]) -> Format:
    if algorithms := found.get("algo_config"):
        raise refuse_setting("algo_config", algorithms, "weights must be quantized without one")
    expect(table_of(found, "export"), "weight_format", "real_quantized", default="real_quantized", where="export")
    tables = {key: dict(entries(found, key, *_LAYER)) for key in (_BY_NAME, _BY_CLASS)}
    for name in tables[_BY_CLASS].keys() - {*CLASSES}:
        raise refuse_setting(_BY_CLASS, name, f"it must be {' or '.join(CLASSES)}")
    caches = quark_caches(found)
    tables[_BY_NAME] = caches | tables[_BY_NAME] | caches
    check_patterns(_BY_NAME, tables[_BY_NAME])
    layers = [(key, name, table[name]) for key, table in tables.items() for name in table]
    plain = [name for _, name, layer in layers if layer.get("weight") is None]
    modules = unquantized({"exclude": [*(names_of(found, "exclude") or []), *plain]}, "exclude")

    def read(layer: dict[str, Any]) -> Format:
        return _format(layer, modules)

    formats: list[tuple[Format, Sequence[str]]] = [
        (of_entry(f"{key}.{name}", read, layer), [name]) for key, name, layer in layers if name not in plain
    ]
    whole = of_entry(_GLOBAL, read, table_of(found, _GLOBAL))
    return MixedWeights.of_targets([*formats, (whole, CLASSES)])


def _format(layer: dict[str, Any], modules: Modules) -> Format:
    weight, inputs = table_of(layer, "weight"), table_of(layer, "input_tensors")
    expect(weight, "dtype", *_TYPES, where="weight")
    expect(inputs, "dtype", *_TYPES, default=weight["dtype"], where="input_tensors")
    planned = _TYPES[inputs["dtype"]] if inputs else None
    if weight["dtype"] == "fp4":
        expect(weight, "qscheme", "per_group", where="weight")
        expect(weight, "group_size", MX_BLOCK, where="weight")
        expect(weight, "scale_format", "e8m0", where="weight")
        return Mxfp4Matrices(*modules, inputs=planned, packing="modelopt")
    expect(weight, "qscheme", "per_tensor", "per_channel", where="weight")
    if planned not in (FP8, None):
        raise refuse_setting("input_tensors.dtype", inputs["dtype"], "of FP8 weights it must be 'fp8_e4m3'")
    return FP8Weights(*modules, per_channel=True, suffix=SCALES[1], inputs=planned)
