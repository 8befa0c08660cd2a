"""The n-gram lookup kernel matches its reference."""

from __future__ import annotations

import random

import pytest
import torch
from crossed import slow_but

pytest.importorskip("triton")

from specbatch.kernels.drafting.ngram import ngram_match_ref
from specbatch.kernels.drafting.ngram_triton import BLOCK, ngram_match


def check(
    tokens: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, *sizes: int, block: int = BLOCK
) -> torch.Tensor:
    expected = ngram_match_ref(tokens, rows, lengths, *sizes)
    drafts, found = ngram_match(tokens, rows, lengths, *sizes, block=block)
    assert drafts.dtype == torch.int64
    assert found.dtype == torch.bool
    assert torch.equal(found, expected[1])
    assert torch.equal(drafts, expected[0])
    return found


@pytest.mark.parametrize("case", slow_but(range(10), range(24)))
def test_kernel_matches_reference(case: int, device: torch.device) -> None:
    """Small vocabularies and blocks: long runs, many ties, matches across blocks."""
    draw = random.Random(case)
    width, batch, letters = draw.choice([5, 33, 100]), draw.randint(1, 6), draw.randint(1, 4)
    generator = torch.Generator().manual_seed(case)
    tokens = torch.randint(0, letters, (batch + 3, width), generator=generator).to(device)
    rows = torch.randint(0, batch + 3, (batch,), generator=generator).to(device)
    lengths = torch.randint(0, width, (batch,), generator=generator).to(device)
    shortest = draw.randint(1, 4)
    sizes = draw.randint(shortest, 16), shortest, draw.randint(1, 9), draw.choice([1, 2, 4])
    check(tokens, rows, lengths, *sizes, block=16 if case % 3 else BLOCK)


@pytest.mark.parametrize("last", [0, 1, 2, 15, 16, 17, 31, 32])
def test_row_and_block_boundaries(last: int, device: torch.device) -> None:
    tokens = torch.arange(33, device=device)[None] % 16
    row = torch.zeros(1, dtype=torch.int64, device=device)
    check(tokens, row, torch.tensor([last], device=device), 4, 1, 5, 3, block=16)


def test_long_rows(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 20_000, (4, 40_000), generator=generator).to(device)
    for row, place in ((1, 77), (2, 20_479), (3, 39_900)):
        tokens[row, place : place + 4] = tokens[row, 39_996:]
    rows = torch.tensor([3, 0, 1, 2], device=device)
    found = check(tokens, rows, torch.tensor([39_999] * 4, device=device), 4, 4, 7)
    assert found[:, 0].tolist() == [True, False, True, True]
