"""Prefill forward pass: eager or piecewise CUDA graphs.

Piecewise graphs record the segments between attention (or recurrent) operations, which run eagerly. The host needs some
milliseconds to launch the segments and operations, as long as a device needs for some hundred tokens of a large model,
and a thousand of a small one. Short passes therefore have one graph of their own, attention included: with a prefix,
whose keys are read from the cache, and without one. Long passes keep the device busy without graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, cast

import torch

from specbatch.core.attention_metadata import PrefillMetadata
from specbatch.kernels.attention.latent.latent_attention import latent_prefill
from specbatch.kernels.attention.prefill.prompt_inputs import prompt_inputs
from specbatch.kernels.attention.qkv import split_qkv_rope
from specbatch.kernels.attention.queries import AttentionInputs, LatentLayout, PrefillInputs, PromptInputs
from specbatch.kernels.attention.ragged_batch import RaggedBatch, StaticRaggedBatch
from specbatch.kernels.common.rehearsal import is_rehearsing
from specbatch.kernels.common.upload import upload
from specbatch.memory.kv_cache import KVCache
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, Features
from specbatch.models.layers.blocks import Attention, Recurrent
from specbatch.runtime.cuda_graphs import (
    SHORT_TOKENS,
    GraphCounters,
    Program,
    Recorder,
    bucket_of,
    nothing,
    token_buckets,
)
from specbatch.runtime.structure import structure_of


def most_spans(bucket: int) -> int:
    """Most sequences of a pass of so many tokens that is recorded as a whole."""
    return max(16, bucket // 64)


class PromptWork(Protocol):
    """The part of a prefill pass that one model runs, from recordings or not."""

    counters: GraphCounters


class Forward(PromptWork, Protocol):
    """Runs a model over a prefill pass and fills its cache."""

    def __call__(
        self, metadata: PrefillMetadata, rows: Sequence[int] | None = None, tokens: torch.Tensor | None = None
    ) -> Features:
        """rows: of the T tokens those whose last hidden states are needed, None for all; tokens int64 [T], None for
        those of the metadata."""
        ...


class EagerForward:
    """Runs without graphs."""

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self.counters = GraphCounters()
        self._model = model
        self._cache = cache

    def __call__(
        self, metadata: PrefillMetadata, rows: Sequence[int] | None = None, tokens: torch.Tensor | None = None
    ) -> Features:
        self.counters.fall_back("off")
        self._cache.begin(metadata.spans)
        return _run_eagerly(self._model, self._cache, metadata, rows, tokens)


def static_bytes(config: ModelConfig, dtype: torch.dtype, most: int, *, needs_all_hidden: bool, aux: int = 0) -> int:
    """Bytes of the static tensors through which the segments of a model with `aux` auxiliary layers are called."""
    projected, mixed = config.mixer_widths
    heads = projected + mixed + (config.num_heads + config.num_kv_heads) * config.head_dim  # q and k
    features = (1 + needs_all_hidden + aux) * config.hidden_size + config.layer_inputs
    return most * ((heads + features) * dtype.itemsize + len(PromptInputs._fields) * torch.int64.itemsize)


class PiecewiseGraphs:
    """Records a model in segments: from the output of one attention or recurrent operation to the input of the next,
    whose keys and values are then in the cache. After the last operation that stores something few rows are needed as a
    rule; they run eagerly. Passes of few tokens and few sequences are recorded as a whole in place of that."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        recorder: Recorder,
        most: int,
        page_table: torch.Tensor,
        tokens: torch.Tensor,
        *,
        needs_all_hidden: bool,
    ) -> None:
        """most: tokens of the largest pass that is recorded; page_table, tokens: those that all passes use;
        needs_all_hidden: the last hidden states of all tokens are needed, so that what follows the last operation is
        recorded, too."""
        config = model.config
        mixers = [layer.mixer for layer in model.layers]
        self.counters = GraphCounters()
        self._model = model
        self._cache = cache
        self._recorder = recorder
        self._all_tokens = tokens
        self._needs_all_hidden = needs_all_hidden
        # Layers of a pass in segments: those after the ones that store keys compute few rows, eagerly. A short pass
        # takes less time in one graph with all layers.
        self._in_segments = len(mixers) if needs_all_hidden or model.aux else model.first_reader
        self.left_out: list[int] = []
        self._buckets = token_buckets(most)
        # Until they are recorded they do nothing, and a pass runs what is between them.
        count = self._in_segments + needs_all_hidden
        self._segments: dict[int, list[Program]] = {bucket: [nothing] * count for bucket in self._buckets}
        # By bucket, and whether no sequence has a prefix.
        self._wholes: dict[tuple[int, bool], Program] = {}
        short = [bucket for bucket in self._buckets if bucket <= SHORT_TOKENS and cache.attention.recordable]
        self._spans = {
            (bucket, fresh): StaticRaggedBatch(bucket, most_spans(bucket), page_table, cache.page_size, fresh=fresh)
            for bucket in short
            for fresh in (True, False)
        }

        def static(*shape: int) -> torch.Tensor:
            return torch.zeros(most, *shape, dtype=model.dtype, device=model.device)

        self._prompt = PromptInputs(
            *(torch.zeros(most, dtype=torch.int64, device=model.device) for _ in PromptInputs._fields)
        )
        self._residual = static(config.hidden_size)
        # Layers differ in width, so each has its own view of these (see `_rows`).
        self._projected = static(max(mixer.width for mixer in mixers))
        self._mixed = static(max(mixer.mixed for mixer in mixers))
        self._q = static(config.num_heads, config.head_dim)
        self._k = static(config.num_kv_heads, config.head_dim)
        self._last = static(config.hidden_size) if needs_all_hidden else None
        self._aux = static(len(model.aux) * config.hidden_size) if model.aux else None
        self._inputs = static(config.layer_inputs) if config.layer_inputs else None

    def __len__(self) -> int:
        return len(self._buckets)

    def capture(self) -> Iterator[None]:
        record = partial(self._record, self.unlike(len(self._model.layers)))
        yield from self._recorder.record_each(self._buckets, record, self._forget, self.left_out)

    def _forget(self) -> None:
        self._segments.clear()
        self._wholes.clear()

    def drop(self) -> None:
        self._forget()
        self._buckets.clear()
        self._spans.clear()
        del self._prompt, self._residual, self._projected, self._mixed, self._q, self._k
        del self._last, self._aux, self._inputs

    def _record(self, all_unlike: list[int], bucket: int) -> None:
        if (bucket, True) not in self._spans:
            self._record_segments(bucket)
            return
        layers = len(self._model.layers)
        for key in ((bucket, True), (bucket, False)):
            programs, spans = list(self._programs(bucket, layers)), self._spans[key]
            self._recorder.warm(partial(self._run_whole, programs, all_unlike, bucket, spans))
            whole = partial(self._run_whole, programs, range(layers), bucket, spans)
            self._wholes[key] = self._recorder.record(whole)
        if not is_rehearsing():
            self._segments.pop(bucket, None)  # recorded when a pass of many sequences first needs them

    def __call__(
        self, metadata: PrefillMetadata, rows: Sequence[int] | None = None, tokens: torch.Tensor | None = None
    ) -> Features:
        """As `Decoder.forward`. The next call may overwrite the result."""
        assert (rows is None) == self._needs_all_hidden, "the recording fixes which rows are needed"
        count, spans = metadata.count, metadata.spans
        self._cache.begin(spans)
        if metadata.embedding_overrides(self._model.embedding) is not None:
            self.counters.fall_back("embeddings")  # the recorded segments look up every token
            return _run_eagerly(self._model, self._cache, metadata, rows, tokens)
        if not self._buckets or count > self._buckets[-1]:
            self.counters.fall_back("long pass" if self._buckets else "dropped")
            return _run_eagerly(self._model, self._cache, metadata, rows, tokens)
        bucket = bucket_of(self._buckets, count)
        key = bucket, spans.fresh
        is_whole = key in self._wholes and len(spans.counts) <= most_spans(bucket)
        if is_whole:  # the graph fills its inputs
            self._spans[key].load(spans, given=tokens is not None)
        if not is_whole or is_rehearsing():  # a later pass of many sequences needs this kernel, too
            metadata.inputs_to(self._prompt.first(bucket))
        if tokens is not None:
            self._prompt.tokens[:count].copy_(tokens)
        else:
            assert metadata.has_tokens, "the pass has no tokens"
        if is_whole:
            self._wholes[key]()
            done = len(self._model.layers)
        else:
            done = self._in_segments
            if bucket not in self._segments:
                self._record_segments(bucket)
                self.counters.recorded_late += 1
            self._run(self._segments[bucket], range(done - (rows is not None)), count, spans)
        self.counters.replays += 1
        self.counters.padded += bucket - count
        aux = None if self._aux is None else self._aux[:count]
        if rows is None:
            assert self._last is not None
            return Features(self._last[:count], aux)
        model, x, places = self._model, self._residual[:count], upload(rows, self._residual.device)
        mixer = model.layers[done - 1].mixer
        output = _rows(self._mixed, count, mixer.mixed)
        layer_inputs = None if self._inputs is None else self._inputs[:count]

        def mix() -> torch.Tensor:
            self._operation(done - 1, count, spans)
            return output

        of_rows = None if is_whole or done > model.first_reader else metadata.bind_rows(places, self._cache)
        if of_rows is not None:
            projected = _rows(self._projected, count, mixer.width)
            mixed = model.mix_rows(of_rows, projected, mix, stored=True)
            return Features(model.end_rows(x, mixed, of_rows, inputs=layer_inputs), aux)
        mixed = output if is_whole else mix()
        if done == len(model.layers):
            return Features(model.finish(x, mixed, places, inputs=layer_inputs), aux)
        context = metadata.bind(self._cache)
        return Features(model.end(x, mixed, metadata.positions, context, places, inputs=layer_inputs), aux)

    def _record_segments(self, bucket: int) -> None:
        programs = list(self._programs(bucket, self._in_segments))
        unlike = self.unlike(self._in_segments)
        for index in (0, *(index + 1 for index in unlike if index + 1 < len(programs))):
            self._recorder.warm(programs[index])
        self._segments[bucket] = [
            self._recorder.record(segment) for segment in self._programs(bucket, self._in_segments)
        ]

    def unlike(self, count: int) -> list[int]:
        """Of the first `count` layers those after whose operation something else is launched than after that of an
        earlier one. What is compiled or allocated on first use is so for all layers once it is for these."""
        model, found = self._model, dict[object, int]()
        if self._inputs is not None or model.config.ranks > 1:
            return list(range(count))  # each layer reads its own columns of the inputs; ranks warm the same layers
        kinds = [structure_of(layer) for layer in model.layers[:count]]
        for index in range(count):
            taken = tuple(item in model.aux for item in model.config.published(index))
            found.setdefault((*kinds[index : index + 2], index + 2 == count, taken), index)
        return list(found.values())

    def _run_whole(self, segments: list[Program], layers: Iterable[int], bucket: int, spans: StaticRaggedBatch) -> None:
        """Fill the inputs of a bucket, then `_run` it."""
        prompt = self._prompt.first(bucket)
        prompt_inputs(spans.table, spans.page_table, spans.page_size, self._all_tokens, prompt, spans.given)
        self._run(segments, layers, bucket, spans)

    def _run(self, segments: list[Program], layers: Iterable[int], count: int, spans: RaggedBatch) -> None:
        """Run the segments, and between them the operations of these layers over the first `count` rows."""
        segments[0]()
        for index in layers:
            self._operation(index, count, spans)
            if index + 1 < len(segments):
                segments[index + 1]()

    def _operation(self, index: int, count: int, spans: RaggedBatch) -> None:
        cache, place, mixer = self._cache, self._model.places[index], self._model.layers[index].mixer
        projected, out = _rows(self._projected, count, mixer.width), _rows(self._mixed, count, mixer.mixed)
        if isinstance(mixer, Attention) and isinstance(mixer.heads, LatentLayout):
            prompt = self._prompt.first(count)
            latents = AttentionInputs(projected, mixer.heads, prompt.positions, *cache.layers[place])
            out.copy_(latent_prefill(latents, prompt.kv_slots, spans))
        elif isinstance(mixer, Attention):
            (k_cache, v_cache, *scales), heads = cache.layers[place], mixer.heads
            q, k, v = self._q[:count], None, None
            if not heads.shared:
                k = self._k[:count]
                v = projected.unflatten(1, (-1, q.shape[2]))[:, -k.shape[1] :]
            out = out.view_as(q)
            inputs = PrefillInputs(q, k, v, k_cache, v_cache, spans, heads.window or 0, out, heads.sinks, *scales)
            mixed = cache.attention(inputs)
            if mixed is not out:
                out.copy_(mixed)
        else:
            assert cache.states is not None
            cast(Recurrent, mixer).prompt(projected, cache.states.layers[place], spans, out)

    def _programs(self, bucket: int, count: int) -> Iterator[Program]:
        """The segments of `count` layers, in order. The residual stream passes from one to the next in memory of the
        graphs' pool."""
        model, layers = self._model, self._model.layers[:count]
        tokens, positions, _, slots = self._prompt.first(bucket)
        q, k, last_input = (static[:bucket] for static in (self._q, self._k, self._residual))
        aux, inputs = (None if static is None else static[:bucket] for static in (self._aux, self._inputs))
        residual: list[torch.Tensor] = []

        def input_of(index: int) -> torch.Tensor:
            return _rows(self._projected, bucket, layers[index].mixer.width)

        def output_of(index: int) -> torch.Tensor:
            return _rows(self._mixed, bucket, layers[index].mixer.mixed)

        def prepare(index: int, x: torch.Tensor) -> None:
            """Prepare the operation of layer `index`, whose projection is computed."""
            mixer, place = layers[index].mixer, model.places[index]
            if isinstance(mixer, Attention) and not isinstance(mixer.heads, LatentLayout):
                caches = self._cache.layers[place]
                split_qkv_rope(AttentionInputs(input_of(index), mixer.heads, positions, *caches), slots, out=(q, k))
            residual[:] = [x] if index + 1 < len(layers) else [last_input.copy_(x)]

        def enter() -> None:
            x, _ = model.enter(tokens, out=input_of(0))
            model.layer_inputs(tokens, x, out=inputs)
            prepare(0, x)

        def segment(index: int) -> Program:
            def program() -> None:
                following = input_of(index + 1)
                x, _ = model.advance(index, residual[0], output_of(index), out=following, aux=aux, inputs=inputs)
                prepare(index + 1, x)

            return program

        def finish() -> None:
            assert self._last is not None
            mixed = output_of(len(layers) - 1)
            self._last[:bucket].copy_(model.finish(residual[0], mixed, aux=aux, inputs=inputs))
            residual.clear()

        yield enter
        yield from (segment(index) for index in range(len(layers) - 1))
        if self._needs_all_hidden:
            yield finish


def _run_eagerly(
    model: Decoder, cache: KVCache, metadata: PrefillMetadata, rows: Sequence[int] | None, tokens: torch.Tensor | None
) -> Features:
    tokens = metadata.tokens if tokens is None else tokens
    places = None if rows is None else upload(rows, model.device)
    overrides = metadata.embedding_overrides(model.embedding)
    of_rows = None if places is None or not model.ends_in_rows else metadata.bind_rows(places, cache)
    return model.forward(tokens, metadata.positions, metadata.bind(cache), places, overrides, of_rows)


def _rows(static: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """The memory of `static` as [count, width]. For one width the first rows are the same for any count."""
    return static.view(-1)[: count * width].view(count, width)
