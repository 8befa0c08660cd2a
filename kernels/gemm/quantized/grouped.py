"""Weights of 4- to 8-bit whole numbers in groups of inputs with a scale and an offset each, as GGUF files hold them.

A weight is value * scale + offset, in float32. On a CPU a GEMM reads them so: `grouped_native` has the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specbatch.kernels.common import native
from specbatch.kernels.common.native import LANES
from specbatch.kernels.dispatch import is_deterministic
from specbatch.kernels.elementwise.activations import silu_and_mul
from specbatch.kernels.elementwise.elementwise_native import rms_norm as native_rms_norm
from specbatch.kernels.elementwise.elementwise_native import silu_and_mul as native_silu_and_mul
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.gemm.quantized.grouped_native import BLOCK, TILE, gemm
from specbatch.kernels.gemm.quantized.weight import UnfusedLinear, Weight

_ROWS = 512  # at a time: their inputs stay in the cache of a core while the tiles are multiplied


def runs_on(device: torch.device) -> bool:
    """Has this device a GEMM of such weights?"""
    return device.type == "cpu" and native.missing() is None


@dataclass(frozen=True)
class GroupedWeight(Weight):
    """values int8 [..., out, in]; scales and offsets, float16 or float32 [..., out, in / group]. A group is a multiple
    of 16 that divides 128."""

    scales: torch.Tensor
    offsets: torch.Tensor

    @property
    def block(self) -> tuple[int, int | None]:
        return 1, self.shape[-1] // self.scales.shape[-1]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        # Products are exact: the sum is rounded once, as a fused multiply-add.
        values = self.values.unflatten(-1, (self.scales.shape[-1], -1)).float()
        found: torch.Tensor = values.mul_(self.scales.float()[..., None]).add_(self.offsets.float()[..., None])
        return found.flatten(-2).to(dtype)

    def in_groups(self, inputs: int) -> GroupedWeight:
        parts = self.shape[-1] // self.scales.shape[-1] // inputs
        return GroupedWeight(self.values, *(part.repeat_interleave(parts, -1) for part in self.tensors[1:]))

    def grouped(self) -> GroupedWeight:
        return self

    def linear(self, bias: torch.Tensor | None = None) -> GroupedLinear:
        return GroupedLinear(self, bias)


def shortest(*parts: torch.Tensor) -> list[torch.Tensor]:
    """In float16 if that changes no number."""
    shorter = [part.half() for part in parts]
    same = all(bool((short == part).all()) for short, part in zip(shorter, parts, strict=True))
    return shorter if same else list(parts)


class GroupedLinear(UnfusedLinear):
    """A `Linear` whose weight is a `GroupedWeight`, in tiles of outputs: values of 4 bits if they are from 0 to 15, two
    in a byte, else of 8; no offsets if all are 0.

    values int8 [tiles, in, 16] (outputs j and j + 16 in byte j) or [tiles, in, 32]; scales and offsets [tiles,
    in / group, 32]."""

    def __init__(self, weight: GroupedWeight, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight.shape, bias)
        self._group = weight.shape[1] // weight.scales.shape[1]
        assert self._group in range(LANES, BLOCK + 1, LANES), f"groups of {self._group} inputs"
        assert BLOCK % self._group == 0, f"groups of {self._group} inputs"
        self._bits = 4 if int(weight.values.min()) >= 0 and int(weight.values.max()) < 16 else 8
        self._values = _tiled(weight.values)
        if self._bits == 4:
            self._values = self._values[..., : TILE // 2] | self._values[..., TILE // 2 :] << 4
        self._scales = _tiled(weight.scales)
        self._offsets = _tiled(weight.offsets.to(weight.scales.dtype)) if weight.offsets.any() else None
        self._run = gemm(self._bits, self._group, self._scales.dtype == torch.float16, self._offsets is not None)

    @property
    def weight(self) -> torch.Tensor:
        """float32 [out, in], dequantized."""
        values = self._values
        if self._bits == 4:
            values = torch.cat([values & 15, values >> 4 & 15], -1)
        offsets = torch.zeros_like(self._scales) if self._offsets is None else self._offsets
        whole = GroupedWeight(*(part.transpose(1, 2).flatten(0, 1) for part in (values, self._scales, offsets)))
        return whole.dequantize(torch.float32)[: self.shape[0]]

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if norm is not None:
            x = native_rms_norm(x, *norm) if _is_plain(x) else rms_norm(x, *norm)
        return self._gemm(x, residual, out)

    def gated(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        y = self(x, norm=norm)
        return native_silu_and_mul(y) if _is_plain(y) and y.shape[1] % TILE == 0 else silu_and_mul(y)

    def _gemm(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        rows, count, (outputs, inputs) = x.float().contiguous(), x.shape[0], self.shape  # len(x) takes microseconds
        tiles = self._values.shape[0]
        width = tiles * TILE
        y = rows.new_empty(count, width)
        fuses = residual is not None and count == 1 and self.bias is None and width == outputs and _is_plain(x)
        for first in range(0, count, _ROWS):
            self._run(
                (tiles + 1) // 2,
                rows.data_ptr() + first * inputs * rows.itemsize,
                self._values.data_ptr(),
                self._scales.data_ptr(),
                0 if self._offsets is None else self._offsets.data_ptr(),
                y.data_ptr() + first * width * y.itemsize,
                min(count - first, _ROWS),
                inputs,
                tiles,
                count == 1 and not is_deterministic(),
                residual.data_ptr() if residual is not None and fuses else 0,
            )
        y = y if width == outputs else y[:, :outputs].contiguous()
        y = y if self.bias is None else y.add_(self.bias)
        y = y.to(x.dtype)
        y = y if residual is None or fuses else residual + y
        return y if out is None else out.copy_(y)


def _is_plain(x: torch.Tensor) -> bool:
    """Whether the compiled operations take x."""
    return x.dtype == torch.float32 and not is_deterministic()


def _tiled(part: torch.Tensor) -> torch.Tensor:
    """[out, n] -> [tiles, n, 32], with zeros for outputs that there are not."""
    tiles: torch.Tensor = F.pad(part, (0, 0, 0, -len(part) % TILE)).unflatten(0, (-1, TILE)).transpose(1, 2)
    return tiles.contiguous()
