"""INT8 checkpoints of compressed-tensors compute what their dequantized weights do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from crossed import crossed, slow_but
from quantized_models import check_model, devices
from quantized_weights import MORE, Stored, forms_of, words

from specbatch.models.formats.eight_bits import Int8Weights

EVERY = [*(("llama", form) for form in forms_of(Int8Weights)), ("moe", "W8A8"), ("next", "W8A16"), ("e2b", "W8A8")]


@devices
@pytest.mark.parametrize(("model", "form"), slow_but(EVERY[::2], EVERY))
def test_model_matches_dequantized_model(
    model: str, form: str, device: str, keeps: bool, bound: float, tmp_path: Path, stay_quantized: Callable[..., None]
) -> None:
    check_model(tmp_path, model, *MORE[form], stay_quantized, device, keeps, bound)


@pytest.mark.parametrize(("packed", "shape"), crossed([False, True], [[], [1], [1, 1], [-1]]))
def test_scales_and_zero_points_of_a_whole_matrix(packed: bool, shape: list[int], tmp_path: Path) -> None:
    """One for the matrix, or one per output in one dimension; zero points are packed otherwise and not stored so."""

    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        scale, zero = torch.full((len(weight), 1), 0.01), torch.full((len(weight), 1), 0 if packed else -3)
        values = (weight / scale + zero).round().clamp(-128, 127).int()
        stored = slice(None) if shape == [-1] else slice(1)
        found = {f"{name}_packed": words(values + 128, (0, 1, 2, 3))} if packed else {name: values.to(torch.int8)}
        found |= {} if packed else {f"{name}_zero_point": zero[stored].to(torch.int8).reshape(shape)}
        return found | {f"{name}_scale": scale[stored].reshape(shape)}, (values - zero) * scale

    weights = {"type": "int", "num_bits": 8, "strategy": "channel" if shape == [-1] else "tensor", "symmetric": packed}
    group = {"targets": ["Linear"], "weights": weights, "format": "pack-quantized" if packed else "int-quantized"}
    described = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    check_model(tmp_path, "llama", described, store, lambda keeps: None, "cpu", True, 2e-5)


def test_packed_words() -> None:
    """The first value in the lowest bits, each plus 128."""
    packed = {
        ".weight_packed": torch.tensor([[0x00_7F_81_FF], [-0x7F_00_00_00]], dtype=torch.int32),
        ".weight_scale": torch.ones(2, 1),
    }
    values = Int8Weights.packings["pack-quantized"].read(packed).values
    assert values.tolist() == [[127, 1, -1, -128], [-128, -128, -128, 1]]
