"""Logits whose argmax is easily taken wrong: ties, zeros of both signs, numbers that are not finite."""

from __future__ import annotations

import torch


def hard_logits(vocabulary: int) -> torch.Tensor:
    """float32 [9, vocabulary]."""
    found = torch.randint(-3, 4, (9, vocabulary), generator=torch.Generator().manual_seed(vocabulary)).float()
    found[1] = 0
    found[2, vocabulary // 2], found[2, -1] = torch.nan, torch.nan
    found[3, -1] = torch.inf
    found[4] = -torch.inf
    found[5] = -1 - torch.arange(vocabulary) % 5
    found[6], found[6, 0] = -0.0, 0.0
    found[7], found[7, 1::2] = 0.0, -0.0
    found[8], found[8, -1] = -torch.inf, -9
    return found


def part_of_logits(logits: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Those of one rank, with zeros after the vocabulary."""
    each = -(-logits.shape[1] // ranks)
    return torch.nn.functional.pad(logits, (0, ranks * each - logits.shape[1]))[:, rank * each : (rank + 1) * each]


DIVIDED = [(2, 37), (3, 37), (4, 5), (8, 17), (3, 8200)]  # (ranks, vocabulary); some ranks have no token
