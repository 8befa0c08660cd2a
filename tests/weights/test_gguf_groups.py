"""Quantized matrices of GGUF files keep every value, and a model computes with them what it does with float32 ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from specbatch.kernels.common import native
from specbatch.models.decoder import Decoder
from specbatch.runtime.loader import kept_groups, weight_bytes
from specbatch.weights import open_checkpoint
from specbatch.weights.gguf_groups import grouped_bytes, grouped_weight, has_groups
from specbatch.weights.gguf_header import GgufTensor
from specbatch.weights.gguf_tensors import dequantize_tensor

Make = Callable[..., Any]
CPU = torch.device("cpu")
HALVES = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "NVFP4": ()}
# Bytes of float16 numbers in a block; else 0 and 2.


def random_tensor(kind: str, out: int = 10, inputs: int = 512) -> GgufTensor:
    """Any bytes with finite scales are valid."""
    rng, quantized = np.random.default_rng(0), GGMLQuantizationType[kind]
    values, size = GGML_QUANT_SIZES[quantized]
    data = rng.integers(0, 256, (out, inputs // values * size), dtype=np.uint8)
    blocks = data.reshape(-1, size)
    for place in HALVES.get(kind, (0, 2)):
        blocks[:, place : place + 2] = rng.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    return GgufTensor("weight", quantized, (out, inputs), data)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "NVFP4"])
def test_values_are_those_of_the_gguf_package(kind: str) -> None:
    tensor = random_tensor(kind)
    assert has_groups(tensor)
    found = grouped_weight(tensor)
    expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.kind))
    assert torch.equal(found.dequantize(torch.float32), expected)
    if native.missing() is None:
        layer = found.linear()
        assert torch.equal(layer.weight, expected)
        # 10 outputs are a tile of 32.
        held = sum(part.nbytes for part in vars(layer).values() if isinstance(part, torch.Tensor))
        assert held == grouped_bytes(tensor) * 32 // 10


def test_scale_of_a_matrix_in_nvfp4() -> None:
    tensor = random_tensor("NVFP4")
    scaled = tensor._replace(scale=np.array([0.3], np.float32))
    expected = dequantize_tensor(scaled)
    assert torch.equal(expected, dequantize_tensor(tensor) * torch.tensor(0.3))
    torch.testing.assert_close(grouped_weight(scaled).dequantize(torch.float32), expected, rtol=2e-7, atol=0)


def test_other_types_have_no_groups() -> None:
    assert not has_groups(random_tensor("Q3_K"))
    assert not has_groups(GgufTensor("experts", GGMLQuantizationType.Q4_0, (2, 2, 32), np.zeros((2, 2, 18), np.uint8)))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("kind", "tied"), [("Q4_1", True), ("Q8_0", False)])
@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_a_model_computes_the_same(tiny_model: Make, write_gguf: Make, family: str, kind: str, tied: bool) -> None:
    """Rows of llama's q and k are in another order in files. Tiny norms and biases stay float32."""
    model = tiny_model(family, tie_word_embeddings=tied, hidden_size=64, intermediate_size=96)
    checkpoint = open_checkpoint(str(write_gguf(model, quantized=GGMLQuantizationType[kind])))
    kept = kept_groups(checkpoint, CPU, None)
    assert kept is not None
    assert kept_groups(checkpoint, torch.device("cuda"), None) is None
    assert len(kept.bytes) == 2 * 7 + 1 + (not tied)
    options: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "max_positions": 8}
    whole = Decoder(checkpoint.config, checkpoint.tensor, **options)
    grouped = Decoder(checkpoint.config, checkpoint.tensor, **options, grouped=kept)
    assert torch.equal(grouped.head.weight, whole.head.weight)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(grouped.layers, whole.layers, strict=True):
        projected, mixed = (layer.mixer.project(x) for layer in (ours, theirs))
        torch.testing.assert_close(projected, mixed, rtol=1e-4, atol=1e-5)
        last = torch.randn(3, theirs.mixer.mixed, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(ours.leave(x.clone(), last), theirs.leave(x.clone(), last), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grouped.logits(x), whole.logits(x), rtol=1e-4, atol=1e-5)

    table = checkpoint.tensor("model.embed_tokens.weight").nbytes
    vectors = [found for name in checkpoint.names() if (found := checkpoint.tensor(name)).dim() == 1]
    sizes = sum(size for name, size in kept.bytes.items() if tied or "embed" not in name)
    assert weight_bytes(checkpoint.config, torch.float32, CPU, kept) == table + sizes + sum(
        part.nbytes for part in vectors
    )
