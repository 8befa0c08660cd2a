"""What every drafter offers, and the one that drafts nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from specbatch.batch import DeviceBatch, Sampling
from specbatch.context import Prefill
from specbatch.models.config import ModelConfig
from specbatch.models.llama import Llama
from specbatch.models.loader import Loader
from specbatch.verification import Proposal

if TYPE_CHECKING:
    from specbatch.config import EngineConfig
    from specbatch.weights import Checkpoint, Log


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


@dataclass(frozen=True)
class DraftPlan:
    """What a drafter takes, known before anything is loaded, and how it is built once the target is.

    parameters: weights of its own; kv_layers: layers of its own KV cache, in the shape that `config` says.
    """

    build: Callable[[Llama, Loader], Drafter]
    config: ModelConfig
    parameters: int = 0
    kv_layers: int = 0


class NoDraft:
    """The baseline: a verify of the root alone."""

    def prefill(self, batch: DeviceBatch, shape: Prefill, hidden: torch.Tensor) -> None:
        pass

    def propose(self, step: Step) -> Proposal:
        return Proposal(step.rows.new_empty(len(step.rows), 0), torch.zeros_like(step.rows))

    def absorb(self, step: Step, hidden: torch.Tensor, accepted: torch.Tensor) -> None:
        pass


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """Plain decoding takes nothing."""
    return DraftPlan(lambda model, loader: NoDraft(), target.config)
