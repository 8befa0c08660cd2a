"""Recurrent mixers: gated delta nets (Qwen3-Next, Qwen3.5), Mamba2 (Nemotron-H) and short convolutions (LFM2).

The recurrences are computed in `kernels.recurrent`; this module assigns columns and tensors to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specbatch.files.config_values import count_of
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.recurrent.gated_delta import delta_prefill, delta_verify
from specbatch.kernels.recurrent.inputs import (
    MOST_TAPS,
    ConvInputs,
    DeltaHeads,
    DeltaInputs,
    Pending,
    SsdHeads,
    SsdInputs,
    SsdMemory,
)
from specbatch.kernels.recurrent.mamba2 import ssd_prefill, ssd_verify
from specbatch.kernels.recurrent.short_conv import conv_prefill, conv_verify
from specbatch.memory.recurrent_state import StateShape
from specbatch.models.layers.blocks import Tensors

if TYPE_CHECKING:
    from specbatch.core.attention_metadata import AttentionContext
    from specbatch.kernels.attention.ragged_batch import RaggedBatch
    from specbatch.kernels.recurrent.state_replay import StateReplay


@dataclass(frozen=True)
class Recurrence:
    """Input projection, recurrence and output projection. norm [hidden_size]: applied to the input; inputs: the input
    projections as one matrix; out: the output projection."""

    norm: Norm
    inputs: Linear
    out: Linear

    @property
    def width(self) -> int:
        return self.inputs.shape[0]

    @property
    def mixed(self) -> int:
        return self.out.shape[1]

    def project(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.inputs(x, norm=self.norm, out=out)

    def mix(
        self, context: AttentionContext, place: int, projected: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return context.recur(place, projected, self)

    def leave(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return self.out(mixed, residual=x)

    def prompt(
        self, projected: torch.Tensor, state: Tensors, spans: RaggedBatch, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        raise NotImplementedError

    def verify(self, projected: torch.Tensor, state: Tensors, replay: StateReplay) -> torch.Tensor:
        raise NotImplementedError


def taps_of(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """Number of taps of a convolution in a config.json."""
    return count_of(config, key, default, least=2, most=MOST_TAPS)


def tap_major(weight: torch.Tensor) -> torch.Tensor:
    """The weight [C, 1, K] of a convolution as [C, K], with the channels of each tap adjacent in memory, so that
    kernels load several at once."""
    return weight[:, 0].t().contiguous().t()


def window_shapes(channels: int, taps: int) -> tuple[StateShape, StateShape]:
    """State of a convolution with `taps` over `channels`."""
    return StateShape("window", (taps - 1, channels)), StateShape("inputs", (channels,), pending=True)


@dataclass(frozen=True)
class GatedDelta(Recurrence):
    """Projected input: [q | k | v], which pass the convolution conv [channels, K], then z, b and a."""

    conv: torch.Tensor
    heads: DeltaHeads

    def prompt(
        self, projected: torch.Tensor, state: Tensors, spans: RaggedBatch, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        qkv, z, b, a = self._split(projected)
        qkv = conv_prefill(ConvInputs(qkv, self.conv, None, state["window"], activation=True), spans)
        return delta_prefill(DeltaInputs(qkv, z, b, a, self.heads, state["matrix"]), spans, out)

    def verify(self, projected: torch.Tensor, state: Tensors, replay: StateReplay) -> torch.Tensor:
        qkv, z, b, a = self._split(projected)
        convolved = ConvInputs(qkv, self.conv, None, state["window"], activation=True)
        inputs = DeltaInputs(conv_verify(convolved, state["inputs"], replay), z, b, a, self.heads, state["matrix"])
        return delta_verify(inputs, Pending(state["k"], state["u"], state["g"]), replay)

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = self.heads
        sizes = [len(self.conv), heads.values * heads.value_dim, heads.values, heads.values]
        parts: tuple[torch.Tensor, ...] = projected.split(sizes, 1)
        return parts


@dataclass(frozen=True)
class Mamba2(Recurrence):
    """Projected input: z, then [x | B | C], which pass the convolution conv [channels, K] with bias, then dt."""

    conv: torch.Tensor
    bias: torch.Tensor | None
    heads: SsdHeads

    def prompt(
        self, projected: torch.Tensor, state: Tensors, spans: RaggedBatch, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        z, xbc, dt = self._split(projected)
        xbc = conv_prefill(ConvInputs(xbc, self.conv, self.bias, state["window"], activation=True), spans)
        memory = SsdMemory(state["matrix"], state["tokens"])
        return ssd_prefill(SsdInputs(xbc, dt, z, self.heads, memory), spans, out)

    def verify(self, projected: torch.Tensor, state: Tensors, replay: StateReplay) -> torch.Tensor:
        z, xbc, dt = self._split(projected)
        inputs = ConvInputs(xbc, self.conv, self.bias, state["window"], activation=True)
        xbc, memory = conv_verify(inputs, state["inputs"], replay), SsdMemory(state["matrix"], state["tokens"])
        return ssd_verify(SsdInputs(xbc, dt, z, self.heads, memory), replay)

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = [self.heads.count * self.heads.dim, len(self.conv), self.heads.count]
        parts: tuple[torch.Tensor, ...] = projected.split(sizes, 1)
        return parts


@dataclass(frozen=True)
class ShortConv(Recurrence):
    """Projected input: B, C and x. Output: C * conv(B * x), conv [channels, K]."""

    conv: torch.Tensor
    bias: torch.Tensor | None

    def prompt(
        self, projected: torch.Tensor, state: Tensors, spans: RaggedBatch, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return conv_prefill(self._inputs(projected, state), spans, out)

    def verify(self, projected: torch.Tensor, state: Tensors, replay: StateReplay) -> torch.Tensor:
        return conv_verify(self._inputs(projected, state), state["inputs"], replay)

    def _inputs(self, projected: torch.Tensor, state: Tensors) -> ConvInputs:
        before, after, x = projected.chunk(3, 1)
        return ConvInputs(x, self.conv, self.bias, state["window"], False, before, after)
