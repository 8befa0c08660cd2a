"""`WholeNumbers`, the base of formats without a GEMM on a GPU: 8-bit whole numbers in groups of inputs with a scale.

A CPU keeps such weights as a `GroupedWeight`; other devices dequantize them at load, and a CPU those of experts. How a
tool stores them is a `Packing`: its tensors, and the function that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from specbatch.errors import refuse
from specbatch.kernels.common.block_sizes import CPU_GROUPS
from specbatch.models.formats.format import FLOATS, Format, Shape, Shapes, Source, check_scales
from specbatch.models.formats.input_scales import INPUT_SCALES, at_inputs, with_input_scales

if TYPE_CHECKING:
    import torch

    from specbatch.kernels.gemm.quantized.weight import Weight

WHOLE = -1  # a group of all inputs


class Part(NamedTuple):
    """A tensor of a weight [out, in]. types: of safetensors; shape: from outputs, inputs and groups; random: between
    which numbers those of random weights are, from the factor of the values; None: any bits."""

    types: tuple[str, ...]
    shape: Callable[[int, int, int], Shape]
    random: Callable[[float], tuple[float, float]] | None = None


class Groups(NamedTuple):
    """values int8 [out, in]; scales float32 [out, groups]; offsets, as many; None if all are 0."""

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None


class Packing(NamedTuple):
    """parts: by what ends their name in place of ".weight"; read: from the tensors by these ends."""

    parts: Mapping[str, Part]
    read: Callable[[Mapping[str, torch.Tensor]], Groups]
    has_offsets: bool = False
    outputs: int = 1  # their number is a multiple of it


@dataclass(frozen=True)
class WholeNumbers(Format):
    """packing: one of the class's `packings`; group: inputs that share a scale, or `WHOLE`."""

    packings: ClassVar[Mapping[str, Packing]]
    rms: ClassVar[float]  # of random values
    has_signed_scales: ClassVar[bool] = False
    has_expert_gemm: ClassVar[bool] = False
    has_stacks: ClassVar[bool] = False

    packing: str = ""
    group: int = WHOLE

    @property
    def input_step(self) -> int:
        return CPU_GROUPS[0] if self.group == WHOLE else self.group

    def parts(self, name: str, shape: Shape) -> Shapes:
        if len(shape) > 2:
            raise refuse("quantization_config", self.name, f"{name} stacks matrices, which have no packing")
        (out, inner), packing, stem = shape, self.packings[self.packing], name.removesuffix(".weight")
        if inner % self.input_step or out % packing.outputs:
            works = f"{self.name} weights need a multiple of {self.input_step} inputs and {packing.outputs} outputs"
            raise refuse(name, list(shape), works)
        groups = 1 if self.group == WHOLE else inner // self.group
        found = {stem + end: part.shape(out, inner, groups) for end, part in packing.parts.items()}
        return found | ({stem + INPUT_SCALES: (inner,)} if name in self.irregular else {})

    def weight_of(self, name: str) -> str | None:
        for end in (*self.packings[self.packing].parts, INPUT_SCALES):
            if name.endswith(end) and end != ".weight":
                return name.removesuffix(end) + ".weight"
        return None

    @classmethod
    def types_of_part(cls, name: str) -> tuple[tuple[str, ...], str] | None:
        every = [item for packing in cls.packings.values() for item in packing.parts.items()]
        types = sorted({kind for end, part in every if name.endswith(end) and end != ".weight" for kind in part.types})
        return (tuple(types), f"{cls.name} has it in {' or '.join(types)}") if types else None

    def types_of(self, name: str) -> tuple[str, ...] | None:
        part = self._part(name)
        return FLOATS if name.endswith(INPUT_SCALES) else None if part is None else part.types

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        return False

    def for_values(self, found: Shapes, tensor: Callable[[str], torch.Tensor]) -> Self:
        return with_input_scales(self, found)

    def load(self, name: str, shape: Shape, source: Source) -> Weight:
        import torch

        from specbatch.kernels.gemm.quantized.grouped import GroupedWeight, shortest
        from specbatch.kernels.gemm.quantized.weight import Weight

        values, scales, offsets = self.read(name, source)
        groups = values.shape[1] // self._size(shape[1])
        parts = [
            part.expand(-1, groups).contiguous()
            for part in (scales, torch.zeros_like(scales) if offsets is None else offsets)
        ]
        check_scales(parts[0], name, source, signed=self.has_signed_scales)
        if name in self.irregular:
            dense = at_inputs(GroupedWeight(values, *parts).dequantize(torch.float32), name, source).to(source.dtype)
            return Weight(dense if dense.shape == shape else source.cut(name, [(dense, shape)])[0])
        if values.shape != shape:
            columns = shape[1] // self._size(shape[1])
            values, *parts = source.cut(name, [(values, shape), *((part, (shape[0], columns)) for part in parts)])
        return GroupedWeight(values, *shortest(*parts))

    def read(self, name: str, source: Source) -> Groups:
        """The whole weight."""
        stem, packing = name.removesuffix(".weight"), self.packings[self.packing]
        tensors = {end: source.whole(stem + end) for end in packing.parts}
        return packing.read(tensors)

    def memory(self, shape: Shape) -> int:
        numbers = 2 if self.packings[self.packing].has_offsets else 1
        return math.prod(shape) + 4 * numbers * math.prod(shape) // self._size(shape[-1])

    def group_memory(self, shape: Shape) -> int | None:
        return self.memory(shape)

    def _size(self, inputs: int) -> int:
        """Inputs that share a scale in memory: a group of all becomes equal ones."""
        return min(CPU_GROUPS[-1], inputs & -inputs) if self.group == WHOLE else self.group

    def random(self, name: str, shape: Shape, inputs: int, generator: torch.Generator) -> torch.Tensor:
        import torch

        part = self._part(name)
        assert part is not None, name
        kind = getattr(torch, _TORCH_TYPES[part.types[0]])
        if part.random is not None:
            low, high = part.random(1 / (self.rms * math.sqrt(inputs)))
            found = torch.empty(shape, device=generator.device).uniform_(low, high, generator=generator)
            return (found if kind.is_floating_point else found.round()).to(kind)
        bits = torch.empty((*shape, kind.itemsize), dtype=torch.uint8, device=generator.device)
        return bits.random_(0, 256, generator=generator).view(kind).reshape(shape)

    def random_item(self, name: str) -> int:
        part = self._part(name)
        return {"F32": 4, "I32": 4, "BF16": 2, "F16": 2}.get("" if part is None else part.types[0], 1)

    def _part(self, name: str) -> Part | None:
        return next((part for end, part in self.packings[self.packing].parts.items() if name.endswith(end)), None)


_TORCH_TYPES = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U8": "uint8", "I32": "int32",
    "F8_E4M3": "float8_e4m3fn",
}  # fmt: skip
