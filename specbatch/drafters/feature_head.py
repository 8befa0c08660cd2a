"""Chains and trees drafted by a head on the target's features: the mechanics that EAGLE, EAGLE-3 and MTP share.

The pair (f_i, t_{i+1}) of a feature and the token behind it has its key and value at slot i of the head's own cache,
under the target's pages. Which pairs are whole depends on what was accepted, so those features of a verify whose pairs
are not written yet wait on the device, and the next draft begins with them.

A prompt that continues a shared prefix finds the last pair of that prefix as somebody else made it, perhaps with
another token behind: this costs at most a little acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from specbatch.core.attention_metadata import DecodeMetadata, PrefillMetadata
from specbatch.core.device_batch import DeviceBatch
from specbatch.core.embedded_prompt import EmbeddingOverrides
from specbatch.core.sampling import Sampling
from specbatch.core.step_input import Proposal, StepInput
from specbatch.draft_shape import DraftShape
from specbatch.drafters.base import DraftPlan, NoDraft, no_drafts
from specbatch.drafters.tree import Beams, expand
from specbatch.kernels.attention.qkv import split_qkv_rope
from specbatch.kernels.drafting.draft_inputs import PendingInputs, beam_inputs, buffer_features, pending_inputs
from specbatch.kernels.elementwise.gather_rows import gather_rows
from specbatch.kernels.sampling.argmax_topk import argmax_embedding
from specbatch.kernels.sampling.rng import DRAFT
from specbatch.memory.kv_cache import KVCache
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, Features
from specbatch.models.draft_head import DraftHead
from specbatch.runtime.cuda_graphs import GraphCounters, Program, Recorder, bucket_of, token_buckets
from specbatch.runtime.loader import Loader

if TYPE_CHECKING:
    from specbatch.config import EngineConfig


class HeadPrefill:
    """Writes keys and values of a prompt's pairs. Nobody reads what the layer computes there, so it does not attend."""

    def __init__(self, head: DraftHead, cache: KVCache) -> None:
        self.counters = GraphCounters()
        self._head = head
        self._cache = cache

    def __call__(self, tokens: torch.Tensor, taken: torch.Tensor, metadata: PrefillMetadata) -> None:
        """tokens int64 [T] behind the features taken [T, width] of the pass's tokens."""
        self.counters.fall_back("off")
        self._write(tokens, taken, metadata.positions, metadata.kv_slots, self._overrides(metadata))

    def _overrides(self, metadata: PrefillMetadata) -> EmbeddingOverrides | None:
        return metadata.embedding_overrides(self._head.embedding, ahead=1)

    def _write(
        self,
        tokens: torch.Tensor,
        taken: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        overrides: EmbeddingOverrides | None = None,
    ) -> None:
        head, cache = self._head, self._cache
        _, qkv = head.enter(head.embed(tokens, overrides), head.project(taken))
        split_qkv_rope(qkv, head.heads, positions, slots, cache.k[0], cache.v[0])


class HeadPrefillGraphs(HeadPrefill):
    """The same from one recording per token bucket."""

    def __init__(self, head: DraftHead, cache: KVCache, recorder: Recorder, most: int) -> None:
        """most: tokens of the largest pass."""
        super().__init__(head, cache)
        self._recorder = recorder
        self._buckets = token_buckets(most)
        self._graphs: dict[int, Program] = {}
        device = head.embedding.device
        # Tokens, positions and slots.
        self._places = torch.zeros(3, most, dtype=torch.int64, device=device)
        self._taken = torch.zeros(most, head.width, dtype=head.embedding.dtype, device=device)

    def __len__(self) -> int:
        return len(self._buckets)

    def capture(self) -> Iterator[None]:
        for bucket in reversed(self._buckets):

            def program(count: int = bucket) -> None:
                tokens, positions, slots = self._places[:, :count]
                self._write(tokens, self._taken[:count], positions, slots)

            self._recorder.warm(program)
            self._graphs[bucket] = self._recorder.record(program)
            yield

    def __call__(self, tokens: torch.Tensor, taken: torch.Tensor, metadata: PrefillMetadata) -> None:
        overrides = self._overrides(metadata)
        if overrides is not None:
            self.counters.fall_back("embeddings")
            self._write(tokens, taken, metadata.positions, metadata.kv_slots, overrides)
            return
        count = len(tokens)
        bucket = bucket_of(self._buckets, count)
        for static, here in zip(self._places, (tokens, metadata.positions, metadata.kv_slots), strict=True):
            static[:count].copy_(here)
        self._taken[:count].copy_(taken)
        self._places[2, count:bucket].zero_()  # what is computed for nobody goes to the page of padding rows
        self._graphs[bucket]()
        self.counters.replays += 1
        self.counters.padded += bucket - count


