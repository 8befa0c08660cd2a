"""INT8 checkpoints of compressed-tensors (W8A8, W8A16): whole numbers with a scale per output or per group of inputs.

* int-quantized: `weight` int8 [out, in]; `weight_scale` [out, groups]; `weight_zero_point` int8, as many
* pack-quantized: `weight_packed` int32 [out, in / 4], the first of four values in the lowest bits, each plus 128;
  `weight_scale` as above; `weight_zero_point` int32 [out / 4, groups]

Activations are not quantized here, whatever the checkpoint was made for. Source: vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from specbatch.files.config_values import flag_of, table_of
from specbatch.kernels.common.block_sizes import CPU_GROUPS
from specbatch.models.formats.format import FLOATS, Format, Group, Shapes
from specbatch.models.formats.settings import activations_of, expect, packing_of
from specbatch.models.formats.whole_numbers import WHOLE, Groups, Packing, Part, WholeNumbers

if TYPE_CHECKING:
    import torch

_PACKED = 4  # values in an int32
_SCALE, _ZEROS = ".weight_scale", ".weight_zero_point"
_Tensors = Mapping[str, "torch.Tensor"]


def _plain(found: _Tensors) -> Groups:
    return _groups(found[".weight"], found[_SCALE], found.get(_ZEROS))


def _packed(found: _Tensors) -> Groups:
    zeros = _unpacked(found[_ZEROS].t()).t() if _ZEROS in found else None
    return _groups(_unpacked(found[".weight_packed"]), found[_SCALE], zeros)


def _groups(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Groups:
    scales = scales.float()
    return Groups(values, scales, None if zeros is None else -zeros.float() * scales)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] -> the four values in each, int8 [n, 4 m]."""
    import torch

    return (packed.contiguous().view(torch.uint8) ^ 128).view(torch.int8)


_VALUES = Part(("I8",), lambda out, inner, groups: (out, inner))
_WORDS = Part(("I32",), lambda out, inner, groups: (out, inner // _PACKED))
_SCALES = Part(FLOATS, lambda out, inner, groups: (out, groups), lambda size: (0.8 * size, 1.2 * size))
_OFFSETS = Part(("I8",), lambda out, inner, groups: (out, groups), lambda size: (0, 0))
_PACKED_OFFSETS = Part(("I32",), lambda out, inner, groups: (out // _PACKED, groups), lambda size: (0, 0))


@dataclass(frozen=True)
class Int8Weights(WholeNumbers):
    """packing: with " asymmetric" there are zero points."""

    name: ClassVar[str] = "INT8"
    file_types: ClassVar[tuple[str, ...]] = ("I8",)
    has_signed_scales: ClassVar[bool] = True
    rms: ClassVar[float] = 73.9  # of whole numbers from -128 to 127
    packings: ClassVar[Mapping[str, Packing]] = {
        "int-quantized": Packing({".weight": _VALUES, _SCALE: _SCALES}, _plain),
        "int-quantized asymmetric": Packing({".weight": _VALUES, _SCALE: _SCALES, _ZEROS: _OFFSETS}, _plain, True),
        "pack-quantized": Packing({".weight_packed": _WORDS, _SCALE: _SCALES}, _packed),
        "pack-quantized asymmetric": Packing(
            {".weight_packed": _WORDS, _SCALE: _SCALES, _ZEROS: _PACKED_OFFSETS}, _packed, True, _PACKED
        ),
    }

    packing: str = "int-quantized"

    @classmethod
    def methods(cls) -> dict[str, Callable[[dict[str, Any]], Format]]:
        return {}

    @classmethod
    def groups(cls) -> dict[tuple[str, int], Callable[[Group], Format]]:
        return {("int", 8): _group}

    def respelled(self, found: Shapes) -> Shapes:
        """Also zero points, which are not packed."""
        if self.group != WHOLE:
            return {}
        parts = self.packings[self.packing].parts
        values = next(iter(parts))
        ends = [end for end in (_SCALE, _ZEROS) if end in parts and parts[end] is not _PACKED_OFFSETS]
        rows = {name.removesuffix(values): shape[0] for name, shape in found.items() if name.endswith(values) and shape}
        return {
            name: (rows[stem], 1)
            for name, shape in found.items()
            for end in ends
            if name.endswith(end) and (stem := name.removesuffix(end)) in rows
            if shape in ((), (1,), (1, 1), (rows[stem],))
        }

    def is_unused(self, name: str) -> bool:
        return super().is_unused(name) or name.endswith(".weight_shape")


def _group(group: Group) -> Format:
    weights, inside = table_of(group.settings, "weights"), f"{group.where}.weights"
    packing = packing_of(group, "int-quantized", "pack-quantized")
    expect(weights, "strategy", "group", "channel", "tensor", where=inside)
    expect(weights, "actorder", "static", "weight", False, default=False, where=inside)
    if weights["strategy"] == "group":
        expect(weights, "group_size", *CPU_GROUPS, where=inside)
    packing += "" if flag_of(weights, "symmetric", True) else " asymmetric"
    size = int(weights["group_size"]) if weights["strategy"] == "group" else WHOLE
    return Int8Weights(*group.modules, inputs=activations_of(group), packing=packing, group=size)
