"""Deterministic attention to latents in Triton: its bits depend on a query's own keys alone."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from company import Company, differing

from specbatch.kernels.attention.deterministic import span_attention, span_latents_triton
from specbatch.kernels.attention.deterministic.span_latents_triton import SPAN
from specbatch.kernels.attention.queries import AttentionInputs, DecodeQueries, LatentLayout, Mask
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.elementwise.rope import rope_table
from specbatch.kernels.gemm import head_gemm_triton
from specbatch.kernels.gemm.head_gemm_triton import HeadTile
from specbatch.models.families import deepseek

PAGE = 16
FP8, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32


class Case:
    """Two sequences of `length` tokens on scattered pages."""

    def __init__(
        self,
        dtype: torch.dtype,
        cache: torch.dtype,
        device: torch.device,
        count: int,
        rank: int,
        rope: int,
        length: int,
        span: int = SPAN,
    ) -> None:
        self.span = span
        generator = torch.Generator().manual_seed(0)
        self.length, pages = length, 2 * -(-length // PAGE)
        self.table = (torch.randperm(pages, generator=generator) + 1).view(2, -1).to(device)
        cos, sin = (x.to(device, dtype) for x in rope_table(0.7 ** torch.arange(rope // 2), length, 1.0))
        sizes: dict[str, Any] = {"rank": rank, "scale": 1.3 * (rank + rope) ** -0.5, "interleaved": True}
        self.heads = LatentLayout(count, 1, rank + rope, None, None, 1e-6, cos, sin, **sizes)
        self.k, self.v = (torch.zeros(pages + 1, PAGE, 1, dim, device=device, dtype=cache) for dim in (rope, rank))
        self.projected = torch.randn(2, length, self.heads.width, generator=generator).to(device, dtype)

    def prompt(self, start: int, end: int, splits: int | None = None) -> torch.Tensor:
        """Of the second sequence."""
        spans = RaggedBatch([start], [end], [1], self.table, PAGE)
        positions = torch.arange(start, end, device=self.table.device)
        slots = kv_slots(self.table, torch.ones_like(positions), positions, PAGE)
        inputs = AttentionInputs(self.projected[1, start:end].clone(), self.heads, positions, self.k, self.v)
        return span_latents_triton.span_latent_prefill(inputs, slots, spans, splits=splits, span=self.span)

    def verify(self, start: int, rows: int, splits: int | None) -> torch.Tensor:
        """The rows at `start` beside others of the first sequence."""
        lengths = torch.tensor([start // 2, start], device=self.table.device)
        queries = DecodeQueries(self.table, torch.tensor([0, 1], device=self.table.device), lengths, rows, PAGE)
        projected = torch.cat([self.projected[0, :rows], self.projected[1, start : start + rows]])
        positions = (lengths[:, None] + torch.arange(rows, device=lengths.device)).flatten()
        attend = span_latents_triton.span_latent_verify(queries)
        inputs = AttentionInputs(projected, self.heads, positions, self.k, self.v)
        return attend(inputs, Mask(), splits=splits, span=self.span)[rows:]


def test_who_computes_a_span_changes_no_bit(device: torch.device) -> None:
    """With tiles of one size, of which numpy adds all alike."""
    case = Case(FP32, FP32, device, 4, 24, 8, 70, span=32)
    every = case.prompt(0, 70, 1)
    for splits in (1, 3):
        assert torch.equal(case.prompt(60, 70, splits), every[60:]), f"{splits} programs of a prompt"
        for start, rows in ((31, 3), (64, 2)):
            found = case.verify(start, rows, splits)
            assert torch.equal(found, every[start : start + rows]), f"{rows} rows at {start}, {splits} programs"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/lossless/test_deterministic_gpu.py runs them on a device")
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_logits_do_not_depend_on_company(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With tiles of one size, as above; the rest of a model runs the references."""
    verify, prefill = span_latents_triton.span_latent_verify, span_latents_triton.span_latent_prefill
    monkeypatch.setattr(span_attention, "SpanDecodeAttention", lambda queries: partial(verify(queries), span=32))
    monkeypatch.setattr(span_attention, "span_latent_prefill", partial(prefill, span=32))
    monkeypatch.setattr(deepseek, "head_gemm", partial(head_gemm_triton.head_gemm, tile=HeadTile(16, 32, 1, 1)))
    assert differing(Company(name, FP32), [70, 20], Random(0), 1) == 0


@pytest.mark.parametrize(
    ("count", "rank", "rope", "dtype", "cache"),
    [
        (16, 512, 64, BF16, BF16),
        (128, 512, 64, BF16, BF16),
        (16, 512, 64, FP16, FP16),
        (16, 512, 64, BF16, FP8),
        (128, 512, 64, BF16, FP8),
        (5, 20, 6, BF16, BF16),
        (40, 24, 8, FP16, FP16),
        (16, 512, 64, FP32, FP32),
    ],
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_bits_depend_on_own_keys_alone(
    count: int, rank: int, rope: int, dtype: torch.dtype, cache: torch.dtype
) -> None:
    length = 600
    case = Case(dtype, cache, torch.device("cuda"), count, rank, rope, length)
    every = case.prompt(0, length)
    assert every.isfinite().all()
    for start, end in ((0, 1), (0, 257), (1, 300), (256, 600), (599, 600), (300, 420)):
        for splits in (None, 1, 3):
            assert torch.equal(case.prompt(start, end, splits), every[start:end]), f"chunk {start}..{end}: {splits}"
    for start in (0, 3, 63, 64, 127, 128, 500, 560):
        for rows in (1, 2, 7, 16):
            for splits in (None, 1, 2, 3):
                found = case.verify(start, rows, splits)
                assert torch.equal(found, every[start : start + rows]), f"{rows} rows at {start}: {splits} programs"
