from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specbatch.errors import SpecbatchError
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Weight
from specbatch.models.formats.fp8 import FP8Weights
from specbatch.models.weight_reader import Reader
from specbatch.models.weight_shapes import parameter_count, tensor_shapes, weight_shapes
from specbatch.weights import open_checkpoint
from specbatch.weights.dummy import SHAPES, random_tensor

# Published parameter counts.
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b-v0.1": 7_241_732_096,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-8b-fp8": 8_190_735_360,
    "qwen3-8b-fp8-dynamic": 8_190_735_360,
    "qwen3-8b-awq": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3-next-80b-a3b-fp8": 79_674_391_296,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-8b-a1b": 8_339_929_856 + 22 * 32,  # with the biases of the routers
    "phi-4": 14_659_507_200,
}


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes(name: str) -> None:
    checkpoint = open_checkpoint(name, "dummy")
    assert parameter_count(checkpoint.config) == PARAMETERS.get(name, parameter_count(checkpoint.config))
    assert checkpoint.tokenizer().vocab_size == checkpoint.config.vocab_size
    assert checkpoint.config.rope.source in ("rope_theta", "rope_parameters", "the family")
    if checkpoint.config.quantization is None and not name.startswith("gpt-oss"):
        assert checkpoint.bytes == 4 * parameter_count(checkpoint.config)


def test_fp8_tensors_of_the_80b_shape() -> None:
    """All but the ends, norms, convolutions, routers and the inputs of the delta nets' gates."""
    checkpoint = open_checkpoint("qwen3-next-80b-a3b-fp8", "dummy", device="cuda")  # nothing is made here
    shapes = tensor_shapes(checkpoint.config)
    plain = {re.sub(r"layers\.\d+\.", "", name) for name in shapes if name + "_scale_inv" not in shapes}
    matrices = {name for name in plain if "norm" not in name and not name.endswith("_scale_inv")}
    assert matrices == {
        *(
            "model.embed_tokens.weight",
            "lm_head.weight",
            "model.mlp.gate.weight",
            "model.mlp.shared_expert_gate.weight",
        ),
        *(f"model.linear_attn.{name}" for name in ("conv1d.weight", "in_proj_ba.weight", "A_log", "dt_bias")),
    }
    assert shapes["model.layers.5.mlp.experts.gate_up_proj_scale_inv"] == (512, 8, 16)
    unquantized = sum(math.prod(shape) for name, shape in shapes.items() if re.sub(r"layers\.\d+\.", "", name) in plain)
    scales = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith("_scale_inv"))
    assert checkpoint.bytes == parameter_count(checkpoint.config) + (unquantized - scales) + 4 * scales
    assert 80e9 < checkpoint.bytes < 81e9


def test_fp8_tensors_have_the_variance_of_others() -> None:
    generator = torch.Generator().manual_seed(1)
    values = FP8Weights().random("a_proj", (3, 256, 300), 300, generator)
    scales = FP8Weights().random("a_proj_scale_inv", (3, 2, 3), 300, generator)
    assert not values.float().isnan().any()
    assert len(values.view(torch.uint8).unique()) == 254
    dequantized = FP8Weight(values, scales).dequantize(torch.float32)
    assert dequantized.std() * 300**0.5 == pytest.approx(1, abs=0.06)
    assert dequantized.mean().abs() < 0.02 * dequantized.std()
    assert len({dequantized[part, :128, :128].std().item() for part in range(3)}) == 3  # each block has its own scale


