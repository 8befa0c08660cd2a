"""Computed scales and offsets of an FP8 KV cache: attention does not see them, and rounding loses less."""

from __future__ import annotations

from random import Random

import pytest
import torch
from company import Company
from targets import TargetCheckpoint

from specbatch.models.cache_calibration import calibrate_cache
from specbatch.models.decoder import Decoder

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn
TEXTS = [[(7 * i + i // 5) % 37 for i in range(count)] for count in (31, 9)]


class BiasedTarget(TargetCheckpoint):
    """A llama whose keys have large constant parts, as those of Qwen2.5 from their biases: every token embeds a
    constant, which the key projections take up."""

    def __init__(self, size: float) -> None:
        super().__init__("llama")
        self.tensors = dict(self.tensors)
        embedding = self.config.names.embedding
        self.tensors[embedding] = self.tensors[embedding].clone()
        self.tensors[embedding][:, 0] = 3.0
        for name in self.tensors:
            if name.endswith("k_proj.weight"):
                self.tensors[name] = self.tensors[name].clone()
                self.tensors[name][6:8, 0] += size  # channels that rope turns slowly


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4-e2b", "gpt-oss", "qwen3.5", "deepseek-v2", "phi3"])
def test_attention_does_not_see_offsets_and_scales(name: str) -> None:
    """In chunks, chains and trees: with windows, shared keys, sinks, latents, recurrent layers, partial rope."""
    found = Company(name, torch.float32, calibrated=True)
    plain = Company(name, torch.float32)
    for text, logits in zip(TEXTS, found.together(TEXTS, Random(name)), strict=True):
        torch.testing.assert_close(logits, plain.alone(text), rtol=1e-3, atol=1e-3)


def test_what_is_stored() -> None:
    """Powers of two, and offsets of layers with keys of their own, but for sinks and latents."""
    sizes = {"llama": (4, 4), "gemma4-e2b": (2, 2), "gpt-oss": (4, 0), "qwen3.5": (1, 1), "deepseek-v3": (4, 0)}
    for name, (layers, offsets) in sizes.items():
        found = Company(name, torch.float32, calibrated=True).calibration
        assert found is not None
        assert (len(found.k_scales), len(found.v_scales), len(found.k_offsets)) == (layers, layers, offsets)
        for scales in found[:2]:
            assert scales.dtype == torch.float32
            assert torch.equal(scales.frexp().mantissa, torch.full_like(scales, 0.5))


@pytest.mark.parametrize("size", [20.0, 60.0])
def test_keys_with_large_constant_parts(size: float) -> None:
    """Rounding them to three bits would lose what differs from key to key."""
    target = BiasedTarget(size)
    exact = Company(target, torch.float32).alone(TEXTS[0])
    plain, stored = (
        (Company(target, torch.float32, kv_dtype=E4M3, calibrated=calibrated).alone(TEXTS[0]) - exact).norm()
        for calibrated in (False, True)
    )
    assert stored < 0.6 * plain
    assert stored < 0.2 * exact.norm()


def test_values_out_of_range() -> None:
    """Small values are below what FP8 resolves, large ones above what it holds, both without scales."""
    for factor in (2.0**-12, 2.0**12):
        target = TargetCheckpoint("llama")
        target.tensors = {
            name: tensor * (factor if "v_proj" in name else 1 / factor if "o_proj" in name else 1.0)
            for name, tensor in target.tensors.items()
        }
        exact = Company(target, torch.float32).alone(TEXTS[0])
        plain, stored = (
            (Company(target, torch.float32, kv_dtype=E4M3, calibrated=calibrated).alone(TEXTS[0]) - exact).norm()
            for calibrated in (False, True)
        )
        assert stored < plain / 4


def test_it_depends_on_the_model_alone() -> None:
    """Engines with other lengths and drafts store the same."""
    target = TargetCheckpoint("gemma3")
    first, second = (
        calibrate_cache(Decoder(target.config, target.tensor, dtype=torch.float32, device=CPU, max_positions=count))
        for count in (64, 512)
    )
    assert torch.equal(first.k_scales, second.k_scales)
    assert torch.equal(first.v_scales, second.v_scales)
    assert all(torch.equal(offset, second.k_offsets[layer]) for layer, offset in first.k_offsets.items())
