"""Encodes matrices as MXFP4 checkpoints of gpt-oss store them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def encoded(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., out, in] -> blocks uint8 [..., out, in / 32, 16] and scales uint8 [..., out, in / 32]: of each block its
    largest value becomes 4 to 8, and all are rounded to the nearest of a 4-bit float."""
    values = matrices.float().unflatten(-1, (-1, 32))
    exponent = values.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
    scaled = values / 2 ** exponent[..., None]
    code = (scaled.abs()[..., None] - MAGNITUDES).abs().argmin(-1) + 8 * (scaled < 0)
    return (code[..., ::2] + 16 * code[..., 1::2]).to(torch.uint8), (exponent + 127).to(torch.uint8)


def encode_experts(folder: Path) -> None:
    """Rewrite a checkpoint of transformers, whose experts are stored transposed."""
    import json

    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            blocks, scales = encoded(tensor.transpose(1, 2))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    described: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": CONFIG}))
