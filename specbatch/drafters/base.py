"""The interface of drafters, what they need of an engine (`DraftPlan`), and the baseline without drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from specbatch.core.attention_metadata import PrefillMetadata
from specbatch.core.completion import Completion
from specbatch.core.device_batch import DeviceBatch
from specbatch.core.step_input import Proposal, StepInput
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, Features
from specbatch.models.formats.format import Shapes
from specbatch.models.weight_shapes import weight_shapes
from specbatch.runtime.loader import Loader

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.weights import Checkpoint, Log

Diagnosis = Callable[[Sequence[Completion]], str | None]


class Drafter(Protocol):
    """Drafts tokens. Shapes are fixed and no device value is read on the host, so that a step can be launched before
    the results of the previous one are known.

    features: the target's hidden states, of B * N tokens after a verify. In prefill those of all T tokens if
    `DraftPlan.needs_all_hidden` is set, else of the tokens that end a prompt.
    """

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        """Update the draft state for prompt tokens, batch.tokens[metadata.slots, metadata.positions]."""

    def propose(self, step: StepInput) -> Proposal:
        """Draft `step.num_drafts` tokens after each root. If that is 0, only keep what later drafts need."""
        ...

    def update(self, step: StepInput, features: Features, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        """Update the draft state after a verify. Queries past accepted [B] are ignored.

        path int64 [B, N], for a tree: the query of the root and those of the accepted nodes in order, then all others;
        None for a chain, whose queries are in order.
        """

    def shorten(self, step: StepInput) -> None:
        """Called with a step's input before it runs, if it drafts fewer tokens than the step before it."""

    def catch_up(self, batch: DeviceBatch, metadata: PrefillMetadata) -> None:
        """Update the draft state for tokens that were computed without it, from the tokens alone (see
        `DraftPlan.catch_up`)."""

    def diagnose(self, completions: Sequence[Completion]) -> str | None:
        """Examine the completions of a run in which hardly any first draft was accepted, with nothing in flight.
        Returns a line for the log; None: there is no such check."""


@dataclass(frozen=True)
class DraftPlan:
    """What a drafter needs, known before anything is loaded, and how to build it once the target is loaded.

    config            the model that drafts, or the target
    kv_layers         layers of its KV cache
    state_layers      its layers with a recurrent state
    weights           the model whose weights are loaded for it; None if it has none, or uses the target's
    shapes_of         name -> shape of the weights that are loaded besides those, for this config or that of one rank
    needs_all_hidden  it reads the target's last hidden states of every prompt token
    aux               it reads the residual stream after these layers, for every token; if the last layer is one of
                      them, this takes `needs_all_hidden`
    num_drafts        tokens drafted per verify, or the most of them; None: as configured
    scratch_slots     KV slots, from the root's on, that it writes to while drafting
    uncached_tail     of a finished request, so many of the newest positions may lack the draft's keys and values
    embedded          embedded tokens that it keeps of each token of a prompt pass, next to the model's activations
    catch_up          how it learns of tokens that were computed while it did not run: "none": it has to run in every
                      step, or keeps nothing of a text; "draft": by itself, from the tokens; "target": from features,
                      for which the target runs again
    """

    build: Callable[[Decoder, Loader], Drafter]
    config: ModelConfig
    kv_layers: int = 0
    state_layers: int = 0
    weights: ModelConfig | None = None
    shapes_of: Callable[[ModelConfig], Shapes] = lambda config: {}
    needs_all_hidden: bool = False
    aux: tuple[int, ...] = ()
    num_drafts: int | None = None
    scratch_slots: int = 0
    uncached_tail: int = 1
    embedded: int = 0
    catch_up: Literal["none", "draft", "target"] = "none"

    def divided(self, ranks: int) -> DraftPlan:
        """The plan of one of `ranks` ranks over which the draft is divided as the target is."""
        weights = self.weights and self.weights.divided(ranks)
        return replace(self, config=self.config.divided(ranks), weights=weights)

    @property
    def layers(self) -> int:
        """Layers of the model that drafts, as far as they keep something of a text."""
        return self.kv_layers + self.state_layers

    @property
    def shapes(self) -> Shapes:
        """Name -> shape of all weights that are loaded for the draft."""
        return (weight_shapes(self.weights) if self.weights else {}) | self.shapes_of(self.config)

    def kv_slots_per_step(self, num_drafts: int) -> int:
        """KV slots, from the root's on, that a step with a verify of `num_drafts` drafts may write to."""
        return max(self.scratch_slots, num_drafts + 1)


class NoDraft:
    """The baseline, no speculation: a verify of the root alone."""

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        pass

    def propose(self, step: StepInput) -> Proposal:
        return no_drafts(step)

    def update(self, step: StepInput, features: Features, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        pass

    def shorten(self, step: StepInput) -> None:
        pass

    def catch_up(self, batch: DeviceBatch, metadata: PrefillMetadata) -> None:
        pass

    def diagnose(self, completions: Sequence[Completion]) -> str | None:
        return None


def no_drafts(step: StepInput) -> Proposal:
    """No drafts."""
    return Proposal(step.slots.new_empty(len(step.slots), 0), step.batch.filled(0, step.slots))


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The baseline needs nothing."""
    return DraftPlan(lambda model, loader: NoDraft(), target.config)
