"""The kernels of the corpus index match their references."""

from __future__ import annotations

import random

import pytest
import torch
from crossed import slow_but

pytest.importorskip("triton")

from specbatch.kernels.drafting.corpus import (
    CorpusIndex,
    corpus_drafts_ref,
    corpus_extend_ref,
    corpus_insert_ref,
)
from specbatch.kernels.drafting.corpus_triton import BLOCK, corpus_drafts, corpus_extend, corpus_insert


@pytest.mark.parametrize("case", slow_but((0, 2, 3), range(20)))
def test_kernels_match_their_references(case: int, device: torch.device) -> None:
    """Small vocabularies, tables and blocks: equal hashes within a block and across blocks, in a ring that is full and
    rows that are used again."""
    block = 16 if case % 3 else BLOCK
    draw = random.Random(case)
    shortest, size, letters, width = draw.randint(1, 4), draw.choice([33, 80, 200]), draw.randint(1, 4), 40
    generator = torch.Generator().manual_seed(case)

    def randint(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    batch, count, table = draw.randint(1, 7), draw.randint(1, 9), draw.choice([4, 32])
    tokens = randint(0, letters, batch + 3, width)
    cpu, own = (CorpusIndex.empty(size, shortest, tokens.to(where)) for where in (torch.device("cpu"), device))
    cpu, own = (index._replace(newest=index.newest[:, :table].contiguous()) for index in (cpu, own))
    start = 0
    for turn in range(4):
        length = draw.randint(1, size)
        written = randint(-1, letters, length)
        texts = torch.stack([written, torch.rand(length, generator=generator) < 0.8]).int()
        corpus_insert_ref(cpu, texts, start)
        corpus_insert(own, texts.to(device), start, block)
        start = (start + length) % size
        same(cpu, own)
        # Some of the rows, in any order, and padding.
        rows = (torch.randperm(batch + 2, generator=generator)[:batch] + 1) * (torch.arange(batch) != 1)
        lengths, accepted = randint(0, width - count, batch), randint(0, count, batch, 3)[:, 1]
        tokens[draw.randint(1, batch + 2)] = randint(0, letters, width)
        corpus_extend_ref(cpu, tokens, rows, lengths, accepted, count)
        packed = torch.stack([accepted, accepted], 1).to(device)[:, turn % 2]
        corpus_extend(own, *(item.to(device) for item in (tokens, rows, lengths)), packed, count, block)
        same(cpu, own)
        inputs = tokens, randint(0, width, batch + 3), rows, randint(50, 60, batch, count), randint(0, count + 1, batch)
        found = corpus_drafts(own, *(item.to(device) for item in inputs))
        for expected, result in zip(corpus_drafts_ref(cpu, *inputs), found, strict=True):
            assert result.dtype == torch.int64
            assert torch.equal(result.cpu(), expected)


def same(index: CorpusIndex, other: CorpusIndex) -> None:
    for expected, table in zip(index[:3], other[:3], strict=True):
        assert torch.equal(table.cpu(), expected)
