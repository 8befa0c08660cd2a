"""FP8 checkpoints: e4m3 matrices with a scale per block of 128 x 128 values, per output, or per tensor.

The scales of a matrix `X` are the tensor `X_scale_inv` (`...q_proj.weight_scale_inv`; for fused experts
`...gate_up_proj_scale_inv`), as DeepSeek-V3, Qwen and transformers name it, or `X_scale` (compressed-tensors,
ModelOpt). Despite the first name they are multiplied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from specbatch.kernels.gemm.quantized.weight import SCALE_BLOCK
from specbatch.models.formats.quantization import Quantization, Shape, Shapes

SCALES = ("_scale_inv", "_scale")
_SCALED = (".weight", "_proj")  # how the names of scaled tensors end


@dataclass(frozen=True)
class FP8Weights(Quantization):
    """per_channel: a scale per output (or the same for all outputs of a tensor) instead of per block; suffix: of the
    names of scales; quantizes_inputs: the checkpoint was made for FP8 activations, too."""

    per_channel: bool = False
    suffix: str = SCALES[0]
    quantizes_inputs: bool = True

    @property
    def name(self) -> str:
        return "FP8"

    @property
    def input_step(self) -> int:
        return 1 if self.per_channel else SCALE_BLOCK

    def parts(self, name: str, shape: Shape) -> Shapes:
        return {name: shape, name + self.suffix: self.scale_shape(shape)}

    def scale_shape(self, shape: Shape) -> Shape:
        """Shape of the scales of a weight [..., out, in]."""
        *stack, out, inner = shape
        if self.per_channel:
            return (*stack, out, 1)
        return (*stack, -(-out // SCALE_BLOCK), -(-inner // SCALE_BLOCK))

    def memory(self, shape: Shape) -> int:
        return math.prod(shape) + 4 * math.prod(self.scale_shape(shape))

    def may_dequantize(self, shape: Shape) -> bool:
        return not self.per_channel and bool(shape[-2] % SCALE_BLOCK)

    def weight_of(self, name: str) -> str | None:
        return scaled(name)

    def fit(self, found: Shapes) -> Self:
        inverse = any(name.endswith(SCALES[0]) for name in found)
        return replace(super().fit(found), suffix=SCALES[0 if inverse else 1])


def scaled(name: str) -> str | None:
    """The FP8 tensor of which `name` is the scales; None if it is anything else."""
    for suffix in SCALES:
        if name.endswith(tuple(end + suffix for end in _SCALED)):
            return name.removesuffix(suffix)
    return None


def is_per_output(scales: Shape, weight: Shape) -> bool:
    """Whether scales of this shape are one per tensor or one per output of a weight [out, in], in any spelling."""
    return len(weight) == 2 and scales in ((), (1,), (1, 1), (weight[0],), (weight[0], 1))
