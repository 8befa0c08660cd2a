"""Prefill attention backends: selection by name, refusals, and results against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specbatch.errors import SpecbatchError
from specbatch.kernels.attention.hopper import Gpu, Layout, not_gluon
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
@pytest.mark.parametrize("name", ["auto", "torch", "triton", "gluon"])
def test_installed_backends_match_reference(
    device: torch.device, name: str, handed: bool, bounds: tuple[list[int], list[int]], window: int
) -> None:
    if name in ("triton", "gluon") and device.type == "cpu":
        pytest.skip("needs a CUDA device")
    for dtype in [torch.float32] if device.type == "cpu" else [torch.float32, torch.float16, torch.bfloat16]:
        layout = Layout(dtype, 64, 8)
        if name == "gluon" and not_gluon(Gpu((9, 0), "3.6.0"), layout):
            continue
        case = Case(*bounds, device, dtype)
        backend = prefill_backend(name, device, layout=layout)
        assert backend.name == name or name == "auto"
        new = (case.k_new, case.v_new) if handed else (None, None)
        out = backend(PrefillInputs(case.q, *new, case.k_cache, case.v_cache, case.spans, window))
        slack = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(out.double(), case.expected(window), rtol=slack, atol=slack)


def test_auto_selects_torch_without_gpu() -> None:
    assert prefill_backend("auto", CPU).name == "torch"


HOPPER, HALF = Gpu((9, 0), "3.6.0"), Layout(torch.bfloat16, 128, 16)


@pytest.mark.parametrize(
    ("gpu", "layout", "reason"),
    [
        (HOPPER, HALF, None),
        (HOPPER, Layout(torch.float16, 64, 8), None),
        (Gpu((9, 0), "3.9.1+git"), Layout(torch.bfloat16, 256, 48), None),
        (None, HALF, "needs a Hopper GPU"),
        (Gpu((10, 0), "3.6.0"), HALF, "needs a Hopper GPU"),
        (Gpu((9, 0), "3.10.0"), HALF, "was compiled with Triton 3.6 to 3.9 only, not 3.10.0"),
        (HOPPER, HALF._replace(dtype=torch.float32), "has float16 and bfloat16 only"),
        (HOPPER, HALF._replace(head_dim=80), "has no heads of 80, only 64, 128, 256"),
        (HOPPER, HALF._replace(page_size=12), "reads pages of a multiple of 8 tokens only, not 12"),
    ],
)
def test_what_gluon_is_for(gpu: Gpu | None, layout: Layout, reason: str | None) -> None:
    assert not_gluon(gpu, layout) == reason


def test_auto_says_why_it_is_not_gluon() -> None:
    lines: list[str] = []
    layout = HALF._replace(head_dim=80)
    assert prefill_backend("auto", GPU, layout=layout, log=lines.append).name == "triton"
    reason = "has no heads of 80, only 64, 128, 256" if torch.cuda.is_available() else "needs a Hopper GPU"
    assert lines == [f"attention_backend: auto is triton, because gluon {reason}"]
    others: list[dict[str, Any]] = [{"deterministic": True}, {"latents": True}]
    for other in others:
        assert prefill_backend("auto", GPU, layout=layout, log=lines.append, **other).name == "triton"
    assert len(lines) == 1


def refusal(name: str, device: torch.device = GPU, **model: bool) -> str:
    with pytest.raises(SpecbatchError) as caught:
        prefill_backend(name, device, "draft_attention_backend", layout=HALF._replace(head_dim=80), **model)
    text = str(caught.value)
    assert text.startswith(f"draft_attention_backend={name!r}: ")
    assert "\n" not in text
    return text


def test_unsupported_backends_are_refused() -> None:
    assert all(name in refusal("flashinfer") for name in NAMES)
    for name in ("gluon", "triton"):
        assert "CUDA" in refusal(name, CPU)
    for name in ("gluon", "torch"):
        assert "multi-head latent attention" in refusal(name, latents=True)
    assert "has no deterministic mode; use triton or auto" in refusal("gluon", deterministic=True)
    assert "use triton or auto" in refusal("gluon")
