"""STANDALONE: a second, smaller model of the same vocabulary drafts a chain by tokens or a tree by levels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from specbatch import weights
from specbatch.core.attention_metadata import PrefillMetadata, positions_from
from specbatch.core.device_batch import DeviceBatch
from specbatch.core.step_input import Proposal, StepInput
from specbatch.draft_shape import DraftShape
from specbatch.drafters.base import DraftPlan, NoDraft, no_drafts
from specbatch.drafters.tree import Beams, expand
from specbatch.errors import of_draft, refuse
from specbatch.kernels.sampling.argmax_topk import argmax
from specbatch.kernels.sampling.rng import DRAFT
from specbatch.memory.kv_cache import KVCache
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, Features
from specbatch.runtime.loader import Loader
from specbatch.runtime.prefill_forward import Forward
from specbatch.tokenizer import vocabulary_difference

if TYPE_CHECKING:
    from specbatch.config import EngineConfig
    from specbatch.weights import Checkpoint, Log


class DraftModelChain(NoDraft):
    """The draft has its own KV cache under the target's page numbers.

    A verify that accepts every draft leaves the last of them without draft KV. The first pass of each iteration
    therefore runs two rows, the newest committed token and the root: what is there already is written again. Where
    nothing is to be drafted the model does not run; later it catches up in prompt passes.
    """

    def __init__(self, model: Decoder, forward: Forward, cache: KVCache, vocabulary: int) -> None:
        """forward: the model's way through a prompt."""
        self._model = model
        self._forward = forward
        self._cache = cache
        self._vocabulary = vocabulary  # of the target; the draft's may be padded further

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        self.catch_up(batch, metadata)

    def catch_up(self, batch: DeviceBatch, metadata: PrefillMetadata) -> None:
        tokens = batch.tokens[metadata.slots, metadata.positions]
        self._forward(self._known(tokens), metadata, rows=metadata.last[:0])  # for its keys and values alone

    def propose(self, step: StepInput) -> Proposal:
        if not step.num_drafts:
            return no_drafts(step)
        batch = step.batch
        start, rows = step.lengths - 1, 2
        positions = positions_from(start, rows)
        tokens = batch.tokens[step.slots[:, None], positions].flatten()
        drafts = step.slots.new_empty(len(step.slots), step.num_drafts)
        laws = []
        for index in range(step.num_drafts):
            context = step.decode_metadata(start, rows).bind(self._cache)
            features = self._model.forward(self._known(tokens), positions.flatten(), context)
            newest = features.last.view(len(step.slots), rows, -1)[:, -1]
            logits = self._fit(self._model.logits(newest))
            start = positions = start + rows
            rows = 1
            if step.sampling.flags.sampled:
                drawn, law = step.sampling.sample_with_probabilities(logits[:, None], start[:, None], DRAFT)
                tokens = drafts[:, index].copy_(drawn[:, 0])
                laws.append(law)
            else:
                tokens = argmax(logits, out=drafts[:, index])
        return Proposal(drafts, batch.filled(step.num_drafts, step.slots), torch.cat(laws, 1) if laws else None)

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens that the draft has embeddings for: a target with more rows may choose one that stands for no text."""
        known = self._model.config.vocab_size
        return tokens if known >= self._vocabulary else tokens.clamp(max=known - 1)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Give the draft's logits [B, Vd] the target's width: tokens it does not know have probability 0."""
        missing = self._vocabulary - logits.shape[-1]
        if missing <= 0:
            return logits[:, : self._vocabulary]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)


