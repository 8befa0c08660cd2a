"""Compiles kernels for short chains of recurrent layers for Hopper, which needs no GPU; see `compiled`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from compiled import compiled

from specbatch.kernels.recurrent import gated_delta_triton, short_conv_triton

_DELTA = {"KEYS": 16, "VALUES": 32, "K": 128, "V": 128, "BLOCK_K": 128, "PDL": True}  # Qwen3.5-35B-A3B


def _sizes(kernel: Any) -> dict[str, str]:
    """Types of all arguments: sizes and strides, unless others are added."""
    return dict.fromkeys(kernel.arg_names, "i32")


def delta(kernel: Any, dtype: str, warps: int, **fixed: Any) -> dict[str, Any]:
    kinds = _sizes(kernel) | dict.fromkeys(("qkv", "b", "a", "o", "z", "weight"), f"*{dtype}")
    kinds |= dict.fromkeys(("a_log", "dt_bias", "state", "old_k", "old_u", "old_g", "kept_k", "kept_g"), "*fp32")
    kinds |= dict.fromkeys(("rows", "count"), "*i64") | {"eps": "fp32"}
    return compiled(kernel, kinds, _DELTA | fixed, num_warps=warps)


def convolution(rows: int) -> dict[str, Any]:
    kernel = short_conv_triton.conv_chain_kernel
    kinds = _sizes(kernel) | dict.fromkeys(("x", "weight", "window", "pending", "y"), "*bf16")
    kinds |= dict.fromkeys(("rows", "count"), "*i64")
    fixed = dict.fromkeys(("before", "after", "bias", "kept")) | {"weight_stride": 1, "TAPS": 4, "SILU": True}
    fixed |= {"CHANNELS": short_conv_triton._CHANNELS, "N": rows, "PDL": True}
    return compiled(kernel, kinds, fixed, num_warps=4, enable_fp_fusion=False)


def every() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of a kernel, and what was found."""
    for dtype in ("bf16", "fp16"):
        chain = {"N": 4, "ROWS": 4, "HELD": 4, "HELD_BLOCK": 4, "COLUMNS": 32, "PRECISION": "tf32"}
        yield f"chain of the gated delta rule, {dtype}", delta(gated_delta_triton.chain_kernel, dtype, 2, **chain)
    one = {"HELD": 1, "HELD_BLOCK": 1, "COLUMNS": 16}
    yield "row of the gated delta rule", delta(gated_delta_triton.one_row_kernel, "bf16", 1, **one)
    norm = {"BLOCK_V": 128, "PRECISION": "tf32", "TILE": 8}
    yield "norm of the gated delta rule", delta(gated_delta_triton.norm_kernel, "bf16", 4, **norm)
    for rows in (1, 4):
        yield f"chain of {rows} of the convolution", convolution(rows)


if __name__ == "__main__":
    for name, found in every():
        print(json.dumps({"name": name, **found}))
