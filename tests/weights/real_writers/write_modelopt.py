"""Writes checkpoints with NVIDIA ModelOpt: python write_modelopt.py FOLDER"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor
from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant
from safetensors.torch import load_file
from tiny_llama import calibration, keep, write_model
from transformers import AutoModelForCausalLM

READ = ("modelopt-fp8", "modelopt-fp8-cache", "modelopt-fp8-per-channel")
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
}


def fp8_weights(written: Path) -> dict[str, torch.Tensor]:
    """As ModelOpt dequantizes them."""
    stored, found = load_file(written / "model.safetensors"), {}
    for name, values in stored.items():
        if values.dtype == torch.float8_e4m3fn:
            scale = stored[f"{name}_scale"].float()
            scale = scale[:, None] if scale.dim() == 1 else scale
            found[name] = FP8QTensor(values.shape, torch.float32, values).dequantize(scale=scale)
    return found


def main(out: Path, names: list[str]) -> None:
    for name in names or KINDS:
        with TemporaryDirectory() as folder:
            plain, written = write_model(Path(folder, "plain"), torch.bfloat16, hidden=128), Path(folder, "written")
            model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
            config = copy.deepcopy(getattr(mtq, KINDS[name]))
            if name.endswith("-cache"):
                config = update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])
            mtq.quantize(model, config, lambda model: [model(ids) for ids in calibration().split(1)])
            export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(written))
            keep(written, out / name, fp8_weights(written) if name in READ else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
