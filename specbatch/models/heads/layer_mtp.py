"""Network of the MTP draft heads of DeepSeek-V3 and GLM-4.5, stored with the target as layers after its last one.

x = eh_proj([enorm(embed(t_{i+1})) ; hnorm(h_i)]), where h_i is the target's last hidden state after its final norm;
then a decoder layer of the family, and shared_head.norm, whose output is the input of the target's output matrix and
the next h. Of several layers, layer d reads the output of layer d - 1 at position i and the token t_{i+1+d}. The files
repeat the target's embedding and output matrix, which are not read.
DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module

from specbatch.errors import refuse
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.families.deepseek import DeepseekConfig
from specbatch.models.families.glm4_moe import Glm4MoeConfig
from specbatch.models.heads.draft_head import recorded_shapes
from specbatch.models.heads.mtp import MtpHead, MtpLayer, joined
from specbatch.models.layers.moe import Shapes
from specbatch.models.rope_tables import rope_tables
from specbatch.models.weight_reader import Reader

_REPEATED = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True, kw_only=True)
class _NumberedLayer(ModelConfig):
    """The head as a model. place: the number of its first layer in the names of tensors."""

    place: int

    def head_shapes(self) -> Shapes:
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
        tables = rope_tables(config, positions, target.dtype, target.device)
        layer = import_module(config.module).layer

        def read(place: int) -> MtpLayer:
            stem = f"model.layers.{place}"
            return MtpLayer(
                join=joined(reader, f"{stem}.eh_proj.weight"),
                token_norm=reader.norm(f"{stem}.enorm"),
                hidden_norm=reader.norm(f"{stem}.hnorm"),
                layer=layer(reader, place, tables),
                norm=reader.norm(f"{stem}.shared_head.norm"),
            )

        head = reader.head(target.head)
        super().__init__(config, target, head, [read(config.place + depth) for depth in range(config.num_layers)])


def mtp_config(target: ModelConfig, found: Shapes | None = None, layers: int = 1) -> DeepseekMtpConfig | Glm4MtpConfig:
    """The config of a target's MTP head of so many layers; found: the files' tensors that are not the target's."""
    assert isinstance(target, DeepseekConfig | Glm4MoeConfig)
    own = {"num_layers": layers, "dense_layers": 0, "tie_embeddings": False, "place": target.num_layers}
    values = {field.name: getattr(target, field.name) for field in fields(target)} | own
    config = DeepseekMtpConfig(**values) if isinstance(target, DeepseekConfig) else Glm4MtpConfig(**values)
    return config if found is None else config.fit(found)


def own_tensors(target: ModelConfig, found: Shapes) -> Shapes:
    """Those of `found` that the head reads. Refused: another embedding or output matrix than the target's sizes."""
    wanted = (target.vocab_size, target.hidden_size)
    for name, shape in found.items():
        if name.endswith(_REPEATED) and shape != wanted:
            raise refuse("model", name, f"its shape is {list(shape)}, and the target's {list(wanted)}")
    return {name: shape for name, shape in found.items() if not name.endswith(_REPEATED)}


def first_layer(target: ModelConfig) -> int:
    """The number of the head's first layer in the names of tensors."""
    return target.num_layers
