"""UNO drafting: the target itself drafts a block in one pass, in which rows of noise have its weights plus a LoRA.

SGLang (#37667). The row of the newest token has the target's own weights and drafts what the target would generate. The
rows after it are random tokens, each of which drafts one more; given the noise, the drafts are independent. The pass
reads the target's KV cache. It writes keys and values from the newest token on, which the verify after it overwrites.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specbatch.config.draft_shape import DraftShape
from specbatch.core.attention_metadata import positions_from
from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.base import DraftPlan, NoDraft, no_drafts
from specbatch.drafters.choose import choose_at_once, draft_states, takes_argmax
from specbatch.drafters.tree import expand_rows
from specbatch.errors import of_draft, refuse
from specbatch.kernels.sampling.argmax_topk import Scores
from specbatch.kernels.sampling.rng import NOISE, verify_keys
from specbatch.memory.kv_cache import KVCache
from specbatch.models.decoder import Decoder
from specbatch.models.heads.uno import CONFIG_FILE, Adapter, adapted, check_target, usual_adapter
from specbatch.runtime.device import find_device
from specbatch.runtime.loader import Loader
from specbatch.weights.draft_heads import dummy_config, dummy_draft, open_draft
from specbatch.weights.folder import check_tensors

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.weights import Checkpoint, Log


class UnoDrafter(NoDraft):
    """Keeps nothing of a text."""

    def __init__(self, model: Decoder, cache: KVCache, count: int) -> None:
        """model: with the adapter, for blocks of `count` tokens; cache: the target's; count: the most drafts."""
        self._model = model
        self._cache = cache
        self._count = count

    def propose(self, step: StepInput) -> Proposal:
        if not step.num_drafts:
            return no_drafts(step)
        scores = self._scores(step, step.num_drafts, greedy=takes_argmax(step))
        return choose_at_once(scores, step, ids=None, vocabulary=self._model.config.vocab_size)

    def _scores(self, step: StepInput, count: int, *, greedy: bool) -> Scores:
        """`Decoder.scores` of the first `count` drafts, [B, count, V]."""
        model = self._model
        keys = verify_keys(positions_from(step.lengths + 1, self._count - 1), step.lengths[:, None])
        noise = (step.sampling.uniform(keys, NOISE) * model.config.vocab_size).long()
        tokens, positions = step.batch.stage(step.slots, noise, None)
        context = step.decode_metadata(step.lengths, self._count).bind(self._cache)
        hidden = model.forward(tokens, positions, context).last.unflatten(0, (-1, self._count))[:, :count]
        found: Scores = model.scores(hidden.flatten(0, 1), greedy=greedy).unflatten(0, hidden.shape[:2])
        return found


class UnoTree(UnoDrafter):
    """Drafts a tree of the texts with the largest products of probabilities, as DFLASH does."""

    def __init__(self, model: Decoder, cache: KVCache, shape: DraftShape) -> None:
        super().__init__(model, cache, shape.steps)
        self._shape = shape

    def propose(self, step: StepInput) -> Proposal:
        logits = self._scores(step, self._shape.steps, greedy=False)
        assert isinstance(logits, torch.Tensor)
        roots, states = step.batch.tokens[step.slots, step.lengths], draft_states(step, logits.shape[-1])
        drafts, ancestors = expand_rows(roots, logits, self._shape, None, states)
        return Proposal(drafts, step.batch.filled(self._shape.tokens, step.slots), ancestors=ancestors)


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is an adapter in the format of PEFT. Raises SpecbatchError if it does not fit the target."""
    asked = config.speculation
    assert asked.draft is not None
    check_target(target.config)
    if config.tensor_parallel > 1:
        raise refuse("tensor_parallel", config.tensor_parallel, "the adapter of a UNO draft is not divided; use 1")
    if asked.draft_steps is not None and not (asked.is_auto or asked.drafts_trees):
        raise refuse("draft_steps", asked.draft_steps, "a block is drafted in one pass; leave it out")
    with of_draft(asked.draft):
        if config.load_format == "dummy":
            described = dummy_config(asked.draft, CONFIG_FILE) or dict(usual_adapter())
            shapes = Adapter.from_dict(described).shapes(target.config)
            files = dummy_draft(described, shapes, config.seed + 1, str(find_device(config.device)))
        else:
            files = open_draft(asked.draft, CONFIG_FILE)
        adapter = Adapter.from_dict(files.config)
    check_tensors(adapter.shapes(target.config), files.shapes, files.origin, "draft")
    log(f"draft: {files.name} ({files.origin}), a LoRA of rank {adapter.rank} on {', '.join(adapter.modules)}")
    shape, is_tree = asked.shape, asked.drafts_trees

    def build(model: Decoder, loader: Loader) -> UnoDrafter:
        reader, cache = loader.draft_reader(target.config, files.tensor), loader.caches[0]
        drafting = adapted(model, adapter, reader, shape.steps)
        return UnoTree(drafting, cache, shape) if is_tree else UnoDrafter(drafting, cache, shape.steps)

    return DraftPlan(build, target.config, shapes_of=adapter.shapes, scratch_slots=shape.steps)
