"""MXFP4 checkpoints as published by OpenAI: the experts of a layer as blocks of 32 values and their scales.

The matrices `X` [experts, outputs, inputs] are the tensors `X_blocks` [experts, outputs, inputs / 32, 16] and
`X_scales` [experts, outputs, inputs / 32], both uint8 (see `kernels.gemm.quantized.mxfp4`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from specbatch.errors import refuse
from specbatch.kernels.common.block_sizes import MX_BLOCK
from specbatch.models.formats.format import Format, Shape, Shapes, Source

if TYPE_CHECKING:
    import torch

    from specbatch.kernels.gemm.quantized.mxfp4 import Mxfp4Weight

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
_QUANTIZED = (".experts.gate_up_proj", ".experts.down_proj")
_RMS = 2.93  # of 4-bit values if all are equally likely


@dataclass(frozen=True)
class Mxfp4Weights(Format):
    """Of experts; all other weights are unquantized, whatever the config lists."""

    name: ClassVar[str] = "MXFP4"
    is_of_family: ClassVar[bool] = True

    @classmethod
    def methods(cls) -> dict[str, Callable[[dict[str, Any]], Format]]:
        return {METHOD: lambda found: Mxfp4Weights()}

    @property
    def input_step(self) -> int:
        return MX_BLOCK

    def parts(self, name: str, shape: Shape) -> Shapes:
        *outer, inputs = shape
        groups = (*outer, inputs // MX_BLOCK)
        return {name + BLOCKS: (*groups, MX_BLOCK // 2), name + SCALES: groups}

    def weight_of(self, name: str) -> str | None:
        return name.removesuffix(BLOCKS).removesuffix(SCALES) if name.endswith((BLOCKS, SCALES)) else None

    @classmethod
    def types_of_part(cls, name: str) -> tuple[tuple[str, ...], str] | None:
        return (("U8",), "blocks and scales are U8") if name.endswith((BLOCKS, SCALES)) else None

    def types_of(self, name: str) -> tuple[str, ...] | None:
        return self.types_of_part(name) and ("U8",)

    def is_quantized(self, name: str, shape: Shape) -> bool:
        return name.endswith(_QUANTIZED)

    def fit(self, found: Shapes) -> Self:
        return self

    def load(self, name: str, shape: Shape, source: Source) -> Mxfp4Weight:
        from specbatch.kernels.gemm.quantized.mxfp4 import (
            LARGEST_PACKED_SCALE,
            LARGEST_SCALE,
            Mxfp4Weight,
            pack_mxfp4,
        )

        blocks, scales = (source.part(part, stored) for part, stored in self.parts(name, shape).items())
        values, largest = pack_mxfp4(blocks), int(scales.max())
        source.require_finite(name + SCALES, largest <= LARGEST_SCALE, "e8m0")
        if not largest:
            raise source.unusable(name + SCALES, "it holds only zeros; the file is damaged")
        if self.runs_on(source.device) and largest > LARGEST_PACKED_SCALE:
            works = f"its scales go up to 2^{largest - 127}; MXFP4 GEMMs take at most 2; use device='cpu'"
            raise source.unusable(name, works)
        return Mxfp4Weight(values, scales)

    def memory(self, shape: Shape) -> int:
        from specbatch.kernels.gemm.quantized.mxfp4 import mxfp4_bytes

        return mxfp4_bytes((*shape[:-1], shape[-1] // MX_BLOCK))

    def random(self, name: str, shape: Shape, inputs: int, generator: torch.Generator) -> torch.Tensor:
        import torch

        bits = torch.empty(shape, device=generator.device, dtype=torch.uint8)
        if name.endswith(BLOCKS):
            return bits.random_(0, 256, generator=generator)
        exponent = 127 + math.floor(math.log2(1 / (_RMS * math.sqrt(inputs))))
        return bits.random_(exponent, exponent + 2, generator=generator)

    def random_item(self, name: str) -> int:
        return 1


def check_width(setting: str, width: int) -> None:
    """Refuse inputs that are no whole number of blocks."""
    if width % MX_BLOCK:
        raise refuse(setting, width, f"MXFP4 has blocks of {MX_BLOCK} inputs; it must be a multiple of {MX_BLOCK}")
