"""Prefill attention backends: selection by name, refusals, and results against the reference."""

from __future__ import annotations

import pytest
import torch

from specbatch.errors import SpecbatchError
from specbatch.kernels.attention.paged_attention import prefill_attention_ref
from specbatch.kernels.attention.prefill.prefill_backends import NAMES, prefill_backend
from specbatch.kernels.attention.queries import PrefillInputs
from specbatch.kernels.attention.ragged_batch import RaggedBatch

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SPANS = [([0, 0], [19, 5]), ([0, 40, 3], [21, 49, 4])]


class Case:
    """Two caches of pages of 8, spans of some of their sequences, and what attention gives."""

    def __init__(self, starts: list[int], ends: list[int], device: torch.device, dtype: torch.dtype) -> None:
        count = len(starts)
        table = (torch.randperm(count * 7) + 1).view(count, 7).to(device)
        self.k_cache, self.v_cache = (torch.randn(count * 7 + 1, 8, 2, 64, device=device).to(dtype) for _ in range(2))
        self.spans = RaggedBatch(starts, ends, list(range(count))[::-1], table, 8)
        self.q = torch.randn(self.spans.offsets[-1], 4, 64, device=device).to(dtype)
        slots = self.spans.key_slots.split(ends)
        own = torch.cat([part[start:] for part, start in zip(slots, starts, strict=True)])
        self.k_new, self.v_new = self.k_cache.flatten(0, 1)[own], self.v_cache.flatten(0, 1)[own]

    def expected(self, window: int) -> torch.Tensor:
        spans = self.spans
        each = zip(self.q.double().split(spans.counts), spans.rows, spans.starts, strict=True)
        caches = self.k_cache.double(), self.v_cache.double()
        return torch.cat([prefill_attention_ref(q, *caches, spans.page_table[row], at, window) for q, row, at in each])


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("bounds", SPANS)
@pytest.mark.parametrize("handed", [True, False])
@pytest.mark.parametrize("name", ["auto", "torch", "triton"])
def test_installed_backends_match_reference(
    device: torch.device, name: str, handed: bool, bounds: tuple[list[int], list[int]], window: int
) -> None:
    if name == "triton" and device.type == "cpu":
        pytest.skip("needs a CUDA device")
    for dtype in [torch.float32] if device.type == "cpu" else [torch.float32, torch.float16, torch.bfloat16]:
        case = Case(*bounds, device, dtype)
        backend = prefill_backend(name, device)
        assert backend.name in ("torch", "triton")
        new = (case.k_new, case.v_new) if handed else (None, None)
        out = backend(PrefillInputs(case.q, *new, case.k_cache, case.v_cache, case.spans, window))
        slack = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(out.double(), case.expected(window), rtol=slack, atol=slack)


def test_auto_selects_torch_without_gpu() -> None:
    assert prefill_backend("auto", CPU).name == "torch"


def refusal(name: str, device: torch.device = GPU, *, latents: bool = False) -> str:
    with pytest.raises(SpecbatchError) as caught:
        prefill_backend(name, device, "draft_attention_backend", latents=latents)
    text = str(caught.value)
    assert text.startswith(f"draft_attention_backend={name!r}: ")
    assert "\n" not in text
    return text


def test_unsupported_backends_are_refused() -> None:
    assert all(name in refusal("flashinfer") for name in NAMES)
    assert "CUDA" in refusal("triton", CPU)
    assert "multi-head latent attention" in refusal("torch", latents=True)
