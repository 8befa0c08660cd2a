"""Writes checkpoints with llm-compressor: python write_llm_compressor.py FOLDER"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.utils import is_match
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from safetensors.torch import load_file, save_file
from tiny_llama import LINEAR, calibration, each, keep, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

KINDS = {  # name -> scheme, group size of the weights if not the scheme's
    "llm-compressor-w4a16": ("W4A16", 32),
    "llm-compressor-w4a16-gptq": ("W4A16", 32),
    "llm-compressor-w4a16-asymmetric": ("W4A16_ASYM", 32),
    "llm-compressor-fp8": ("FP8", None),
    "llm-compressor-fp8-dynamic": ("FP8_DYNAMIC", None),
    "llm-compressor-fp8-block": ("FP8_BLOCK", None),
    "llm-compressor-w4afp8": ("W4AFP8", 32),
    "llm-compressor-w8a8": ("W8A8", None),
    "llm-compressor-w8a16": ("W8A16", None),
    "llm-compressor-nvfp4": ("NVFP4", None),
    "llm-compressor-nvfp4a16": ("NVFP4A16", None),
    "llm-compressor-mxfp4": ("MXFP4", None),
    "llm-compressor-mxfp4a16": ("MXFP4A16", None),
    "llm-compressor-fp8-cache": ("FP8_DYNAMIC", None),
    "llm-compressor-cache": (None, None),
    "llm-compressor-mixed": ("FP8_DYNAMIC", None),
}
# Groups of a checkpoint with several formats beside that of its scheme: preset, size of groups, modules.
MIXED = (("W4A16_ASYM", 32, ["re:.*mlp.(gate|up)_proj"]), ("W8A8", None, ["model.layers.1.mlp.down_proj"]))
CACHES = {"llm-compressor-fp8-cache": "tensor", "llm-compressor-cache": "attn_head"}  # strategies of their KV caches


def scheme_of(preset: str, group: int | None, targets: Sequence[str] = ("Linear",)) -> QuantizationScheme:
    found = preset_name_to_scheme(preset, list(targets))
    if group is not None:
        found.weights = QuantizationArgs(**found.weights.model_dump() | {"group_size": group})
    return found


def main(out: Path, names: list[str]) -> None:
    for name in names or KINDS:
        preset, group = KINDS[name]
        with TemporaryDirectory() as folder:
            hidden = 128 if preset in ("FP8_BLOCK", "W8A16") else 64
            plain = write_model(Path(folder, "plain"), torch.bfloat16, hidden)
            written = Path(folder, "written")
            model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
            modifier = GPTQModifier if name.endswith("-gptq") else QuantizationModifier
            groups: dict[str, Any] = {} if preset is None else {"config_groups": {"group_0": scheme_of(preset, group)}}
            if name.endswith("-mixed"):
                rest = ["re:.*self_attn.*", "model.layers.0.mlp.down_proj"]
                schemes = [scheme_of(preset, group, rest), *(scheme_of(*one) for one in MIXED)]
                groups["config_groups"] = {f"group_{place}": scheme for place, scheme in enumerate(schemes)}
            if name in CACHES:
                cache = QuantizationArgs(num_bits=8, type="float", strategy=CACHES[name], dynamic=False, symmetric=True)
                groups["kv_cache_scheme"] = cache
            oneshot(
                model=model, tokenizer=AutoTokenizer.from_pretrained(plain), max_seq_length=64,
                dataset=Dataset.from_dict({"input_ids": calibration().tolist()}), num_calibration_samples=8,
                recipe=modifier(**groups, ignore=["lm_head"]),
                output_dir=str(written),
            )  # fmt: skip
            if "nvfp4" in name:
                keep(written, out / name, nvfp4_weights(written, groups["config_groups"]["group_0"].weights))
                continue
            exact = with_float32_scales(written, Path(folder, "exact"))
            if name.endswith("-mixed"):
                keep(written, out / name, mixed_weights(exact, model))
                continue
            config = CompressedTensorsConfig(run_compressed=False)
            read = AutoModelForCausalLM.from_pretrained(exact, quantization_config=config, dtype=torch.float32)
            keep(written, out / name, each(read, lambda layer: layer.weight.float()))


def with_float32_scales(written: Path, to: Path) -> Path:
    """The same checkpoint: decompression at load rounds weights to the type of their scales, BF16."""
    shutil.copytree(written, to)
    stored = load_file(written / "model.safetensors")
    scales = {name: t.float() for name, t in stored.items() if name.endswith("_scale") and t.dtype == torch.bfloat16}
    save_file(stored | scales, to / "model.safetensors", {"format": "pt"})
    return to


def mixed_weights(exact: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Each by the compressor of its group: transformers 5.23 takes one group for all dense layers."""
    described = json.loads((exact / "config.json").read_text())["quantization_config"]
    schemes = QuantizationConfig.model_validate(described).config_groups.values()
    stored = load_file(exact / "model.safetensors")

    def weight(name: str, layer: torch.nn.Module) -> torch.Tensor:
        scheme = next(scheme for scheme in schemes if is_match(name, layer, scheme.targets))
        own = {key.removeprefix(f"{name}."): value for key, value in stored.items() if key.startswith(f"{name}.")}
        return BaseCompressor.get_value_from_registry(scheme.format).decompress(own, scheme)["weight"].float()

    layers = ((name, module) for name, module in model.named_modules() if name.endswith(LINEAR))
    return {f"{name}.weight": weight(name, module) for name, module in layers}


def nvfp4_weights(written: Path, args: QuantizationArgs) -> dict[str, torch.Tensor]:
    """In float32, where decompression at load rounds the scales divided by the global one to BF16."""
    stored, found = load_file(written / "model.safetensors"), {}
    for name in stored:
        if name.endswith(".weight_packed"):
            stem, (out, half) = name.removesuffix("_packed"), stored[name].shape
            values = unpack_fp4_from_uint8(stored[name], out, 2 * half, torch.float32)
            scale, whole = stored[f"{stem}_scale"].float(), stored[f"{stem}_global_scale"]
            found[stem] = dequantize(values, scale, args=args, dtype=torch.float32, global_scale=whole)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
