"""What formats without a GEMM on a GPU have in common: ranks, memory, log lines, and files that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import slow_but
from quantized_models import CPU, LLAMA, change, load, logits, write
from quantized_weights import MORE
from thread_ranks import ThreadCommunicator, on_ranks
from uncached import decoder_of, logits_of

from specbatch.errors import SpecbatchError
from specbatch.kernels.common import native
from specbatch.models.config import ModelConfig
from specbatch.runtime.loader import quantization_lines, weight_bytes
from specbatch.weights import open_checkpoint

NAME = "model.layers.1.mlp.down_proj"
WIDE = LLAMA | {"hidden_size": 128}  # halves of whole groups of 64
needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@pytest.mark.parametrize("form", slow_but([form for form in MORE if "asymmetric" not in form], MORE))
def test_two_ranks_compute_what_one_does(form: str, tmp_path: Path) -> None:
    write(tmp_path, WIDE, *MORE[form])
    tokens = torch.randint(0, 41, (9,), generator=torch.Generator().manual_seed(5))

    def of(ranks: ThreadCommunicator | None) -> torch.Tensor:
        return logits_of(decoder_of(open_checkpoint(str(tmp_path)), ranks=ranks), tokens)

    whole = of(None)
    first, second = on_ranks(2, of)
    assert torch.equal(first, second)
    assert (first - whole).abs().max() < 1e-5 * whole.abs().max()


@pytest.mark.parametrize(
    ("form", "inputs"), [("W8A8", "INT8"), ("W4AFP8", "FP8"), ("NVFP4 of ModelOpt", "NVFP4"), ("W8A16", None)]
)
def test_log_says_what_is_not_quantized(form: str, inputs: str | None, tmp_path: Path) -> None:
    write(tmp_path, LLAMA, *MORE[form])
    checkpoint = open_checkpoint(str(tmp_path))
    model = decoder_of(checkpoint, dtype=torch.bfloat16)
    lines = [*quantization_lines(model, checkpoint.config, loads=(True, False), quantizes=False)]
    about = f"{inputs} activations, for which the checkpoint was made: off, they are bfloat16"
    assert [line for line in lines if "activations" in line] == ([about] if inputs else [])


@needs_native
@pytest.mark.parametrize("form", ["W8A8", "W8A16", "NVFP4A16", "MXFP4A16"])
def test_a_cpu_keeps_bytes_and_other_devices_dequantize(form: str, tmp_path: Path) -> None:
    meant = write(tmp_path, LLAMA, *MORE[form])
    config = open_checkpoint(str(tmp_path)).config
    values, count = 2 * (64 * (128 + 2 * 64) + 128 * 64 + 3 * 128 * 64), sum(item.numel() for item in meant.values())
    of_down = 2 * 128 * (64 + 64)  # groups of all 128 inputs: down, o
    groups = {"W8A16": values // 16, "NVFP4A16": values // 16, "MXFP4A16": values // 32}
    scales = groups.get(form, of_down // 128 + (values - of_down) // 64)
    assert weight_bytes(config, torch.float32, CPU) == 4 * (count - values) + values + 4 * scales
    assert weight_bytes(config, torch.bfloat16, torch.device("cuda")) == 2 * count


@pytest.mark.parametrize(
    ("form", "name", "tensor", "message"),
    [
        ("W8A8", f"{NAME}.weight_scale", None, "weight is I8 and there is no .*weight_scale"),
        (
            "W8A8",
            f"{NAME}.weight_scale",
            torch.ones(63, 1),
            r"weight_scale is \[63, 1\]; .* \[64, 1\]",
        ),
        ("W8A16", f"{NAME}.weight_packed", torch.ones(64, 32), "weight_packed is F32; .*INT8 has it in I32"),
        ("W8A16", f"{NAME}.weight_packed", torch.ones(64, 32).byte(), "weight_packed is U8; INT8 has it in I32"),
        (
            "W8A8",
            f"{NAME}.weight",
            torch.ones(64, 128).to(torch.float8_e4m3fn),
            "weight is F8_E4M3; INT8 has it in I8",
        ),
        ("W8A8", f"{NAME}.weight_scale", torch.full((64, 1), torch.inf), "scales hold values that are not finite"),
        ("NVFP4A16", f"{NAME}.weight_global_scale", torch.zeros(1), "scales hold values that are not finite"),
        ("NVFP4A16", f"{NAME}.weight_global_scale", torch.tensor([torch.inf]), "scales hold only zeros"),
        ("NVFP4 of ModelOpt", f"{NAME}.weight_scale_2", torch.tensor(0.0), "scales hold only zeros"),
        ("NVFP4 of ModelOpt", f"{NAME}.weight_scale_2", torch.tensor(-0.1), "scales hold negative values"),
        ("W8A8", f"{NAME}.weight_scale", torch.zeros(64, 1), "scales hold only zeros"),
        ("MXFP4A16", f"{NAME}.weight_scale", torch.zeros(64, 4).byte(), "scales hold only zeros"),
        ("INT4 of ModelOpt", f"{NAME}.weight_scale", torch.zeros(64, 4), "scales hold only zeros"),
        ("INT4 of ModelOpt", f"{NAME}.weight_scale", torch.ones(64, 4).byte(), "scale is U8; INT4 has it in BF16"),
        ("INT4 of ModelOpt", f"{NAME}.weight", torch.ones(32, 128).to(torch.int8), "weight is I8; INT4 has it in U8"),
        ("W4AFP8", f"{NAME}.weight", torch.full((64, 128), 8).to(torch.int8), "more than 4 bits"),
        ("W4AFP8 asymmetric", f"{NAME}.weight_zero_point", torch.full((64, 2), -9).to(torch.int8), "than 4 bits"),
        ("W4AFP8", f"{NAME}.weight_g_idx", torch.arange(128).int() % 4, "weight_g_idx.*in the order of the inputs"),
        ("NVFP4A16", f"{NAME}.weight_global_scale", None, "weight_global_scale is missing"),
        ("NVFP4A16", f"{NAME}.weight_scale", torch.ones(64, 8).half(), "weight_scale is F16; NVFP4 has it in F8_E4M3"),
        ("MXFP4A16", f"{NAME}.weight_scale", torch.full((64, 4), 253).byte(), "scales hold values that are not finite"),
        ("MXFP4A16", f"{NAME}.pre_quant_scale", torch.full((128,), torch.nan), "values that are not finite"),
    ],
)
def test_damaged_files_are_refused(form: str, name: str, tensor: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, LLAMA, *MORE[form])
    change(tmp_path, name, tensor)

    def opened() -> None:
        checkpoint = open_checkpoint(str(tmp_path))
        load(checkpoint.config, checkpoint.tensor)

    with pytest.raises(SpecbatchError, match=message) as caught:
        opened()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["NVFP4 of ModelOpt", "INT4 of ModelOpt"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_scales_of_inputs(form: str, ranks: int, tmp_path: Path, stay_quantized: Callable[..., None]) -> None:
    """Such weights are dequantized, on a GPU, too."""
    meant, name = write(tmp_path, WIDE, *MORE[form]), f"{NAME}.weight"
    scales = torch.rand(128, generator=torch.Generator().manual_seed(6)) + 0.5
    change(tmp_path, f"{NAME}.pre_quant_scale", scales)
    expected = logits(load(ModelConfig.from_dict(WIDE), (meant | {name: meant[name] * scales}).__getitem__))
    stay_quantized()
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config.quantization is not None
    assert checkpoint.config.quantization.irregular == {name}
    found = [load(checkpoint.config, checkpoint.tensor)] if ranks == 1 else []
    ours = logits(found[0]) if found else on_ranks(2, lambda group: logits(decoder_of(checkpoint, ranks=group)))[0]
    assert (ours - expected).abs().max() < 2e-5 * expected.abs().max()
    for model in found:
        lines = [*quantization_lines(model, checkpoint.config, loads=(True, False), quantizes=False)]
        assert any(line.endswith(f"another order: 1 dequantized to float32, such as {name}") for line in lines)
