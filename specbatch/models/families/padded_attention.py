"""Attention of models whose layers have heads of different sizes (Gemma 4): padded and repeated to one size.

One KV cache and one set of kernels then serve all layers. Neither padding with zeros nor repeating KV heads changes a
score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.linear import Norm
from specbatch.models.families.gemma3 import NormedAttention


class Heads(NamedTuple):
    """The heads of a kind of layer: channels of each, and how many have keys and values."""

    dim: int
    kv: int


@dataclass(frozen=True, kw_only=True)
class PaddedAttention(NormedAttention):
    """Attention whose heads of `own` sizes are padded and repeated to those of `heads`. qkv: without values, they are
    the keys before their norm; without both, if they are shared. value_norm: of values, with weights of one."""

    own: Heads
    value_norm: Norm

    @property
    def width(self) -> int:
        return (self.heads.count + 2 * self.heads.own_kv) * self.heads.dim

    def project(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        heads, (dim, kv) = self.heads, self.own
        rows = self.qkv(x, norm=self.norm).view(len(x), -1, dim)
        out = x.new_empty(len(x), self.width) if out is None else out
        if dim < heads.dim:
            out.zero_()
        padded = out.view(len(x), -1, heads.dim)
        self._pad(rows[:, : heads.count], padded[:, : heads.count])
        if not heads.shared:
            k, v = rows[:, heads.count : heads.count + kv], rows[:, -kv:]
            v = rms_norm(v.reshape(-1, dim).contiguous(), *self.value_norm).view(len(x), kv, dim)
            both = heads.count + heads.kv
            self._pad(_repeated(k, heads.kv), padded[:, heads.count : both])
            padded[:, both:, :dim] = _repeated(v, heads.kv)
        return out

    def _pad(self, narrow: torch.Tensor, padded: torch.Tensor) -> None:
        low, middle = narrow.shape[-1] // 2, self.heads.dim // 2
        padded[..., :low] = narrow[..., :low]
        padded[..., middle : middle + low] = narrow[..., low:]  # kernels rotate channel i with i + heads.dim / 2

    def leave(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        own = mixed.view(len(x), self.heads.count, self.heads.dim)[..., : self.own.dim]
        return super().leave(x, own.flatten(1).contiguous())


def _repeated(x: torch.Tensor, kv: int) -> torch.Tensor:
    """[T, n, dim] -> [T, kv, dim]: neighbouring heads are equal."""
    return x.repeat_interleave(kv // x.shape[1], 1) if x.shape[1] < kv else x
