"""Checkpoints in each quantized format compute what their dequantized weights do; damaged ones are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_weights import FORMATS, int4
from safetensors.torch import load_file, save_file
from uncached import logits_of

from specbatch.config.engine_config import EngineConfig
from specbatch.engine.setup.prepare import prepare
from specbatch.errors import SpecbatchError
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.formats.int4 import Int4Weights
from specbatch.runtime.loader import dequantized_bytes, weight_bytes
from specbatch.weights import open_checkpoint

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 41, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "mlp_only_layers": [1],
}  # fmt: skip
NEXT = MOE | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "mlp_only_layers": [],
    "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
E2B = LLAMA | {
    "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 4, "global_head_dim": 64, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7, "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 41, "tie_word_embeddings": True,
}  # fmt: skip
NAME = "model.layers.1.mlp.down_proj"


def write(folder: Path, described: dict[str, Any], form: str) -> dict[str, torch.Tensor]:
    """Writes a checkpoint in this format; returns its dequantized weights."""
    quantization, store = FORMATS[form]
    described = described | {"quantization_config": quantization}
    config = ModelConfig.from_dict(described)
    if form == "modelopt":  # as its older versions do
        stated = {key: value for key, value in quantization.items() if key != "quant_method"}
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
        del described["quantization_config"]
    (folder / "config.json").write_text(json.dumps(described))
    assert config.quantization is not None
    stored = config.quantization.except_for(config.unquantized_ends)
    generator, tensors, meant = torch.Generator().manual_seed(2), {}, {}
    for name, shape in config.weight_shapes().items():
        weight = torch.randn(shape, generator=generator)
        weight = weight * 1.2 / shape[-1] ** 0.5 if len(shape) > 1 else weight.sigmoid() + 0.5
        parts, meant[name] = store(name, weight) if stored.is_quantized(name, shape) else ({name: weight}, weight)
        tensors |= parts
    save_file(tensors, folder / "model.safetensors")
    return meant


def logits(model: Decoder) -> torch.Tensor:
    tokens = torch.randint(0, model.config.vocab_size, (23,), generator=torch.Generator().manual_seed(4))
    return logits_of(model, tokens.to(model.device))


def load(config: ModelConfig, tensor: Any, device: str = "cpu") -> Decoder:
    return Decoder(config, tensor, dtype=torch.float32, device=torch.device(device), max_positions=64)


NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"))
EVERY = [("llama", form) for form in FORMATS] + [("moe", "channel"), ("moe", "modelopt"), ("next", "channel")]
EVERY += [("moe", "awq"), ("next", "gptq"), ("e2b", "channel"), ("e2b", "awq")]
MODELS = {"llama": LLAMA, "moe": MOE, "next": NEXT, "e2b": E2B}


@pytest.mark.parametrize(
    ("device", "keeps", "bound"),
    [
        pytest.param("cpu", False, 2e-5, id="dequantized"),
        pytest.param("cpu", True, 2e-5, id="kept"),
        pytest.param("cuda", True, 1e-3, id="kernels", marks=NEEDS_GPU),
    ],
)
@pytest.mark.parametrize(("model", "form"), EVERY)
def test_quantized_model_matches_dequantized_model(
    model: str, form: str, device: str, keeps: bool, bound: float, tmp_path: Path, stay_quantized: Callable[..., None]
) -> None:
    described = MODELS[model]
    meant = write(tmp_path, described, form)
    checkpoint = open_checkpoint(str(tmp_path))
    unquantized = ModelConfig.from_dict(described).fit({name: tuple(item.shape) for name, item in meant.items()})
    expected = logits(load(unquantized, meant.__getitem__, device))
    if device == "cpu":
        stay_quantized(keeps)
    found = load(checkpoint.config, checkpoint.tensor, device)
    attention = {name for name in found.dequantized if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")}
    assert bool(attention) == (keeps and model == "next")
    assert not found.dequantized - attention
    ours = logits(found)
    assert (ours - expected).abs().max() < bound * expected.abs().max()
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_memory_plan_counts_bytes_as_stored(tmp_path: Path, stay_quantized: Callable[..., None]) -> None:
    meant = write(tmp_path, LLAMA, "tensor")
    config = open_checkpoint(str(tmp_path)).config
    count = sum(item.numel() for item in meant.values())
    assert weight_bytes(config, torch.bfloat16, CPU) == 2 * count
    stay_quantized()
    outputs = 2 * (128 + 2 * 64 + 64 + 2 * 128 + 64)
    values = 2 * (64 * (128 + 2 * 64) + 128 * 64 + 3 * 128 * 64)
    assert weight_bytes(config, torch.bfloat16, CPU) == 2 * (count - values) + values + 4 * outputs


def test_memory_plan_counts_packed_bytes(tmp_path: Path, stay_quantized: Callable[..., None]) -> None:
    """4 bits a value, and for 32 of them a word of a scale and a zero point; the plan has room for the largest matrix
    dequantized."""
    meant = write(tmp_path, LLAMA, "awq")
    config = open_checkpoint(str(tmp_path)).config
    stay_quantized()
    values, count = 2 * (64 * (128 + 2 * 64) + 128 * 64 + 3 * 128 * 64), sum(item.numel() for item in meant.values())
    assert weight_bytes(config, torch.bfloat16, CPU) == 2 * (count - values) + values // 2 + 4 * values // 32
    assert dequantized_bytes(config, torch.bfloat16, CPU) == 2 * (2 * 128 * 64)


def test_group_of_all_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Becomes groups of 128."""
    described = LLAMA | {"hidden_size": 128}
    for name, form in (("whole", "pack-quantized"), ("gptq whole", "gptq")):
        packing = "pack-quantized" if form == "pack-quantized" else "gptq"
        quantization = json.loads(json.dumps(FORMATS[form][0]))
        if form == "gptq":
            quantization["group_size"] = -1
        else:
            quantization["config_groups"]["group_0"]["weights"]["strategy"] = "channel"
        monkeypatch.setitem(FORMATS, name, (quantization, int4(packing, -1)))
        folder = tmp_path / name
        folder.mkdir()
        meant = write(folder, described, name)
        checkpoint = open_checkpoint(str(folder))
        expected = logits(load(ModelConfig.from_dict(described), meant.__getitem__))
        assert (logits(load(checkpoint.config, checkpoint.tensor)) - expected).abs().max() < 2e-5 * expected.abs().max()


