"""STANDALONE drafting: a smaller model drafts a chain or a tree."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specbatch import weights
from specbatch.config.draft_shape import DraftShape
from specbatch.core.attention_metadata import PrefillMetadata, positions_from
from specbatch.core.device_batch import DeviceBatch
from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.base import DraftPlan, NoDraft, no_drafts
from specbatch.drafters.choose import DraftChain, draft_states, takes_argmax
from specbatch.drafters.draft_vocabulary import OtherVocabulary, SameVocabulary
from specbatch.drafters.head_checks import check_algorithm
from specbatch.drafters.tree import Beams, expand
from specbatch.errors import of_draft, refuse
from specbatch.memory.kv_cache import KVCache
from specbatch.memory.recurrent_state import RecurrentStates
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, Features
from specbatch.runtime.device import find_device
from specbatch.runtime.loader import Loader
from specbatch.runtime.prefill_forward import Forward
from specbatch.text.shared_tokens import SharedTokens, shared_tokens
from specbatch.text.tokenizer import ByteTokenizer, vocabulary_difference

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.config.speculation import Speculation
    from specbatch.weights import Checkpoint, Log


class DraftModelChain(NoDraft):
    """Drafts a chain with a draft model. The model has its own KV cache with the target's page numbers.

    After a verify that accepts all drafts, the last draft has no keys and values in this cache. The first pass of each
    step therefore runs two tokens, the newest committed one and the root; existing entries are overwritten with the
    same values. If accepted drafts may be another drafter's (with a corpus), it runs as many tokens as a verify can
    commit, and the root. In steps without drafts the model does not run; it catches up later with prompt passes.

    model, cache: the draft model and its KV cache
    """

    def __init__(
        self, model: Decoder, forward: Forward, cache: KVCache, vocabulary: SameVocabulary, first: int = 2
    ) -> None:
        """forward: the model's prefill forward pass; first: tokens of the first pass of a step."""
        self.model = model
        self._forward = forward
        self.cache = cache
        self._first = first
        self._vocabulary = vocabulary

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        self.catch_up(batch, metadata)

    def catch_up(self, batch: DeviceBatch, metadata: PrefillMetadata) -> None:
        # Only keys and values are needed.
        self._forward(metadata, rows=[], tokens=None if self._vocabulary.reads_all else self._read(metadata.tokens))

    def propose(self, step: StepInput) -> Proposal:
        if not step.num_drafts:
            return no_drafts(step)
        words = self._vocabulary
        chain = DraftChain(step, ids=words.ids, vocabulary=words.size)
        newest = self._newest(step)
        for count in range(1, step.num_drafts + 1):
            chain.choose(words.scores(self.model, newest, greedy=takes_argmax(step)))
            if count < step.num_drafts:
                newest = self._after(step, chain.tokens[:, :count])
        return chain.proposal()

    def _newest(self, step: StepInput) -> torch.Tensor:
        """Run the first pass. Returns the hidden states [B, H] of the roots."""
        rows = self._first
        start = step.lengths + 1 - rows
        if rows > 2:  # a short text has fewer tokens; what is stored after its root is overwritten
            start = start.clamp(min=0)
        positions = positions_from(start, rows)
        tokens = step.batch.tokens[step.slots[:, None], positions].flatten()
        context = step.decode_metadata(start, rows).bind(self.cache)
        last = self.model.forward(self._read(tokens), positions.flatten(), context).last
        hidden = last.view(len(step.slots), rows, -1)
        if rows == 2:
            return hidden[:, -1]
        root = (step.lengths - start)[:, None, None].expand(-1, 1, hidden.shape[2])
        return hidden.gather(1, root)[:, 0]

    def _after(self, step: StepInput, drafts: torch.Tensor) -> torch.Tensor:
        """Run the last of `drafts` [B, n]. Returns its hidden states [B, H]."""
        place = step.lengths + drafts.shape[1]
        context = step.decode_metadata(place, 1).bind(self.cache)
        return self.model.forward(self._read(drafts[:, -1]), place, context).last

    def _read(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._vocabulary.read(tokens)


class LaggingDraftModel(DraftModelChain):
    """A draft model that runs the tokens which the last verify accepted, and the root, in the first pass of each step.
    The pass has a fixed number of tokens, the most that can be new; what it computes after the root is overwritten."""

    def __init__(
        self, model: Decoder, forward: Forward, cache: KVCache, vocabulary: SameVocabulary, first: int, device_rows: int
    ) -> None:
        """first: see `DraftModelChain`."""
        super().__init__(model, forward, cache, vocabulary, first)
        # Per device row: number of newest tokens that the model has not run, including the root; 1 for the padding row.
        self._new = torch.ones(device_rows, dtype=torch.int64, device=model.device)

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        super().prefill(batch, metadata, features)
        self._new.index_fill_(0, metadata.slots, 1)

    def update(self, step: StepInput, features: Features, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        self._new[step.slots] = torch.where(step.slots > 0, accepted + 1, 1)

    def _newest(self, step: StepInput) -> torch.Tensor:
        new, count = self._new[step.slots], self._first
        start = step.lengths + 1 - new
        positions = positions_from(start, count)
        tokens = self._read(step.batch.tokens[step.slots[:, None], positions])
        context = step.decode_metadata(start, count).bind(self.cache)
        last = self.model.forward(tokens.flatten(), positions.flatten(), context).last
        hidden = last.view(len(new), count, -1)
        return hidden.gather(1, (new - 1)[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]


class DraftModelTree(LaggingDraftModel):
    """Drafts a tree with a draft model.

    Tree nodes write their keys and values to the slots after the root, level by level. Those of accepted nodes are thus
    not at their positions, and the last level is not run at all: they run again in the next step.
    """

    def __init__(
        self,
        model: Decoder,
        forward: Forward,
        cache: KVCache,
        shape: DraftShape,
        vocabulary: SameVocabulary,
        device_rows: int,
    ) -> None:
        super().__init__(model, forward, cache, vocabulary, shape.steps + 1, device_rows)
        self._shape = shape

    def propose(self, step: StepInput) -> Proposal:
        model, lengths, words = self.model, step.lengths, self._vocabulary
        logits = words.fit(model.logits(self._newest(step)))

        def run(beams: Beams) -> torch.Tensor:
            width = beams.tokens.shape[1]
            positions = (lengths + beams.depth).repeat_interleave(width)
            context = step.decode_metadata(lengths, width, beams.ancestors, beams.first).bind(self.cache)
            features = model.forward(self._read(beams.tokens).flatten(), positions, context)
            return words.fit(model.logits(features.last)).view(len(lengths), width, -1)

        drafts, ancestors = expand(logits, self._shape, run, words.ids, draft_states(step, words.size))
        return Proposal(drafts, step.batch.filled(self._shape.tokens, step.slots), ancestors=ancestors)


class RecurrentDraftChain(LaggingDraftModel):
    """Drafts a chain with a model that has recurrent layers.

    Only committed tokens reach its states. The pass after the first one of a step includes them; of drafts, each pass
    runs all that are there, since the states before them are kept (see `RecurrentStates`).
    """

    def _newest(self, step: StepInput) -> torch.Tensor:
        hidden = super()._newest(step)
        self._states.commit(step.slots, self._new[step.slots] - 1, None)
        return hidden

    def _after(self, step: StepInput, drafts: torch.Tensor) -> torch.Tensor:
        start, count = step.lengths + 1, drafts.shape[1]
        context = step.decode_metadata(start, count).bind(self.cache)
        positions = positions_from(start, count).flatten()
        last = self.model.forward(self._read(drafts).flatten(), positions, context).last
        self._states.commit(step.slots, step.batch.filled(-1, step.slots), None)  # nothing of this pass
        return last.view(len(drafts), count, -1)[:, -1]

    @property
    def _states(self) -> RecurrentStates:
        assert self.cache.states is not None
        return self.cache.states


def _read_config(found: dict[str, Any]) -> ModelConfig:
    check_algorithm(found, "standalone")
    return ModelConfig.from_dict(found)


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is another checkpoint, or the target without some layers ("self:skip=12-15").

    Skipping layers follows Zhang et al., "Draft & Verify" (2023). Raises SpecbatchError if the draft does not fit the
    target.
    """
    asked = config.speculation
    assert asked.draft is not None
    if asked.draft == "self" or asked.draft.startswith("self:"):
        skipped = parse_skip(asked.draft, target.config.num_layers)
        kept = [layer for layer in range(target.config.num_layers) if layer not in skipped]
        for layer in kept:
            if (source := target.config.kv_layer(layer)) in skipped:
                works = f"layer {layer} attends to the keys and values of layer {source}; keep that one"
                raise refuse("draft", asked.draft, works)

        def view(model: Decoder, loader: Loader) -> Decoder:
            return model.without(skipped)

        return _plan(config, target.config, target.config, kept, view)

    load_format = "dummy" if config.load_format == "dummy" else "auto"
    with of_draft(asked.draft):
        draft = weights.open_checkpoint(
            asked.draft,
            load_format,
            seed=config.seed + 1,
            log=log,
            read=_read_config,
            max_model_len=config.max_model_len,
            device=str(find_device(config.device)),
        )
        own = draft.tokenizer()
    # A draft of random weights has no tokenizer, and one that was given is the target's alone: only the sizes count.
    theirs = ByteTokenizer(target.config.vocab_size) if isinstance(own, ByteTokenizer) else target.tokenizer()
    shared = None
    if difference := vocabulary_difference(theirs, own):
        shared = None if isinstance(own, ByteTokenizer) else shared_tokens(theirs, own)
        if shared is None:
            works = "and shares no text with it; use a draft whose tokens are texts of the target's"
            raise refuse("draft", asked.draft, f"its vocabulary is not the target's ({difference}), {works}")
    log(f"draft: {draft.name} ({draft.origin}); {draft.config.rope}")
    if draft.config.note is not None:
        log(f"draft: {draft.config.note}")
    if shared is not None:
        log(
            f"draft: another vocabulary ({difference}): it drafts the {len(shared.draft)} of its tokens that are also "
            f"among the target's {len(shared.known)}"
        )

    def loaded(model: Decoder, loader: Loader) -> Decoder:
        return loader.model(draft, of_draft=True)

    layers = range(draft.config.num_layers)
    return _plan(config, target.config, draft.config, layers, loaded, draft.config, shared)


def _plan(
    config: EngineConfig,
    target: ModelConfig,
    draft: ModelConfig,
    layers: Sequence[int],
    model_of: Callable[[Decoder, Loader], Decoder],
    own: ModelConfig | None = None,
    shared: SharedTokens | None = None,
) -> DraftPlan:
    """The plan of a draft model that consists of these `layers` of a model with the config `draft`. model_of: makes it
    from the target; own: the model whose weights are loaded for it; shared: with another vocabulary."""
    asked = config.speculation
    if own is None and asked.quantizes_draft:
        works = "a draft that skips layers shares the target's weights; leave it out"
        raise refuse("draft_quantization", asked.draft_quantization, works)
    shape, sizes = asked.shape, (target.vocab_size, draft.vocab_size)
    attention = sum(layer in layers for layer in draft.kv_layers)
    if recurrent := sum(not draft.has_kv[layer] for layer in layers):
        _check_recurrent(asked, recurrent)
    most = shape.tokens + 1

    def build(model: Decoder, loader: Loader) -> DraftModelChain:
        found, rows = model_of(model, loader), len(loader.page_table)
        way = loader.draft(found)
        vocabulary = SameVocabulary(*sizes) if shared is None else OtherVocabulary(*sizes, shared, found.device)
        if asked.drafts_trees:
            return DraftModelTree(found, *way, shape, vocabulary, rows)
        if recurrent:
            return RecurrentDraftChain(found, *way, vocabulary, most, rows)
        return DraftModelChain(found, *way, vocabulary, 2 if asked.corpus is None else most)

    is_tree = asked.drafts_trees
    return DraftPlan(
        build,
        draft,
        attention,
        recurrent,
        own,
        scratch_slots=shape.draft_slots if is_tree else 0,
        uncached_tail=shape.steps if is_tree else 1 if asked.corpus is None else shape.tokens,
        catch_up="draft" if asked.is_auto else "none",
    )


def _check_recurrent(asked: Speculation, layers: int) -> None:
    works = f"the draft has {layers} recurrent layer{'s' if layers > 1 else ''}"
    if asked.is_auto:
        raise refuse("draft_tokens", "auto", f"{works}, whose states would miss steps without drafts; use a number")
    if asked.drafts_trees:
        raise refuse("draft_topk", asked.shape.topk, f"{works}, which draft chains only; use 1")


def parse_skip(draft: str, layers: int) -> frozenset[int]:
    """Parse "self:skip=12-15,20": the layers that are skipped, of a model with `layers` layers. Ranges are
    inclusive."""
    skipped: set[int] = set()
    for part in draft.removeprefix("self:skip=").split(","):
        found = re.fullmatch("([0-9]{1,19})(?:-([0-9]{1,19}))?", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if first > last:
            raise refuse("draft", draft, "write self:skip=FIRST-LAST, for example self:skip=12-15")
        skipped |= set(range(min(first, layers), min(last, layers) + 1))
    if not skipped or not skipped < set(range(layers)):
        raise refuse("draft", draft, f"the model has layers 0-{layers - 1}; skip some of them and keep at least one")
    return frozenset(skipped)
