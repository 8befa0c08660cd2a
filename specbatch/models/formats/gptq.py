"""GPTQ, AWQ and auto-round in config.json: weights of 4 or 8 bits, and tables of layers that have other settings.

* gptq, awq: `dynamic` has the settings of modules whose names begin with a match of a regular expression. "-:" before
  it leaves them unquantized. Of the others, with or without "+:", the first that fits counts. ModelCloud/GPTQModel,
  `QuantizeConfig.dynamic`
* auto-round: `extra_config` has the settings of modules by name, or by a regular expression that fits anywhere in it;
  names count before expressions, of which the first counts. 16 bits: unquantized. intel/auto-round, `get_layer_config`

An entry has the settings that differ from those of the whole config. The tensors are described in `int4` and
`eight_bits`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from specbatch.files.config_values import flag_of, spelled, table_of
from specbatch.kernels.common.block_sizes import CPU_GROUPS, INT4_GROUPS
from specbatch.models.formats.eight_bits import Int8Weights
from specbatch.models.formats.format import PATTERN, Format, Modules
from specbatch.models.formats.int4 import WHOLE, Int4Weights, Packing
from specbatch.models.formats.mixed import CLASSES, MixedWeights
from specbatch.models.formats.settings import (
    check_patterns,
    entries,
    expect,
    of_entry,
    refuse_setting,
    unquantized,
)

_GROUPS = {4: INT4_GROUPS, 8: CPU_GROUPS}  # by bits
_UNQUANTIZED = (16, 32)  # bits
# What an entry may have: settings of the stored weights, and those by which GPTQModel found them.
_DYNAMIC = ("bits", "group_size", "sym", "desc_act", "pack_dtype")
_SEARCH = (
    *("act_group_aware", "damp_auto_increment", "damp_percent", "failsafe", "fallback", "foem", "gptaq", "hessian"),
    *("mse", "smooth", "smoother", "static_groups", "true_sequential", "v2"),
)
_EXTRA = (
    *("bits", "group_size", "sym", "data_type", "act_bits", "act_data_type", "act_dynamic", "act_group_size"),
    *("act_sym", "rotation_config", "scale_dtype", "super_bits", "super_group_size"),
)
# Packing formats of auto-round 0.16.1, and the tensors that they are. Only those of auto_gptq have zero points less 1.
_PACKINGS: dict[str, Packing] = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
}


def read_awq(found: dict[str, Any]) -> Format:
    key = spelled(found, "version", "format")
    version = found.get(key) or "gemm"
    if str(version).lower() != "gemm":
        raise refuse_setting(key, version, "it must be 'gemm'")
    zeros = {"sym": not flag_of(found, "zero_point", True)}
    return _dynamic(found, lambda layer, plain: _weights(layer | zeros, "awq", plain))


def read_gptq(found: dict[str, Any]) -> Format:
    key = spelled(found, "checkpoint_format", "format")  # GPTQModel 7.7 and transformers 5.23 read both
    expect(found, key, "gptq", "gptq_v2", default="gptq")
    packing: Packing = "gptq_v2" if found.get(key) == "gptq_v2" else "gptq"

    def read(layer: dict[str, Any], plain: Modules) -> Format:
        expect(layer, "pack_dtype", "int32", default="int32")
        form, has_order = _weights(layer, packing, plain), flag_of(layer, "desc_act")
        return replace(form, has_order=has_order) if isinstance(form, Int4Weights) else form

    return _dynamic(found, read)


def _dynamic(found: dict[str, Any], read: Callable[[dict[str, Any], Modules], Format]) -> Format:
    """A config of GPTQModel, some of whose layers may have other settings."""
    key = "dynamic"
    rules = {rule: PATTERN + re.sub("^[-+]:", "", rule) for rule in table_of(found, key)}
    check_patterns(key, rules.values())
    names, patterns = unquantized(found, "modules_to_not_convert")
    plain = names, (*patterns, *(pattern for rule, pattern in rules.items() if rule.startswith("-:")))
    layers = [
        (rule, rules[rule], entry)
        for rule, entry in entries(found, key, *_DYNAMIC, also=_SEARCH)
        if not rule.startswith("-:")
    ]
    return _mixed(found, key, layers, lambda layer: read(layer, plain))


def read_auto_round(found: dict[str, Any]) -> Format:
    """auto-round's own method: tensors of GPTQ or AWQ."""
    expect(found, "packing_format", *_PACKINGS)
    key, layers, plain = "extra_config", [], []
    for name, entry in entries(found, key, *_EXTRA):
        target = name if re.fullmatch(r"[\w.]+", name) else f"{PATTERN}.*(?:{name})"
        check_patterns(key, [PATTERN + name, target])
        if entry.get("bits") in _UNQUANTIZED:
            plain.append(target)
        elif entry:
            layers.append((name, target, entry))
    modules = unquantized({key: plain}, key)

    def read(layer: dict[str, Any]) -> Format:
        expect(layer, "data_type", "int", default="int")
        expect(layer, "act_bits", *_UNQUANTIZED, default=16)
        if rotation := layer.get("rotation_config"):
            raise refuse_setting("rotation_config", rotation, "weights must not need rotated activations")
        return _weights(layer, _PACKINGS[layer["packing_format"]], modules)

    return _mixed(found, key, layers, read)


def _mixed(
    found: dict[str, Any],
    key: str,
    layers: Sequence[tuple[str, str, dict[str, Any]]],
    read: Callable[[dict[str, Any]], Format],
) -> Format:
    """The formats of a config and of its layers with other settings: entry of the table `key`, what `MixedWeights`
    takes for its modules, settings."""
    formats: list[tuple[Format, Sequence[str]]] = []
    for name, target, entry in layers:
        stated = {setting: value for setting, value in entry.items() if value is not None}
        formats.append((of_entry(f"{key}.{name}", read, found | stated), [target]))
    return MixedWeights.of_targets([*formats, (read(found), CLASSES)])


def _weights(layer: dict[str, Any], packing: Packing, plain: Modules) -> Format:
    """Symmetric weights (`sym`) have the middle of the values as zero point, whatever their `qzeros` hold. A config
    without `sym` means symmetric ones, as for GPTQModel 7.7 and transformers 5.23; vLLM 0.33 refuses it for GPTQ."""
    expect(layer, "bits", *_GROUPS if packing != "awq" else (4,))
    expect(layer, "group_size", *_GROUPS[layer["bits"]], WHOLE)
    group, has_zeros = int(layer["group_size"]), not flag_of(layer, "sym", True)
    if layer["bits"] == 4:
        return Int4Weights(*plain, packing=packing, group=group, has_zeros=has_zeros)
    return Int8Weights(*plain, packing=f"{packing} asymmetric" if has_zeros else packing, group=group)
