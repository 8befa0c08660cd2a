"""Network of MTP (NEXTN) draft heads, stored with the target as `mtp.*` in the layout of Qwen3-Next and Qwen3.5.

x = fc([norm(embed(t_{i+1})) ; norm(h_i)]), where h_i is the target's last hidden state after its final norm; then a
layer of these families with gated attention, and a norm whose output is the input of the target's output matrix and
the next h. All norms are centred on zero: they multiply by 1 + weight. With several layers, layer d reads the output of
layer d - 1 at position i and the token t_{i+1+d}; fc and norms are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.gemm.quantized.weight import Weight
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.families import qwen3_next
from specbatch.models.families.qwen3_next import Qwen3NextConfig, centred
from specbatch.models.heads.draft_head import DraftHead, Joined, recorded_shapes
from specbatch.models.layers.blocks import Attention, Layer
from specbatch.models.layers.moe import Shapes
from specbatch.models.rope_tables import rope_tables
from specbatch.models.weight_reader import Reader

PREFIX = "mtp."
FC = f"{PREFIX}fc.weight"


@dataclass(frozen=True, kw_only=True)
class MtpConfig(Qwen3NextConfig):
    """The head as a model without embedding and output matrix."""

    def head_shapes(self) -> Shapes:
        return recorded_shapes(self, lambda read, target: Mtp(read, target, 1))


@dataclass(frozen=True)
class MtpLayer:
    """A layer of the target's family over the joined norms of token and feature, and a norm after it."""

    join: Joined
    token_norm: Norm
    hidden_norm: Norm
    layer: Layer
    norm: Norm


class MtpHead(DraftHead):
    """One layer for all drafts, or one for each."""

    def __init__(self, config: ModelConfig, target: Decoder, head: Linear, layers: Sequence[MtpLayer]) -> None:
        """head: see `DraftHead`."""
        first = layers[0].layer.mixer
        assert isinstance(first, Attention)
        super().__init__(config, first.heads, target, head)
        self._layers = tuple(layers)
        self.more = tuple(part.layer for part in layers[1:])
        self.depths = len(layers)

    def start(self, depth: int, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream and qkv of a layer, from embedded tokens and the output of the layer before it."""
        part = self._layers[depth]
        x = part.join(embedded, hidden, part.token_norm, part.hidden_norm)
        return x, part.layer.mixer.project(x)

    def finish(self, depth: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The output of a layer after its attention; may overwrite x."""
        part = self._layers[depth]
        return rms_norm(part.layer.leave(x, attended), *part.norm)

    def begin(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.start(0, embedded, hidden)

    def advance(
        self, layer: int, x: torch.Tensor, attended: torch.Tensor, embedded: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert embedded is not None
        return self.start(layer + 1, embedded, self.finish(layer, x, attended))

    def leave(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return self.finish(self.depths - 1, x, attended)


def joined(reader: Reader, name: str) -> Joined:
    """The matrix `name` of token and feature."""
    config = reader.config
    weight = reader.weight({name: config.hidden_size}, 2 * config.hidden_size)
    if config.may_dequantize(name, weight.shape):  # a block of scales spans both halves
        weight = Weight(reader.dequantize(name, weight))
    return Joined(weight)


class Mtp(MtpHead):
    def __init__(self, reader: Reader, target: Decoder, positions: int) -> None:
        """positions: length of the rope tables."""
        config = reader.config
        tables = rope_tables(config, positions, target.dtype, target.device)
        token, hidden = (centred(reader, f"{PREFIX}pre_fc_norm_{part}") for part in ("embedding", "hidden"))
        layers = [qwen3_next.layer(reader, depth, tables) for depth in range(config.num_layers)]
        join, norm = joined(reader, FC), centred(reader, f"{PREFIX}norm")
        head = reader.head(target.head)
        super().__init__(config, target, head, [MtpLayer(join, token, hidden, layer, norm) for layer in layers])


def mtp_config(target: ModelConfig, found: Shapes | None = None, layers: int = 1) -> MtpConfig:
    """The config of a target's MTP head of so many layers: gated attention with the target's sizes and rope, without
    biases, and the target's mixture of experts. If the tensors `found` are given, they determine whether it has a dense
    MLP instead, and which of them are FP8."""
    mixture = target.mixture if isinstance(target, Qwen3NextConfig) else None
    if found is not None and f"{PREFIX}layers.0.mlp.gate.weight" not in found:
        mixture = None
    own: dict[str, Any] = {"num_layers": layers, "qk_norm": True, "windows": ()}
    own |= dict.fromkeys(("tie_embeddings", "qkv_bias", "o_bias", "mlp_bias"), False)
    config = MtpConfig(
        **{field.name: getattr(target, field.name) for field in fields(ModelConfig)} | own,
        attends=(True,) * layers,
        delta=None,
        mixture=mixture,
        sparse=(mixture is not None,) * layers,
        prefix=PREFIX,
    )
    return config if found is None else config.fit(found)


def own_tensors(target: ModelConfig, found: Shapes) -> Shapes:
    """Those of the tensors `found` of a draft head that it reads."""
    return found


def first_layer(target: ModelConfig) -> int:
    """The number of the head's first layer in the names of tensors."""
    return 0
