"""KV slots: flat places of tokens in the paged cache, page * page_size + offset."""

from __future__ import annotations

from typing import NamedTuple

import torch


def kv_slots(page_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """The slot of each position: page_table int64 [R, P]; rows and positions int64, broadcast together -> int64."""
    return page_table[rows, positions // page_size] * page_size + positions % page_size


class VerifiedRows(NamedTuple):
    """Which rows of a verify were accepted, and where they are in the cache.

    page_table int64 [R, P] of all slots; slots int64 [B]; lengths int64 [B]: KV length before the verify, which is
    the place of each root; accepted int64 [B], may be strided."""

    page_table: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    accepted: torch.Tensor