GPTQ_V2 = {"checkpoint_format": "gptq_v2"}
IN_AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
AS_AWQ, PLAIN_AUTO_ROUND = ({"packing_format": f"auto_round{suffix}"} for suffix in (":auto_awq", ""))


@pytest.mark.parametrize(
    ("packing", "changes", "stored"),
    [
        *(
            pytest.param("gptq", {"sym": True} | method, word, marks=() if word in (0, 9) else pytest.mark.slow)
            for method in ({}, GPTQ_V2, IN_AUTO_ROUND)
            for word in range(0, 16, 3)
        ),
        *(("gptq", {"sym": True, "desc_act": True} | method, None) for method in ({}, GPTQ_V2, IN_AUTO_ROUND)),
        *(("gptq", {"sym": None} | method, word) for method in ({}, GPTQ_V2, IN_AUTO_ROUND) for word in (7, 8, None)),
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
    packing: str, changes: dict[str, Any], stored: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights with the zero point 8, as `sym` and `zero_point` describe them; every zero point is stored as this
    number, or none is."""
    described = (AWQ if packing == "awq" else GPTQ) | changes
    if described["quant_method"] != "awq":
        described.pop("version", None), described.pop("zero_point", None)
    monkeypatch.setitem(FORMATS, "this", (described, int4(packing, 32, symmetric=True)))
    meant = write(tmp_path, LLAMA, "this")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".qzeros")]:
        zeros = tensors.pop(name)
        word = int(f"{stored or 0:x}" * 8, 16)
        if stored is not None:
            tensors[name] = torch.full_like(zeros, word - (1 << 32) if word >= 1 << 31 else word)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    found = load(checkpoint.config, checkpoint.tensor)
    expected = load(ModelConfig.from_dict(LLAMA), meant.__getitem__)
    assert torch.equal(logits(found), logits(expected))


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_of_layers_without_one_must_be_zero(value: float, tmp_path: Path) -> None:
    """Old versions of AutoGPTQ write a bias of zeros for every layer."""
    meant = write(tmp_path, LLAMA, "gptq")
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
        found = Int4Weights(packing=packing, group=32).weight("a.weight", tensors.__getitem__)
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
    assert torch.equal(read("compressed-tensors", packed), by_input)


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")


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
        ("modelopt", f"{NAME}.weight", torch.ones(64, 128), "weight_scale, but no F8_E4M3 tensor"),
        ("channel", "lm_head.weight_scale", torch.ones(41, 1), "no F8_E4M3 tensor"),
        ("awq", f"{NAME}.qzeros", None, "down_proj.qzeros is missing"),
        ("awq", f"{NAME}.scales", torch.ones(4, 65).half(), r"scales is \[4, 65\]; its config requires \[4, 64\]"),
        ("gptq", f"{NAME}.qweight", torch.ones(16, 64), "qweight is F32; packed INT4 values are in I32"),
        ("gptq", f"{NAME}.qzeros", torch.ones(4, 8).long(), "qzeros is I64; packed INT4 values are in I32"),
        ("gptq", f"{NAME}.qzeros", torch.ones(3, 8).int(), r"qzeros is \[3, 8\]; its config requires \[4, 8\]"),
        ("gptq", f"{NAME}.g_idx", torch.arange(128).int() % 4, r"g_idx: its inputs are in another order \(desc_act\)"),
        ("awq", "lm_head.qweight", torch.ones(64, 5).int(), "lm_head.weight is quantized"),
        ("symmetric", f"{NAME}.weight_scale", torch.ones(64, 3).half(), r"weight_scale is \[64, 3\]; .* \[64, 4\]"),
    ],
)
def test_damaged_scales_are_refused(form: str, name: str, tensor: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, LLAMA, form)
    change(tmp_path, name, tensor)
    with pytest.raises(SpecbatchError, match=message):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("form", "name", "scales", "message"),
    [
        ("awq", "scales", torch.full((4, 64), torch.inf).half(), r"\.weight.*scales hold values that are not finite"),
        ("channel", "weight_scale", torch.full((64, 1), torch.nan), r"\.weight_scale.*values that are not finite"),
    ],
)
def test_scales_that_are_not_finite_are_refused(
    form: str, name: str, scales: torch.Tensor, message: str, tmp_path: Path
) -> None:
    write(tmp_path, LLAMA, form)
    change(tmp_path, f"{NAME}.{name}", scales)
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(SpecbatchError, match=NAME + message):
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
    write(tmp_path, LLAMA, "awq")
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


def test_quantized_output_matrix_is_refused(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, "channel")
    change(tmp_path, "lm_head.weight_scale", torch.ones(41, 1))
    change(tmp_path, "lm_head.weight", torch.ones(41, 64).to(torch.float8_e4m3fn))
    with pytest.raises(SpecbatchError, match=r"lm_head.weight is quantized.*put it on the ignore list"):
        open_checkpoint(str(tmp_path))


def test_scales_of_activations_and_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of activations are not used, which is said; those of a cache must not be ignored by one in FP8."""
    write(tmp_path, LLAMA, "tensor")
    for part in "kv":
        change(tmp_path, f"model.layers.0.self_attn.{part}_scale", torch.tensor(0.02))
    lines: list[str] = []
    checkpoint = open_checkpoint(str(tmp_path), log=lines.append)
    assert any(
        re.search(r"16 scales are not used, such as model\.layers\.0\.mlp\.down_proj\.input_scale", line)
        for line in lines
    )
    assert checkpoint.config.quantization is not None
    assert checkpoint.config.quantization.has_cache_scales
    monkeypatch.setattr("specbatch.engine.setup.prepare._check_device", lambda config, device: None)
    with pytest.raises(SpecbatchError, match=r"kv_dtype='fp8': the checkpoint has scales .*use auto"):
        prepare(EngineConfig(model=str(tmp_path), device="cpu", kv_dtype="fp8"), print)


def scheme(**changes: Any) -> dict[str, Any]:
    """The quantization_config of "channel"; changes: of its weights."""
    found: dict[str, Any] = json.loads(json.dumps(FORMATS["channel"][0]))
    found["config_groups"]["group_0"]["weights"] |= changes
    return found


def with_group(**changes: Any) -> dict[str, Any]:
    found = scheme()
    found["config_groups"]["group_0"] |= changes
    return found


def quark(**weight: Any) -> dict[str, Any]:
    weight = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"} | weight
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": None}}


TWO = scheme()
TWO["config_groups"]["group_1"] = {"weights": {"num_bits": 8, "type": "float", "strategy": "block"}}
AWQ, GPTQ, PACKED = (FORMATS[form][0] for form in ("awq", "gptq", "symmetric"))
AUTO_ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int", "sym": True,
    "packing_format": "auto_round:auto_gptq",
}  # fmt: skip
PACKED_GROUP = PACKED["config_groups"]["group_0"]
IGNORING = scheme() | {"ignore": ["re:.*mlp.(gate|up)_proj", "lm_head", "model.layers.1.self_attn"]}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            scheme(strategy="group"),
            "config_groups.group_0.weights.strategy='group': it must be 'tensor' or 'channel' or 'block'",
        ),
        (scheme(type="int"), r"config_groups.group_0.weights=\('int', 8\): use FP8.* or INT4"),
        (scheme(symmetric=False), "weights.symmetric=False"),
        (scheme(strategy="block", block_structure=[64, 64]), r"block_structure=\[64, 64\]"),
        (with_group(input_activations={"type": "int", "num_bits": 8}), "input_activations"),
        (TWO, "config_groups=.*quantized in one way"),
        (scheme() | {"config_groups": {}}, "config_groups"),
        (scheme() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
        (scheme() | {"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
        (scheme() | {"ignore": ["re:("]}, r"ignore='re:\(': it is no regular expression"),
        ({"quant_method": "awq", "bits": 8}, "bits=8: it must be 4"),
        (AWQ | {"version": "gemv"}, "version='gemv': it must be 'gemm'"),
        (AWQ | {"version": None, "format": "gemv"}, "format='gemv': it must be 'gemm'"),
        (GPTQ | {"format": "bitblas"}, "format='bitblas': it must be 'gptq' or 'gptq_v2'"),
        (AWQ | {"group_size": 48}, "group_size=48: it must be 32 or 64 or 128 or -1"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, "dynamic=.*quantized in one way"),
        (PACKED | {"config_groups": {"a": PACKED_GROUP | {"input_activations": {"type": "int"}}}}, "input_activations"),
        (AUTO_ROUND | {"bits": 8}, "bits=8: it must be 4"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type='mx_fp': it must be 'int'"),
        (AUTO_ROUND | {"act_bits": 8}, "act_bits=8"),
        (AUTO_ROUND | {"packing_format": "auto_round:mlx"}, "packing_format='auto_round:mlx': it must be 'auto_round"),
        (AUTO_ROUND | {"packing_format": None}, "packing_format=None: it must be 'auto_round:auto_gptq' or"),
        (AUTO_ROUND | {"extra_config": {"a": {"bits": 8}}}, "extra_config.a.bits=8: it must be 16 or 32"),
        (AUTO_ROUND | {"extra_config": {"(a": {"bits": 16}}}, r"extra_config='re:\(a': it is no regular expression"),
        (AUTO_ROUND | {"rotation_config": {"a": 1}}, "rotation_config="),
        (quark(dtype="fp4"), "global_quant_config.weight.dtype='fp4': it must be 'fp8_e4m3'"),
        (quark(qscheme="per_group"), "global_quant_config.weight.qscheme='per_group': it must be 'per_tensor'"),
        (quark() | {"layer_quant_config": {"a": {"weight": {}}}}, "layer_quant_config=.*quantized in one way"),
        (quark() | {"export": {"weight_format": "fake_quantized"}}, "export.weight_format='fake_quantized'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4': it must be 'FP8'"),
    ],
)
def test_other_schemes_are_refused(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecbatchError, match=message):
        ModelConfig.from_dict(LLAMA | {"quantization_config": quantization})


def test_ignored_modules_are_not_quantized() -> None:
    config = ModelConfig.from_dict(LLAMA | {"quantization_config": IGNORING})
    scaled = {name for name in config.tensor_shapes() if name.endswith("_scale")}
    attention = {f"model.layers.0.self_attn.{part}_proj.weight_scale" for part in "qkvo"}
    assert scaled == attention | {f"model.layers.{layer}.mlp.down_proj.weight_scale" for layer in range(2)}


def test_layers_that_auto_round_left_unquantized() -> None:
    """By name or regular expression."""
    layers = {
        "model.layers.0.mlp.up_proj": {"bits": 16, "data_type": "float"},
        r".*layers\.1\.(mlp|self).*": {"bits": 16},
    }
    config = ModelConfig.from_dict(LLAMA | {"quantization_config": AUTO_ROUND | {"extra_config": layers}})
    scaled = {name.removesuffix(".scales") for name in config.tensor_shapes() if name.endswith(".scales")}
    parts = [*(f"self_attn.{part}_proj" for part in "qkvo"), "mlp.gate_proj", "mlp.down_proj"]
    assert scaled == {f"model.layers.0.{part}" for part in parts}
