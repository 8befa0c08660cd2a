"""KV slots: flat places of tokens in the paged cache, page * page_size + offset."""

from __future__ import annotations

import torch


def kv_slots(page_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """The slot of each position: page_table int64 [R, P]; rows and positions int64, broadcast together -> int64."""
    return page_table[rows, positions // page_size] * page_size + positions % page_size
