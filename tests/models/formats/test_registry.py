"""What all formats have in common, and the quantization_config that chooses one; other schemes are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantized_models import CPU, LLAMA
from quantized_weights import FORMATS

from specbatch.errors import SpecbatchError
from specbatch.kernels.common import native
from specbatch.kernels.gemm.quantized.weight import Weight, concat_experts, concat_outputs, stack_experts
from specbatch.models.config import ModelConfig
from specbatch.models.formats import registry
from specbatch.models.formats.format import Format
from specbatch.models.weight_reader import Reader
from specbatch.models.weight_shapes import tensor_shapes

every_format = pytest.mark.parametrize("form", registry.FORMATS, ids=lambda form: form.__name__)


def random_weight(form: type[Format], shape: tuple[int, int] = (256, 640), seed: int = 1) -> Weight:
    """A random weight, loaded from its parts; MXFP4 has stacks only, and this is one of a stack."""
    stored, generator = form(), torch.Generator().manual_seed(seed)
    if not stored.runs_on(CPU) and native.missing() is not None:
        pytest.skip(str(native.missing()))  # such weights are dequantized
    is_stack = stored.is_of_family
    name = "layers.0.mlp.experts.down_proj" if is_stack else "layers.0.mlp.up_proj.weight"
    whole = (1, *shape) if is_stack else shape
    tensors = {part: stored.random(part, size, shape[1], generator) for part, size in stored.parts(name, whole).items()}
    assert {part: tuple(tensor.shape) for part, tensor in tensors.items()} == stored.parts(name, whole)
    assert all(tensor.element_size() == stored.random_item(part) for part, tensor in tensors.items())
    assert {stored.weight_of(part) or part for part in tensors} == {name}
    config: Any = SimpleNamespace(format_except_ends=stored)
    found = Reader(config, tensors.__getitem__, torch.float32, CPU).fused(name, *whole)
    if stored.runs_on(CPU) and (not is_stack or stored.has_expert_gemm):
        assert sum(part.nbytes for part in found.for_experts().tensors) == stored.memory(whole)
    return found.of(0) if is_stack else found


@every_format
def test_random_weights_have_the_variance_of_others(form: type[Format], stay_quantized: Callable[..., None]) -> None:
    """And take the memory that is planned."""
    stay_quantized()
    weight = random_weight(form)
    assert weight.is_quantized
    values = weight.dequantize(torch.float32)
    assert values.shape == weight.shape == (256, 640)
    assert 0.7 < values.std() * 640**0.5 < 1.4
    assert values.mean().abs() < 0.15 * values.std()


@every_format
def test_weights_are_joined_and_cut_as_their_values(form: type[Format], stay_quantized: Callable[..., None]) -> None:
    stay_quantized()
    first, second = (random_weight(form, (256, 512), seed) for seed in (1, 2))
    values, others = (weight.dequantize(torch.float32) for weight in (first, second))

    def check(found: Weight | None, expected: torch.Tensor) -> None:
        assert found is not None
        assert type(found) is type(first)
        assert torch.equal(found.dequantize(torch.float32), expected)

    check(concat_outputs([first, second]), torch.cat([values, others]))
    assert concat_outputs([first, Weight(others)]) is None
    assert stack_experts([first, Weight(others)]) is None
    stack = stack_experts([first, second])
    check(stack, torch.stack([values, others]))
    assert stack is not None
    check(concat_experts(stack, stack), torch.stack([values, others] * 2))
    check(stack.of(1), others)
    check(first.map_outputs(lambda part, rows: part.roll(128 // rows, 0)), values.roll(128, 0))
    left, right = first.split_inputs()
    check(left, values[:, :256])
    check(right, values[:, 256:])


@every_format
def test_a_format_has_a_test_file(form: type[Format]) -> None:
    assert (Path(__file__).parent / f"test_{form.__module__.rpartition('.')[2]}.py").is_file()


def scheme(**changes: Any) -> dict[str, Any]:
    """The quantization_config of "channel"; changes: of its weights."""
    found: dict[str, Any] = json.loads(json.dumps(FORMATS["channel"][0]))
    found["config_groups"]["group_0"]["weights"] |= changes
    return found


def with_group(**changes: Any) -> dict[str, Any]:
    found = scheme()
    found["config_groups"]["group_0"] |= changes
    return found


def packed(kind: str, bits: int, form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    group = {"format": form, "weights": {"type": kind, "num_bits": bits} | weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


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
        (
            scheme(type="int", num_bits=3),
            r"config_groups.group_0.weights=\('int', 3\): use FP8.* or INT4 .* or NVFP4",
        ),
        (scheme(num_bits=[8]), r"config_groups.group_0.weights=\('float', \[8\]\): use FP8"),
        (scheme(symmetric=False), "weights.symmetric=False"),
        (scheme(strategy="block", block_structure=[64, 64]), r"block_structure=\[64, 64\]"),
        (with_group(input_activations={"type": "int", "num_bits": 8}), "input_activations='INT8': .* in FP8 or not"),
        (TWO, r"config_groups.group_1.targets=\[\]: beside other groups it must name layers"),
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
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ': it must be 'FP8'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size=32: it must be 16"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "has_zero_point": True}, "has_zero_point=True"),
        (packed("float", 4, group_size=8, form="nvfp4-pack-quantized"), "group_size=8: it must be 16"),
        (packed("float", 4, form="float-quantized"), "format='float-quantized': it must be 'nvfp4-pack-quantized' or"),
        (packed("int", 8, strategy="group", group_size=48), "group_size=48: it must be 16 or 32 or 64 or 128"),
        (packed("int", 8, strategy="channel", actorder="group"), "actorder='group': it must be 'static' or"),
    ],
)
def test_other_schemes_are_refused(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecbatchError, match=message):
        ModelConfig.from_dict(LLAMA | {"quantization_config": quantization})


def test_ignored_modules_are_not_quantized() -> None:
    config = ModelConfig.from_dict(LLAMA | {"quantization_config": IGNORING})
    scaled = {name for name in tensor_shapes(config) if name.endswith("_scale")}
    attention = {f"model.layers.0.self_attn.{part}_proj.weight_scale" for part in "qkvo"}
    assert scaled == attention | {f"model.layers.{layer}.mlp.down_proj.weight_scale" for layer in range(2)}


def test_layers_that_auto_round_left_unquantized() -> None:
    """By name or regular expression."""
    layers = {
        "model.layers.0.mlp.up_proj": {"bits": 16, "data_type": "float"},
        r".*layers\.1\.(mlp|self).*": {"bits": 16},
    }
    config = ModelConfig.from_dict(LLAMA | {"quantization_config": AUTO_ROUND | {"extra_config": layers}})
    scaled = {name.removesuffix(".scales") for name in tensor_shapes(config) if name.endswith(".scales")}
    parts = [*(f"self_attn.{part}_proj" for part in "qkvo"), "mlp.gate_proj", "mlp.down_proj"]
    assert scaled == {f"model.layers.0.{part}" for part in parts}
