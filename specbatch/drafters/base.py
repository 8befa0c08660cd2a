"""What every drafter offers, and the one that drafts nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from specbatch.core.attention_metadata import DecodeMetadata, Mask, PrefillMetadata
from specbatch.core.device_batch import DeviceBatch, Sampling
from specbatch.core.request import Completion
from specbatch.drafters.verification import Proposal
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, Features
from specbatch.runtime.loader import Loader

if TYPE_CHECKING:
    from specbatch.config import EngineConfig
    from specbatch.weights import Checkpoint, Log

Diagnosis = Callable[[Sequence[Completion]], str]


@dataclass(frozen=True)
class Step:
    """One iteration: device rows [B], their KV lengths [B] before it, and what the host knows about them.

    count: tokens to draft behind each root, of a tree its nodes; at most those that the drafter was made for. No row's
    KV can be longer than `bound` after the iteration.
    """

    batch: DeviceBatch
    rows: torch.Tensor
    lengths: torch.Tensor
    count: int
    page_size: int
    bound: int
    sampling: Sampling

    def decode_metadata(
        self,
        lengths: torch.Tensor,
        rows: int,
        ancestors: torch.Tensor | None = None,
        first: int = 0,
        masks: tuple[Mask, ...] | None = None,
    ) -> DecodeMetadata:
        """The shape of a pass of `rows` tokens per device row behind `lengths` [B]: a chain, or with words of
        `ancestors` [B, rows] a tree, of which `first` nodes are in the cache already; `masks`: see `Verify`."""
        table, size = self.batch.page_table, self.page_size
        return DecodeMetadata(table, self.rows, lengths, rows, size, self.bound, ancestors, first, masks)


class Drafter(Protocol):
    """Shapes are fixed and nothing is read on the host, so that an iteration can run ahead of its results.

    features: the target's, of B * N tokens after a verify; in prefill the last ones are those of all T if
    `DraftPlan.every` says so, else of those that end a prompt. diagnose: what to say behind a run in which hardly
    any first draft was accepted, from requests that have ended, with nothing in flight; None: there is nothing to look
    at.
    """

    diagnose: Diagnosis | None

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        """Take in prompt positions (tokens in batch.tokens[metadata.slots, metadata.positions])."""

    def propose(self, step: Step) -> Proposal:
        """Draft `step.count` tokens behind each row's root. With none, keep what later drafts need."""
        ...

    def update(self, step: Step, features: Features, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        """Take in what a verify showed; rows beyond accepted [B] are of no account.

        path int64 [B, N]: of a tree, the row of the root and those of the accepted nodes in order, then all others;
        None for a chain, whose rows are in order.
        """

    def shorten(self, step: Step) -> None:
        """Called before an iteration that drafts fewer tokens than the one before it, with its rows."""

    def catch_up(self, batch: DeviceBatch, metadata: PrefillMetadata) -> None:
        """Take in positions that were committed by iterations without drafts (see `DraftPlan.rests`)."""


@dataclass(frozen=True)
class DraftPlan:
    """What a drafter takes, known before anything is loaded, and how it is built once the target is.

    config: the model that drafts, or the target; kv_layers: layers of its KV cache; weights: whose weights are loaded
    for it, None if they are the target's or none; parameters: how many are loaded beside those; every: it wants the
    target's last features of every prompt token; aux: it wants the residual stream behind these layers, of every token,
    which takes `every` where the last layer is one of them; drafted: tokens drafted per verify, or the most of them,
    None if what was asked for stands; slots: KV slots from a root on that it writes to while drafting; lag: of a
    request that has ended, so many of the newest positions may lack the draft's own keys; rests: it does nothing where
    nothing is drafted, and must catch up before it drafts again.
    """

    build: Callable[[Decoder, Loader], Drafter]
    config: ModelConfig
    kv_layers: int = 0
    weights: ModelConfig | None = None
    parameters: int = 0
    every: bool = False
    aux: tuple[int, ...] = ()
    drafted: int | None = None
    slots: int = 0
    lag: int = 1
    rests: bool = False

    def slots_of(self, rows: int) -> int:
        """KV slots from a root on that an iteration with a verify of `rows` rows may write to."""
        return max(self.slots, rows)


class NoDraft:
    """The baseline: a verify of the root alone."""

    diagnose: Diagnosis | None = None

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        pass

    def propose(self, step: Step) -> Proposal:
        return no_drafts(step)

    def update(self, step: Step, features: Features, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        pass

    def shorten(self, step: Step) -> None:
        pass

    def catch_up(self, batch: DeviceBatch, metadata: PrefillMetadata) -> None:
        pass


def no_drafts(step: Step) -> Proposal:
    """No drafts."""
    return Proposal(step.rows.new_empty(len(step.rows), 0), step.batch.filled(0, step.rows))


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """Plain decoding takes nothing."""
    return DraftPlan(lambda model, loader: NoDraft(), target.config)
