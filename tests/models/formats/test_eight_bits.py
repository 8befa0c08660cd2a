"""INT8 checkpoints of compressed-tensors compute what their dequantized weights do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_models import check_model, devices
from quantized_weights import MORE, forms_of

from specbatch.models.formats.eight_bits import Int8Weights

EVERY = [*(("llama", form) for form in forms_of(Int8Weights)), ("moe", "W8A8"), ("next", "W8A16"), ("e2b", "W8A8")]


@devices
@pytest.mark.parametrize(("model", "form"), EVERY)
def test_model_matches_dequantized_model(
    model: str, form: str, device: str, keeps: bool, bound: float, tmp_path: Path, stay_quantized: Callable[..., None]
) -> None:
    check_model(tmp_path, model, *MORE[form], stay_quantized, device, keeps, bound)


def test_packed_words() -> None:
    """The first value in the lowest bits, each plus 128."""
    packed = {
        ".weight_packed": torch.tensor([[0x00_7F_81_FF], [-0x7F_00_00_00]], dtype=torch.int32),
        ".weight_scale": torch.ones(2, 1),
    }
    values = Int8Weights.packings["pack-quantized"].read(packed).values
    assert values.tolist() == [[127, 1, -1, -128], [-128, -128, -128, 1]]
