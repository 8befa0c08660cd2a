"""FP8 checkpoints with a scale per output or per tensor compute what their dequantized weights do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import CPU, LLAMA, change, check_model, load, on_devices, write
from quantized_weights import FORMATS, forms_of

from specbatch.errors import SpecbatchError
from specbatch.models.formats.fp8 import FP8Weights
from specbatch.runtime.loader import weight_bytes
from specbatch.weights import open_checkpoint

NAME = "model.layers.1.mlp.down_proj"
EVERY = [*(("llama", form) for form in forms_of(FP8Weights)), *(("moe", form) for form in ("channel", "modelopt"))]
EVERY += [("next", "channel"), ("e2b", "channel")]


@on_devices(("model", "form"), EVERY)
def test_model_matches_dequantized_model(
    model: str, form: str, device: str, keeps: bool, bound: float, tmp_path: Path, stay_quantized: Callable[..., None]
) -> None:
    check_model(tmp_path, model, *FORMATS[form], stay_quantized, device, keeps, bound)


def test_memory_plan_counts_bytes_as_stored(tmp_path: Path, stay_quantized: Callable[..., None]) -> None:
    meant = write(tmp_path, LLAMA, *FORMATS["tensor"])
    config = open_checkpoint(str(tmp_path)).config
    count = sum(item.numel() for item in meant.values())
    assert weight_bytes(config, torch.bfloat16, CPU) == 2 * count
    stay_quantized()
    outputs = 2 * (128 + 2 * 64 + 64 + 2 * 128 + 64)
    values = 2 * (64 * (128 + 2 * 64) + 128 * 64 + 3 * 128 * 64)
    assert weight_bytes(config, torch.bfloat16, CPU) == 2 * (count - values) + values + 4 * outputs


@pytest.mark.parametrize(
    ("form", "name", "tensor", "message"),
    [
        ("channel", f"{NAME}.weight_scale", None, "is F8_E4M3 and there is no .*weight_scale_inv or .*weight_scale"),
        (
            "channel",
            f"{NAME}.weight_scale",
            torch.ones(63, 1),
            r"weight_scale is \[63, 1\]; its config requires \[64, 1\]",
        ),
        ("tensor", f"{NAME}.weight_scale", torch.ones(3), r"weight_scale is \[3\]; its config requires \[64, 1\]"),
        ("modelopt", f"{NAME}.weight", torch.ones(64, 128), "weight_scale, but no F8_E4M3 or .* tensor"),
        ("channel", f"{NAME}.weight_scale", torch.ones(64, 1).byte(), "weight_scale is U8; FP8 has it in BF16 or F16"),
        ("channel", "lm_head.weight_scale", torch.ones(41, 1), "no F8_E4M3 or .* tensor"),
    ],
)
def test_damaged_scales_are_refused(form: str, name: str, tensor: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, LLAMA, *FORMATS[form])
    change(tmp_path, name, tensor)
    with pytest.raises(SpecbatchError, match=message):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("scale", "holds"), [(torch.nan, "values that are not finite"), (0.0, "only zeros"), (-0.1, "negative values")]
)
def test_impossible_scales_are_refused(scale: float, holds: str, tmp_path: Path) -> None:
    write(tmp_path, LLAMA, *FORMATS["channel"])
    change(tmp_path, f"{NAME}.weight_scale", torch.full((64, 1), scale))
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(SpecbatchError, match=NAME + rf"\.weight_scale.*{holds}"):
        load(checkpoint.config, checkpoint.tensor)


def test_quantized_output_matrix_is_refused(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, *FORMATS["channel"])
    change(tmp_path, "lm_head.weight_scale", torch.ones(41, 1))
    change(tmp_path, "lm_head.weight", torch.ones(41, 64).to(torch.float8_e4m3fn))
    with pytest.raises(SpecbatchError, match=r"lm_head.weight is quantized.*put it on the ignore list"):
        open_checkpoint(str(tmp_path))


def test_scales_of_activations_are_not_used_which_is_said(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, *FORMATS["tensor"])
    lines: list[str] = []
    open_checkpoint(str(tmp_path), log=lines.append)
    message = r"14 scales are not used, such as model\.layers\.0\.mlp\.down_proj\.input_scale"
    assert any(re.search(message, line) for line in lines)
