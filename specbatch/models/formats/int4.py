"""INT4 checkpoints: AWQ, GPTQ and compressed-tensors (`pack-quantized`), eight values in an int32.

* awq: `qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]
* gptq, gptq_v2: `qweight` [in / 8, out], `qzeros` [groups, out / 8], `scales` [groups, out]
* compressed-tensors: `weight_packed` [out, in / 8], `weight_scale` [out, groups]; `weight_zero_point` [out / 8, groups]
  where the zero points are not all 8

The first of eight values is in the lowest bits, but AWQ (AutoAWQ's "gemm") has the outputs 0, 2, 4, 6, 1, 3, 5, 7 in
this order. GPTQ stores zero points less 1, "gptq_v2" as they are (AutoGPTQ, GPTQModel).

Symmetric weights have the zero point 8. GPTQ's `qzeros` then hold 7, 8 or something else, or are missing, and are not
read, as in kernels of the Marlin kind. Scales may be negative: half of those of auto-round's symmetric weights are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from specbatch.errors import refuse
from specbatch.models.formats.quantization import Quantization, Shape, Shapes

if TYPE_CHECKING:
    import torch

    from specbatch.kernels.gemm.quantized.weight import Weight

Packing = Literal["awq", "gptq", "gptq_v2", "compressed-tensors"]
PACKED = 8  # values in an int32
WHOLE = -1  # a group of all inputs
_WHOLE_STEP = 128  # the groups that such a group becomes here
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where the outputs are: the inverse of 0, 2, 4, 6, 1, 3, 5, 7
_ZERO = 8  # of symmetric weights
_ZEROS = ".qzeros"
_PARTS = (".qweight", ".qzeros", ".scales", ".weight_packed", ".weight_zero_point", ".weight_scale")
ORDERS = (".g_idx", ".weight_g_idx")  # the group of each input
_UNUSED = (*ORDERS, ".weight_shape")
VALUES = (".qweight", ".qzeros", ".weight_packed", ".weight_zero_point")  # how names of packed values end
INTEGERS = (*VALUES, *_UNUSED)


@dataclass(frozen=True)
class Int4Weights(Quantization):
    """group: inputs that share a scale, or `WHOLE`; has_zeros: whether stored zero points count, else all are 8."""

    packing: Packing = "awq"
    group: int = 128
    has_zeros: bool = True

    @property
    def name(self) -> str:
        return "INT4"

    @property
    def input_step(self) -> int:
        return _WHOLE_STEP if self.group == WHOLE else self.group

    def parts(self, name: str, shape: Shape) -> Shapes:
        if len(shape) > 2:
            raise refuse("quantization_config", self.name, f"{name} stacks matrices, which have no INT4 packing")
        stem, (out, inner) = name.removesuffix(".weight"), shape
        if inner % self.input_step:
            works = f"{name} has {inner} inputs; they must be a multiple of {self.input_step}"
            raise refuse("quantization_config.group_size", self.group, works)
        if out % PACKED:
            raise refuse(name, list(shape), f"INT4 weights need a multiple of {PACKED} outputs")
        groups = 1 if self.group == WHOLE else inner // self.group
        if self.packing == "compressed-tensors":
            zeros = {f"{name}_zero_point": (out // PACKED, groups)} if self.has_zeros else {}
            return {f"{name}_packed": (out, inner // PACKED), f"{name}_scale": (out, groups), **zeros}
        packed = (inner, out // PACKED) if self.packing == "awq" else (inner // PACKED, out)
        zeros = {f"{stem}.qzeros": (groups, out // PACKED)} if self.has_zeros else {}
        return {f"{stem}.qweight": packed, **zeros, f"{stem}.scales": (groups, out)}

    def memory(self, shape: Shape) -> int:
        values = math.prod(shape)
        return values // 2 + 4 * values // self.input_step  # a word of a scale and a zero point

    def may_dequantize(self, shape: Shape) -> bool:
        return False

    def weight_of(self, name: str) -> str | None:
        for part in _PARTS:
            if name.endswith(part):
                return name.removesuffix(part) + ".weight"
        return None

    def is_unused(self, name: str) -> bool:
        is_unread = self.packing in ("gptq", "gptq_v2") and not self.has_zeros and name.endswith(_ZEROS)
        return super().is_unused(name) or name.endswith(_UNUSED) or is_unread

    def fit(self, found: Shapes) -> Self:
        """AWQ's zero points count wherever the files have some: gptqmodel and auto-round write them (8) with
        `zero_point: false`, too."""
        has_zeros = self.has_zeros or (self.packing == "awq" and any(name.endswith(_ZEROS) for name in found))
        return replace(super().fit(found), has_zeros=has_zeros)

    def weight(self, name: str, read: Callable[[str], torch.Tensor]) -> Weight:
        """The whole weight `name` [out, in] from the tensors on disk, on their device."""
        import torch

        from specbatch.kernels.gemm.quantized.int4 import pack_int4
        from specbatch.kernels.gemm.quantized.weight import Weight

        stem = name.removesuffix(".weight")
        if self.packing == "compressed-tensors":
            values, scales = _unpacked(read(f"{name}_packed")), read(f"{name}_scale")
            zeros = _unpacked(read(f"{name}_zero_point").t()).t() if self.has_zeros else None
        else:
            packed, scales = read(f"{stem}.qweight"), read(f"{stem}.scales").t()
            zeros = _unpacked(read(stem + _ZEROS)) if self.has_zeros else None
            is_awq = self.packing == "awq"
            values = _ordered(_unpacked(packed)).t() if is_awq else _unpacked(packed.t())
            if zeros is not None:
                zeros = (_ordered(zeros) if is_awq else zeros + 1 & 15 if self.packing == "gptq" else zeros).t()
        if zeros is None:
            zeros = torch.full_like(scales, _ZERO, dtype=torch.uint8)
        if self.group == WHOLE:
            count = values.shape[1] // _WHOLE_STEP
            scales, zeros = scales.expand(-1, count), zeros.expand(-1, count)
        return Weight(pack_int4(values), scales.contiguous(), zeros.contiguous())


def is_zeros(name: str) -> bool:
    """Whether a tensor has zero points."""
    return name.endswith((".qzeros", ".weight_zero_point"))


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] -> the eight values in each, the lowest bits first: uint8 [n, 8 m]."""
    import torch

    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Values in AWQ's order in that of the outputs, [n, out]."""
    ordered: torch.Tensor = values.unflatten(1, (-1, PACKED))[..., list(_AWQ_PLACES)]
    return ordered.flatten(1)
