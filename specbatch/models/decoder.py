"""A decoder: embedding, layers (`layers.py`) that each family makes in its own way, norm and head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F

from specbatch.core.attention_metadata import AttentionContext
from specbatch.core.embedded_prompt import EmbeddingOverrides, embed
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.elementwise.rope import rope_table
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.models.config import ModelConfig
from specbatch.models.layers import Attention, Layer, Reader


class Features(NamedTuple):
    """What a forward pass over T tokens leaves for others.

    last [T, hidden_size], or [rows, hidden_size] where some were asked for: hidden states after the final norm; aux
    [T, n * hidden_size]: the residual stream behind each of the model's n auxiliary layers, as they are published, side
    by side, or None without any.
    """

    last: torch.Tensor
    aux: torch.Tensor | None


class Decoder:
    """`read` gives a tensor of the checkpoint by its Hugging Face name, on the CPU; several threads call it."""

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
    ) -> None:
        """ends: a model whose embedding and head are this one's too. of_draft, dequantized: see `Reader`."""
        self.config = config
        self.aux: tuple[int, ...] = ()
        self.dtype = dtype
        self.device = device
        names, fetch = config.names, Reader(config, read, dtype, device, of_draft=of_draft)
        tables = rope_tables(config, max_positions, dtype, device)
        family = import_module(config.module)
        self.embedding: torch.Tensor = fetch(names.embedding) if ends is None else ends.embedding
        with ThreadPoolExecutor(max_workers=8) as pool:  # reading and converting overlap; nothing is held twice
            self.layers: tuple[Layer, ...] = tuple(
                pool.map(lambda index: family.layer(fetch, index, tables), range(config.num_layers))
            )
        self.norm: Norm = family.final_norm(fetch, names.norm)
        self.head: Linear = (
            Linear(self.embedding if config.tie_embeddings else fetch(names.head)) if ends is None else ends.head
        )
        self.dequantized: frozenset[str] = frozenset(fetch.dequantized)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self._layers

    @layers.setter
    def layers(self, layers: tuple[Layer, ...]) -> None:
        """places: of each layer, which one of its kind it is, that is which cache or state is its own."""
        attends = [isinstance(layer.mixer, Attention) for layer in layers]
        self._layers = layers
        self.places = tuple(attends[:index].count(kind) for index, kind in enumerate(attends))

    @property
    def attention_layers(self) -> int:
        return sum(isinstance(layer.mixer, Attention) for layer in self.layers)

    @property
    def recurrent_layers(self) -> int:
        return len(self.layers) - self.attention_layers

    def with_positions(self, count: int) -> Decoder:
        """The same model for positions 0..count-1, sharing every weight."""
        view = self._view()
        cos, sin = rope_tables(self.config, count, self.dtype, self.device)

        def moved(layer: Layer) -> Layer:
            mixer = layer.mixer
            if not isinstance(mixer, Attention):
                return layer
            return replace(layer, mixer=replace(mixer, heads=replace(mixer.heads, cos=cos, sin=sin)))

        view.layers = tuple(map(moved, self.layers))
        return view

    def without(self, skipped: Iterable[int]) -> Decoder:
        """The same model with layers left out, sharing every weight: a draft that costs no memory but its KV."""
        gone = set(skipped)
        view = self._view()
        view.layers = tuple(layer for index, layer in enumerate(self.layers) if index not in gone)
        return view

    def with_aux(self, layers: tuple[int, ...]) -> Decoder:
        """The same model, whose forward pass also hands over the residual stream behind these layers."""
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
    ) -> Features:
        """tokens and positions int64 [T]. rows int64 [n]: the tokens whose last features are wanted, in their order;
        None is all. Auxiliary features are those of all tokens. given: embeddings of some of the tokens."""
        assert rows is None or not self.config.ends_in(self.aux), "auxiliary features are those of all tokens"
        x, projected = self.enter(tokens, overrides=overrides)
        aux = x.new_empty(len(x), len(self.aux) * x.shape[1]) if self.aux else None
        last = len(self.layers) - 1
        for index in range(last):
            x, projected = self.advance(index, x, self.mix(index, context, projected, positions), aux=aux)
        return Features(self.finish(x, self.mix(last, context, projected, positions), rows, aux), aux)

    def mix(
        self, index: int, context: AttentionContext, projected: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """What layer `index` gets out of the context for what it has projected."""
        return self.layers[index].mixer.mix(context, self.places[index], projected, positions)

    # A forward pass in pieces, cut where layers look at the context: what lies between needs none.

    def enter(
        self, tokens: torch.Tensor, out: torch.Tensor | None = None, overrides: EmbeddingOverrides | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [T] -> residual stream [T, hidden_size] and what the first layer projects (in `out`, if given)."""
        x = embed(tokens, self.embedding, overrides)
        return x, self.layers[0].mixer.project(x, out=out)

    def advance(
        self,
        index: int,
        x: torch.Tensor,
        mixed: torch.Tensor,
        out: torch.Tensor | None = None,
        aux: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From what layer `index` got out of the context to the residual stream behind it and what the next layer
        projects (in `out`, if given). `aux` gets its share of the features."""
        x = self._leave(index, x, mixed, aux)
        return x, self.layers[index + 1].mixer.project(x, out=out)

    def finish(
        self,
        x: torch.Tensor,
        mixed: torch.Tensor,
        rows: torch.Tensor | None = None,
        aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """From what the last layer got out of the context to the hidden states after the final norm, of `rows` only if
        given."""
        if rows is not None:
            x, mixed = x[rows], mixed[rows]
        if not len(x):
            return x
        return rms_norm(self._leave(len(self.layers) - 1, x, mixed, aux), *self.norm)

    def _leave(self, index: int, x: torch.Tensor, mixed: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        """The residual stream behind layer `index`."""
        layer = self.layers[index]
        if aux is None:
            return layer.leave(x, mixed)
        behind = self.config.published(index)  # the last ones of these streams
        for place, x in enumerate(layer.streams(x, mixed), len(behind) - len(layer.mlps) - 1):  # noqa: B020
            if place >= 0 and behind[place] in self.aux:
                aux.unflatten(1, (-1, x.shape[1]))[:, self.aux.index(behind[place])].copy_(x)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, hidden_size] -> [T, vocab_size], in the model's type."""
        return self.head(hidden)


def rope_tables(
    config: ModelConfig, positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, head_dim] in the model's type; pairs of channels beyond rotary_dim stand still, and no
    factor scales them."""
    rope = config.rope
    turning, still = rope.inverse_frequencies(), (config.head_dim - rope.rotary_dim) // 2
    scale = F.pad(torch.full_like(turning, rope.attention_factor), (0, still), value=1.0)
    cos, sin = rope_table(F.pad(turning, (0, still)), positions, scale)
    return cos.to(device=device, dtype=dtype), sin.to(device=device, dtype=dtype)


def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """The most that a token's activations take at a time in a forward pass by kernels: the residual stream, what a
    layer has projected and what came out of its context, and what it or the next product takes beside them; its place
    in six tables."""
    projected, mixed = config.mixer_widths
    held = (config.hidden_size + projected + mixed) * dtype.itemsize
    following = (config.hidden_size + projected) * dtype.itemsize
    return held + max(config.mixing_bytes(dtype), config.mlp_bytes(dtype), following) + 6 * torch.int64.itemsize
