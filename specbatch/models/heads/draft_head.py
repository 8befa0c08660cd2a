"""Draft heads on the target's features (EAGLE, EAGLE-3, MTP): decoder layers over pairs of a feature and a token.

After t_0 .. t_i the target has computed the feature f_i and chosen t_{i+1}. The pair (f_i, t_{i+1}) is the head's
input at draft position i and predicts t_{i+2}. For the next draft the head's own output replaces f_{i+1} (Li et al.,
"EAGLE", 2024). Almost all heads have one layer. Those after the first are plain layers, as in vLLM (#26164).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from specbatch.core.embedded_prompt import EmbeddingOverrides, embed
from specbatch.errors import refuse
from specbatch.files.config_values import names_of
from specbatch.kernels.attention.queries import QKVLayout
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.gemm.quantized.weight import Weight
from specbatch.kernels.sampling.argmax_topk import Scores
from specbatch.models.config import ModelConfig, without_windows
from specbatch.models.decoder import Decoder, Features
from specbatch.models.families.llama import decoder_layer, dense
from specbatch.models.layers.blocks import Attention, Layer
from specbatch.models.partition import scores
from specbatch.models.rope_tables import rope_tables
from specbatch.models.shape_recorder import ShapeRecorder
from specbatch.models.weight_reader import Reader

Shapes = dict[str, tuple[int, ...]]
Attend = Callable[[int, torch.Tensor, QKVLayout], torch.Tensor]  # layer, its qkv, its heads -> attention output
LAYER = "layers.0"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class Joined:
    """[a ; b] @ weight.T + bias for a and b [T, H], weight [out, 2H], bias [out]. It is computed as one GEMM per half,
    which avoids the concatenation and fuses the norm of each half. H is a multiple of 128 if the weight has scales."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        first, second = weight.split_inputs()
        self._first, self._second = first.linear(bias), second.linear()

    def __call__(self, a: torch.Tensor, b: torch.Tensor, a_norm: Norm | None, b_norm: Norm | None) -> torch.Tensor:
        return self._second(b, norm=b_norm, residual=self._first(a, norm=a_norm))


