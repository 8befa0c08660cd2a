"""The fused kernel that writes context keys and values matches its reference and writes nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from crossed import crossed
from dtypes import DTYPES

from specbatch.kernels.attention.context_kv import write_context_kv_ref, write_verified_kv_ref
from specbatch.kernels.attention.context_kv_triton import write_context_kv, write_verified_kv
from specbatch.kernels.attention.queries import ContextKVLayout
from specbatch.kernels.common.kv_slots import VerifiedRows
from specbatch.kernels.elementwise.rope import rope_table

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SIZES = [(1, 1, 128), (3, 2, 24), (5, 3, 80), (2, 5, 20)]
PAGES, PAGE = 40, 4


class Case:
    """`count` tokens, and caches full of NaN."""

    def __init__(self, device: torch.device, dtype: torch.dtype, count: int, layers: int, kv: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(count * layers)
        frequencies = 1 / 5000 ** (torch.arange(0, dim, 2).float() / dim)
        cos, sin = (table.to(device, dtype) for table in rope_table(frequencies, PAGES * PAGE, 0.9))
        norms = (torch.rand(layers, dim, generator=generator) + 0.5).to(device, dtype)
        self.heads = ContextKVLayout(kv, dim, norms, 1e-3, cos, sin)
        self.kv = torch.randn(count, layers * 2 * kv * dim, generator=generator).to(device, dtype)
        shape = (layers, PAGES, PAGE, kv, dim)
        self.ours = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2)]
        self.theirs = [item.clone() for item in self.ours]
        self.generator = generator

    def compare(self, written: int) -> None:
        """All pages except page 0, which no sequence owns; `written` tokens are stored."""
        slack = TOLERANCE[self.kv.dtype]
        for ours, theirs in zip(self.ours, self.theirs, strict=True):
            ours, theirs = ours[:, 1:], theirs[:, 1:]
            assert int((~theirs.isnan()).all(-1).all(-1).all(0).sum()) == written
            torch.testing.assert_close(ours, theirs, rtol=slack, atol=slack, equal_nan=True)


@pytest.mark.parametrize(("layers", "kv", "dim", "dtype"), crossed(SIZES, DTYPES))
def test_context_kv_of_a_prompt(device: torch.device, dtype: torch.dtype, layers: int, kv: int, dim: int) -> None:
    case = Case(device, dtype, 37, layers, kv, dim)
    positions = torch.randint(PAGES * PAGE, (37,), generator=case.generator).to(device)
    slots = (torch.randperm((PAGES - 1) * PAGE, generator=case.generator)[:37] + PAGE).to(device)
    write_context_kv_ref(case.kv, case.heads, *case.theirs, positions, slots)
    write_context_kv(case.kv, case.heads, *case.ours, positions, slots)
    case.compare(37)


@pytest.mark.parametrize(("layers", "kv", "dim", "dtype"), crossed(SIZES, DTYPES))
def test_verify_writes_accepted_positions_only(
    device: torch.device, dtype: torch.dtype, layers: int, kv: int, dim: int
) -> None:
    case = Case(device, dtype, 4 * 6, layers, kv, dim)
    table = torch.zeros(6, 6, dtype=torch.int64)
    table[1:] = torch.randperm(PAGES - 1, generator=case.generator)[:30].view(5, 6) + 1
    lengths = torch.tensor([0, 3, 17, 9], device=device)
    packed = torch.zeros(4, 9, dtype=torch.int64, device=device)
    packed[:, 6] = torch.tensor([0, 5, 2, 3])
    where = VerifiedRows(table.to(device), torch.tensor([4, 1, 5, 2], device=device), lengths, packed[:, 6])
    write_verified_kv_ref(case.kv, case.heads, *case.theirs, where)
    write_verified_kv(case.kv, case.heads, *case.ours, where)
    case.compare(1 + 6 + 3 + 4)


@pytest.mark.parametrize("stored", [torch.float32, torch.float8_e4m3fn])
def test_scales(device: torch.device, stored: torch.dtype) -> None:
    """Of each layer and KV head. In FP8 nothing is rounded, which the interpreter does differently."""
    case = Case(device, torch.float32, 9, 2, 2, 64)
    case.ours, case.theirs = ([x.zero_().to(stored) for x in caches] for caches in (case.ours, case.theirs))
    scales = [torch.rand(2, 2, device=device) + 0.5 for _ in range(2)]
    if stored != torch.float32:
        case.kv = case.kv.sign()  # of RMSNorm, too
        case.heads = replace(case.heads, eps=0.0)
        case.heads.k_norms.fill_(2.0), case.heads.cos.fill_(1), case.heads.sin.fill_(0)
        scales = [2.0 ** torch.randint(-8, 3, (2, 2), device=device) for _ in range(2)]
        case.kv[3, 70] = 1e6
    positions = torch.arange(9, device=device)
    for write, caches in ((write_context_kv_ref, case.theirs), (write_context_kv, case.ours)):
        write(case.kv, case.heads, *caches, positions, positions + PAGE, *scales)
    for ours, theirs in zip(case.ours, case.theirs, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-6, atol=2e-6)
        assert ours.float().isfinite().all()


def test_padding_rows_write_to_page_0(device: torch.device) -> None:
    case = Case(device, torch.float32, 2 * 3, 2, 2, 16)
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    table = torch.zeros(2, 4, dtype=torch.int64, device=device)
    write_verified_kv(case.kv, case.heads, *case.ours, VerifiedRows(table, zeros, zeros + 1, zeros + 2))
    case.compare(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fp8_cache(device: torch.device) -> None:
    case = Case(device, torch.bfloat16, 9, 2, 2, 64)
    positions = torch.arange(9, device=device)
    quantized = [torch.zeros(item.shape, dtype=torch.float8_e4m3fn, device=device) for item in case.ours]
    write_context_kv(case.kv, case.heads, *case.ours, positions, positions + PAGE)
    write_context_kv(case.kv, case.heads, *quantized, positions, positions + PAGE)
    for ours, full in zip(quantized, case.ours, strict=True):
        there = ~full.isnan()
        assert torch.equal(ours.float()[there], full.to(torch.float8_e4m3fn).float()[there])
