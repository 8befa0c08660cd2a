"""MiniMax-M2 in the format and with the keys of its published checkpoint: FP8 in blocks, `rotary_dim`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import CPU, LLAMA, load, logits, write
from quantized_weights import Stored

from specbatch.errors import SpecbatchError
from specbatch.models.config import ModelConfig
from specbatch.runtime.loader import kept_quantized, weight_bytes
from specbatch.weights import open_checkpoint

MINIMAX: dict[str, Any] = LLAMA | {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 128, "num_local_experts": 3,
    "num_experts_per_tok": 2, "rotary_dim": 16, "rope_theta": 5e6, "scoring_func": "sigmoid", "use_qk_norm": True,
    "qk_norm_type": "per_layer", "use_routing_bias": True, "num_mtp_modules": 3, "shared_intermediate_size": 0,
}  # fmt: skip
FP8 = {
    "quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}  # fmt: skip


def blocks(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Of matrices with at most 128 outputs and inputs."""
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {name: values, f"{name}_scale_inv": scale.view(1, 1)}, values.float() * scale


@pytest.mark.parametrize("keeps", [False, True], ids=["dequantized", "kept"])
def test_fp8_blocks(keeps: bool, tmp_path: Path, stay_quantized: Callable[..., None]) -> None:
    """Queries, keys and values are one matrix whose rows are permuted, and are dequantized; experts stay."""
    meant = write(tmp_path, MINIMAX, FP8, blocks)
    expected = logits(load(ModelConfig.from_dict(MINIMAX), meant.__getitem__))
    stay_quantized(keeps)
    checkpoint = open_checkpoint(str(tmp_path))
    found = load(checkpoint.config, checkpoint.tensor)
    assert (logits(found) - expected).abs().max() < 2e-5 * expected.abs().max()
    kept = {name.split(".", 3)[-1] for name in kept_quantized(checkpoint.config, CPU)}
    experts = {f"block_sparse_moe.experts.{expert}.w{part}.weight" for expert in range(3) for part in (1, 2, 3)}
    assert kept == ({"self_attn.o_proj.weight"} | experts if keeps else set())
    held = sum(tensor.nbytes for tensor in meant.values()) // 4
    assert weight_bytes(checkpoint.config, torch.bfloat16, CPU) <= 2 * held


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qk_norm_type": "per_head"}, "qk_norm_type='per_head': .* 'per_layer'"),
        ({"use_qk_norm": False}, "use_qk_norm=False: .* True"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax': .* 'sigmoid'"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size=64: no shared expert"),
        ({"rotary_dim": 15}, "partial_rotary_factor=.*even number of the 32 channels"),
    ],
)
def test_other_layers_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecbatchError, match=named):
        ModelConfig.from_dict(MINIMAX | changes)
