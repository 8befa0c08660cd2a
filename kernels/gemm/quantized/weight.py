"""Weights of GEMMs in the type of the activations, and the interface of quantized ones: a subclass for each format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import torch
import torch.nn.functional as F

from specbatch.kernels.dispatch import is_deterministic
from specbatch.kernels.elementwise.activations import relu_squared, silu_and_mul
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.deterministic.fixed_rows import linear_in_blocks
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.gemm.quantized.fp8_activations import FP8Activations

W = TypeVar("W", bound="Weight")


@dataclass(frozen=True)
class Weight:
    """A matrix or a stack of them, [..., out, in], in the type of the activations.

    Quantized formats have subclasses, whose further fields are tensors [..., rows, columns] with a number for each
    `block` of values, such as its scale. A subclass defines `block`, `dequantize` and `linear`, and if its values are
    packed `shape`, `unpacked` and `packed`.
    """

    values: torch.Tensor

    @property
    def is_quantized(self) -> bool:
        return type(self) is not Weight

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The values, and the tensors of their blocks."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]."""
        return tuple(self.values.shape)

    @property
    def block(self) -> tuple[int, int | None]:
        """How many outputs and inputs share a scale. None: all inputs, in all parts of a weight that is divided."""
        return 1, 1

    def unpacked(self) -> torch.Tensor:
        """The values [..., out, in] as they are stored, one in each element."""
        return self.values

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        """`unpacked` values as GEMMs read them."""
        return values

    def in_groups(self, inputs: int) -> Self | None:
        """The same, with blocks of so many inputs, a part of those that it has; None where these are not divided."""
        return self if self.block[1] == inputs else None

    def grouped(self) -> Weight | None:
        """The same as a `GroupedWeight`, for the GEMMs of a CPU; None if it has no such form."""
        return None

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [..., out, in] in this type, cast once."""
        return self.values.to(dtype)

    def linear(self, bias: torch.Tensor | None = None) -> Linear:
        """The linear layer of a weight [out, in], with a bias [out]."""
        return Linear(self.values, bias)

    def for_experts(self) -> Weight:
        """A stack in the layout of the GEMMs of experts."""
        return self

    def of(self, expert: int) -> Self:
        """One of a stack."""
        return _combined([self], lambda parts: parts[0][expert])

    def map_outputs(self, change: Callable[[torch.Tensor, int], torch.Tensor]) -> Self:
        """This with other outputs. change: gets a tensor, and how many outputs a row of it is for."""
        values, *others = self.tensors
        rows = self.block[0]
        changed = _on_bytes(lambda parts: change(parts[0], 1), [values])
        return type(self)(changed, *(change(part, rows) for part in others))

    def map_inputs(self, change: Callable[[torch.Tensor, int], torch.Tensor]) -> Self:
        """This with other inputs. change: gets a tensor, and how many inputs a column of it is for."""
        values = self.packed(_on_bytes(lambda parts: change(parts[0], 1), [self.unpacked()]))
        inputs = self.block[1]
        if inputs is None:
            return type(self)(values, *(part.expand(*values.shape[:-1], 1) for part in self.tensors[1:]))
        return type(self)(values, *(change(part, inputs) for part in self.tensors[1:]))

    def split_inputs(self) -> tuple[Self, Self]:
        """The left and the right columns of a weight [out, in], each a whole number of blocks."""
        half = self.shape[1] // 2
        assert half % (self.block[1] or 1) == 0, "a block of scales would be cut"
        left = self.map_inputs(lambda part, step: part[:, : half // step].contiguous())
        return left, self.map_inputs(lambda part, step: part[:, half // step :].contiguous())


def concat_outputs(weights: Sequence[Weight]) -> Weight | None:
    """Weights [..., out, in] one below the other; None where they are of several types, or where another one than the
    last is cut off within a block of scales."""
    if len(weights) == 1:
        return weights[0]
    if len({(type(weight), weight.block[0]) for weight in weights}) > 1:
        return None
    if any(weight.shape[-2] % weight.block[0] for weight in weights[:-1]):
        return None
    inputs = min(weight.block[1] or 0 for weight in weights)
    found = list(weights)
    if any(weight.block[1] not in (None, inputs) for weight in weights):
        found = [part for weight in weights if (part := weight.in_groups(inputs)) is not None]
    return _combined(found, lambda parts: torch.cat(parts, -2)) if len(found) == len(weights) else None


def concat_experts(first: W, second: W) -> W:
    """Two stacks [E, out, in] of one type as one."""
    return _combined([first, second], lambda parts: torch.cat(parts, 0))


def stack_experts(weights: Sequence[Weight]) -> Weight | None:
    """Weights [out, in] as a stack; None where they are of several types, or have different blocks."""
    if len({(type(weight), weight.block) for weight in weights}) > 1:
        return None
    return _combined(weights, torch.stack)


def _combined(weights: Sequence[W], change: Callable[[list[torch.Tensor]], torch.Tensor]) -> W:
    """One weight of several of a type. change: makes a tensor of theirs."""
    return type(weights[0])(
        *(_on_bytes(change, list(parts)) for parts in zip(*(weight.tensors for weight in weights), strict=True))
    )


def _on_bytes(change: Callable[[list[torch.Tensor]], torch.Tensor], parts: list[torch.Tensor]) -> torch.Tensor:
    """change(parts); torch can neither concatenate nor pad FP8 values, only their bytes."""
    kind = parts[0].dtype
    if kind != torch.float8_e4m3fn:
        return change(parts)
    return change([part.view(torch.uint8) for part in parts]).view(kind)


def quantized_linear_ref(
    x: torch.Tensor | FP8Activations,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias + residual for x [T, in], weight [out, in] of any format, bias [out], residual [T, out]; in
    the memory of `out` [T, out] if given; else that of the residual may be used up. With FP8 x it is computed in
    float32 and cast once, to the type before quantization."""
    linear = linear_in_blocks if is_deterministic() else F.linear
    if isinstance(x, FP8Activations):
        y = linear(x.dequantize(), weight.dequantize(torch.float32), None if bias is None else bias.float())
        y = (y if residual is None else residual + y).to(x.dtype)
    else:
        y = linear(x, weight.dequantize(x.dtype), bias)
        y = y if residual is None else residual + y
    return y if out is None else out.copy_(y)


class UnfusedLinear(Linear):
    """A `Linear` in which the norm before the GEMM and the activation after it are operations of their own."""

    def __init__(self, shape: Sequence[int], bias: torch.Tensor | None = None) -> None:
        self.shape, self.bias = torch.Size(shape), bias

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._gemm(x if norm is None else rms_norm(x, *norm), residual, out)

    def _gemm(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError

    def gated(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return silu_and_mul(self(x, norm=norm))

    def squared(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return relu_squared(self(x, norm=norm))


class ConcatLinear(UnfusedLinear):
    """GEMMs of the same x with concatenated outputs, where weights of several types form one `Linear`."""

    def __init__(self, *parts: Linear) -> None:
        super().__init__((sum(part.shape[0] for part in parts), parts[0].shape[1]))
        self._parts = parts

    def _gemm(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(len(x), self.shape[0]) if out is None else out
        for part, columns in zip(self._parts, out.split([part.shape[0] for part in self._parts], 1), strict=True):
            part(x, out=columns)
        return out if residual is None else residual + out
