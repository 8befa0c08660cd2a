"""Network of the MTP draft heads of DeepSeek-V3 and GLM-4.5, stored with the target as a layer after its last one.

x = eh_proj([enorm(embed(t_{i+1})) ; hnorm(h_i)]), where h_i is the target's last hidden state after its final norm;
then a decoder layer of the family, and shared_head.norm, whose output is the input of the target's output matrix and
the next h. The files repeat the target's embedding and output matrix, which are not read.
DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module

from specbatch.errors import refuse
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, rope_tables
from specbatch.models.deepseek import DeepseekConfig
from specbatch.models.draft_head import recorded_shapes
from specbatch.models.glm4_moe import Glm4MoeConfig
from specbatch.models.layers import Reader
from specbatch.models.moe import Shapes
from specbatch.models.mtp import MtpHead

_REPEATED = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True, kw_only=True)
class _NumberedLayer(ModelConfig):
    """The head as a model of one layer. place: the number of that layer in the names of tensors."""

    place: int

    @property
    def stem(self) -> str:
        return f"model.layers.{self.place}"

    def weight_shapes(self) -> Shapes:
        return recorded_shapes(self, lambda read, target: Mtp(read, target, 1))


@dataclass(frozen=True, kw_only=True)
class DeepseekMtpConfig(_NumberedLayer, DeepseekConfig):
    pass


@dataclass(frozen=True, kw_only=True)
class Glm4MtpConfig(_NumberedLayer, Glm4MoeConfig):
    pass


class Mtp(MtpHead):
    def __init__(self, reader: Reader, target: Decoder, positions: int) -> None:
        """positions: length of the rope tables."""
        config = reader.config
        assert isinstance(config, _NumberedLayer)
        stem, tables = config.stem, rope_tables(config, positions, target.dtype, target.device)
        norms = reader.norm(f"{stem}.enorm"), reader.norm(f"{stem}.hnorm"), reader.norm(f"{stem}.shared_head.norm")
        layer = import_module(config.module).layer(reader, config.place, tables)
        super().__init__(reader, target, layer, f"{stem}.eh_proj.weight", norms)


def mtp_config(target: ModelConfig, found: Shapes | None = None) -> DeepseekMtpConfig | Glm4MtpConfig:
    """The config of a target's MTP head; found: the tensors of the files that are not the target's."""
    assert isinstance(target, DeepseekConfig | Glm4MoeConfig)
    own = {"num_layers": 1, "dense_layers": 0, "tie_embeddings": False, "place": target.num_layers}
    values = {field.name: getattr(target, field.name) for field in fields(target)} | own
    config = DeepseekMtpConfig(**values) if isinstance(target, DeepseekConfig) else Glm4MtpConfig(**values)
    return config if found is None else config.fit(found)


def own_tensors(target: ModelConfig, found: Shapes) -> Shapes:
    """Those of `found` that the head reads. Refused: another embedding or output matrix than the target's sizes."""
    wanted = (target.vocab_size, target.hidden_size)
    for name in (f"model.layers.{target.num_layers}.{end}" for end in _REPEATED):
        if found.get(name, wanted) != wanted:
            raise refuse("model", name, f"its shape is {list(found[name])}, and the target's {list(wanted)}")
    return {name: shape for name, shape in found.items() if not name.endswith(_REPEATED)}
