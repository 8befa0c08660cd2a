"""Building blocks of decoder layers: mixers (attention, recurrence), MLPs, and the reader of their weights.

All blocks are pre-norm and add to the residual stream. A mixer consists of an input projection, attention or recurrence
over the context, and an output projection. Piecewise CUDA graphs of prompt passes are split at the middle part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specbatch.core.attention_metadata import AttentionContext, RecurrentOp
from specbatch.errors import refuse
from specbatch.kernels.attention.qkv import QKVLayout
from specbatch.kernels.gemm.fp8_linear import linear
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.gemm.weight import Weight, concat_outputs, contains_nan, keeps_fp8
from specbatch.models.config import ModelConfig
from specbatch.models.fp8 import PLAIN, SCALES

Tensors = dict[str, torch.Tensor]
Tables = tuple[torch.Tensor, torch.Tensor]  # cos and sin [positions, head_dim] of rope


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
            mixed = mixed * self.gate(x, norm=self.norm).sigmoid()
        return self.out(mixed, residual=x)


@dataclass(frozen=True)
class SwiGlu:
    """A dense MLP: down(silu(gate) * up). gate and up are one matrix."""

    norm: Norm
    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up.gated(x, self.norm), residual=x)


@dataclass(frozen=True)
class Layer:
    """A mixer and the MLPs after it: usually one; in Nemotron-H none or several."""

    mixer: Mixer
    mlps: tuple[Mlp, ...]

    def leave(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """From the attention or recurrence output to the residual stream after the layer."""
        [x] = deque(self.streams(x, mixed), maxlen=1)
        return x

    def streams(self, x: torch.Tensor, mixed: torch.Tensor) -> Iterator[torch.Tensor]:
        """The residual stream after the mixer, then after each MLP; each may overwrite the one before."""
        yield (x := self.mixer.leave(x, mixed))
        for mlp in self.mlps:
            yield (x := mlp(x))


class Reader:
    """Reads a checkpoint's tensors, converts them to a dtype and device, and builds linear layers, norms and the like
    of them. Several threads may read at the same time.

    FP8 tensors have scales (see `models.fp8`). dequantized: names of those that could not stay in FP8, because they are
    part of a matrix whose blocks of scales they would cut.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        of_draft: bool = False,
    ) -> None:
        """of_draft: refuse every tensor with values that are not finite, because verification would hide the error.
        With a target the logits show it, except for small tensors that select or weight (decays, routing of experts)
        and for FP8 weights; these are always checked."""
        self.config = config
        self._of_draft = of_draft
        self.dequantized: set[str] = set()
        self._read = read
        self._dtype = dtype
        self._device = device

    def __call__(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Tensors in `dtype` (default: the reader's); several are concatenated by rows."""
        parts = [self._upcast(name, dtype or self._dtype) for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def weight(self, *names: str) -> Weight:
        """Matrices concatenated by rows: in FP8 if all of them are and the device supports it, else in the reader's
        dtype."""
        parts = [self._stored(name) for name in names]
        whole = concat_outputs(parts)
        return whole or Weight(torch.cat([self.dequantize(*part) for part in zip(names, parts, strict=True)]))

    def stack(self, groups: Sequence[tuple[str, ...]]) -> Weight:
        """A stack of such matrices, one per group of names."""
        parts = [self.weight(*names) for names in groups]
        scales = [part.scales for part in parts if part.scales is not None]
        if len(scales) == len(parts):
            values = torch.stack([part.values.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
            return Weight(values, torch.stack(scales))
        names = ("; ".join(group) for group in groups)
        return Weight(torch.stack([self.dequantize(*part) for part in zip(names, parts, strict=True)]))

    def norm(self, stem: str) -> Norm:
        return Norm(self(f"{stem}.weight"), self.config.rms_norm_eps)

    def linear(self, *stems: str, bias: bool = False) -> Linear:
        weight = self.weight(*(f"{stem}.weight" for stem in stems))
        return linear(weight, self(*(f"{stem}.bias" for stem in stems)) if bias else None)

    def _stored(self, name: str) -> Weight:
        """A tensor on the device: in FP8 if it is stored so and the device supports it, else in the reader's dtype."""
        values = self._read(name).to(self._device)
        if values.dtype != torch.float8_e4m3fn:
            return Weight(self._checked(name, values.to(self._dtype)))
        scales = self._read(name + SCALES).to(device=self._device, dtype=torch.float32)
        self._checked(name, values)
        found = Weight(values, self._checked(name + SCALES, scales))
        return found if keeps_fp8(self._device) else Weight(found.dequantize(self._dtype))

    def _upcast(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self._read(name)
        if stored.dtype == torch.float8_e4m3fn:
            return self.dequantize(name, self._stored(name)).to(dtype)
        return self._checked(name, stored.to(device=self._device, dtype=dtype))

    def _checked(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if values.dtype == torch.float8_e4m3fn:
            is_finite = not contains_nan(values)
        else:
            is_checked = self._of_draft or values.dim() == 1 or name.endswith(PLAIN)
            is_finite = not is_checked or bool(values.isfinite().all())
        if not is_finite:
            works = f"the tensor holds values that are not finite in {values.dtype}; the file is damaged"
            raise refuse("draft" if self._of_draft else "model", name, works)
        return values

    def dequantize(self, name: str, weight: Weight) -> torch.Tensor:
        """The weight that was read as `name`, in the reader's dtype."""
        if weight.scales is not None:
            self.dequantized.add(name)
        return weight.dequantize(self._dtype)

    def heads(self, stem: str, tables: Tables) -> QKVLayout:
        config = self.config
        return QKVLayout(
            count=config.num_heads,
            kv=config.num_kv_heads,
            dim=config.head_dim,
            q_norm=self(f"{stem}.q_norm.weight") if config.qk_norm else None,
            k_norm=self(f"{stem}.k_norm.weight") if config.qk_norm else None,
            eps=config.rms_norm_eps,
            cos=tables[0],
            sin=tables[1],
        )
