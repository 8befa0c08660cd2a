"""INT8 checkpoints of compressed-tensors (W8A8, W8A16) and GPTQ: whole numbers with a scale per output or group.

* int-quantized: `weight` int8 [out, in]; `weight_scale` [out, groups]; `weight_zero_point` int8, as many
* pack-quantized: `weight_packed` int32 [out, in / 4], the first of four values in the lowest bits, each plus 128;
  `weight_scale` as above; `weight_zero_point` int32 [out / 4, groups]
* gptq, gptq_v2: `qweight` int32 [in / 4, out], each value plus 128; `scales` [groups, out]; `qzeros` int32
  [groups, out / 4], less 1 in gptq, which do not count for symmetric weights. The config is read in `gptq`

Activations are not quantized here, whatever the checkpoint was made for. Source: vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from specbatch.errors import refuse
from specbatch.files.config_values import flag_of, table_of
from specbatch.kernels.common.block_sizes import CPU_GROUPS
from specbatch.models.formats.format import FLOATS, Format, Group, Shapes, in_order, is_zero_bias
from specbatch.models.formats.qzeros import QZEROS, check_symmetric, plus_ones
from specbatch.models.formats.settings import activations_of, expect, packing_of
from specbatch.models.formats.whole_numbers import WHOLE, Groups, Packing, Part, WholeNumbers

if TYPE_CHECKING:
    import torch

_PACKED = 4  # values in an int32
_SCALE, _ZEROS = ".weight_scale", ".weight_zero_point"
_ORDER = ".g_idx"  # of GPTQ
_MIDDLES = -0x7F7F7F80  # four times 128, in an int32
_Tensors = Mapping[str, "torch.Tensor"]


def _plain(found: _Tensors) -> Groups:
    return _groups(found[".weight"], found[_SCALE], found.get(_ZEROS))


def _packed(found: _Tensors) -> Groups:
    zeros = _unpacked(found[_ZEROS].t()).t() if _ZEROS in found else None
    return _groups(_unpacked(found[".weight_packed"]), found[_SCALE], zeros)


def _gptq(less: bool) -> Callable[[_Tensors], Groups]:
    """less: whether zero points are stored less 1."""

    def read(found: _Tensors) -> Groups:
        zeros = found.get(QZEROS)
        if zeros is not None:
            zeros = _unpacked(plus_ones(zeros, 8) if less else zeros).t()
        return _groups(_unpacked(found[".qweight"].t()), found[".scales"].t(), zeros)

    return read


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
_GPTQ = {
    ".qweight": Part(("I32",), lambda out, inner, groups: (inner // _PACKED, out)),
    ".scales": Part(FLOATS, lambda out, inner, groups: (groups, out), _SCALES.random),
}
_GPTQ_ZEROS = {
    QZEROS: Part(("I32",), lambda out, inner, groups: (groups, out // _PACKED), lambda size: (_MIDDLES, _MIDDLES))
}


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
        "gptq": Packing(_GPTQ, _gptq(True)),
        "gptq_v2": Packing(_GPTQ, _gptq(False)),
        "gptq asymmetric": Packing(_GPTQ | _GPTQ_ZEROS, _gptq(True), True, _PACKED),
        "gptq_v2 asymmetric": Packing(_GPTQ | _GPTQ_ZEROS, _gptq(False), True, _PACKED),
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
        if self.group != WHOLE or self._is_gptq:
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

    def weight_of(self, name: str) -> str | None:
        for end in (QZEROS, _ORDER):
            if self._is_gptq and name.endswith(end):
                return name.removesuffix(end) + ".weight"
        return super().weight_of(name)

    def is_unused(self, name: str) -> bool:
        is_unread = name.endswith(QZEROS) and QZEROS not in self.packings[self.packing].parts
        return super().is_unused(name) or is_unread or name.endswith((".weight_shape", _ORDER))

    def is_idle(self, name: str, found: Shapes, tensor: Callable[[str], torch.Tensor]) -> bool:
        return is_zero_bias(name, found, tensor)

    def for_values(self, found: Shapes, tensor: Callable[[str], torch.Tensor]) -> Self:
        if self._is_gptq and not self.packings[self.packing].has_offsets:
            check_symmetric(found, tensor)
        for name in found if self._is_gptq else ():
            if name.endswith(_ORDER):
                groups, scales = tensor(name).flatten(), found.get(name.removesuffix(_ORDER) + ".scales")
                count = scales[0] if scales else 1  # of another size of groups, the scales have another shape
                if not in_order(groups, max(1, len(groups) // max(1, count))):
                    raise refuse("model", name, "8-bit weights must have their groups in the order of the inputs")
        return super().for_values(found, tensor)

    @property
    def _is_gptq(self) -> bool:
        return self.packing.startswith("gptq")


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
