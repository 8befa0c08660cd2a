"""Network of MTP (NEXTN) draft heads, stored with the target as `mtp.*` in the layout of Qwen3-Next and Qwen3.5.

x = fc([norm(embed(t_{i+1})) ; norm(h_i)]), where h_i is the target's last hidden state after its final norm; then a
layer of these families with gated attention, and a norm whose output is the input of the target's output matrix and
the next h. All norms are centred on zero: they multiply by 1 + weight.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.gemm.weight import Weight
from specbatch.models import qwen3_next
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, rope_tables
from specbatch.models.draft_head import DraftHead, Joined
from specbatch.models.layers import Attention, Layer, Reader
from specbatch.models.moe import Shapes
from specbatch.models.qwen3_next import Qwen3NextConfig, centred

PREFIX = "mtp."
FC = f"{PREFIX}fc.weight"


@dataclass(frozen=True, kw_only=True)
class MtpConfig(Qwen3NextConfig):
    """The head as a model of one layer without embedding and output matrix."""

    def weight_shapes(self) -> Shapes:
        hidden, shapes = self.hidden_size, super().weight_shapes()
        for name in (self.names.embedding, self.names.head):
            del shapes[name]  # they are the target's
        norms = {f"{PREFIX}pre_fc_norm_{part}.weight": (hidden,) for part in ("embedding", "hidden")}
        return {FC: (hidden, 2 * hidden), **norms, **shapes}


class MtpHead(DraftHead):
    """A layer of the target's family over the joined norms of token and feature, and a norm after it."""

    def __init__(self, reader: Reader, target: Decoder, layer: Layer, fc: str, norms: tuple[Norm, Norm, Norm]) -> None:
        """fc: name of the matrix that joins them; norms: of tokens, of features, and the one after the layer."""
        config = reader.config
        assert isinstance(layer.mixer, Attention)
        super().__init__(config, layer.mixer.heads, target)
        self._layer = layer
        weight = reader.weight({fc: config.hidden_size}, 2 * config.hidden_size)
        if config.may_dequantize(fc, weight.values.shape):  # a block of scales spans both halves
            weight = Weight(reader.dequantize(fc, weight))
        self._fc = Joined(weight)
        self._token_norm, self._hidden_norm, self._norm = norms

    def begin(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._fc(embedded, hidden, self._token_norm, self._hidden_norm)
        return x, self._layer.mixer.project(x)

    def _leave_first(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return self._layer.leave(x, attended)

    def _finish(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, *self._norm)


class Mtp(MtpHead):
    def __init__(self, reader: Reader, target: Decoder, positions: int) -> None:
        """positions: length of the rope tables."""
        tables = rope_tables(reader.config, positions, target.dtype, target.device)
        token, hidden = (centred(reader, f"{PREFIX}pre_fc_norm_{part}") for part in ("embedding", "hidden"))
        norms = token, hidden, centred(reader, f"{PREFIX}norm")
        super().__init__(reader, target, qwen3_next.layer(reader, 0, tables), FC, norms)


def mtp_config(target: ModelConfig, found: Shapes | None = None) -> MtpConfig:
    """The config of a target's MTP head: gated attention with the target's sizes and rope, without biases, and the
    target's mixture of experts. If the tensors `found` are given, they determine whether it has a dense MLP instead,
    and which of them are FP8."""
    mixture = target.mixture if isinstance(target, Qwen3NextConfig) else None
    if found is not None and f"{PREFIX}layers.0.mlp.gate.weight" not in found:
        mixture = None
    own: dict[str, Any] = {"num_layers": 1, "qk_norm": True, "windows": ()}
    own |= dict.fromkeys(("tie_embeddings", "qkv_bias", "o_bias", "mlp_bias"), False)
    config = MtpConfig(
        **{field.name: getattr(target, field.name) for field in fields(ModelConfig)} | own,
        attends=(True,),
        delta=None,
        mixture=mixture,
        sparse=(mixture is not None,),
        prefix=PREFIX,
    )
    return config if found is None else config.fit(found)


def own_tensors(target: ModelConfig, found: Shapes) -> Shapes:
    """Those of the tensors `found` of a draft head that it reads."""
    return found
