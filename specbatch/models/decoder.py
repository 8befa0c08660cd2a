"""Decoder-only transformer: embedding, the layers of a family, final norm and output matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import NamedTuple, Protocol

import torch

from specbatch.core.attention_metadata import AttentionContext, RowsContext
from specbatch.core.embedded_prompt import EmbeddingOverrides, embed
from specbatch.kernels.attention.queries import LatentLayout, QKVLayout
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.kernels.dispatch import is_deterministic
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.sampling.argmax_topk import Scores
from specbatch.models.config import ModelConfig
from specbatch.models.formats.grouped import GroupedSource
from specbatch.models.layers.blocks import Attention, Layer
from specbatch.models.partition import scores
from specbatch.models.rope_tables import layer_tables
from specbatch.models.weight_reader import Reader
from specbatch.progress.bars import Report

# Prompts that end in a pass whose last attention is computed of their last tokens only. Of more, each is short, so that
# it would save little, and attention would be compiled for more batch sizes.
_FEW_ROWS = 4


class LayerInputs(Protocol):
    def __call__(
        self, tokens: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None, overrides: EmbeddingOverrides | None
    ) -> torch.Tensor:
        """See `Decoder.layer_inputs`."""
        ...


class Features(NamedTuple):
    """Hidden states of a forward pass over T tokens.

    last  [T, hidden_size], or [rows, hidden_size] if rows were selected: hidden states after the final norm
    aux   [T, n * hidden_size]: the residual stream after each of the model's n auxiliary (published) layers,
          concatenated; None without auxiliary layers
    """

    last: torch.Tensor
    aux: torch.Tensor | None


class Decoder:
    """`read` returns a tensor of the checkpoint by its Hugging Face name, on the CPU; several threads call it."""

    def __init__(
        self,
        config: ModelConfig,
        read: Callable[[str], torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        ends: Decoder | None = None,
        of_draft: bool = False,
        ranks: Communicator | None = None,
        to_fp8: bool = False,
        grouped: GroupedSource | None = None,
        report: Report = lambda done, total: None,
    ) -> None:
        """ends: a model whose embedding and output matrix this one shares; report: called with the number of layers
        loaded; config, of_draft, ranks, to_fp8, grouped, dequantized: see `Reader`."""
        self.config = config
        self.aux: tuple[int, ...] = ()
        self.dtype = dtype
        self.device = device
        names = config.names
        fetch = Reader(config, read, dtype, device, of_draft=of_draft, ranks=ranks, to_fp8=to_fp8, grouped=grouped)
        tables = layer_tables(config, max_positions, dtype, device)
        family = import_module(config.module)
        self.embedding: torch.Tensor = fetch(names.embedding) if ends is None else ends.embedding
        with ThreadPoolExecutor(max_workers=8) as pool:  # reading and conversion overlap; no weight is held twice
            layers: list[Layer] = []
            for layer in pool.map(lambda index: family.layer(fetch, index, tables[index]), range(config.num_layers)):
                layers.append(layer)
                report(len(layers), config.num_layers)
        self._set_layers(layers, range(config.num_layers))
        self._layer_inputs: LayerInputs | None = family.layer_inputs(fetch) if config.layer_inputs else None
        self.norm: Norm = family.final_norm(fetch, names.norm)
        tied = self.embedding if config.tie_embeddings else None
        self.head: Linear
        if ends is None:
            self.head = fetch.head(fetch.output_matrix(names.head, config.vocab_size, tied))
        else:
            self.head = ends.head
        self.dequantized: frozenset[str] = frozenset(fetch.dequantized)

    def _set_layers(self, layers: Iterable[Layer], numbers: Iterable[int]) -> None:
        """numbers: of the layers in the whole model; places: per layer, the index of its cache or state among those of
        its kind; kv_layers: how many have a cache; first_reader: the layers from this one on store nothing, because
        they attend to the keys of earlier ones."""
        self.layers, self._numbers = tuple(layers), tuple(numbers)
        keys = {  # per attention layer, the number of the one whose keys it sees
            number: self.config.kv_layer(number)
            for number, layer in zip(self._numbers, self.layers, strict=True)
            if isinstance(layer.mixer, Attention)
        }
        caches = [number for number, source in keys.items() if number == source]
        states = [number for number in self._numbers if number not in keys]
        self.kv_layers, self.recurrent_layers = len(caches), len(states)
        self.first_reader = 1 + max(index for index, number in enumerate(self._numbers) if number in {*caches, *states})
        self.places = tuple(
            caches.index(keys[number]) if number in keys else states.index(number) for number in self._numbers
        )

    def with_positions(self, count: int, config: ModelConfig) -> Decoder:
        """This model with rope tables for positions 0..count-1; all weights are shared. config: this model's, with the
        rope for these positions."""
        tables = layer_tables(config, count, self.dtype, self.device)
        view = self._with_heads(lambda index, heads: replace(heads, cos=tables[index][0], sin=tables[index][1]))
        view.config = config
        return view

    def with_k_offsets(self, offsets: Mapping[int, torch.Tensor]) -> Decoder:
        """This model with these `QKVLayout.k_offset` of layers, by place; none for the others."""
        return self._with_heads(
            lambda index, heads: replace(heads, k_offset=None if heads.shared else offsets.get(self.places[index]))
        )

    def _with_heads(self, changed: Callable[[int, QKVLayout], QKVLayout]) -> Decoder:
        """This model with other heads of its attention layers; all weights are shared."""

        def layer(index: int, layer: Layer) -> Layer:
            mixer = layer.mixer
            if not isinstance(mixer, Attention):
                return layer
            return replace(layer, mixer=replace(mixer, heads=changed(index, mixer.heads)))

        return self.with_layers(layer)

    def with_layers(self, changed: Callable[[int, Layer], Layer]) -> Decoder:
        """This model with other layers, from the place and the layer there; all other weights are shared."""
        view = self._view()
        view._set_layers([changed(*each) for each in enumerate(self.layers)], self._numbers)
        return view

    def without(self, skipped: Iterable[int]) -> Decoder:
        """This model without some layers; all weights are shared: a draft model that needs memory only for its KV
        cache. Layers whose keys and values others share must stay."""
        gone = set(skipped)
        view = self._view()
        kept = [index for index in range(len(self.layers)) if index not in gone]
        view._set_layers([self.layers[index] for index in kept], [self._numbers[index] for index in kept])
        return view

    def with_aux(self, layers: tuple[int, ...]) -> Decoder:
        """This model with auxiliary layers: its forward pass also returns the residual stream after these layers."""
        view = self._view()
        view.aux = layers
        return view

    def _view(self) -> Decoder:
        view = object.__new__(Decoder)
        view.__dict__.update(self.__dict__)
        return view

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        rows: torch.Tensor | None = None,
        overrides: EmbeddingOverrides | None = None,
        of_rows: RowsContext | None = None,
    ) -> Features:
        """tokens and positions int64 [T]. rows int64 [n]: the tokens whose last hidden states are returned, in this
        order; None: all. Auxiliary features are always those of all tokens. overrides: embeddings given for some of the
        tokens. of_rows: of `rows`, if `ends_in_rows`; what ends the pass then computes nothing else."""
        assert rows is None or not self.config.ends_in(self.aux), "auxiliary features are those of all tokens"
        x, projected = self.enter(tokens, overrides=overrides)
        inputs = self.layer_inputs(tokens, x, overrides=overrides)
        aux = x.new_empty(len(x), len(self.aux) * x.shape[1]) if self.aux else None
        last = self.first_reader - 1
        for index in range(last):
            # Not named: a name would keep the output while the next layer's is computed.
            x, projected = self.advance(
                index, x, self.mix(index, context, projected, positions), aux=aux, inputs=inputs
            )
        mix = partial(self.mix, last, context, projected, positions)
        if of_rows is not None:
            mixed = self.mix_rows(of_rows, projected, mix)
            return Features(self.end_rows(x, mixed, of_rows, aux, inputs), aux)
        mixed = mix()
        del mix, projected
        return Features(self.end(x, mixed, positions, context, rows, aux, inputs), aux)

    @property
    def ends_in_rows(self) -> bool:
        """Whether what follows the last stored keys or states needs to be computed only of the tokens whose last hidden
        states are needed: no later layer has auxiliary features, which are those of all tokens."""
        return not self.aux or self.first_reader == len(self.layers)

    def mix_rows(
        self, of_rows: RowsContext, projected: torch.Tensor, mix: Callable[[], torch.Tensor], *, stored: bool = False
    ) -> torch.Tensor:
        """The operation of the last layer that stores keys or states, of some tokens: [n, mixed]. mix: computes it of
        all tokens, for many rows, in deterministic mode, whose results must not depend on how many there are, and for
        operations other than attention to heads in the cache. stored: see `RowsContext.attend`."""
        index, rows = self.first_reader - 1, of_rows.rows
        mixer = self.layers[index].mixer
        if not isinstance(mixer, Attention) or isinstance(mixer.heads, LatentLayout):
            return mix()[rows]
        if len(rows) > _FEW_ROWS or is_deterministic():
            return mix()[rows]
        return of_rows.attend(self.places[index], projected, mixer.heads, stored=stored)

    def end_rows(
        self,
        x: torch.Tensor,
        mixed: torch.Tensor,
        of_rows: RowsContext,
        aux: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `end` of some tokens; x and inputs are those of all tokens, mixed comes from `mix_rows`."""
        x, inputs = x[of_rows.rows], None if inputs is None else inputs[of_rows.rows]
        if self.first_reader == len(self.layers):
            return self.finish(x, mixed, aux=aux, inputs=inputs)
        return self.end(x, mixed, of_rows.positions, of_rows.context, aux=aux, inputs=inputs)

    def mix(
        self, index: int, context: AttentionContext, projected: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Attention or recurrence of layer `index` on its projected input."""
        return self.layers[index].mixer.mix(context, self.places[index], projected, positions)

    # A forward pass in segments, split at attention and recurrence, so that the segments do not depend on the context.

    def enter(
        self, tokens: torch.Tensor, out: torch.Tensor | None = None, overrides: EmbeddingOverrides | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [T] -> residual stream [T, hidden_size] and the first layer's projected input (in `out`, if given)."""
        x = embed(tokens, self.embedding, overrides, self.config.embedding_scale)
        return x, self.layers[0].mixer.project(x, out=out)

    def layer_inputs(
        self,
        tokens: torch.Tensor,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        overrides: EmbeddingOverrides | None = None,
    ) -> torch.Tensor | None:
        """tokens [T] and the residual stream that they enter with -> [T, `ModelConfig.layer_inputs`] (in `out`, if
        given); None in models without such inputs."""
        return None if self._layer_inputs is None else self._layer_inputs(tokens, x, out, overrides)

    def advance(
        self,
        index: int,
        x: torch.Tensor,
        mixed: torch.Tensor,
        out: torch.Tensor | None = None,
        aux: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the attention or recurrence output of layer `index` to the residual stream after the layer and the next
        layer's projected input (in `out`, if given). Auxiliary features are written to `aux`. inputs: those of
        `layer_inputs`."""
        x = self._leave(index, x, mixed, aux, inputs)
        return x, self.layers[index + 1].mixer.project(x, out=out)

    def end(
        self,
        x: torch.Tensor,
        mixed: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        rows: torch.Tensor | None = None,
        aux: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """From the attention or recurrence output of the last layer that stores keys or states to the hidden states
        after the final norm, of `rows` only if given."""
        for index in range(self.first_reader, len(self.layers) if len(x) else 0):
            x, projected = self.advance(index - 1, x, mixed, aux=aux, inputs=inputs)
            del mixed
            mixed = self.mix(index, context, projected, positions)
        return self.finish(x, mixed, rows, aux, inputs)

    def finish(
        self,
        x: torch.Tensor,
        mixed: torch.Tensor,
        rows: torch.Tensor | None = None,
        aux: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """From the attention or recurrence output of the last layer to the hidden states after the final norm, of
        `rows` only if given."""
        if rows is not None:
            x, mixed, inputs = x[rows], mixed[rows], None if inputs is None else inputs[rows]
        if not len(x):
            return x
        return rms_norm(self._leave(len(self.layers) - 1, x, mixed, aux, inputs), *self.norm)

    def _leave(
        self,
        index: int,
        x: torch.Tensor,
        mixed: torch.Tensor,
        aux: torch.Tensor | None,
        inputs: torch.Tensor | None,
    ) -> torch.Tensor:
        """The residual stream after layer `index`."""
        layer = self.layers[index]
        if aux is None:
            return layer.leave(x, mixed, inputs)
        published = self.config.published(index)  # the last of these streams
        for place, x in enumerate(layer.streams(x, mixed, inputs), len(published) - len(layer.mlps) - 1):  # noqa: B020
            if place >= 0 and published[place] in self.aux:
                aux.unflatten(1, (-1, x.shape[1]))[:, self.aux.index(published[place])].copy_(x)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, hidden_size] -> logits [T, vocab_size] in the model's dtype."""
        return self._capped(self.head(hidden))

    def scores(self, hidden: torch.Tensor, *, greedy: bool) -> Scores:
        """`logits`, or if `greedy` what suffices for their argmax."""
        found = scores(self.head, hidden, greedy=greedy)
        return self._capped(found) if isinstance(found, torch.Tensor) else found  # maxima stay where they are

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Peak bytes of activations per token in a forward pass with kernels: the residual stream and what layers get
    beside it, a layer's projected input and its attention output, temporary tensors of the layer or the next GEMM, and
    an entry in each of six index tables."""
    projected, mixed = config.mixer_widths
    held = (config.hidden_size + config.layer_inputs + projected + mixed) * dtype.itemsize
    following = (max(config.hidden_size + projected, config.layer_inputs)) * dtype.itemsize
    mlp = config.mlp_bytes(dtype)
    if config.ranks > 1:
        mlp = max(mlp + bool(config.chosen) * config.hidden_size * dtype.itemsize, _summing_bytes(config, dtype))
    return held + max(config.mixing_bytes(dtype), mlp, following) + 6 * torch.int64.itemsize


def _summing_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of a sum over ranks: the stream that it is added to, the input of the linear layer, this rank's part, and the
    sum."""
    return (3 * config.hidden_size + max(config.hidden_size, config.intermediate_size)) * dtype.itemsize
