"""What every drafter offers, and the one that drafts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from specbatch.batch import DeviceBatch, Sampling
from specbatch.context import Prefill
from specbatch.verification import Proposal


@dataclass(frozen=True)
class Step:
    """One iteration's rows: device rows [B] and what the host knows about them.

    page_table int64 [B, P] covers `bound` tokens, more than any row's KV can reach in this iteration.
    """

    batch: DeviceBatch
    rows: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    bound: int
    sampling: Sampling


class Drafter(Protocol):
    """Shapes are fixed and nothing is read on the host, so that an iteration can run ahead of its results.

    hidden: the target's hidden states after its final norm, [T, hidden_size] in prefill, [B * N, hidden_size] after a
    verify.
    """

    def prefill(self, batch: DeviceBatch, shape: Prefill, hidden: torch.Tensor) -> None:
        """Take in prompt positions (tokens in batch.tokens[shape.rows, shape.positions])."""

    def propose(self, step: Step) -> Proposal:
        """Draft behind each row's root."""
        ...

    def absorb(self, step: Step, hidden: torch.Tensor, accepted: torch.Tensor) -> None:
        """Take in what a verify showed; rows beyond accepted [B] are of no account."""


class NoDraft:
    """The baseline: a verify of the root alone."""

    def prefill(self, batch: DeviceBatch, shape: Prefill, hidden: torch.Tensor) -> None:
        pass

    def propose(self, step: Step) -> Proposal:
        return Proposal(step.rows.new_empty(len(step.rows), 0), torch.zeros_like(step.rows))

    def absorb(self, step: Step, hidden: torch.Tensor, accepted: torch.Tensor) -> None:
        pass
