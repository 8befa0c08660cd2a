"""The kernels of the corpus index match their references."""

from __future__ import annotations

import random

import pytest
import torch
from crossed import slow_but

pytest.importorskip("triton")

from specbatch.kernels.drafting import corpus_triton
from specbatch.kernels.drafting.corpus import CorpusIndex, corpus_drafts_ref, corpus_insert_ref
from specbatch.kernels.drafting.corpus_triton import corpus_drafts, corpus_insert


@pytest.mark.parametrize("case", slow_but(range(6), range(20)))
def test_kernels_match_their_references(case: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vocabularies, tables and blocks: equal hashes within a block and across blocks, in a ring that is full."""
    if case % 3:
        monkeypatch.setattr(corpus_triton, "_BLOCK", 16)
    draw, shortest = random.Random(case), random.Random(case).randint(1, 4)
    size, letters = draw.choice([33, 80, 200]), draw.randint(1, 4)
    generator = torch.Generator().manual_seed(case)
    cpu, own = (CorpusIndex.empty(size, shortest, where) for where in (torch.device("cpu"), device))
    cpu, own = (index._replace(newest=index.newest[:, : draw.choice([4, 32])].contiguous()) for index in (cpu, own))
    own = own._replace(newest=torch.full_like(cpu.newest, -1, device=device))
    start = 0
    for _ in range(4):
        length = draw.randint(1, size)
        tokens = torch.randint(-1, letters, (length,), generator=generator)
        texts = torch.stack([tokens, torch.rand(length, generator=generator) < 0.8]).int()
        corpus_insert_ref(cpu, texts, start)
        corpus_insert(own, texts.to(device), start)
        start = (start + length) % size
        for expected, table in zip(cpu[:3], own[:3], strict=True):
            assert torch.equal(table.cpu(), expected)
    batch, count, width = draw.randint(1, 7), draw.randint(1, 9), 40
    tokens = torch.randint(0, letters, (batch + 3, width), generator=generator)
    rows = torch.randint(0, batch + 3, (batch,), generator=generator)
    lengths = torch.randint(0, width, (batch,), generator=generator)
    drafts = torch.randint(50, 60, (batch, count), generator=generator)
    drafted = torch.randint(0, count + 1, (batch,), generator=generator)
    inputs = (tokens, rows, lengths, drafts, drafted)
    found = corpus_drafts(own, *(item.to(device) for item in inputs))
    for expected, result in zip(corpus_drafts_ref(cpu, *inputs), found, strict=True):
        assert result.dtype == torch.int64
        assert torch.equal(result.cpu(), expected)
