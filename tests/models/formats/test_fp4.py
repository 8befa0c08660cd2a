"""NVFP4 and MXFP4 checkpoints compute what their dequantized weights do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from quantized_models import check_model, on_devices
from quantized_weights import MORE, forms_of

from specbatch.models.formats.fp4 import Mxfp4Matrices, Nvfp4Weights

FORMS = [*forms_of(Nvfp4Weights), *forms_of(Mxfp4Matrices)]
EVERY = [*(("llama", form) for form in FORMS), ("moe", "NVFP4 of ModelOpt"), ("next", "NVFP4A16"), ("e2b", "MXFP4A16")]


@on_devices(("model", "form"), EVERY)
def test_model_matches_dequantized_model(
    model: str, form: str, device: str, keeps: bool, bound: float, tmp_path: Path, stay_quantized: Callable[..., None]
) -> None:
    check_model(tmp_path, model, *MORE[form], stay_quantized, device, keeps, bound)


def test_every_value() -> None:
    """Values 2 j are in the low bits; the global scale of compressed-tensors divides, that of ModelOpt multiplies."""
    bits = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values, scale = torch.cat([magnitudes, -magnitudes])[None], torch.tensor([[3.5]])

    def read(form: type[Nvfp4Weights | Mxfp4Matrices], packing: str, **tensors: torch.Tensor) -> torch.Tensor:
        found = form.packings[packing].read({f".{name}": tensor for name, tensor in tensors.items()})
        return found.values.float() * found.scales

    e4m3 = scale.to(torch.float8_e4m3fn)
    divided = {"weight_packed": bits, "weight_scale": e4m3, "weight_global_scale": torch.tensor([8.0])}
    assert torch.equal(read(Nvfp4Weights, "compressed-tensors", **divided), values * 3.5 / 8)
    multiplied = {"weight": bits, "weight_scale": e4m3, "weight_scale_2": torch.tensor(0.25)}
    assert torch.equal(read(Nvfp4Weights, "modelopt", **multiplied), values * 3.5 / 4)
    for exponent in (1, 120, 127, 252):
        tensors = {"weight": bits, "weight_scale": torch.tensor([[exponent]], dtype=torch.uint8)}
        assert torch.equal(read(Mxfp4Matrices, "modelopt", **tensors), values * 2.0 ** (exponent - 127))
