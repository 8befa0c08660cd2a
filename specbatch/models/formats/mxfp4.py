"""MXFP4 checkpoints as published by OpenAI: the experts of a layer as blocks of 32 values and their scales.

The matrices `X` [experts, outputs, inputs] are the tensors `X_blocks` [experts, outputs, inputs / 32, 16] and
`X_scales` [experts, outputs, inputs / 32], both uint8 (see `kernels.gemm.quantized.mxfp4`).
"""

from __future__ import annotations

from typing import Any

from specbatch.errors import refuse
from specbatch.files.config_values import table_of
from specbatch.kernels.gemm.quantized.weight import MX_BLOCK

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
_QUANTIZED = (".experts.gate_up_proj", ".experts.down_proj")
Shape = tuple[int, ...]


def is_mxfp4(config: dict[str, Any]) -> bool:
    """Whether the config.json is that of an MXFP4 checkpoint."""
    return bool(table_of(config, "quantization_config").get("quant_method") == METHOD)


def stored_shapes(shapes: dict[str, Shape]) -> dict[str, Shape]:
    """Name -> shape of a file's tensors from those of the weights: experts [E, out, in] as blocks and scales."""
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if not name.endswith(_QUANTIZED):
            found[name] = shape
            continue
        *outer, inputs = shape
        groups = (*outer, inputs // MX_BLOCK)
        found |= {name + BLOCKS: (*groups, MX_BLOCK // 2), name + SCALES: groups}
    return found


def check_width(setting: str, width: int) -> None:
    """Refuse inputs that are no whole number of blocks."""
    if width % MX_BLOCK:
        raise refuse(setting, width, f"MXFP4 has blocks of {MX_BLOCK} inputs; it must be a multiple of {MX_BLOCK}")
