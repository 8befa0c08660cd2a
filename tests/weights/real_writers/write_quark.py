"""Writes checkpoints with AMD Quark: python write_quark.py FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from quark.torch import ModelQuantizer, export_safetensors
from quark.torch.quantization import (
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
)
from quark.torch.utils import create_pack_method
from safetensors.torch import load_file
from tiny_llama import calibration, keep, write_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

STATIC = FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False).to_quantization_spec()
CHANNEL = FP8E4M3PerChannelSpec(ch_axis=0, is_dynamic=False).to_quantization_spec()
MXFP4 = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()
MXFP4_INPUTS = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True).to_quantization_spec()
MIXED = {
    "layer_quant_config": {
        "*.[kv]_proj": QLayerConfig(weight=CHANNEL),
        "*.q_proj": QLayerConfig(input_tensors=STATIC),  # its weight is not quantized
        "*mlp.down_proj": QLayerConfig(input_tensors=STATIC, weight=STATIC),
        "model.layers.1.mlp.up_proj": QLayerConfig(weight=CHANNEL),
    },
    "layer_type_quant_config": {torch.nn.Linear: QLayerConfig(input_tensors=MXFP4_INPUTS, weight=MXFP4)},
    "exclude": ["lm_head", "*1.self_attn.o_proj"],
}
CACHE = {"kv_cache_quant_config": {name: QLayerConfig(output_tensors=STATIC) for name in ("*k_proj", "*v_proj")}}
KINDS: dict[str, dict[str, Any]] = {"quark-fp8": {}, "quark-fp8-cache": CACHE, "quark-mixed": MIXED}


def main(out: Path, names: list[str]) -> None:
    for name in names or KINDS:
        write(out / name, KINDS[name])


def write(to: Path, tables: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        plain, written = write_model(Path(folder, "plain"), torch.bfloat16), Path(folder, "written")
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        layers = QLayerConfig(input_tensors=STATIC, weight=STATIC)
        config = QConfig(**{"global_quant_config": layers, "exclude": ["lm_head"]} | tables)
        tool = ModelQuantizer(config)
        model = tool.freeze(tool.quantize_model(model, DataLoader(calibration(), batch_size=1)))
        export_safetensors(model, str(written))
        stored, weights = load_file(written / "model.safetensors"), {}
        for name, values in stored.items():
            if values.dtype == torch.float8_e4m3fn:
                weights[name] = values.float() * stored[f"{name}_scale"].float().reshape(-1, 1)
            elif values.dtype == torch.uint8 and not name.endswith("scale"):
                numbers = create_pack_method("per_group", "fp4").unpack(values, reorder=False).float()
                exponents = stored[f"{name}_scale"].float() - 127
                weights[name] = numbers * exponents.exp2().repeat_interleave(32, 1)
        keep(written, to, weights)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
