"""Attention with shared prefixes matches the reference, which reads them for each sequence."""

from __future__ import annotations

import pytest
import torch
from verify_case import Case

from specbatch.kernels.attention.queries import SharedPrefixes
from specbatch.kernels.attention.verify.prefix_attention_configs import PrefixTile

Groups = list[tuple[list[int], int]]  # sequences and the keys of their prefix
TWO: Groups = [([0, 3, 4], 36), ([5, 1], 8)]  # the third sequence has none
LENGTHS = [40, 8, 13, 60, 36, 30]


def share(case: Case, groups: Groups, most: int = 4) -> SharedPrefixes:
    """Have sequences share pages, and say so as a step does."""
    lengths = torch.zeros(len(case.rows), dtype=torch.int32)
    members = torch.zeros(len(case.rows), dtype=torch.int32)
    table = torch.zeros(3, most, dtype=torch.int32)
    taken = 0
    for index, (sequences, keys) in enumerate(groups):
        rows = case.rows[sequences]
        pages = keys // case.page_size
        case.table[rows, :pages] = case.table[rows[0], :pages].clone()
        lengths[sequences] = keys
        members[taken : taken + len(sequences)] = torch.tensor(sequences)
        table[:, index] = torch.tensor([taken, len(sequences), keys])
        taken += len(sequences)
    device = case.qkv.device
    return SharedPrefixes(lengths.to(device), members.to(device), table.to(device))


@pytest.mark.parametrize("n", [1, 5])
def test_chain(device: torch.device, n: int) -> None:
    case = Case(device, torch.float32, LENGTHS, n)
    case.prefixes = share(case, TWO)
    for splits in (1, 3):
        case.check(splits, prefix_tile=PrefixTile(16, 16, 4, 1, None))
