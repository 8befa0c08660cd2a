"""Per-layer embeddings (Gemma 4 E2B and E4B): each layer gets numbers of its own for every token.

A second embedding table has a row for all layers of each token. Its sum with a projection of the ordinary embedding is
computed once, before the first layer (`LayerInputs`), and each layer adds a gated projection of its part to the
residual stream (`GatedLayer`). The table of E2B has 4.7 GB in BF16, of which a token reads one row of 18 KB. It stays
on the model's device, and every rank has the whole of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specbatch.core.embedded_prompt import EmbeddingOverrides
from specbatch.kernels.elementwise.activations import gelu_and_mul
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.models.layers.blocks import Layer
from specbatch.models.weight_reader import Reader


@dataclass(frozen=True)
class PerLayerSizes:
    """width: numbers per token and layer; vocabulary: rows of the table; padding: the token whose row stands for a
    given embedding (see `EmbeddedPrompt`)."""

    width: int
    vocabulary: int
    padding: int


@dataclass(frozen=True)
class LayerInputs:
    """(norm(projection(x)) + sqrt(width) * table[token]) / sqrt(2), where `norm` is over the `width` numbers of a layer
    and x the embedding. table [vocabulary, layers * width]."""

    table: torch.Tensor
    projection: Linear
    norm: Norm
    padding: int

    def __call__(
        self, tokens: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None, overrides: EmbeddingOverrides | None
    ) -> torch.Tensor:
        """See `Decoder.layer_inputs`."""
        if overrides is not None:
            tokens = tokens.index_fill(0, overrides.places, self.padding)
        width = self.norm.weight.shape[0]
        found = rms_norm(self.projection(x).view(-1, width), *self.norm).view(len(x), -1)
        found = found.add_(F.embedding(tokens, self.table), alpha=math.sqrt(width)).mul_(0.5**0.5)
        return found if out is None else out.copy_(found)


@dataclass(frozen=True)
class GatedLayer(Layer):
    """A layer that ends in scale * (x + post(projection(gelu(gate(x)) * part))). part: columns from `first` on of what
    `LayerInputs` returns."""

    first: int
    gate: Linear
    projection: Linear
    post: Norm
    scale: torch.Tensor

    def streams(
        self, x: torch.Tensor, mixed: torch.Tensor, inputs: torch.Tensor | None = None
    ) -> Iterator[torch.Tensor]:
        assert inputs is not None
        yield (x := self.mixer.leave(x, mixed))
        [mlp] = self.mlps
        x = mlp(x)
        gate = self.gate(x)
        part = inputs[:, self.first : self.first + gate.shape[1]]
        change = self.projection(gelu_and_mul(torch.cat([gate, part], 1)))
        yield (x + rms_norm(change, *self.post)) * self.scale


def read_layer_inputs(read: Reader, prefix: str, sizes: PerLayerSizes) -> LayerInputs:
    """prefix: of the names of the tensors."""
    config, stem = read.config, f"{prefix}per_layer"
    width, hidden = config.layer_inputs, config.hidden_size
    norm = read.norm(f"{stem}_projection_norm", sizes.width)
    return LayerInputs(
        read(table_name(prefix), sizes.vocabulary, width),
        read.linear({f"{stem}_model_projection": width}, hidden),
        # The model divides what is normalized by the root of the hidden size, which only matters to eps.
        norm._replace(eps=norm.eps * hidden),
        sizes.padding,
    )


def table_name(prefix: str) -> str:
    return f"{prefix}embed_tokens_per_layer.weight"


def gated(read: Reader, stem: str, index: int, sizes: PerLayerSizes, layer: Layer, scale: torch.Tensor) -> GatedLayer:
    """`layer` with inputs of its own, as layer `index`, whose tensors are named `stem`.*."""
    hidden = read.config.hidden_size
    return GatedLayer(
        layer.mixer,
        layer.mlps,
        first=index * sizes.width,
        gate=read.linear({f"{stem}.per_layer_input_gate": sizes.width}, hidden),
        projection=read.linear({f"{stem}.per_layer_projection": hidden}, sizes.width),
        post=read.norm(f"{stem}.post_per_layer_input_norm"),
        scale=scale,
    )
