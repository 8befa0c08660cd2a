"""Keys and values of a prompt for draft heads (EAGLE, EAGLE-3, MTP), written eagerly or by CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from specbatch.core.attention_metadata import DecodeMetadata, PrefillMetadata
from specbatch.core.embedded_prompt import EmbeddingOverrides
from specbatch.kernels.attention.qkv import write_keys
from specbatch.kernels.attention.queries import AttentionInputs
from specbatch.memory.kv_cache import KVCache
from specbatch.models.heads.draft_head import Attend, DraftHead
from specbatch.runtime.cuda_graphs import GraphCounters, Recorder, bucket_of, nothing, token_buckets


class HeadPrefill:
    """Writes keys and values of a prompt's pairs. The last layer's output is not needed there, so its attention is
    skipped."""

    def __init__(self, head: DraftHead, cache: KVCache) -> None:
        self.counters = GraphCounters()
        self.head = head
        self.cache = cache

    def __call__(self, tokens: Sequence[torch.Tensor], taken: torch.Tensor, metadata: PrefillMetadata) -> None:
        """tokens: int64 [T] for each of the head's `depths`, the token 1, 2, ... after each of the pass's tokens; taken
        [T, width]: features of these."""
        self.counters.fall_back("off")
        attend = attention_of(self.head, self.cache, metadata, metadata.positions)
        self._write(tokens, taken, metadata.positions, metadata.kv_slots, self._overrides(metadata), attend)

    def _overrides(self, metadata: PrefillMetadata) -> list[EmbeddingOverrides | None]:
        head = self.head
        return [metadata.embedding_overrides(head.embedding, ahead=1 + depth) for depth in range(head.depths)]

    def _write(
        self,
        tokens: Sequence[torch.Tensor],
        taken: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        overrides: Sequence[EmbeddingOverrides | None],
        attend: Attend | None = None,
    ) -> None:
        head, cache = self.head, self.cache
        embedded = [head.embed(*each) for each in zip(tokens, overrides, strict=True)]
        _, qkv = head.enter(embedded[0], head.project(taken), attend, embedded[1:])
        write_keys(AttentionInputs(qkv, head.heads_of(head.depth - 1), positions, *cache.layers[-1]), slots)


def attention_of(
    head: DraftHead, cache: KVCache, metadata: PrefillMetadata | DecodeMetadata, positions: torch.Tensor
) -> Attend | None:
    """The attention of the layers before the last one; None for a head of one layer."""
    return partial(metadata.bind(cache).attend, positions=positions) if head.more else None


class HeadPrefillGraphs(HeadPrefill):
    """The same with CUDA graphs per token bucket: one up to the first attention, and one after that of each layer but
    the last."""

    def __init__(self, head: DraftHead, cache: KVCache, recorder: Recorder, most: int) -> None:
        """most: number of tokens of the largest pass that is recorded."""
        super().__init__(head, cache)
        self._recorder = recorder
        self.left_out: list[int] = []
        self._buckets = token_buckets(most)
        self._graphs = {bucket: [nothing] * head.depth for bucket in self._buckets}  # until they are recorded
        like, between = head.embedding, most if head.more else 0
        projected, mixed = head.config.mixer_widths
        # Tokens, positions and slots.
        self._places = torch.zeros(head.depths + 2, most, dtype=torch.int64, device=like.device)
        self._taken, self._x, self._qkv, self._attended = (
            torch.zeros(count, width, dtype=like.dtype, device=like.device)
            for count, width in (
                (most, head.width),
                (between, head.config.hidden_size),
                (between, projected),
                (between, mixed),
            )
        )

    def __len__(self) -> int:
        return len(self._buckets)

    def capture(self) -> Iterator[None]:
        yield from self._recorder.record_each(self._buckets, self._record, self._graphs.clear, self.left_out)

    def drop(self) -> None:
        self._graphs.clear()
        self._buckets.clear()
        del self._places, self._taken, self._x, self._qkv, self._attended

    def _record(self, bucket: int) -> None:
        programs = [partial(self._segment, layer, bucket) for layer in range(self.head.depth)]
        for program in programs:
            self._recorder.warm(program)
        self._graphs[bucket] = [self._recorder.record(program) for program in programs]

    def __call__(self, tokens: Sequence[torch.Tensor], taken: torch.Tensor, metadata: PrefillMetadata) -> None:
        overrides = self._overrides(metadata)
        attend = attention_of(self.head, self.cache, metadata, metadata.positions)
        has_embeddings = any(given is not None for given in overrides)
        reason = "dropped" if not self._buckets else "long pass" if len(taken) > self._buckets[-1] else ""
        if has_embeddings or reason:
            self.counters.fall_back("embeddings" if has_embeddings else reason)
            self._write(tokens, taken, metadata.positions, metadata.kv_slots, overrides, attend)
            return
        count = len(taken)
        bucket = bucket_of(self._buckets, count)
        for static, here in zip(self._places, (*tokens, metadata.positions, metadata.kv_slots), strict=True):
            static[:count].copy_(here)
        self._taken[:count].copy_(taken)
        self._places[-1, count:bucket].zero_()  # padding tokens write to the page of padding rows
        for layer, program in enumerate(self._graphs[bucket]):
            if layer:
                assert attend is not None
                attended = attend(layer - 1, self._qkv[:count], self.head.heads_of(layer - 1))
                self._attended[:count].copy_(attended)
            program()
        self.counters.replays += 1
        self.counters.padded += bucket - count

    def _segment(self, layer: int, count: int) -> None:
        """What is between the attention of the layer before and that of `layer`."""
        head, cache = self.head, self.cache
        *tokens, positions, slots = self._places[:, :count]
        if layer:
            embedded = head.embed(tokens[layer]) if layer < head.depths else None
            x, qkv = head.advance(layer - 1, self._x[:count], self._attended[:count], embedded)
        else:
            x, qkv = head.begin(head.embed(tokens[0]), head.project(self._taken[:count]))
        if layer + 1 < head.depth:
            self._x[:count].copy_(x)
            self._qkv[:count].copy_(qkv)
        else:
            write_keys(AttentionInputs(qkv, head.heads_of(layer), positions, *cache.layers[-1]), slots)
