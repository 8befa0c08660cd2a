"""The sequences of a verify and how many of their drafts are accepted."""

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
