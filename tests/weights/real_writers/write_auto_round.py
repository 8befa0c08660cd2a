"""Writes checkpoints with auto-round: python write_auto_round.py FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from auto_round import AutoRound
from auto_round.export.export_to_awq.utils import dequantize_gemm
from safetensors.torch import load_file
from tiny_llama import by_identity, calibration, keep, write_model
from transformers import AutoModelForCausalLM, AutoRoundConfig, AutoTokenizer

MIXED = {  # names and parts of names
    "model.layers.1.mlp.down_proj": {"bits": 16},
    "layers.0.self_attn": {"group_size": 64},
    "model.layers.1.self_attn.q_proj": {"bits": 8},
    "model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 64},
}
KINDS = {  # name -> format, symmetric
    "auto-round-gptq": ("auto_round", True),  # packing_format auto_round:auto_gptq
    "auto-round-awq": ("auto_round:auto_awq", True),
    "auto-round-asymmetric": ("auto_round", False),  # packing_format auto_round:auto_awq
    "auto-round-gptq-asymmetric": ("auto_round:auto_gptq", False),
    "auto-round-gptqmodel": ("auto_round:gptqmodel", False),  # zero points as they are
    "auto-round-mixed": ("auto_round", True),  # with `extra_config`
    "auto-round-as-gptq": ("auto_gptq", True),
    "auto-round-as-awq": ("auto_awq", True),
    "auto-round-as-gptq-mixed": ("auto_gptq", True),  # with `dynamic`
}


def main(out: Path, names: list[str]) -> None:
    for name in names or KINDS:
        form, symmetric = KINDS[name]
        with TemporaryDirectory() as folder:
            plain = write_model(Path(folder, "plain"))
            model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float16)
            layers = MIXED if name.endswith("mixed") else None
            tool = AutoRound(
                model, AutoTokenizer.from_pretrained(plain), bits=4, group_size=32, sym=symmetric, iters=2, nsamples=8,
                seqlen=64, batch_size=4, dataset=list(calibration().split(1)), device_map="cpu", layer_config=layers,
            )  # fmt: skip
            _, written = tool.quantize_and_save(str(Path(folder, "written")), format=form)
            written = Path(written[0] if isinstance(written, list) else written)
            keep(written, out / name, awq_weights(written) if is_awq(written) else weights(written))


def is_awq(written: Path) -> bool:
    settings = json.loads((written / "config.json").read_text())["quantization_config"]
    return "awq" in settings.get("packing_format", settings["quant_method"])


def weights(written: Path) -> dict[str, torch.Tensor]:
    given = AutoRoundConfig()  # GPTQ files are read by auto-round, too
    read = AutoModelForCausalLM.from_pretrained(
        written, device_map="cpu", dtype=torch.float32, quantization_config=given
    )
    return by_identity(read)


def awq_weights(written: Path) -> dict[str, torch.Tensor]:
    """auto-round has no linear layer for AWQ on a CPU, but the function."""
    stored, found = load_file(written / "model.safetensors"), {}
    for name in stored:
        if name.endswith(".qweight"):
            values, zeros, scales = (stored[name.replace("qweight", part)] for part in ("qweight", "qzeros", "scales"))
            matrix = dequantize_gemm(values, zeros, scales.float(), 4, 32)
            found[name.replace("qweight", "weight")] = matrix.T.contiguous()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
