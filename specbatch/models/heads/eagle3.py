"""Network and config of EAGLE-3 draft heads (Li et al. 2025), in the formats of SpecForge and speculators.

h = fc(three concatenated residual streams of the target), or the head's own output for later drafts. The attention of
the first layer reads [norm(embed(t_{i+1})) ; norm(h)], and its output is added to h. The output matrix covers only the
most frequent tokens; `d2t` maps them to the target's token ids.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, flag_of, places_of, table_of
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, Features
from specbatch.models.families.llama import qkv_rows
from specbatch.models.heads.draft_head import (
    EMBEDDING,
    HEAD,
    LAYER,
    Joined,
    LlamaHead,
    Shapes,
    layer_config,
    recorded_shapes,
)
from specbatch.models.heads.feature_layers import FeatureLayers
from specbatch.models.weight_reader import Reader

# Switches of eagle_config that are true for all heads that follow these equations.
_USUAL = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm", "next_layer_regular")
_SWITCHES = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
NESTED = f"eagle_config.{_LAYERS}"


@dataclass(frozen=True)
class Eagle3Config:
    """The settings of a head's config.json.

    layer                 sizes of its layers
    target_hidden         hidden size of the target that it was trained for
    draft_vocabulary      number of tokens that it can draft
    features              the target's layers that it reads; None if the config lists none
    norm_before_residual  the residual stream is hidden_norm(h), not h. A speculators config without the key means h,
                          as the class that writes it; vLLM takes hidden_norm(h)
    norm_output           the next hidden state is norm(y), not y
    norm_before_fc        one norm over the concatenated features
    fc_norm               one norm per feature
    """

    layer: ModelConfig
    target_hidden: int
    draft_vocabulary: int
    features: FeatureLayers | None
    norm_before_residual: bool
    norm_output: bool
    norm_before_fc: bool
    fc_norm: bool

    @classmethod
    def from_dict(cls, config: dict[str, Any], shapes: Shapes | None = None, algorithm: str = "eagle3") -> Eagle3Config:
        """Read either format, of a head for `algorithm`. If the tensors `shapes` are given, they take
        precedence over the config."""
        method = config.get("speculators_model_type")
        if method not in (None, algorithm):
            raise refuse("speculators_model_type", method, f"algorithm {algorithm!r} runs {algorithm!r} checkpoints")
        nested = table_of(config, "eagle_config")
        _refuse_switches(config, nested)
        names = shapes or {}
        layer = layer_config(table_of(config, "transformer_layer_config") if method else config, shapes)
        switches = {name: flag_of(config, name, flag_of(nested, name)) for name in _SWITCHES}
        switches["norm_before_fc"] |= "input_norm.weight" in names
        switches["fc_norm"] |= "fc_norm.0.weight" in names
        if switches["norm_before_fc"] and switches["fc_norm"]:
            raise refuse("fc_norm", True, "norm_before_fc is true, too; heads with one of the two are supported")
        vocabulary = count_of(config, "draft_vocab_size", layer.vocab_size)
        if vocabulary > layer.vocab_size:
            raise refuse(
                "draft_vocab_size", vocabulary, f"the head's vocab_size is {layer.vocab_size}; use at most that"
            )
        return cls(
            layer=layer,
            target_hidden=count_of(config, "target_hidden_size", layer.hidden_size),
            draft_vocabulary=vocabulary,
            features=_features(config, nested),
            **switches,
        )

    def shapes(self, count: int, found: Shapes) -> Shapes:
        """Name -> shape of its tensors for `count` features; optional ones only if they are among `found`."""
        layer, names = self.layer, set(found)
        if self.draft_vocabulary != layer.vocab_size:
            names |= {HEAD, "d2t"}
        if layer.hidden_size != self.target_hidden:  # then the target's matrices do not fit
            names |= {EMBEDDING, HEAD}
        read = recorded_shapes(layer, lambda read, target: Eagle3(layer, self, count, read, names, target, 1, None))
        # t2d is for training: which of the target's tokens can be drafted.
        maps: Shapes = {"d2t": (self.draft_vocabulary,), "t2d": (layer.vocab_size,)}
        # Of P-EAGLE: what stands for the features at masked places.
        masked, width = found.get("mask_hidden", ()), count * self.target_hidden
        maps["mask_hidden"] = masked if math.prod(masked) == width else (1, 1, width)
        return read | {name: shape for name, shape in maps.items() if name in names}


def _refuse_switches(config: dict[str, Any], nested: dict[str, Any]) -> None:
    """Refuse unknown switches that are on: they change the equations."""
    mine = {key: value for key, value in config.items() if key.startswith(("norm_", "fc_"))}
    for where, switches in (("", mine), ("eagle_config.", nested)):
        for key, value in switches.items():
            if value is True and key not in _SWITCHES + _USUAL:
                known = ", ".join(_SWITCHES)
                raise refuse(f"{where}{key}", value, f"supported switches are {known}")
    for key in _USUAL:
        if not flag_of(nested, key, True):
            raise refuse(f"eagle_config.{key}", False, "only heads with true are supported")


def _features(config: dict[str, Any], nested: dict[str, Any]) -> FeatureLayers | None:
    """The same key has two meanings: at the top level (speculators, vLLM) it lists boundaries, in eagle_config
    (SpecForge, SGLang) in most files layers whose output is meant."""
    boundaries, listed = places_of(config, _LAYERS), places_of(nested, _LAYERS)
    if boundaries:
        return FeatureLayers(_LAYERS, boundaries, first=1)
    if not listed:
        return None
    # The usual list of outputs starts with 1. Published lists that do not were found to be boundaries.
    return FeatureLayers(NESTED, listed, first=0 if listed[0] == 1 else 1)


def default_aux(layers: int) -> tuple[int, int, int]:
    """Boundaries that heads read whose config lists none, of a target with that many layers."""
    return 2, layers // 2, layers - 3


class Eagle3(LlamaHead):
    def __init__(
        self,
        config: ModelConfig,
        described: Eagle3Config,
        count: int,
        read: Reader,
        names: Collection[str],
        target: Decoder,
        positions: int,
        d2t: torch.Tensor | None,
    ) -> None:
        """config: `described.layer` as it runs beside the target; count: features side by side; d2t: int64 [Vd], what
        to add to a draft's id for the target's."""
        super().__init__(config, read, names, target, positions, described.draft_vocabulary)
        rows = qkv_rows(config, f"{LAYER}.self_attn")
        self._width = count * described.target_hidden
        self._qkv = Joined(
            read.weight({f"{stem}.weight": count for stem, count in rows.items()}, 2 * config.hidden_size),
            torch.cat([read(f"{stem}.bias", count) for stem, count in rows.items()]) if config.qkv_bias else None,
        )
        self._fc = read.linear({"fc": config.hidden_size}, self._width, "fc.bias" in names)
        self._token_norm = read.norm(f"{LAYER}.input_layernorm")
        self._hidden_norm = read.norm(f"{LAYER}.hidden_norm")
        self._norm = read.norm("norm")
        self._before_residual = described.norm_before_residual
        self._norm_output = described.norm_output
        self._head_norm = None if described.norm_output else self._norm
        self._together = read.norm("input_norm", self._width) if described.norm_before_fc else None
        sizes = [described.target_hidden] * count if described.fc_norm else []
        self._each = [read.norm(f"fc_norm.{index}", size) for index, size in enumerate(sizes)]
        if d2t is not None:
            self.vocabulary = (torch.arange(len(d2t)) + d2t).to(target.device)

    @property
    def width(self) -> int:
        return self._width

    def take(self, features: Features) -> torch.Tensor:
        assert features.aux is not None
        return features.aux

    def project(self, taken: torch.Tensor) -> torch.Tensor:
        if self._each:
            parts = taken.chunk(len(self._each), 1)
            normed = [rms_norm(part.contiguous(), *norm) for part, norm in zip(parts, self._each, strict=True)]
            taken = torch.cat(normed, 1)
        return self._fc(taken, norm=self._together)

    def begin(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        norm = self._token_norm
        if self._before_residual:
            hidden = rms_norm(hidden, *self._hidden_norm)
            return hidden, self._qkv(embedded, hidden, norm, None)
        return hidden, self._qkv(embedded, hidden, norm, self._hidden_norm)

    def _finish(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, *self._norm) if self._norm_output else x
