"""Packed rows: every sequence's rows, in order and without gaps, and back to the rectangle."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from specbatch.kernels.common.packed_rows import pack_rows


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_rows_are_packed_in_order_and_spread_back(counts):
    packed = pack_rows(torch.tensor(counts), 5, sum(counts))
    rectangle = torch.arange(len(counts) * 5)
    wanted = [sequence * 5 + row for sequence, count in enumerate(counts) for row in range(count)]
    assert packed.pack(rectangle).tolist() == wanted
    spread = packed.spread(packed.pack(rectangle)).view(-1, 5).tolist()
    for sequence, (row, count) in enumerate(zip(spread, counts, strict=True)):
        first = sequence * 5
        assert row == [*range(first, first + count), *[first] * (5 - count)]
