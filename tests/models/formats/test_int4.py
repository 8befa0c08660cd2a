"""INT4 checkpoints of every packing compute what their dequantized weights do; damaged ones are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import CPU, LLAMA, change, check_model, load, logits, on_devices, write
from quantized_weights import FORMATS, MORE, Store, Stored, forms_of, int4, words
from safetensors.torch import load_file, save_file
from thread_ranks import on_ranks
from uncached import decoder_of

from specbatch.errors import SpecbatchError
from specbatch.models.config import ModelConfig
from specbatch.models.formats.int4 import Int4Weights
from specbatch.models.weight_reader import Reader
from specbatch.runtime.loader import dequantized_bytes, weight_bytes
from specbatch.weights import open_checkpoint

NAME = "model.layers.1.mlp.down_proj"
AWQ, GPTQ = (FORMATS[form][0] for form in ("awq", "gptq"))
EVERY = [*(("llama", form) for form in forms_of(Int4Weights)), ("moe", "awq"), ("next", "gptq"), ("e2b", "awq")]
GPTQ_V2 = {"checkpoint_format": "gptq_v2"}
IN_AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
AS_AWQ, PLAIN_AUTO_ROUND = ({"packing_format": f"auto_round{suffix}"} for suffix in (":auto_awq", ""))


@on_devices(("model", "form"), EVERY)
def test_model_matches_dequantized_model(
    model: str, form: str, device: str, keeps: bool, bound: float, tmp_path: Path, stay_quantized: Callable[..., None]
) -> None:
    check_model(tmp_path, model, *(FORMATS | MORE)[form], stay_quantized, device, keeps, bound)


def test_memory_plan_counts_packed_bytes(tmp_path: Path, stay_quantized: Callable[..., None]) -> None:
    """4 bits a value, and for 32 of them a word of a scale and a zero point; the plan has room for the largest matrix
    dequantized."""
    meant = write(tmp_path, LLAMA, *FORMATS["awq"])
    config = open_checkpoint(str(tmp_path)).config
    stay_quantized()
    values, count = 2 * (64 * (128 + 2 * 64) + 128 * 64 + 3 * 128 * 64), sum(item.numel() for item in meant.values())
    assert weight_bytes(config, torch.bfloat16, CPU) == 2 * (count - values) + values // 2 + 4 * values // 32
    assert dequantized_bytes(config, torch.bfloat16, CPU) == 2 * (2 * 128 * 64)


@pytest.mark.parametrize("packing", ["pack-quantized", "gptq"])
def test_group_of_all_inputs(tmp_path: Path, packing: str) -> None:
    """Becomes groups of 128."""
    described = LLAMA | {"hidden_size": 128}
    quantization = json.loads(json.dumps(FORMATS[packing][0]))
    if packing == "gptq":
        quantization["group_size"] = -1
    else:
        quantization["config_groups"]["group_0"]["weights"]["strategy"] = "channel"
    meant = write(tmp_path, described, quantization, int4(packing, -1))
    checkpoint = open_checkpoint(str(tmp_path))
    expected = logits(load(ModelConfig.from_dict(described), meant.__getitem__))
    assert (logits(load(checkpoint.config, checkpoint.tensor)) - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("packing", "changes", "stored"),
    [
        *(
            pytest.param("gptq", {"sym": True} | method, word, marks=() if word in (0, 9) else pytest.mark.slow)
            for method in ({}, GPTQ_V2, IN_AUTO_ROUND)
            for word in range(0, 16, 3)
        ),
        *(("gptq", {"sym": True, "desc_act": True} | method, None) for method in ({}, GPTQ_V2, IN_AUTO_ROUND)),
        *(
            pytest.param("gptq", {"sym": None} | method, word, marks=() if word == quick else pytest.mark.slow)
            for method, quick in (({}, 7), (GPTQ_V2, 8), (IN_AUTO_ROUND, None))
            for word in (7, 8, None)
        ),
        ("gptq", {"checkpoint_format": None}, 7),
        ("gptq", {"sym": False}, 7),
        ("gptq", {"sym": False} | GPTQ_V2, 8),
        ("gptq", {"sym": False, "format": "gptq_v2"}, 8),
        ("gptq", {"sym": False, "format": "gptq_v2", "checkpoint_format": None}, 8),
        ("gptq", {"sym": False, "format": "gptq", "checkpoint_format": "gptq_v2"}, 8),
        ("gptq", IN_AUTO_ROUND | {"sym": False}, 7),
        ("gptq", IN_AUTO_ROUND | PLAIN_AUTO_ROUND | {"sym": False}, 8),
        ("gptq", {"quant_method": "intel/auto-round", "packing_format": "auto_round:gptqmodel", "sym": False}, 8),
        ("awq", {"zero_point": False}, 8),
        ("awq", {"zero_point": False}, None),
        ("awq", {"zero_point": True}, 8),
        ("awq", IN_AUTO_ROUND | AS_AWQ | {"sym": True}, 8),
        ("awq", IN_AUTO_ROUND | AS_AWQ | {"sym": True}, None),
        ("awq", IN_AUTO_ROUND | AS_AWQ | {"sym": False}, 8),
    ],
)
def test_zero_points_of_symmetric_weights(
    packing: str, changes: dict[str, Any], stored: int | None, tmp_path: Path
) -> None:
    """Weights with the zero point 8, as `sym` and `zero_point` describe them; every zero point is stored as this
    number, or none is."""
    described = (AWQ if packing == "awq" else GPTQ) | changes
    if described["quant_method"] != "awq":
        described.pop("version", None), described.pop("zero_point", None)
    meant = write(tmp_path, LLAMA, described, int4(packing, 32, symmetric=True))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".qzeros")]:
        zeros = tensors.pop(name)
        word = int(f"{stored or 0:x}" * 8, 16)
        if stored is not None:
            tensors[name] = torch.full_like(zeros, word - (1 << 32) if word >= 1 << 31 else word)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    found = load(checkpoint.config, checkpoint.tensor)
    expected = logits(load(ModelConfig.from_dict(LLAMA), meant.__getitem__))
    assert (logits(found) - expected).abs().max() < 2e-5 * expected.abs().max()


def reordered(store: Store) -> Store:
    """As GPTQ stores weights whose inputs it quantized in another order (`desc_act`)."""

    def stored(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
        found, meant = store(name, weight[:, order])
        back, stem = order.argsort(), name.removesuffix(".weight")
        bits = torch.stack([found[f"{stem}.qweight"] >> 4 * place & 15 for place in range(8)], 1).flatten(0, 1)
        found[f"{stem}.qweight"] = words(bits[back].t()).t().contiguous()
        return found | {f"{stem}.g_idx": found[f"{stem}.g_idx"][back]}, meant[:, back]

    return stored


@pytest.mark.parametrize("changes", [{"sym": True}, {"sym": False}, {"sym": False} | GPTQ_V2])
def test_inputs_in_another_order(changes: dict[str, Any], tmp_path: Path, stay_quantized: Callable[..., None]) -> None:
    """They are dequantized, on a GPU, too; the plan counts them so."""
    described, described_wide = GPTQ | {"desc_act": True} | changes, LLAMA | {"hidden_size": 128}
    packing = "gptq_v2" if GPTQ_V2.items() <= changes.items() else "gptq"
    store = reordered(int4(packing, 32, symmetric=changes["sym"]))
    meant = write(tmp_path, described_wide, described, store)
    stay_quantized()
    checkpoint = open_checkpoint(str(tmp_path))
    expected = logits(load(ModelConfig.from_dict(described_wide), meant.__getitem__))
    assert (logits(load(checkpoint.config, checkpoint.tensor)) - expected).abs().max() < 2e-5 * expected.abs().max()
    parts = on_ranks(2, lambda ranks: logits(decoder_of(checkpoint, ranks=ranks)))
    assert (parts[0] - expected).abs().max() < 2e-5 * expected.abs().max()
    count = sum(item.numel() for item in meant.values())
    assert weight_bytes(checkpoint.config, torch.bfloat16, CPU) == 2 * count
    change(tmp_path, f"{NAME}.g_idx", torch.arange(64).int() // 32)
    with pytest.raises(SpecbatchError, match=r"down_proj.g_idx is \[64\]; its config requires \[128\]"):
        open_checkpoint(str(tmp_path))
    if described.get("quant_method") == "gptq":  # which says that there is one
        change(tmp_path, f"{NAME}.g_idx", None)
        with pytest.raises(SpecbatchError, match=r"tensor .*down_proj.g_idx is missing"):
            open_checkpoint(str(tmp_path))
    for order in (torch.arange(128) % 5, torch.arange(128) % 4 - 1, torch.zeros(128), torch.arange(128) // 33):
        change(tmp_path, f"{NAME}.g_idx", order.int())
        checkpoint = open_checkpoint(str(tmp_path))
        with pytest.raises(SpecbatchError, match=r"its g_idx must have 32 inputs in each of the groups 0 to 3"):
            load(checkpoint.config, checkpoint.tensor)


@pytest.mark.parametrize("value", [0.0, 0.5])
@pytest.mark.parametrize("name", ["gptq", "W8A16 of GPTQ"])
def test_biases_of_layers_without_one_must_be_zero(name: str, value: float, tmp_path: Path) -> None:
    """Old versions of AutoGPTQ write a bias of zeros for every layer."""
    meant = write(tmp_path, LLAMA, *(FORMATS | MORE)[name])
    tensors = load_file(tmp_path / "model.safetensors")
    stems = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    tensors |= {f"{stem}.bias": torch.zeros(tensors[f"{stem}.scales"].shape[-1]).half() for stem in stems}
    tensors[f"{stems[-1]}.bias"][3] = value
    save_file(tensors, tmp_path / "model.safetensors")
    if value:
        with pytest.raises(SpecbatchError, match=f"its config describes no tensor {re.escape(stems[-1])}.bias"):
            open_checkpoint(str(tmp_path))
        return
    checkpoint = open_checkpoint(str(tmp_path))
    expected = logits(load(ModelConfig.from_dict(LLAMA), meant.__getitem__))
    assert (logits(load(checkpoint.config, checkpoint.tensor)) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_packed_words_are_those_of_the_formats() -> None:
    """Written out by hand: outputs 0, 1, 2, ... of the first input are 0, 1, 2, ..., and their zero points 8."""

    def read(packing: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        reader = Reader(ModelConfig.from_dict(LLAMA), tensors.__getitem__, torch.float32, CPU)
        found = Int4Weights(packing=packing, group=32).weight("a.weight", reader)
        return found.dequantize(torch.float32)

    ones = torch.ones(1, 8).half()
    # In AWQ the second output is in bits 16 to 19, and the third in bits 4 to 7.
    awq = torch.full((32, 1), 0x7531_6420, dtype=torch.int32)
    eights = torch.tensor([[-0x7777_7778]], dtype=torch.int32)
    by_output = torch.arange(8.0)[:, None].expand(8, 32) - 8
    assert torch.equal(read("awq", {"a.qweight": awq, "a.qzeros": eights, "a.scales": ones}), by_output)
    # In GPTQ the inputs are packed, the first in the lowest bits, and zero points are stored less 1.
    gptq = torch.full((4, 8), 0x7654_3210, dtype=torch.int32)
    by_input = torch.arange(8.0).repeat(4).expand(8, 32) - 8
    sevens = torch.tensor([[0x7777_7777]], dtype=torch.int32)
    assert torch.equal(read("gptq", {"a.qweight": gptq, "a.qzeros": sevens, "a.scales": ones}), by_input)
    assert torch.equal(read("gptq_v2", {"a.qweight": gptq, "a.qzeros": eights, "a.scales": ones}), by_input)
    packed = {"a.weight_packed": gptq.t(), "a.weight_scale": ones.t(), "a.weight_zero_point": eights}
    assert torch.equal(read("pack-quantized", packed), by_input)


@pytest.mark.parametrize(
    ("form", "name", "tensor", "message"),
    [
        ("awq", f"{NAME}.qzeros", None, "down_proj.qzeros is missing"),
        ("awq", f"{NAME}.scales", torch.ones(4, 65).half(), r"scales is \[4, 65\]; its config requires \[4, 64\]"),
        ("gptq", f"{NAME}.qweight", torch.ones(16, 64), "qweight is F32; packed INT4 values are in I32"),
        ("gptq", f"{NAME}.qzeros", torch.ones(4, 8).long(), "qzeros is I64; packed INT4 values are in I32"),
        ("gptq", f"{NAME}.qzeros", torch.ones(3, 8).int(), r"qzeros is \[3, 8\]; its config requires \[4, 8\]"),
        ("awq", "lm_head.qweight", torch.ones(64, 5).int(), "lm_head.weight is quantized"),
        ("symmetric", f"{NAME}.weight_scale", torch.ones(64, 3).half(), r"weight_scale is \[64, 3\]; .* \[64, 4\]"),
    ],
)
def test_damaged_scales_are_refused(form: str, name: str, tensor: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, LLAMA, *FORMATS[form])
    change(tmp_path, name, tensor)
    with pytest.raises(SpecbatchError, match=message):
        open_checkpoint(str(tmp_path))


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, *FORMATS["awq"])
    change(tmp_path, f"{NAME}.scales", torch.full((4, 64), torch.inf).half())
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(SpecbatchError, match=NAME + r"\.weight.*scales hold values that are not finite"):
        load(checkpoint.config, checkpoint.tensor)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (64.0, "largest scale is 64; on a GPU use less than 64"),
        (-64.0, "largest scale is 64; on a GPU use less than 64"),
        (1e-6, "scales, up to .*e-07, are too small for float16"),
        (-1e-6, "scales, up to .*e-07, are too small for float16"),
    ],
)
def test_scales_that_gemms_cannot_take_are_refused(
    tmp_path: Path, stay_quantized: Callable[..., None], scale: float, message: str
) -> None:
    """A CPU takes them."""
    write(tmp_path, LLAMA, *FORMATS["awq"])
    change(tmp_path, f"{NAME}.scales", torch.full((4, 64), scale).bfloat16().float())
    checkpoint = open_checkpoint(str(tmp_path))
    load(checkpoint.config, checkpoint.tensor)
    stay_quantized()
    with pytest.raises(SpecbatchError, match=rf"{NAME}\.weight.*{message}"):
        load(checkpoint.config, checkpoint.tensor)


@pytest.mark.parametrize(("form", "sizes", "ranks"), [("awq", {"head_dim": 16}, 4), ("awq", {}, 8)])
def test_ranks_that_would_cut_groups_are_refused(form: str, sizes: dict[str, Any], ranks: int) -> None:
    described = LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 8} | sizes
    config = ModelConfig.from_dict(described | {"quantization_config": FORMATS[form][0] | {"group_size": 64}})
    with pytest.raises(SpecbatchError, match=f"tensor_parallel={ranks}: "):
        config.divided(ranks)
