"""Network of the MTP draft head of DeepSeek-V3, stored with the target as decoder layers after its last one.

x = eh_proj([enorm(embed(t_{i+1})) ; hnorm(h_i)]), where h_i is the target's last hidden state after its final norm;
then a decoder layer with latent attention and a mixture, and shared_head.norm, whose output is the input of the
target's output matrix and the next h. The files repeat the target's embedding and output matrix, which are not read.
DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from specbatch.errors import refuse
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.weight import Weight
from specbatch.models import deepseek
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, rope_tables
from specbatch.models.deepseek import DeepseekConfig, LatentAttention
from specbatch.models.draft_head import DraftHead, Joined
from specbatch.models.layers import Reader, ShapeRecorder
from specbatch.models.moe import Shapes

_REPEATED = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True, kw_only=True)
class DeepseekMtpConfig(DeepseekConfig):
    """The head as a model of one layer. place: the number of that layer in the names of tensors."""

    place: int

    @property
    def stem(self) -> str:
        return f"model.layers.{self.place}"

    def weight_shapes(self) -> Shapes:
        hidden, read = self.hidden_size, ShapeRecorder(self)
        deepseek.layer(read, self.place, (torch.zeros(0), torch.zeros(0)))
        norms = {f"{self.stem}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
        return {f"{self.stem}.eh_proj.weight": (hidden, 2 * hidden), **norms, **read.shapes}


class Mtp(DraftHead):
    def __init__(self, reader: Reader, target: Decoder, positions: int) -> None:
        """positions: length of the rope tables."""
        config = reader.config
        assert isinstance(config, DeepseekMtpConfig)
        stem = config.stem
        layer = deepseek.layer(reader, config.place, rope_tables(config, positions, target.dtype, target.device))
        assert isinstance(layer.mixer, LatentAttention)
        super().__init__(config, layer.mixer.heads, target)
        self._layer = layer
        joined = f"{stem}.eh_proj.weight"
        weight = reader.weight({joined: config.hidden_size}, 2 * config.hidden_size)
        if config.may_dequantize(joined, weight.values.shape):  # a block of scales spans both halves
            weight = Weight(reader.dequantize(joined, weight))
        self._joined = Joined(weight)
        self._token_norm, self._hidden_norm = reader.norm(f"{stem}.enorm"), reader.norm(f"{stem}.hnorm")
        self._norm = reader.norm(f"{stem}.shared_head.norm")

    def begin(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._joined(embedded, hidden, self._token_norm, self._hidden_norm)
        return x, self._layer.mixer.project(x)

    def _leave_first(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return self._layer.leave(x, attended)

    def _finish(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, *self._norm)


def mtp_config(target: ModelConfig, found: Shapes | None = None) -> DeepseekMtpConfig:
    """The config of a target's MTP head; found: the tensors of the files that are not the target's."""
    assert isinstance(target, DeepseekConfig)
    own = {"num_layers": 1, "dense_layers": 0, "tie_embeddings": False}
    values = {field.name: getattr(target, field.name) for field in fields(DeepseekConfig)} | own
    config = DeepseekMtpConfig(**values, place=target.num_layers)
    return config if found is None else config.fit(found)


def own_tensors(target: ModelConfig, found: Shapes) -> Shapes:
    """Those of `found` that the head reads. Refused: another embedding or output matrix than the target's sizes."""
    wanted = (target.vocab_size, target.hidden_size)
    for name in (f"model.layers.{target.num_layers}.{end}" for end in _REPEATED):
        if found.get(name, wanted) != wanted:
            raise refuse("model", name, f"its shape is {list(found[name])}, and the target's {list(wanted)}")
    return {name: shape for name, shape in found.items() if not name.endswith(_REPEATED)}
