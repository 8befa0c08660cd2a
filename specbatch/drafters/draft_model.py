"""STANDALONE drafting: a smaller model with the same vocabulary drafts a chain or a tree."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specbatch import weights
from specbatch.core.attention_metadata import PrefillMetadata, positions_from
from specbatch.core.device_batch import DeviceBatch
from specbatch.core.step_input import Proposal, StepInput
from specbatch.draft_shape import DraftShape
from specbatch.drafters.base import DraftPlan, NoDraft, no_drafts
from specbatch.drafters.choose import sample_drafts
from specbatch.drafters.head_checks import check_algorithm
from specbatch.drafters.tree import Beams, expand
from specbatch.errors import of_draft, refuse
from specbatch.kernels.sampling.argmax_topk import argmax
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
    """Drafts a chain with a draft model. The model has its own KV cache with the target's page numbers.

    After a verify that accepts all drafts, the last draft has no keys and values in this cache. The first pass of each
    step therefore runs two tokens, the newest committed one and the root; existing entries are overwritten with the
    same values. If accepted drafts may be another drafter's (with a corpus), it runs as many tokens as a verify can
    commit, and the root. In steps without drafts the model does not run; it catches up later with prompt passes.
    """

    def __init__(self, model: Decoder, forward: Forward, cache: KVCache, vocabulary: int, first: int = 2) -> None:
        """forward: the model's prefill forward pass; vocabulary: size of the target's; first: tokens of the first pass
        of a step."""
        self._model = model
        self._forward = forward
        self._cache = cache
        self._first = first
        self._vocabulary = vocabulary  # the draft's may be padded to another size

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        self.catch_up(batch, metadata)

    def catch_up(self, batch: DeviceBatch, metadata: PrefillMetadata) -> None:
        tokens = batch.tokens[metadata.slots, metadata.positions]
        self._forward(self._known(tokens), metadata, rows=metadata.last[:0])  # only keys and values are needed

    def propose(self, step: StepInput) -> Proposal:
        if not step.num_drafts:
            return no_drafts(step)
        drafts = step.slots.new_empty(len(step.slots), step.num_drafts)
        distributions = []
        newest, place = self._newest(step), step.lengths
        for index in range(step.num_drafts):
            place = place + 1
            if step.sampling.flags.sampled:
                logits = self._fit(self._model.logits(newest))
                drawn, distribution = sample_drafts(
                    logits[:, None], step, place[:, None], ids=None, vocabulary=self._vocabulary
                )
                tokens = drafts[:, index].copy_(drawn[:, 0])
                distributions += [] if distribution is None else [distribution]
            else:
                is_larger = self._model.config.vocab_size > self._vocabulary
                best = self._fit(self._model.logits(newest)) if is_larger else self._model.scores(newest, greedy=True)
                tokens = argmax(best, out=drafts[:, index])
            if index + 1 < step.num_drafts:
                context = step.decode_metadata(place, 1).bind(self._cache)
                newest = self._model.forward(self._known(tokens), place, context).last
        drafted = step.batch.filled(step.num_drafts, step.slots)
        return Proposal(drafts, drafted, torch.cat(distributions, 1) if distributions else None)

    def _newest(self, step: StepInput) -> torch.Tensor:
        """Run the first pass. Returns the hidden states [B, H] of the roots."""
        rows = self._first
        start = step.lengths + 1 - rows
        if rows > 2:  # a short text has fewer tokens; what is stored after its root is overwritten
            start = start.clamp(min=0)
        positions = positions_from(start, rows)
        tokens = step.batch.tokens[step.slots[:, None], positions].flatten()
        context = step.decode_metadata(start, rows).bind(self._cache)
        last = self._model.forward(self._known(tokens), positions.flatten(), context).last
        hidden = last.view(len(step.slots), rows, -1)
        if rows == 2:
            return hidden[:, -1]
        root = (step.lengths - start)[:, None, None].expand(-1, 1, hidden.shape[2])
        return hidden.gather(1, root)[:, 0]

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Clamp tokens to those that the draft has embeddings for: a target with a larger padded vocabulary may choose
        a padding token."""
        known = self._model.config.vocab_size
        return tokens if known >= self._vocabulary else tokens.clamp(max=known - 1)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Pad or cut the draft's logits [B, Vd] to the target's vocabulary; missing tokens get probability 0."""
        missing = self._vocabulary - logits.shape[-1]
        if missing <= 0:
            return logits[:, : self._vocabulary]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)


class DraftModelTree(DraftModelChain):
    """Drafts a tree with a draft model.

    Tree nodes write their keys and values to the slots after the root, level by level. Those of accepted nodes are thus
    not at their positions, and the last level is not run at all. The first pass of each step therefore runs the tokens
    that the last verify accepted, and the root. It has a fixed number of queries, the most that can be new; entries
    after the root are overwritten later.
    """

    def __init__(
        self, model: Decoder, forward: Forward, cache: KVCache, shape: DraftShape, vocabulary: int, device_rows: int
    ) -> None:
        super().__init__(model, forward, cache, vocabulary)
        self._shape = shape
        # Per device row: number of newest tokens without keys, including the root; 1 for the padding row.
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


def _read_config(found: dict[str, Any]) -> ModelConfig:
    check_algorithm(found, "standalone")
    return ModelConfig.from_dict(found)


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is another checkpoint with the same vocabulary, or the target without some layers ("self:skip=12-15").

    Skipping layers follows Zhang et al., "Draft & Verify" (2023). Raises SpecbatchError if the draft does not fit the
    target.
    """
    asked = config.speculation
    shape = asked.shape
    assert asked.draft is not None
    first = 2 if asked.corpus is None else shape.tokens + 1
    scratch, uncached_tail = (shape.draft_slots, shape.steps) if shape.topk > 1 else (0, first - 1)
    takes = partial(DraftPlan, scratch_slots=scratch, uncached_tail=uncached_tail, idle_at_zero=asked.is_auto)

    def drafter(model: Decoder, loader: Loader) -> DraftModelChain:
        way = loader.draft(model)
        if shape.topk > 1:
            return DraftModelTree(model, *way, shape, target.config.vocab_size, len(loader.page_table))
        return DraftModelChain(model, *way, target.config.vocab_size, first)

    if asked.draft == "self" or asked.draft.startswith("self:"):
        _refuse_states(asked.draft, target.config)
        skipped = parse_skip(asked.draft, target.config.num_layers)

        def build_view(model: Decoder, loader: Loader) -> DraftModelChain:
            return drafter(model.without(skipped), loader)

        return takes(build_view, target.config, target.config.num_layers - len(skipped))

    load_format = "dummy" if config.load_format == "dummy" else "auto"
    with of_draft(asked.draft):
        draft = weights.open_checkpoint(asked.draft, load_format, seed=config.seed + 1, log=log, read=_read_config)
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
            f"it has {recurrent} recurrent layers, whose states cannot be rolled back after drafting; use a draft with "
            "attention layers only, or algorithm 'eagle3', 'mtp', 'dflash' or 'ngram'"
        )
        raise refuse("draft", draft, works)


def parse_skip(draft: str, layers: int) -> frozenset[int]:
    """Parse "self:skip=12-15,20": the layers that are skipped, of a model with `layers` layers. Ranges are
    inclusive."""
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
