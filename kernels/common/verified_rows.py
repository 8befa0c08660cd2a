"""Arguments of kernels that run after a verify: page table, slots, KV lengths and number of accepted drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch


class VerifiedRows(NamedTuple):
    """page_table int64 [R, P] of all slots; slots int64 [B]; lengths int64 [B]: KV length before the verify, which is
    the place of each root; accepted int64 [B], may be strided."""

    page_table: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    accepted: torch.Tensor
