"""Building blocks of decoder layers: mixers (attention, recurrence) and MLPs.

All blocks are pre-norm and add to the residual stream. A mixer consists of an input projection, attention or recurrence
over the context, and an output projection. Piecewise CUDA graphs of prompt passes are split at the middle part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from specbatch.core.attention_metadata import AttentionContext, RecurrentOp
from specbatch.kernels.attention.queries import QKVLayout
from specbatch.kernels.elementwise.activations import mul_sigmoid
from specbatch.kernels.gemm.linear import Linear, Norm

Tensors = dict[str, torch.Tensor]


class Mixer(Protocol):
    """A block that combines tokens. norm: applied to its input; width: columns of the projected input; mixed: columns
    of the attention or recurrence output."""

    @property
    def norm(self) -> Norm: ...

    @property
    def width(self) -> int: ...

    @property
    def mixed(self) -> int: ...

    def project(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Residual stream x [T, hidden_size] -> [T, width], in `out` if given."""
        ...

    def mix(
        self, context: AttentionContext, place: int, projected: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """[T, width] -> [T, mixed]. place: index of the layer among those of its kind."""
        ...

    def leave(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Project the output and add it to the residual stream x, possibly in place."""
        ...


class Recurrent(Mixer, RecurrentOp, Protocol):
    """A mixer with a state of fixed size in place of keys and values."""


class Mlp(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Add the MLP's output to the residual stream x, possibly in place."""
        ...


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention. q, k and v are one matrix; gate: sigmoid(gate(norm(x))) multiplies the attention
    output."""

    norm: Norm
    qkv: Linear
    heads: QKVLayout
    out: Linear
    gate: Linear | None = None

    @property
    def width(self) -> int:
        return self.qkv.shape[0]

    @property
    def mixed(self) -> int:
        return self.heads.count * self.heads.dim

    def project(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.qkv(x, norm=self.norm, out=out)

    def mix(
        self, context: AttentionContext, place: int, projected: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return context.attend(place, projected, self.heads, positions)

    def leave(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        if self.gate is not None:
            mixed = mul_sigmoid(mixed, self.gate(x, norm=self.norm))
        return self.out(mixed, residual=x)


@dataclass(frozen=True)
class SwiGlu:
    """A dense MLP: down(silu(gate) * up). gate and up are one matrix."""

    norm: Norm
    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.after_gate(self.gate_up, x, self.norm, residual=x)


@dataclass(frozen=True)
class Layer:
    """A mixer and the MLPs after it: usually one; in Nemotron-H none or several."""

    mixer: Mixer
    mlps: tuple[Mlp, ...]

    def leave(self, x: torch.Tensor, mixed: torch.Tensor, inputs: torch.Tensor | None = None) -> torch.Tensor:
        """From the attention or recurrence output to the residual stream after the layer. inputs: see `streams`."""
        [x] = deque(self.streams(x, mixed, inputs), maxlen=1)
        return x

    def streams(
        self, x: torch.Tensor, mixed: torch.Tensor, inputs: torch.Tensor | None = None
    ) -> Iterator[torch.Tensor]:
        """The residual stream after the mixer, then after each MLP; each may overwrite the one before. inputs
        [T, ModelConfig.layer_inputs]: what layers get beside it, in models that have such inputs."""
        yield (x := self.mixer.leave(x, mixed))
        for mlp in self.mlps:
            yield (x := mlp(x))
