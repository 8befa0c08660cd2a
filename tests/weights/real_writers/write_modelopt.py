"""Writes checkpoints with NVIDIA ModelOpt: python write_modelopt.py FOLDER"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, NVFP4QTensor
from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant
from safetensors.torch import load_file
from tiny_llama import calibration, keep, write_model
from transformers import AutoModelForCausalLM

REFUSED = ("modelopt-w4a8-awq",)
KINDS = {
    "modelopt-fp8": "FP8_DEFAULT_CFG",
    "modelopt-fp8-cache": "FP8_DEFAULT_CFG",
    "modelopt-fp8-per-channel": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "modelopt-fp8-blocks": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "modelopt-nvfp4": "NVFP4_DEFAULT_CFG",
    "modelopt-int4-awq": "INT4_AWQ_CFG",
    "modelopt-int4-blocks": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "modelopt-w4a8-awq": "W4A8_AWQ_BETA_CFG",
    "modelopt-mxfp4": "MXFP4_DEFAULT_CFG",
    "modelopt-mixed": "FP8_DEFAULT_CFG",
}
# Quantizers of modules that have another format than the others.
MIXED = {"*layers.0.mlp*": "NVFP4_DEFAULT_CFG", "*layers.1.mlp*": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG"}


def weights(written: Path) -> dict[str, torch.Tensor]:
    """As ModelOpt dequantizes them."""
    stored, found = load_file(written / "model.safetensors"), {}
    for name, values in stored.items():
        scale, second = stored.get(f"{name}_scale"), stored.get(f"{name}_scale_2")
        if scale is None:
            continue
        if values.dtype == torch.float8_e4m3fn:
            found[name] = fp8_weight(values, scale.float())
        elif second is not None:
            shape = torch.Size((values.shape[0], 2 * values.shape[1]))
            whole = NVFP4QTensor(shape, torch.float32, values)
            found[name] = whole.dequantize(scale=scale, double_scale=second, block_sizes={-1: 16})
        elif scale.dtype == torch.uint8:
            shape = torch.Size((values.shape[0], 2 * values.shape[1]))
            whole = MXFP4QTensor(shape, torch.float32, values)
            found[name] = whole.dequantize(scale=scale, block_sizes={-1: 32})
        else:
            found[name] = int4_weight(values, scale, stored.get(name.replace("weight", "pre_quant_scale")))
    return found


def of_modules(pattern: str, kind: str) -> list[dict[str, Any]]:
    """What a configuration says of all quantizers, for those of some modules."""
    return [
        item | {"quantizer_name": pattern + item["quantizer_name"]}
        for item in getattr(mtq, kind)["quant_cfg"]
        if item["quantizer_name"] in ("*weight_quantizer", "*input_quantizer")
    ]


def fp8_weight(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    whole = FP8QTensor(values.shape, torch.float32, values)
    if scale.dim() == 4:
        return whole.dequantize(scale=scale.flatten(2).flatten(0, 1), block_sizes={-1: 128, -2: 128})
    return whole.dequantize(scale=scale[:, None] if scale.dim() == 1 else scale)


def int4_weight(values: torch.Tensor, scale: torch.Tensor, inputs: torch.Tensor | None) -> torch.Tensor:
    """The inverse of `quant_utils.pack_int4_in_uint8`, for which ModelOpt has none."""
    low, high = (part - 16 * (part > 7) for part in (values.int() & 15, values.int() >> 4))
    found = torch.stack([low, high], 1).flatten(0, 1) * scale.repeat_interleave(128, 1)
    return found if inputs is None else found * inputs.float()


def main(out: Path, names: list[str]) -> None:
    for name in names or KINDS:
        with TemporaryDirectory() as folder:
            hidden = 256 if name == "modelopt-fp8-blocks" else 128
            plain, written = write_model(Path(folder, "plain"), torch.bfloat16, hidden), Path(folder, "written")
            model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
            config = copy.deepcopy(getattr(mtq, KINDS[name]))
            if name.endswith("-cache"):
                config = update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])
            if name.endswith("-mixed"):
                config["quant_cfg"] += [item for pattern, kind in MIXED.items() for item in of_modules(pattern, kind)]
            mtq.quantize(model, config, lambda model: [model(ids) for ids in calibration().split(1)])
            export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(written))
            keep(written, out / name, None if name in REFUSED else weights(written))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
