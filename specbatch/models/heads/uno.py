"""The LoRA adapter of UNO, by which the target itself drafts a block of tokens in one pass.

As SGLang (#37667) reads it: an adapter in the format of PEFT, adapter_config.json and safetensors. In the pass that
drafts, the row of the newest token has the target's weights, and the rows of noise after it those plus the adapter's:
W x + scale * B (A x).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, names_of, positive_of, table_of
from specbatch.kernels.elementwise.activations import silu_and_mul
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.families import llama
from specbatch.models.formats.format import Shapes
from specbatch.models.layers.blocks import Attention, Layer, SwiGlu

CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model.model.layers"
_OF_ATTENTION, _OF_MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
MODULES = (*_OF_ATTENTION, *_OF_MLP)
# Options of PEFT that would make it another adapter.
_OFF: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "exclude_modules": (None, []),
    "lora_bias": (None, False),
}


@dataclass(frozen=True)
class Adapter:
    """rank: of the matrices; scale: see above; modules: that have an adapter, of `MODULES`."""

    rank: int
    scale: float
    modules: tuple[str, ...]

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Adapter:
        """Read an adapter_config.json. Raises SpecbatchError for what is not supported."""
        if config.get("peft_type") != "LORA":
            raise refuse("peft_type", config.get("peft_type"), "a UNO draft is a 'LORA'")
        for key, off in _OFF.items():
            if config.get(key) not in off:
                raise refuse(key, config[key], "not supported; leave it out")
        for key in ("rank_pattern", "alpha_pattern"):
            if table_of(config, key):
                raise refuse(key, config[key], "not supported; all matrices must have one rank")
        modules = names_of(config, "target_modules")
        if not modules or not set(modules) <= set(MODULES):
            raise refuse("target_modules", config.get("target_modules"), f"list some of {', '.join(MODULES)}")
        rank = count_of(config, "r")
        return cls(rank, positive_of(config, "lora_alpha") / rank, tuple(name for name in MODULES if name in modules))

    def shapes(self, target: ModelConfig) -> Shapes:
        """Name -> shape of the tensors for a target."""
        found: Shapes = {}
        for index in range(target.num_layers):
            for name in self.modules:
                columns, rows = _sizes(target)[name]
                found[tensor_name(index, name, "A")] = (self.rank, columns)
                found[tensor_name(index, name, "B")] = (rows, self.rank)
        return found


def _sizes(target: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the modules."""
    hidden, inner, dim = target.hidden_size, target.intermediate_size, target.head_dim
    own, keys = target.num_heads * dim, target.num_kv_heads * dim
    return {
        "q_proj": (hidden, own),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (own, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def tensor_name(layer: int, module: str, matrix: str) -> str:
    """matrix: "A" or "B"."""
    part = "mlp" if module in _OF_MLP else "self_attn"
    return f"{_PREFIX}.{layer}.{part}.{module}.lora_{matrix}.weight"


class AdaptedLinear(Linear):
    """A `Linear` of the target, plus an adapter in all but the first of every `rows` rows."""

    def __init__(self, base: Linear, down: torch.Tensor, up: torch.Tensor, rows: int) -> None:
        """down [rank, in], up [out, rank] with the scale applied."""
        self.shape, self.bias = base.shape, base.bias
        self._base, self._down, self._up, self._rows = base, Linear(down), Linear(up), rows

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        read = x if norm is None else rms_norm(x, *norm)
        noise = read.view(-1, self._rows, x.shape[1])[:, 1:]
        added = self._up(self._down(noise.flatten(0, 1))).view(*noise.shape[:2], -1)
        y = self._base(x, norm=norm, residual=residual, out=out)
        y.view(-1, self._rows, y.shape[1])[:, 1:] += added
        return y

    def after_gate(
        self, gate_up: Linear, x: torch.Tensor, norm: Norm, *, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return self(silu_and_mul(gate_up(x, norm=norm)), residual=residual)


def check_target(target: ModelConfig) -> None:
    """Refuse a target whose layers are not those of the family of Llama."""
    if target.module != llama.__name__:
        works = "a UNO draft adapts dense layers, such as those of Llama, Mistral, Qwen2 and Qwen3"
        raise refuse("algorithm", "uno", works)


def adapted(model: Decoder, adapter: Adapter, read: Callable[[str], torch.Tensor], rows: int) -> Decoder:
    """The model with an adapter, for passes whose tokens are blocks of `rows` tokens; all its weights are shared.
    read: returns a tensor of the adapter in the model's type, on its device."""
    if rows == 1:  # the newest token's row, without noise
        return model
    sizes = _sizes(model.config)

    def matrices(index: int, names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of modules that the model has as one matrix, in this order; None if none of them has an adapter."""
        present = [name for name in names if name in adapter.modules]
        if not present:
            return None
        down = torch.cat([read(tensor_name(index, name, "A")) for name in present])
        up = down.new_zeros(sum(sizes[name][1] for name in names), len(down))
        row = 0
        for name in names:
            if name in present:
                column = present.index(name) * adapter.rank
                part = up[row : row + sizes[name][1], column : column + adapter.rank]
                part.copy_(read(tensor_name(index, name, "B")) * adapter.scale)
            row += sizes[name][1]
        return down, up

    def linear(base: Linear, index: int, *names: str) -> Linear:
        found = matrices(index, names)
        return base if found is None else AdaptedLinear(base, *found, rows)

    def layer(index: int, layer: Layer) -> Layer:
        mixer, [mlp] = layer.mixer, layer.mlps
        assert isinstance(mixer, Attention)
        assert isinstance(mlp, SwiGlu)
        qkv, out = linear(mixer.qkv, index, *_OF_ATTENTION[:3]), linear(mixer.out, index, "o_proj")
        gate_up, down = linear(mlp.gate_up, index, *_OF_MLP[:2]), linear(mlp.down, index, "down_proj")
        return replace(layer, mixer=replace(mixer, qkv=qkv, out=out), mlps=(replace(mlp, gate_up=gate_up, down=down),))

    return model.with_layers(layer)


def usual_adapter() -> Mapping[str, Any]:
    """The adapter_config.json of random weights."""
    return {"peft_type": "LORA", "r": 64, "lora_alpha": 128, "target_modules": list(MODULES)}