class FeatureChain(NoDraft):
    """Up to `count` drafts per iteration, one pass each; the first also writes the pairs that have waited.

    It remembers per device row up to count + 1 projected features, those of a verify, and how many of them stand for
    tokens that were kept: `ready`. They are those before the root, so their places are lengths - ready and on.

    An iteration takes in as many waiting pairs as its own verify makes. Before it drafts fewer than the one before,
    `shorten` therefore leaves one. Without drafts keys and values are written, and no more is computed.
    """

    def __init__(
        self, head: DraftHead, cache: KVCache, prefill: HeadPrefill, count: int, slots: int, vocabulary: int
    ) -> None:
        """slots: device rows without the padding row; vocabulary: the target's."""
        like = head.embedding
        self._head = head
        self._cache = cache
        self._prefill = prefill
        self._vocabulary = vocabulary
        self._waiting = torch.zeros(slots + 1, count + 1, head.config.hidden_size, dtype=like.dtype, device=like.device)
        self._ready = torch.ones(slots + 1, dtype=torch.int64, device=like.device)

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        taken = self._head.take(features)
        # Behind a prompt's last token stands whatever was there; that pair waits, too, and is written again.
        self._prefill(batch.tokens[metadata.slots, metadata.positions + 1], taken, metadata)
        rows = metadata.slots[metadata.last]
        self._waiting[rows, 0] = self._head.project(taken[metadata.last])
        self._ready.index_fill_(0, rows, 1)  # by an index and a number it would wait for the device

    def propose(self, step: StepInput) -> Proposal:
        if not step.num_drafts:
            self._write(step)
            return no_drafts(step)
        hidden, places = self._newest(step)
        drafts = step.slots.new_empty(len(step.slots), step.num_drafts)
        laws: list[torch.Tensor] = []
        for index in range(step.num_drafts):
            embedded, law = self.choose(hidden, step.sampling, places[index], drafts[:, index])
            laws += [] if law is None else [law]
            if index + 1 < step.num_drafts:
                place = places[index + 1]
                hidden = self._run(step.decode_metadata(place, 1), embedded, hidden, place)
        drafted = step.batch.filled(step.num_drafts, step.slots)
        return Proposal(drafts, drafted, torch.cat(laws, 1) if laws else None)

    def update(self, step: StepInput, features: Features, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        hidden = self._head.project(self._head.take(features))
        buffer_features(hidden, step.slots, accepted, path, self._waiting, self._ready)

    def shorten(self, step: StepInput) -> None:
        rows, most = step.slots, self._waiting.shape[1]
        self._write(step, most)
        self._waiting[rows, 0] = self._waiting[rows, self._ready[rows] - 1]
        self._ready.index_fill_(0, rows, 1)

    def choose(
        self, hidden: torch.Tensor, sampling: Sampling, places: torch.Tensor, out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One token for each hidden [B, hidden_size], behind the pairs at `places` int64 [B]: to `out` int64 [B].
        Returns its embedding [B, hidden_size], and float32 [B, 1, V] that it was drawn from, None if it is the
        likeliest."""
        head = self._head
        logits, ids = head.logits(hidden), head.vocabulary
        if not sampling.flags.sampled:
            return argmax_embedding(logits, head.embedding, ids, out), None
        positions = places[:, None] + 2  # a token is one position after its pair
        tokens, law = sampling.sample_with_probabilities(logits[:, None], positions, DRAFT)
        if ids is not None:  # what the head cannot draft has probability 0
            tokens, law = ids[tokens], law.new_zeros(*law.shape[:2], self._vocabulary).index_copy_(2, ids, law)
        return head.embed(out.copy_(tokens[:, 0])), law

    def _newest(self, step: StepInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the pairs that have waited; the hidden state [B, hidden_size] of the newest, which ends in the root,
        and the places from its own on, int64 [n, B]."""
        most = min(step.num_drafts + 1, self._waiting.shape[1])
        due = self._due(step, most)
        return self._run(
            step.decode_metadata(due.start, most), due.embedded, due.hidden, due.positions, due.newest
        ), due.places

    def _write(self, step: StepInput, most: int = 1) -> None:
        """Write the pairs that have waited, up to `most` of a row, and compute nothing else."""
        due, size, cache = self._due(step, most), step.page_size, self._cache
        rows = step.slots.repeat_interleave(most)
        slots = step.batch.page_table[rows, due.positions // size] * size + due.positions % size
        _, qkv = self._head.enter(due.embedded, due.hidden)
        split_qkv_rope(qkv, self._head.heads, due.positions, slots, cache.k[0], cache.v[0])

    def _due(self, step: StepInput, most: int) -> PendingInputs:
        """Up to `most` pairs of each row. Of those beyond the ready ones the places are written again before anything
        sees them."""
        memory = self._waiting, self._ready
        return pending_inputs(step.batch.tokens, step.slots, step.lengths, *memory, self._head.embedding, most)

    def _run(
        self,
        metadata: DecodeMetadata,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pairs of `shape` through the layer: the hidden states [n, hidden_size] of `rows`, or of all."""
        head = self._head
        x, qkv = head.enter(embedded, hidden)
        attended = metadata.bind(self._cache).attend(0, qkv, head.heads, positions)
        if rows is not None:
            x, attended = gather_rows(x, attended, rows)
        return head.leave(x, attended)


class FeatureTree(FeatureChain):
    """The same by best-first expansion. The pair of the root is the tree's own root: nodes stand behind it."""

    def __init__(
        self, head: DraftHead, cache: KVCache, prefill: HeadPrefill, shape: DraftShape, slots: int, vocabulary: int
    ) -> None:
        super().__init__(head, cache, prefill, shape.steps, slots, vocabulary)
        self._shape = shape

    def propose(self, step: StepInput) -> Proposal:
        head = self._head
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

        drafts, ancestors = expand(head.logits(newest), self._shape, run, head.vocabulary)
        drafted = step.batch.filled(self._shape.tokens, step.slots)
        return Proposal(drafts, drafted, ancestors=ancestors)


def head_plan(
    build: Callable[[Decoder, Loader], FeatureChain],
    layer: ModelConfig,
    config: EngineConfig,
    *,
    weights: ModelConfig | None = None,
    parameters: int = 0,
    needs_all_hidden: bool = True,
    aux: tuple[int, ...] = (),
) -> DraftPlan:
    """What a head of one `layer` takes; weights, parameters, every and aux as in `DraftPlan`. Of a request that ends,
    the pairs of the newest verify still wait."""
    shape = config.speculation.shape
    return DraftPlan(
        build,
        layer,
        kv_layers=1,
        weights=weights,
        parameters=parameters,
        needs_all_hidden=needs_all_hidden,
        aux=aux,
        scratch_slots=shape.draft_slots,
        uncached_tail=shape.steps + 1,
    )


def feature_chain(head: DraftHead, loader: Loader, config: EngineConfig, vocabulary: int) -> FeatureChain:
    """The drafter of an engine, and its pairs among the loader's ways through a prompt."""
    cache = loader.cache(head.config, 1, "draft")
    prefill = HeadPrefill(head, cache)
    if loader.recorder is not None:
        prefill = HeadPrefillGraphs(head, cache, loader.recorder, loader.chunk)
    loader.forwards["draft"] = prefill
    shape, slots = config.speculation.shape, config.max_running
    if shape.topk > 1:
        return FeatureTree(head, cache, prefill, shape, slots, vocabulary)
    return FeatureChain(head, cache, prefill, shape.tokens, slots, vocabulary)