@pytest.mark.parametrize(
    ("shape", "changes", "name", "size", "bound"),
    [
        ("qwen3-next-80b-a3b-fp8", {"num_experts": 12}, "experts.gate_up_proj", (12, 1024, 640), 0.03),
        ("qwen3-next-80b-a3b-fp8", {"num_experts": 12}, "experts.down_proj", (12, 640, 512), 0.03),
        ("qwen3-8b-awq", {"intermediate_size": 256}, "up_proj.weight", (256, 640), 0.03),
        ("gpt-oss-20b", {"num_local_experts": 4, "intermediate_size": 128}, "experts.down_proj", (4, 640, 128), 0.5),
    ],
)
def test_quantized_tensors_have_the_variance_of_others(
    shape: str, changes: dict[str, int], name: str, size: tuple[int, ...], bound: float, tmp_path: Path
) -> None:
    small = {"vocab_size": 300, "num_hidden_layers": 1, "hidden_size": 640} | changes
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape] | small))
    checkpoint = open_checkpoint(str(tmp_path), "dummy")
    read = Reader(checkpoint.config, checkpoint.tensor, torch.float32, torch.device("cpu"))
    values = read.fused(f"model.layers.0.mlp.{name}", *size).dequantize(torch.float32)
    assert values.std() * size[-1] ** 0.5 == pytest.approx(1, abs=bound)
    assert abs(values.mean()) < 0.15 * values.std()


def test_int4_tensors_take_half_a_byte_and_scales() -> None:
    packed = open_checkpoint("qwen3-8b-awq", "dummy", device="cuda")  # nothing is made here
    matrices = sum(math.prod(shape) for name, shape in weight_shapes(packed.config).items() if "layers" in name)
    assert packed.bytes == pytest.approx(2 * (8_190_735_360 - matrices) + matrices * (0.5 + 2.5 / 128), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_gpu_generates_its_own_tensors() -> None:
    checkpoint = open_checkpoint("qwen3-next-80b-a3b-fp8", "dummy", device="cuda")
    stem = "model.layers.3.mlp.experts"
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    up = checkpoint.tensor(f"{stem}.down_proj")
    assert (up.dtype, up.shape, up.is_cuda) == (torch.float8_e4m3fn, (512, 2048, 512), True)
    assert torch.cuda.max_memory_allocated() - before < 2.1 * up.numel()
    assert checkpoint.tensor(f"{stem}.down_proj_scale_inv").dtype == torch.float32
    router = checkpoint.tensor("model.layers.3.mlp.gate.weight")
    assert router.dtype == torch.bfloat16
    assert float(router.float().std()) * 2048**0.5 == pytest.approx(1, abs=0.01)
    again = open_checkpoint("qwen3-next-80b-a3b-fp8", "dummy", device="cuda")
    assert torch.equal(again.tensor("model.layers.3.mlp.gate.weight"), router)


def test_tensors_depend_on_name_and_seed_only() -> None:
    names = list(open_checkpoint("toy", "dummy").names())
    forward = {name: open_checkpoint("toy", "dummy", seed=3).tensor(name) for name in names}
    checkpoint = open_checkpoint("toy", "dummy", seed=3)
    assert all(torch.equal(checkpoint.tensor(name), forward[name]) for name in reversed(names))
    other = open_checkpoint("toy", "dummy", seed=4)
    assert not any(torch.equal(other.tensor(name), forward[name]) for name in names)
    assert torch.equal(random_tensor("a", (40, 30), 7), random_tensor("a", (40, 30), 7, "cpu", torch.float32))
    q, k = (forward[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1))
    assert not torch.equal(q, k)


def test_activations_keep_their_variance(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    sizes = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 24}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    described = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    checkpoint = open_checkpoint(str(tmp_path), "dummy")
    assert open_checkpoint(str(tmp_path / "config.json"), "dummy").config == checkpoint.config
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(read_all(checkpoint))
    with torch.no_grad():
        found = model(torch.arange(100).unsqueeze(0), output_hidden_states=True)
    assert 0.5 < found.logits.std() < 3
    assert found.hidden_states[-2].abs().max() < 50


def test_unsupported_dummies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecbatchError, match=r"model='gpt-7'.*toy, smollm2-135m"):
        open_checkpoint("gpt-7", "dummy")
    small = {**SHAPES["toy"], "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(small))
    with pytest.raises(SpecbatchError, match="vocab_size=100: a model without a tokenizer needs at least 257"):
        open_checkpoint(str(tmp_path), "dummy").tokenizer()
