"""FP8 checkpoints: e4m3 matrices with a scale per block of 128 x 128 values, as published by DeepSeek-V3 and Qwen.

The scales of a matrix `X` are the tensor `X_scale_inv` (`...q_proj.weight_scale_inv`; for fused experts
`...gate_up_proj_scale_inv`). Despite the name they are multiplied.
"""

from __future__ import annotations

from typing import Any

from specbatch.config_values import names_of, table_of
from specbatch.errors import refuse
from specbatch.kernels.gemm.weight import SCALE_BLOCK

SCALES = "_scale_inv"
# Never quantized: convolutions and routers. Embedding and output matrix are excluded by their names.
PLAIN = ("conv1d.weight", "conv.conv.weight", ".gate.weight", ".router.weight", "shared_expert_gate.weight")
Shape = tuple[int, ...]


def unconverted(config: dict[str, Any]) -> frozenset[str] | None:
    """Modules that are not quantized in an FP8 checkpoint; None if the config.json has no quantization."""
    found = table_of(config, "quantization_config")
    if not found:
        return None
    asked = {
        "quant_method": ("fp8", found.get("quant_method")),
        "fmt": ("e4m3", found.get("fmt", "e4m3")),
        "weight_block_size": ([SCALE_BLOCK, SCALE_BLOCK], found.get("weight_block_size")),
        "activation_scheme": ("dynamic", found.get("activation_scheme", "dynamic")),
    }
    for key, (works, value) in asked.items():
        if value != works:
            fp8 = f"quant_method 'fp8' with weight_block_size {[SCALE_BLOCK, SCALE_BLOCK]}"
            raise refuse(f"quantization_config.{key}", value, f"it must be {works!r}: use unquantized weights, {fp8}, "
                         "or a GGUF file")  # fmt: skip
    listed = names_of(found, "modules_to_not_convert") or names_of(found, "ignored_layers") or []
    return frozenset(listed)


def is_scaled(name: str, shape: Shape, plain: frozenset[str]) -> bool:
    """Whether a tensor is FP8, given the unquantized modules `plain`. These include their submodules, and a name
    matches every module that ends with it."""
    if len(shape) < 2 or name.endswith(PLAIN):
        return False
    parts = name.removesuffix(".weight").split(".")
    places = range(len(parts))
    inside = any(".".join(parts[: place + 1]) in plain for place in places)
    return not inside and not any(".".join(parts[place:]) in plain for place in places)


def scale_shape(shape: Shape) -> Shape:
    """Shape of the scales of a weight [..., out, in]."""
    *stack, out, inner = shape
    return (*stack, -(-out // SCALE_BLOCK), -(-inner // SCALE_BLOCK))


def with_scales(shapes: dict[str, Shape], plain: frozenset[str]) -> dict[str, Shape]:
    """`shapes` with the scales after each FP8 tensor."""
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        found[name] = shape
        if is_scaled(name, shape, plain):
            found[name + SCALES] = scale_shape(shape)
    return found


def left_plain(found: dict[str, Shape]) -> frozenset[str]:
    """The modules without scales among the tensors of a file (name -> shape)."""
    names = (name for name, shape in found.items() if len(shape) > 1 and not name.endswith(SCALES))
    return frozenset(name.removesuffix(".weight") for name in names if name + SCALES not in found)