class DraftHead:
    """A draft head, split at the attention of its last layer. The embedding is the target's, and so is the output
    matrix, or a copy of it in FP8.

    config      sizes of its layers
    heads       of the first layer
    more        the layers after the first
    vocabulary  int64 [Vd]: target token id of each draft token id; None if they are the same
    depths      layers that read a token: the first, or all where each makes another draft (MTP with a layer per depth)
    width       columns of the features that it reads
    """

    vocabulary: torch.Tensor | None = None
    depths = 1
    _head_norm: Norm | None = None  # of the output matrix

    def __init__(self, config: ModelConfig, heads: QKVLayout, target: Decoder, head: Linear) -> None:
        """head: the output matrix, see `Reader.head`."""
        self.config = config
        self.heads = heads
        self.more: tuple[Layer, ...] = ()
        self.embedding = target.embedding
        self._head = head

    @property
    def width(self) -> int:
        return self.config.hidden_size

    def take(self, features: Features) -> torch.Tensor:
        """The features that it reads: [T, width]."""
        return features.last

    def project(self, taken: torch.Tensor) -> torch.Tensor:
        """Features [T, width] -> hidden [T, hidden_size], which its own output replaces in later drafts."""
        return taken

    @property
    def depth(self) -> int:
        """Number of layers."""
        return 1 + len(self.more)

    def heads_of(self, layer: int) -> QKVLayout:
        return self._attention(layer).heads if layer else self.heads

    def enter(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        attend: Attend | None = None,
        later: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedded tokens and hidden [T, hidden_size] -> residual stream [T, hidden_size], which may be `hidden`
        itself, and qkv, both of the last layer. attend: the attention of the layers before it, if there are any; later:
        the embedded tokens of the layers after the first, if they read any (see `depths`)."""
        x, qkv = self.begin(embedded, hidden)
        for layer in range(len(self.more)):
            assert attend is not None
            x, qkv = self.advance(layer, x, attend(layer, qkv, self.heads_of(layer)), *later[layer : layer + 1])
        return x, qkv

    def leave(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """From the attention output [T, heads * head_dim] of the last layer to the next `hidden` [T, hidden_size]; may
        overwrite x."""
        return self._finish(self._leave(len(self.more), x, attended))

    def begin(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream and qkv of the first layer; see `enter`."""
        raise NotImplementedError

    def advance(
        self, layer: int, x: torch.Tensor, attended: torch.Tensor, embedded: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the attention output of a layer to the residual stream and qkv of the next one, which reads `embedded`
        tokens if it is one of the `depths`; may overwrite x."""
        x = self._leave(layer, x, attended)
        return x, self._attention(layer + 1).project(x)

    def _leave(self, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream after a layer."""
        return self.more[layer - 1].leave(x, attended) if layer else self._leave_first(x, attended)

    def _leave_first(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _finish(self, x: torch.Tensor) -> torch.Tensor:
        """From the residual stream after the last layer to the next `hidden`."""
        return x

    def _attention(self, layer: int) -> Attention:
        """That of a layer after the first."""
        mixer = self.more[layer - 1].mixer
        assert isinstance(mixer, Attention)
        return mixer

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, hidden_size] -> logits [T, V], or [T, Vd] with a draft vocabulary."""
        return self._head(hidden, norm=self._head_norm)

    def scores(self, hidden: torch.Tensor, *, greedy: bool) -> Scores:
        """`logits`, or if `greedy` what suffices for their argmax."""
        return scores(self._head, hidden, greedy=greedy, norm=self._head_norm)

    def embed(self, tokens: torch.Tensor, overrides: EmbeddingOverrides | None = None) -> torch.Tensor:
        return embed(tokens, self.embedding, overrides)


class LlamaHead(DraftHead):
    """A head whose first layer is a Llama layer from the attention on, and whose others are whole ones. It may have its
    own embedding and output matrix, and then a hidden size that differs from the target's."""

    def __init__(
        self,
        config: ModelConfig,
        read: Reader,
        names: Collection[str],
        target: Decoder,
        positions: int,
        outputs: int | None = None,
    ) -> None:
        """names: the tensors of the checkpoint; positions: length of the rope tables; outputs: tokens of its own output
        matrix, if not all of the vocabulary."""
        attention = f"{LAYER}.self_attn"
        tables = rope_tables(config, positions, target.dtype, target.device)
        head = read.output_matrix(HEAD, outputs or config.vocab_size) if HEAD in names else target.head
        super().__init__(config, read.heads(attention, tables), target, read.head(head))
        if EMBEDDING in names:
            self.embedding = read(EMBEDDING, config.vocab_size, config.hidden_size)
        columns = config.num_heads * config.head_dim
        self._out = read.linear({f"{attention}.o_proj": config.hidden_size}, columns, config.o_bias)
        self._mlp = dense(read, LAYER)
        self.more = tuple(decoder_layer(read, f"layers.{index}", tables) for index in range(1, config.num_layers))

    def _leave_first(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return self._mlp(self._out(attended, residual=x))


def layer_config(described: dict[str, Any], shapes: Shapes | None = None) -> ModelConfig:
    """The sizes of a head's layers. Its config.json names the architecture that the head was derived from, marked as
    EAGLE. Biases and q/k norms are taken from the tensors `shapes`, if given, not from the config."""
    plain = dict(described)
    names = names_of(plain, "architectures")
    if names:
        plain["architectures"] = [re.sub("Eagle3?", "", name) for name in names]
    config = without_windows(ModelConfig.from_dict(plain), "the layers of a draft head")
    if config.quantization is not None:
        raise refuse("quantization_config", config.quantization.name, "quantized draft heads are not supported")
    if shapes is None:
        return config
    return replace(
        config,
        qkv_bias=f"{LAYER}.self_attn.q_proj.bias" in shapes,
        o_bias=f"{LAYER}.self_attn.o_proj.bias" in shapes,
        mlp_bias=f"{LAYER}.mlp.down_proj.bias" in shapes,
        qk_norm=f"{LAYER}.self_attn.q_norm.weight" in shapes,
    )


def recorded_shapes(config: ModelConfig, build: Callable[[Reader, Decoder], DraftHead]) -> Shapes:
    """Name -> shape of the tensors that a head of this config reads, from building one without weights."""
    read = ShapeRecorder(config)
    target: Any = SimpleNamespace(embedding=None, head=None, dtype=torch.bfloat16, device=torch.device("meta"))
    build(read, target)
    return read.shapes
