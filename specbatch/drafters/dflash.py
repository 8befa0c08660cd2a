"""DFLASH drafting: a small model that attends to the target's features drafts a whole block in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specbatch import weights
from specbatch.config.draft_shape import DraftShape
from specbatch.core.attention_metadata import PrefillMetadata
from specbatch.core.device_batch import DeviceBatch
from specbatch.core.draft_states import DraftStates
from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.base import DraftPlan, NoDraft, no_drafts
from specbatch.drafters.choose import choose_at_once, draft_states, takes_argmax
from specbatch.drafters.head_checks import stated_drafts
from specbatch.drafters.tree import expand_rows
from specbatch.errors import of_draft, refuse
from specbatch.kernels.attention.context_kv import write_context_kv, write_verified_kv
from specbatch.kernels.sampling.argmax_topk import Scores
from specbatch.memory.kv_cache import KVCache
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, Features
from specbatch.models.heads.dflash import DFlash, DFlashConfig, published_shape, token_ids
from specbatch.models.weight_reader import Reader
from specbatch.runtime.device import find_device
from specbatch.runtime.loader import Loader
from specbatch.weights.dummy import DummyCheckpoint

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.weights import Checkpoint, Log


class DFlashDrafter(NoDraft):
    """The draft's KV cache has context entries for every verified position, with the target's page numbers. They depend
    on the tokens only, so pages of a shared prefix have valid entries, too. A block writes its own keys and values
    after the context; the next verified tokens or the next block overwrite them before they are read.
    """

    def __init__(self, model: DFlash, cache: KVCache, count: int) -> None:
        """count: maximum number of drafts. A pass always runs the rows for all of them."""
        self._model = model
        self._cache = cache
        self._rows = count if model.config.from_anchor else count + 1

    def reserve(self, slots: int) -> None:
        """Allocate what is kept for each slot of the batch. Called once, before anything else."""

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        context = self._context(features)
        write_context_kv(
            context, self._model.heads, *self._stores, metadata.positions, metadata.kv_slots, *self._scales
        )

    def propose(self, step: StepInput) -> Proposal:
        if not step.num_drafts:
            return no_drafts(step)
        hidden, roots = self._fill(step)
        return self._choose(step, hidden, roots)

    def update(self, step: StepInput, features: Features, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        write_verified_kv(
            self._context(features), self._model.heads, *self._stores, step.verified(accepted), *self._scales
        )

    def _fill(self, step: StepInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the block. Returns its hidden states [B, rows, H], and the roots int64 [B]."""
        model, rows = self._model, self._rows
        masks = step.slots.new_full((len(step.slots), rows - 1), model.config.mask_token)
        tokens, positions = step.batch.stage(step.slots, masks, None)
        metadata = step.decode_metadata(step.lengths, rows, masks=model.config.masks)
        hidden = model.block.forward(tokens, positions, metadata.bind(self._cache)).last
        return hidden.unflatten(0, (-1, rows)), tokens.view(-1, rows)[:, 0]

    def _choose(self, step: StepInput, hidden: torch.Tensor, roots: torch.Tensor) -> Proposal:
        """Choose drafts from the hidden states of a block [B, rows, H] after roots int64 [B].

        Each has a row of its own; given the context they are independent.
        """
        model = self._model
        scores = self._scores(hidden, step.num_drafts, greedy=takes_argmax(step))
        return choose_at_once(scores, step, ids=model.ids, vocabulary=model.config.vocab_size)

    def _scores(self, hidden: torch.Tensor, count: int, *, greedy: bool) -> Scores:
        """[B, rows, H] -> `Decoder.scores` [B, count, V] of the rows that draft. For all drafts a row of the root that
        drafts nothing passes the output matrix, too: its logits are not used, but a GEMM of 512 rows takes less time
        than one of 480.
        """
        first = self._first_row
        skipped = 0 if first + count == self._rows else first
        rows = hidden[:, skipped : first + count]
        scores: Scores = self._model.block.scores(rows.flatten(0, 1), greedy=greedy).unflatten(0, rows.shape[:2])
        return scores[:, first - skipped :]

    def _drafting(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """The rows [B, count, H] of the first `count` drafts, of hidden states [B, rows, H] of a block."""
        return hidden[:, self._first_row :][:, :count]

    @property
    def _first_row(self) -> int:
        """The row of the first draft."""
        return 0 if self._model.config.from_anchor else 1

    def _context(self, features: Features) -> torch.Tensor:
        assert features.aux is not None
        return self._model.context(features.aux)

    @property
    def _stores(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.keys, self._cache.values

    @property
    def _scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self._cache.k_scales, self._cache.v_scales


class DFlashTree(DFlashDrafter):
    """Drafts a tree from the distributions of a block, which are independent given the context: the texts with the
    largest products of probabilities (`tree.expand_block`)."""

    def __init__(self, model: DFlash, cache: KVCache, shape: DraftShape) -> None:
        super().__init__(model, cache, shape.steps)
        self._shape = shape

    def propose(self, step: StepInput) -> Proposal:
        drafts, ancestors = self._expand(step, *self._fill(step), draft_states(step, self._model.config.vocab_size))
        return Proposal(drafts, step.batch.filled(self._shape.tokens, step.slots), ancestors=ancestors)

    def update(self, step: StepInput, features: Features, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        assert path is not None
        assert features.aux is not None
        first = torch.arange(len(path), device=path.device)[:, None] * path.shape[1]
        ordered = features.aux[(first + path).flatten()]  # the accepted nodes at the positions of their tokens
        super().update(step, features._replace(aux=ordered), accepted, None)

    def _expand(
        self, step: StepInput, hidden: torch.Tensor, roots: torch.Tensor, states: DraftStates | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tree of a block, as `expand_given` returns it, from its hidden states [B, rows, H] after roots int64
        [B]."""
        logits = self._scores(hidden, self._shape.steps, greedy=False)
        assert isinstance(logits, torch.Tensor)
        return expand_rows(roots, logits, self._shape, self._model.ids, states)


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is a published checkpoint, or with load_format "dummy" random weights: draft="dummy" has the shape of
    published drafts. Raises SpecbatchError if the draft does not fit the target.
    """
    return block_plan(target, config, log, Block(DFlashConfig, DFlash, DFlashDrafter, published_shape, DFlashTree))


class Block(NamedTuple):
    """What a block draft consists of: its config, network and drafter, the published config for a target, and the
    drafter of trees."""

    config: type[DFlashConfig]
    network: Callable[[Reader, Decoder, int], Any]
    drafter: Callable[[Any, KVCache, int], DFlashDrafter]
    published: Callable[[ModelConfig], dict[str, Any]]
    tree: Callable[[Any, KVCache, DraftShape], DFlashTree]


def block_plan(target: Checkpoint, config: EngineConfig, log: Log, parts: Block) -> DraftPlan:
    """The plan of a draft that fills a block. Raises SpecbatchError if it does not fit the target."""
    asked = config.speculation
    is_tree = asked.drafts_trees
    if asked.draft_steps is not None and not (asked.is_auto or is_tree):
        raise refuse("draft_steps", asked.draft_steps, "a block is drafted in one pass; leave it out")
    draft = _open(target, config, log, parts)
    shape = draft.config
    if not isinstance(shape, parts.config):
        raise refuse("draft", asked.draft, f"a draft for {asked.algorithm!r} is a folder of safetensors or a hub id")
    differences = shape.differences(target.config)
    if differences:
        raise refuse("draft", asked.draft, f"it was not trained for {target.name}: {'; '.join(differences)}")
    if shape.draft_vocab is not None:
        ids = token_ids(draft.tensor("d2t"))
        if len(ids.unique()) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < shape.vocab_size:
            works = f"its d2t must have offsets to {len(ids)} different tokens of {shape.vocab_size}"
            raise refuse("draft", asked.draft, works)
    most = shape.most_drafts
    usual = stated_drafts(shape.stated_drafts, most, asked, log) or most
    count = asked.shape.steps if is_tree else (asked.draft_steps if asked.is_auto else asked.draft_tokens) or usual
    assert isinstance(count, int)
    if count > most:
        setting = "draft_steps" if is_tree else "draft_tokens"
        raise refuse(setting, count, f"the draft's block size is {shape.block_size}; use at most {most}")
    if asked.shape.topk > shape.choices:
        works = f"the draft chooses from {shape.choices} tokens at each position; use at most {shape.choices}"
        raise refuse("draft_topk", asked.shape.topk, works)
    log(f"draft: {draft.name} ({draft.origin})")
    for line in shape.lines():
        log(line)

    def build(model: Decoder, loader: Loader) -> DFlashDrafter:
        own = parts.network(loader.draft_reader(shape.with_drafts(count), draft.tensor), model, loader.max_positions)
        cache = loader.cache(own.config, shape.num_layers, "draft")
        drafter = parts.tree(own, cache, asked.shape) if is_tree else parts.drafter(own, cache, count)
        drafter.reserve(loader.page_table.shape[0])
        return drafter

    return DraftPlan(
        build,
        shape,
        shape.num_layers,
        weights=shape,
        needs_all_hidden=target.config.ends_in(shape.target_layers),
        aux=shape.target_layers,
        num_drafts=None if is_tree else count,
        scratch_slots=count + 1 if is_tree else 0,
        catch_up="target" if asked.is_auto else "none",
    )


def _open(target: Checkpoint, config: EngineConfig, log: Log, parts: Block) -> Checkpoint:
    asked, seed = config.speculation.draft, config.seed + 1
    assert asked is not None
    dummy, device = config.load_format == "dummy", str(find_device(config.device))
    read = parts.config.from_dict
    if dummy and asked == "dummy":
        own = read(parts.published(target.config))
        return DummyCheckpoint(own, name=f"a draft for {target.name}", seed=seed, tokenizer=None, device=device)
    with of_draft(asked):
        works = "give a folder with config.json and safetensors, or a hub id"
        return weights.open_checkpoint(
            asked, "dummy" if dummy else "auto", seed=seed, log=log, read=read, works=works, device=device
        )