class DraftModelTree(DraftModelChain):
    """The nodes of a tree that are run have their keys behind the root, level by level. Those of accepted ones are not
    where a later pass looks for them, or were never made: the first pass of each iteration therefore runs what was
    accepted last, and the root. It has as many rows as can be new; those behind the root are written over.
    """

    def __init__(
        self, model: Decoder, forward: Forward, cache: KVCache, shape: DraftShape, vocabulary: int, device_rows: int
    ) -> None:
        super().__init__(model, forward, cache, vocabulary)
        self._shape = shape
        # Of each device row: the newest tokens without keys, the root among them. A padding row has one.
        self._new = torch.ones(device_rows, dtype=torch.int64, device=model.device)

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        super().prefill(batch, metadata, features)
        self._new.index_fill_(0, metadata.slots, 1)

    def propose(self, step: StepInput) -> Proposal:
        model, lengths = self._model, step.lengths
        new = self._new[step.slots]
        start, count = lengths + 1 - new, self._shape.steps + 1
        positions = positions_from(start, count)
        tokens = self._known(step.batch.tokens[step.slots[:, None], positions])
        context = step.decode_metadata(start, count).bind(self._cache)
        hidden = model.forward(tokens.flatten(), positions.flatten(), context).last.unflatten(0, (-1, count))
        newest = (new - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
        logits = self._fit(model.logits(hidden.gather(1, newest)[:, 0]))

        def run(beams: Beams) -> torch.Tensor:
            width = beams.tokens.shape[1]
            positions = (lengths + beams.depth).repeat_interleave(width)
            context = step.decode_metadata(lengths, width, beams.ancestors, beams.first).bind(self._cache)
            features = model.forward(self._known(beams.tokens).flatten(), positions, context)
            return self._fit(model.logits(features.last)).view(len(lengths), width, -1)

        drafts, ancestors = expand(logits, self._shape, run)
        return Proposal(drafts, step.batch.filled(self._shape.tokens, step.slots), ancestors=ancestors)

    def update(self, step: StepInput, features: Features, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        self._new[step.slots] = torch.where(step.slots > 0, accepted + 1, 1)


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """Another checkpoint of the same vocabulary, or the target without some layers ("self:skip=12-15").

    Leaving layers out follows Zhang et al., "Draft & Verify" (2023). Raises SpecbatchError where the draft does not
    fit the target.
    """
    asked = config.speculation
    shape = asked.shape
    assert asked.draft is not None
    scratch, uncached_tail = (shape.draft_slots, shape.steps) if shape.topk > 1 else (0, 1)
    takes = partial(DraftPlan, scratch_slots=scratch, uncached_tail=uncached_tail, idle_at_zero=asked.is_auto)

    def drafter(model: Decoder, loader: Loader) -> DraftModelChain:
        way = loader.draft(model)
        if shape.topk > 1:
            return DraftModelTree(model, *way, shape, target.config.vocab_size, len(loader.page_table))
        return DraftModelChain(model, *way, target.config.vocab_size)

    if asked.draft == "self" or asked.draft.startswith("self:"):
        _refuse_states(asked.draft, target.config)
        skipped = parse_skip(asked.draft, target.config.num_layers)

        def build_view(model: Decoder, loader: Loader) -> DraftModelChain:
            return drafter(model.without(skipped), loader)

        return takes(build_view, target.config, target.config.num_layers - len(skipped))

    load_format = "dummy" if config.load_format == "dummy" else "auto"
    with of_draft(asked.draft):
        draft = weights.open_checkpoint(asked.draft, load_format, seed=config.seed + 1, log=log)
        own = draft.tokenizer()
    _refuse_states(asked.draft, draft.config)
    difference = vocabulary_difference(target.tokenizer(), own)
    if difference:
        raise refuse("draft", asked.draft, f"its vocabulary is not the target's ({difference}); use one of its family")
    log(f"draft: {draft.name} ({draft.origin}); {draft.config.rope}")

    def build(model: Decoder, loader: Loader) -> DraftModelChain:
        return drafter(loader.model(draft, of_draft=True), loader)

    return takes(build, draft.config, draft.config.num_layers, draft.config)


def _refuse_states(draft: str, config: ModelConfig) -> None:
    recurrent = config.num_layers - config.attention_layers
    if recurrent:
        works = (
            f"it has {recurrent} recurrent layers, whose states cannot be rolled back while it drafts; use a draft of "
            "attention layers alone, or algorithm 'eagle3', 'mtp', 'dflash' or 'ngram'"
        )
        raise refuse("draft", draft, works)


def parse_skip(draft: str, layers: int) -> frozenset[int]:
    """Layers that "self:skip=12-15,20" leaves out of a model with `layers` layers; ranges are inclusive."""
    skipped: set[int] = set()
    head, _, ranges = draft.partition("=")
    try:
        if head != "self:skip":
            raise ValueError
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            skipped |= set(range(int(first), min(int(last or first), layers) + 1))
    except ValueError:
        raise refuse("draft", draft, "write self:skip=FIRST-LAST, for example self:skip=12-15") from None
    if not skipped or not skipped < set(range(layers)):
        raise refuse("draft", draft, f"the model has layers 0-{layers - 1}; skip some of them and keep at least one")
    return frozenset(skipped)
