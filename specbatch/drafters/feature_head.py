"""EAGLE, EAGLE-3 and MTP drafting: a head on the target's hidden states drafts a chain or a tree.

The pair (f_i, t_{i+1}) of a feature and the next token has its key and value at position i of the head's own KV cache,
which has the target's page numbers. Which pairs are complete after a verify depends on the accepted tokens, so the
features of a verify are buffered on the device, and the next draft starts with their pairs.

A prompt that continues a shared prefix reuses the last pair of that prefix, which may contain another next token. This
costs at most a little acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from specbatch.config.draft_shape import DraftShape
from specbatch.core.attention_metadata import DecodeMetadata, PrefillMetadata
from specbatch.core.completion import Completion
from specbatch.core.device_batch import DeviceBatch
from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.base import Diagnosis, DraftPlan, NoDraft, no_drafts
from specbatch.drafters.choose import DraftChain, draft_states, takes_argmax
from specbatch.drafters.head_prefill import HeadPrefill, HeadPrefillGraphs, attention_of
from specbatch.drafters.tree import Beams, expand
from specbatch.errors import refuse
from specbatch.kernels.attention.qkv import write_keys
from specbatch.kernels.attention.queries import AttentionInputs
from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.drafting.draft_inputs import PendingInputs, beam_inputs, buffer_features, pending_inputs
from specbatch.kernels.elementwise.gather_rows import gather_rows
from specbatch.kernels.sampling.argmax_topk import Scores
from specbatch.memory.kv_cache import KVCache
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, Features
from specbatch.models.heads.draft_head import DraftHead, Shapes
from specbatch.runtime.loader import Loader

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig


class FeatureChain(NoDraft):
    """Drafts a chain of up to `shape.steps` tokens, one pass each. The first pass also writes the buffered pairs.

    Per device row it buffers up to steps + 1 projected features, those of a verify, and the number `ready` of them that
    belong to committed tokens. These precede the root, so their positions are lengths - ready, lengths - ready + 1, ...

    A step consumes as many buffered pairs as its own verify can produce. Before a step with fewer drafts than the one
    before, `shorten` therefore writes all but one of them. A step without drafts only writes keys and values.

    head, cache: the network and its KV cache
    """

    def __init__(
        self,
        head: DraftHead,
        cache: KVCache,
        prefill: HeadPrefill,
        shape: DraftShape,
        slots: int,
        vocabulary: int,
        diagnosis: Diagnosis | None = None,
    ) -> None:
        """slots: device rows without the padding row; vocabulary: the target's; diagnosis: see `Drafter.diagnose`."""
        like, room, hidden = head.embedding, shape.steps + head.depths, head.config.hidden_size
        self.head = head
        self.cache = cache
        self._prefill = prefill
        self._shape = shape
        self._vocabulary = vocabulary
        self._diagnosis = diagnosis
        self._waiting = torch.zeros(slots + 1, room, hidden, dtype=like.dtype, device=like.device)
        self._ready = torch.ones(slots + 1, dtype=torch.int64, device=like.device)

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        taken = self.head.take(features)
        # The next token of a prompt's last token is not known yet; that pair is buffered, too, and written again.
        self._prefill([batch.tokens[metadata.slots, metadata.positions + 1]], taken, metadata)
        rows = metadata.slots[metadata.last]
        # A step runs the pairs after the ready ones, too, so they must be finite.
        self._waiting.index_fill_(0, rows, 0.0)
        self._waiting[rows, 0] = self.head.project(taken[metadata.last])
        self._ready.index_fill_(0, rows, 1)  # assigning a number by index would synchronize with the device

    def diagnose(self, completions: Sequence[Completion]) -> str | None:
        return None if self._diagnosis is None else self._diagnosis(completions)

    def propose(self, step: StepInput) -> Proposal:
        if not step.num_drafts:
            self._write(step)
            return no_drafts(step)
        hidden, places = self._newest(step)
        chain = self.begin_chain(step)
        for index in range(step.num_drafts):
            embedded = chain.choose_embedded(self.scores(hidden, step), self.head.embedding)
            if index + 1 < step.num_drafts:
                place = places[index + 1]
                hidden = self._run(step.decode_metadata(place, 1), embedded, hidden, place)
        return chain.proposal()

    def update(self, step: StepInput, features: Features, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        hidden = self.head.project(self.head.take(features))
        buffer_features(hidden, step.slots, accepted, path, self._waiting, self._ready)

    def shorten(self, step: StepInput) -> None:
        rows, most = step.slots, self._waiting.shape[1]
        self._write(step, most)
        self._waiting[rows, 0] = self._waiting[rows, self._ready[rows] - 1]
        self._ready.index_fill_(0, rows, 1)

    def begin_chain(self, step: StepInput) -> DraftChain:
        return DraftChain(step, ids=self.head.vocabulary, vocabulary=self._vocabulary)

    def scores(self, hidden: torch.Tensor, step: StepInput) -> Scores:
        """hidden [T, hidden_size] -> scores [T, Vd], of which a step chooses drafts."""
        return self.head.scores(hidden, greedy=takes_argmax(step))

    def _newest(self, step: StepInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the buffered pairs. Returns the hidden state [B, hidden_size] of the newest pair, whose token is the
        root, and the positions from that pair on, int64 [n, B]."""
        most = min(step.num_drafts + 1, self._waiting.shape[1])
        due = self._due(step, most)
        return self._run(
            step.decode_metadata(due.start, most), due.embedded, due.hidden, due.positions, due.newest
        ), due.places

    def _write(self, step: StepInput, most: int = 1) -> None:
        """Write keys and values of the buffered pairs, up to `most` per row, without the last layer's attention."""
        due, cache = self._due(step, most), self.cache
        rows = step.slots.repeat_interleave(most)
        slots = kv_slots(step.batch.page_table, rows, due.positions, step.page_size)
        head, attend = self.head, None
        if head.more:
            metadata = step.decode_metadata(due.start, most)
            metadata = replace(metadata, bound=None)  # pairs that are not ready may be beyond it
            attend = attention_of(head, cache, metadata, due.positions)
        _, qkv = head.enter(due.embedded, due.hidden, attend)
        write_keys(AttentionInputs(qkv, head.heads_of(head.depth - 1), due.positions, *cache.layers[-1]), slots)

    def _due(self, step: StepInput, most: int) -> PendingInputs:
        """Up to `most` buffered pairs per row. Rows with fewer ready pairs get invalid ones after them, whose positions
        are overwritten before they are read."""
        memory = self._waiting, self._ready
        return pending_inputs(step.batch.tokens, step.slots, step.lengths, *memory, self.head.embedding, most)

    def _run(
        self,
        metadata: DecodeMetadata,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run pairs through the layers. Returns hidden states [n, hidden_size] of `rows`, or of all."""
        head = self.head
        attend = partial(metadata.bind(self.cache).attend, positions=positions)
        x, qkv = head.enter(embedded, hidden, attend)
        attended = attend(head.depth - 1, qkv, head.heads_of(head.depth - 1))
        if rows is not None:
            x, attended = gather_rows(x, attended, rows)
        return head.leave(x, attended)


ChainKind = Callable[[DraftHead, KVCache, HeadPrefill, DraftShape, int, int, Diagnosis | None], FeatureChain]


class FeatureTree(FeatureChain):
    """Drafts a tree by best-first expansion. The pair whose token is the root is the root of the tree."""

    def propose(self, step: StepInput) -> Proposal:
        head = self.head
        newest, places = self._newest(step)
        before, root = newest[:, None], places[0]

        def run(beams: Beams) -> torch.Tensor:
            nonlocal before
            width = beams.tokens.shape[1]
            pairs = beam_inputs(beams.tokens, beams.origin, before, root, beams.depth, head.embedding)
            hidden = self._run(step.decode_metadata(root, width, beams.ancestors, beams.first), *pairs)
            before = hidden.unflatten(0, (-1, width))
            logits: torch.Tensor = head.logits(hidden).unflatten(0, (-1, width))
            return logits

        drafts, ancestors = expand(
            head.logits(newest), self._shape, run, head.vocabulary, draft_states(step, self._vocabulary)
        )
        drafted = step.batch.filled(self._shape.tokens, step.slots)
        return Proposal(drafts, drafted, ancestors=ancestors)


def head_plan(
    build: Callable[[Decoder, Loader], FeatureChain],
    layer: ModelConfig,
    config: EngineConfig,
    *,
    weights: ModelConfig | None = None,
    shapes_of: Callable[[ModelConfig], Shapes] = lambda config: {},
    needs_all_hidden: bool = True,
    aux: tuple[int, ...] = (),
) -> DraftPlan:
    """The plan of a head with layers like `layer`; other arguments as in `DraftPlan`. When a request ends, the pairs of
    its last verify are still buffered, which gives the `uncached_tail`."""
    if config.draft_attention_backend != "auto" and layer.num_layers == 1:
        works = "this head has one layer, which writes keys and values of prompts without attention; leave it out"
        raise refuse("draft_attention_backend", config.draft_attention_backend, works)
    shape = config.speculation.shape
    return DraftPlan(
        build,
        layer,
        kv_layers=layer.num_layers,
        weights=weights,
        shapes_of=shapes_of,
        needs_all_hidden=needs_all_hidden,
        aux=aux,
        scratch_slots=shape.draft_slots,
        uncached_tail=shape.steps + 1,
        catch_up="target" if config.speculation.is_auto else "none",
        embedded=1,
    )


def feature_chain(
    head: DraftHead,
    loader: Loader,
    config: EngineConfig,
    vocabulary: int,
    diagnosis: Diagnosis | None = None,
    kind: ChainKind | None = None,
) -> FeatureChain:
    """Build the drafter of an engine and register its prefill with the loader. diagnosis: see `Drafter.diagnose`; kind:
    its class, if not that of a chain or tree by the shape."""
    cache = loader.cache(head.config, head.depth, "draft")
    prefill = HeadPrefill(head, cache)
    if loader.recorder is not None:
        prefill = HeadPrefillGraphs(head, cache, loader.recorder, loader.chunk)
    loader.forwards["draft"] = prefill
    shape, slots = config.speculation.shape, loader.page_table.shape[0] - 1
    kind = kind or (FeatureTree if config.speculation.drafts_trees else FeatureChain)
    return kind(head, cache, prefill, shape, slots, vocabulary, diagnosis)
