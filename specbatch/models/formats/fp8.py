"""FP8 checkpoints: e4m3 matrices with a scale per block of 128 x 128 values, per output, or per tensor.

The scales of a matrix `X` are the tensor `X_scale_inv` (`...q_proj.weight_scale_inv`; for fused experts
`...gate_up_proj_scale_inv`), as DeepSeek-V3, Qwen and transformers name it, or `X_scale` (compressed-tensors,
ModelOpt). Despite the first name they are multiplied.
ModelOpt's blocks have scales of four dimensions [outputs / 128, 1, inputs / 128, 1], or none if there is one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from specbatch.files.config_values import flag_of, table_of
from specbatch.kernels.common.block_sizes import SCALE_BLOCK
from specbatch.models.formats.cache_scales import FP8
from specbatch.models.formats.format import (
    FLOATS,
    SCALES,
    Format,
    Group,
    Shape,
    Shapes,
    Source,
    check_scales,
    scaled,
    scales_per_output,
)
from specbatch.models.formats.settings import activations_of, expect, packing_of, refuse_setting, unquantized

if TYPE_CHECKING:
    import torch

    from specbatch.kernels.gemm.quantized.fp8_linear import FP8Weight

_BLOCKS = [SCALE_BLOCK, SCALE_BLOCK]
# Root mean square of float8_e4m3fn values if all bit patterns except the two NaNs are equally likely.
_RMS = 100.06


@dataclass(frozen=True)
class FP8Weights(Format):
    """per_channel: a scale per output (or the same for all outputs of a tensor) instead of per block; suffix: of the
    names of scales."""

    name: ClassVar[str] = "FP8"
    file_types: ClassVar[tuple[str, ...]] = ("F8_E4M3",)
    has_fp8_gemm: ClassVar[bool] = True

    inputs: str | None = FP8
    per_channel: bool = False
    suffix: str = SCALES[0]

    @classmethod
    def methods(cls) -> dict[str, Callable[[dict[str, Any]], Format]]:
        return {"fp8": _fine_grained}

    @classmethod
    def algorithms(cls) -> dict[str, Callable[[dict[str, Any]], Format]]:
        return {"FP8": _modelopt, "FP8_PER_CHANNEL_PER_TOKEN": _modelopt, "FP8_PB_WO": _modelopt}

    @classmethod
    def groups(cls) -> dict[tuple[str, int], Callable[[Group], Format]]:
        return {("float", 8): _group}

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

    def weight_of(self, name: str) -> str | None:
        return scaled(name)

    def types_of(self, name: str) -> tuple[str, ...] | None:
        return self.file_types if scaled(name) is None else FLOATS

    def respelled(self, found: Shapes) -> Shapes:
        if self.per_channel:
            return scales_per_output(found)
        pairs = ((name, shape, found[weight]) for name, shape in found.items() if (weight := scaled(name)) in found)
        blocks = ((name, shape, self.scale_shape(of)) for name, shape, of in pairs if len(of) == 2)
        return {name: (a, b) for name, shape, (a, b) in blocks if shape == (a, 1, b, 1) or (shape, a, b) == ((), 1, 1)}

    def fit(self, found: Shapes) -> Self:
        inverse = any(name.endswith(SCALES[0]) for name in found)
        return replace(super().fit(found), suffix=SCALES[0 if inverse else 1])

    def load(self, name: str, shape: Shape, source: Source) -> FP8Weight:
        import torch

        from specbatch.kernels.gemm.quantized.fp8_linear import FP8Weight, contains_nan

        values, rows = source.part(name, shape), 1 if self.per_channel else SCALE_BLOCK
        scales = source.part(name + self.suffix, self.scale_shape(shape), of=name, rows=rows).to(torch.float32)
        source.require_finite(name, not contains_nan(values), values.dtype)
        check_scales(scales, name + self.suffix, source)
        return FP8Weight(values, scales)

    def memory(self, shape: Shape) -> int:
        return math.prod(shape) + 4 * math.prod(self.scale_shape(shape))

    @property
    def kind(self) -> str:
        return "FP8 per channel" if self.per_channel else "FP8 in blocks"

    def may_dequantize(self, shape: Shape) -> bool:
        return not self.per_channel and bool(shape[-2] % SCALE_BLOCK)

    def random(self, name: str, shape: Shape, inputs: int, generator: torch.Generator) -> torch.Tensor:
        """Values are generated as bits to avoid a larger copy."""
        import torch

        from specbatch.kernels.gemm.quantized.fp8_linear import byte_chunks

        if scaled(name) is not None:
            scales = torch.empty(shape, device=generator.device).uniform_(0.8, 1.2, generator=generator)
            return scales.mul_(1 / (_RMS * math.sqrt(inputs)))
        bits = torch.empty(shape, device=generator.device, dtype=torch.uint8).random_(0, 254, generator=generator)
        for part in byte_chunks(bits):
            part += part >= 127  # 127 and 255 are NaN
        return bits.view(torch.float8_e4m3fn)

    def random_item(self, name: str) -> int:
        return 1 if scaled(name) is None else 4


def _fine_grained(found: dict[str, Any]) -> Format:
    """What transformers calls `FineGrainedFP8Config`; without blocks, one scale per tensor."""
    expect(found, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    blocks = found.get("weight_block_size")
    if blocks is not None:
        expect(found, "weight_block_size", _BLOCKS)
    schemes = ("dynamic", "static") if blocks is None else ("dynamic",)
    expect(found, "activation_scheme", *schemes, default="dynamic")
    return FP8Weights(*unquantized(found, "modules_to_not_convert", "ignored_layers"), per_channel=blocks is None)


def _modelopt(found: dict[str, Any]) -> Format:
    in_blocks = found["quant_algo"] == "FP8_PB_WO"  # weights only
    plain, inputs = unquantized(found, "ignore", "exclude_modules"), None if in_blocks else FP8
    return FP8Weights(*plain, per_channel=not in_blocks, suffix=SCALES[1], inputs=inputs)


def _group(group: Group) -> Format:
    """A group of compressed-tensors."""
    where, inputs = group.where, activations_of(group)
    weights = table_of(group.settings, "weights")
    packing_of(group, "float-quantized")
    if not flag_of(weights, "symmetric", True):
        raise refuse_setting(f"{where}.weights.symmetric", False, "FP8 has no zero points; it must be true")
    expect(weights, "strategy", "tensor", "channel", "block", where=f"{where}.weights")
    per_channel = weights["strategy"] != "block"
    if not per_channel:
        expect(weights, "block_structure", _BLOCKS, default=_BLOCKS, where=f"{where}.weights")
    if inputs not in (FP8, None):
        raise refuse_setting(f"{where}.input_activations", inputs, "activations must be in FP8 or not quantized")
    return FP8Weights(*group.modules, per_channel=per_channel, suffix=SCALES[1], inputs=inputs)
