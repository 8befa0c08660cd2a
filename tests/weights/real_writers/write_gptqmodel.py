"""Writes checkpoints with gptqmodel: python write_gptqmodel.py FOLDER"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.cpu_count = lambda: 8  # gptqmodel 7.7.0 cannot be imported where it finds two cores (DeviceThreadPool)

import torch  # noqa: E402
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # noqa: E402
from gptqmodel.quantization import FORMAT, METHOD  # noqa: E402
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_llama import calibration, each, keep, write_model  # noqa: E402

AWQ: dict[str, Any] = {"quant_method": METHOD.AWQ, "format": FORMAT.GEMM}
# Rules for layers: "-:" counts first, wherever it stands, then the first that fits.
DYNAMIC = {
    r"+:.*\.1\.mlp\.down_proj": {"bits": 8, "sym": False},
    r"+:.*down_proj": {"bits": 8},
    r"-:.*layers\.1\.self_attn\.o_proj": {},
    r".*layers\.0\.mlp": {"group_size": 64, "sym": False},
    r"+:.*\.1\..*[qk]_proj$": {"desc_act": True, "damp_percent": 0.02},
}
KINDS: dict[str, dict[str, Any]] = {
    "gptqmodel": {},
    "gptqmodel-asymmetric": {"sym": False},
    "gptqmodel-v2": {"format": FORMAT.GPTQ_V2},
    "gptqmodel-v2-asymmetric": {"format": FORMAT.GPTQ_V2, "sym": False},
    "gptqmodel-desc-act": {"desc_act": True},
    "gptqmodel-8-bits": {"bits": 8},
    "gptqmodel-dynamic": {"dynamic": DYNAMIC},
    "gptqmodel-awq": AWQ,
    "gptqmodel-awq-zero-points": AWQ | {"sym": False},
}


def main(out: Path, names: list[str]) -> None:
    for name in names or KINDS:
        with TemporaryDirectory() as folder:
            plain, written = write_model(Path(folder, "plain")), Path(folder, "written")
            settings = QuantizeConfig(**{"bits": 4, "group_size": 32, "device": "cpu"} | KINDS[name])
            model = GPTQModel.load(str(plain), settings)
            model.quantize(
                [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in calibration().split(1)]
            )
            model.save(str(written))
            keep(written, out / name, awq_weights(written) if "awq" in name else weights(written))


def weights(written: Path) -> dict[str, torch.Tensor]:
    read = GPTQModel.load(str(written), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model

    def weight(layer: Any) -> torch.Tensor:
        return layer.weight if isinstance(layer, torch.nn.Linear) else layer.dequantize_weight().T.float()

    return each(torch.nn.Module.float(read), weight)


def awq_weights(written: Path) -> dict[str, torch.Tensor]:
    """From the function of its linear layers, which use it in 16 bits."""
    stored, found = load_file(written / "model.safetensors"), {}
    for name in stored:
        if name.endswith(".qweight"):
            values, zeros, scales = (stored[name.replace("qweight", part)] for part in ("qweight", "qzeros", "scales"))
            found[name.replace("qweight", "weight")] = dequantize_gemm(values, zeros, scales.float(), 4, 32).T
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
