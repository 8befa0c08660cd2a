"""Writes an FP8 checkpoint with AMD Quark: python write_quark.py FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from quark.torch import ModelQuantizer, export_safetensors
from quark.torch.quantization import FP8E4M3PerTensorSpec, QConfig, QLayerConfig
from safetensors.torch import load_file
from tiny_llama import calibration, keep, write_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


def main(out: Path) -> None:
    for name in ("quark-fp8", "quark-fp8-cache"):
        write(out / name, has_cache=name.endswith("-cache"))


def write(to: Path, *, has_cache: bool) -> None:
    with TemporaryDirectory() as folder:
        plain, written = write_model(Path(folder, "plain"), torch.bfloat16), Path(folder, "written")
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        static = FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False).to_quantization_spec()
        layers = QLayerConfig(input_tensors=static, weight=static)
        outputs = {name: QLayerConfig(output_tensors=static) for name in ("*k_proj", "*v_proj")} if has_cache else {}
        config = QConfig(global_quant_config=layers, exclude=["lm_head"], kv_cache_quant_config=outputs)
        tool = ModelQuantizer(config)
        model = tool.freeze(tool.quantize_model(model, DataLoader(calibration(), batch_size=1)))
        export_safetensors(model, str(written))
        stored, weights = load_file(written / "model.safetensors"), {}
        for name, values in stored.items():
            if values.dtype == torch.float8_e4m3fn:
                weights[name] = values.float() * stored[f"{name}_scale"].float()
        keep(written, to, weights)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
