"""MXFP4 checkpoints of gpt-oss give the logits of transformers; damaged ones are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from mxfp4_encoding import encode_experts, encoded
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadCommunicator, on_ranks
from uncached import decoder_of, logits_of

from specbatch.errors import SpecbatchError
from specbatch.kernels.gemm.quantized.mxfp4 import dequantize_mxfp4, pack_mxfp4
from specbatch.kernels.gemm.quantized.weight import Weight
from specbatch.models.layers.moe import MoeMlp
from specbatch.models.weight_shapes import parameter_count
from specbatch.runtime.loader import quantization_lines, weight_bytes
from specbatch.weights import open_checkpoint

CPU = torch.device("cpu")
EXPERTS = "model.layers.0.mlp.experts"
SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "num_local_experts": 4,
    "num_experts_per_tok": 2, "sliding_window": 6, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_and_scale(dtype: torch.dtype) -> None:
    """Up to a scale of 252: beyond it the largest values are not finite."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # which takes a second

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 253, -1, -1).contiguous()
    scales = torch.arange(253, dtype=torch.uint8)[None, :, None].expand(1, 253, 16).contiguous()
    found = dequantize_mxfp4(pack_mxfp4(blocks), scales, dtype)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2))
    assert torch.equal(found.double(), dequantize_mxfp4(pack_mxfp4(blocks), scales, torch.float64))


def test_encoder_is_within_half_a_step() -> None:
    matrices = torch.randn(2, 5, 96)
    blocks, scales = encoded(matrices)
    found = dequantize_mxfp4(pack_mxfp4(blocks), scales, torch.float32)
    largest = matrices.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, -1, 32).flatten(2)
    assert ((found - matrices).abs() <= largest / 4).all()
    assert (found - matrices).norm() < 0.2 * matrices.norm()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    model = hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.2 / parameter[0].numel() ** 0.5)
    path = tmp_path_factory.mktemp("mxfp4")
    model.to(torch.bfloat16).save_pretrained(path)
    encode_experts(path)
    return path


def logits(path: Path, tokens: torch.Tensor, ranks: ThreadCommunicator | None = None) -> torch.Tensor:
    return logits_of(decoder_of(open_checkpoint(str(path)), ranks=ranks), tokens)


@pytest.mark.parametrize("keeps", [False, True], ids=["dequantized", "kept"])
def test_logits_are_those_of_transformers(folder: Path, stay_quantized: Callable[..., None], keeps: bool) -> None:
    stay_quantized(keeps)
    quantization = hf.Mxfp4Config(dequantize=True)
    theirs = hf.GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=quantization, attn_implementation="eager"
    ).float()  # transformers 5.17 leaves the experts in BF16
    tokens = torch.randint(0, 131, (20,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens[None], use_cache=False).logits[0]
    ours = logits(folder, tokens)
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()
    first, second = on_ranks(2, lambda ranks: logits(folder, tokens, ranks))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, ours, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("keeps", [False, True], ids=["dequantized", "kept"])
def test_plan_counts_the_memory_of_experts(folder: Path, stay_quantized: Callable[..., None], keeps: bool) -> None:
    stay_quantized(keeps)
    checkpoint = open_checkpoint(str(folder))
    config = checkpoint.config
    model = decoder_of(checkpoint, dtype=torch.bfloat16)
    stacks: list[Weight] = []
    for layer in model.layers:
        [mlp] = layer.mlps
        assert isinstance(mlp, MoeMlp)
        stacks += [mlp.experts.weights.up, mlp.experts.weights.down]
    held = sum(part.nbytes for stack in stacks for part in stack.tensors)
    values = sum(math.prod(stack.shape) for stack in stacks)
    shapes = [stack.shape for stack in stacks]
    packed = sum(count * rows * (-(-inputs // 128) * 64 + inputs // 32) for count, rows, inputs in shapes)
    assert held == (packed if keeps else 2 * values)
    assert weight_bytes(config, torch.bfloat16, CPU) == held + 2 * (parameter_count(config) - values)
    [line] = quantization_lines(model, config, loads=(True, False), quantizes=False)
    stored = "kept" if keeps else "dequantized to bfloat16, as this device has no MXFP4 GEMM"
    assert line == f"MXFP4 weights: {stored}"


def changed(folder: Path, to: Path, tensors: dict[str, torch.Tensor | None], **config: Any) -> Path:
    to.mkdir()
    described = json.loads((folder / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps(described))
    stored = load_file(folder / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, to / "model.safetensors")
    return to


def test_damaged_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    scales = load_file(folder / "model.safetensors")[f"{EXPERTS}.down_proj_scales"].clone()
    scales[1, 3, 2] = 255
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"down_proj_scales": scales}, {}, "down_proj_scales': .* not finite in e8m0"),
        ({"down_proj_scales": None}, {}, "tensor .*down_proj_scales is missing"),
        ({"down_proj_scales": scales[:, :, :2].contiguous()}, {}, r"down_proj_scales is \[4, 64, 2\]; .*\[4, 64, 4\]"),
        ({"down_proj_scales": scales.bfloat16()}, {}, "down_proj_scales is BF16; blocks and scales are U8"),
        ({}, {"intermediate_size": 120}, "intermediate_size=120: .* multiple of 32"),
        ({}, {"quantization_config": {"quant_method": "mxfp4x"}}, "quant_method='mxfp4x'"),
        ({}, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "quant_method='mxfp4'"),
    ]
    for number, (tensors, config, works) in enumerate(cases):
        stored = {f"{EXPERTS}.{name}": tensor for name, tensor in tensors.items()}
        path = changed(folder, tmp_path / str(number), stored, **config)
        with pytest.raises(SpecbatchError, match=works) as caught:
            logits(path, torch.arange(3))
        assert "\n" not in str(caught.value)


def test_ranks_that_would_cut_blocks_are_refused(folder: Path) -> None:
    config = open_checkpoint(str(folder)).config
    with pytest.raises(SpecbatchError, match=r"tensor_parallel=8: .*intermediate_size=128, .* multiple of 32"):
        config.divided(8)
