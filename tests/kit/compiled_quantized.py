"""Compiles GEMMs with quantized weights for Hopper, as compiled.py does others. Prints the same lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from compiled import compiled

from specbatch.kernels.gemm.quantized import fp8_few_rows_triton as fp8_few_rows
from specbatch.kernels.gemm.quantized import fp8_linear_triton as fp8s
from specbatch.kernels.gemm.quantized import int4_few_rows_triton as int4_few_rows
from specbatch.kernels.gemm.quantized import int4_triton as int4s
from specbatch.kernels.gemm.quantized import w8a8_few_rows_triton as w8a8_few_rows
from specbatch.kernels.moe import experts_triton as experts


def experts_of_four_bits(rows: int, *, is_gated: bool, group: int = 0) -> dict[str, Any]:
    """A grouped GEMM of gpt-oss; with a group of Qwen3-30B-A3B in INT4."""
    tile = experts.FOUR_BITS_TILES[rows]
    kinds = dict.fromkeys(("x", "bias", "y"), "*bf16") | {"weight": "*i32"}
    kinds |= dict.fromkeys(("order", "blocks", "used"), "*i32")
    kinds |= dict.fromkeys(("N", "K", "x_stride", "scale_stride"), "i32")
    kinds["scales"] = "*i32" if group else "*u8"
    fixed: dict[str, Any] = {
        "x_scales": None, "QUANTIZED": False, "SHARE": 4 if is_gated else 1, "GATED": is_gated,
        "CLAMPED": is_gated and not group, "GELU": False, "SQUARED": False, "SCALED": False, "PER_CHANNEL": False,
        "FP8": False, "MXFP4": not group, "INT4": group, "SCALE_BLOCK": 128, "ONCE": rows == 16, "EARLY": False,
        "EVEN_K": bool(group), "BM": rows, "HALVES": rows == 128, "BN": tile.n, "BK": tile.k, "TILES": tile.per_program,
        "CHUNK": 128, "UNIT": 128, "BF16": True, "WARPS": tile.warps, "PDL": True,
    }  # fmt: skip
    fixed |= {"bias": None} if group else {}
    return compiled(experts.grouped_kernel, kinds, fixed, num_warps=tile.warps, num_stages=tile.stages)


def fp8(rows: int, *, per_channel: bool, quantized: bool, n: int = 4096, k: int = 12288) -> dict[str, Any]:
    kinds = dict.fromkeys(("x", "bias", "residual", "y"), "*bf16") | {"scales": "*fp32", "weight": "*fp8e4nv"}
    kinds |= dict.fromkeys(("M", "N", "K", "x_stride", "scale_stride", "residual_stride", "y_stride"), "i32")
    kinds |= {"x": "*fp8e4nv", "x_scales": "*fp32"} if quantized else {}
    kinds |= {"partial": "*fp32", "counters": "*i32"}
    tile = fp8s.tile_for(rows, n, k, 1 if quantized else 2)
    fixed: dict[str, Any] = {"PER_CHANNEL": per_channel, "HAS_BIAS": False, "HAS_RESIDUAL": True}
    if isinstance(tile, w8a8_few_rows.W8A8FewRowsTile):
        return of_few_rows(w8a8_few_rows.w8a8_few_rows_kernel, kinds, fixed | {"SIDE": 128}, rows, tile)
    if isinstance(tile, fp8_few_rows.FP8FewRowsTile):
        return of_few_rows(
            fp8_few_rows.fp8_few_rows_kernel, kinds | {"weight": "*i32"}, fixed | {"SIDE": 128}, rows, tile
        )
    fixed |= {
        "QUANTIZED": quantized, "SCALE_BLOCK": 128, "EVEN_K": True, "SPLITS": tile.splits, "BM": tile.rows,
        "BN": tile.outputs, "BK": tile.k, "PDL": True,
    }  # fmt: skip
    fixed |= {} if quantized else {"x_scales": None}
    return compiled(fp8s.fp8_linear_kernel, kinds, fixed, num_warps=tile.warps, num_stages=tile.stages)


def of_few_rows(
    kernel: Any,
    kinds: dict[str, str],
    fixed: dict[str, Any],
    rows: int,
    tile: fp8_few_rows.FP8FewRowsTile | w8a8_few_rows.W8A8FewRowsTile,
) -> dict[str, Any]:
    _, settings = tile.settings(torch.empty(rows, 12288, device="meta"), 4096, 96)
    settings.pop("launch_pdl")
    options = {name: settings.pop(name) for name in ("num_warps", "num_stages")}
    return compiled(kernel, kinds, fixed | settings | {"PDL": True}, **options)


def int4(rows: int, kind: str, group: int, n: int = 4096, k: int = 12288) -> dict[str, Any]:
    tile = int4s.tile_for(rows, n, k, 2)
    kinds = dict.fromkeys(("x", "bias", "residual", "y"), f"*{kind}") | {"partial": "*fp32"}
    kinds |= dict.fromkeys(("weight", "scales", "counters"), "*i32")
    kinds |= dict.fromkeys(("M", "N", "K", "x_stride", "residual_stride", "y_stride"), "i32")
    fixed: dict[str, Any] = {"HAS_BIAS": False, "HAS_RESIDUAL": True, "CHUNK": 128, "UNIT": 128}
    fixed["BF16"] = kind == "bf16"
    if isinstance(tile, int4_few_rows.Int4FewRowsTile):
        fixed |= {
            "GROUPS": 128 // group, "CHUNKS": tile.chunks, "SPLITS": tile.splits, "BM": rows, "BN": tile.outputs,
            "WARPS": 4, "STAGES": tile.stages, "AHEAD": 2, "PDL": True,
        }  # fmt: skip
        return compiled(int4_few_rows.int4_few_rows_kernel, kinds, fixed, num_warps=4, num_stages=tile.stages)
    fixed |= {
        "GROUP": group, "SPLITS": tile.splits, "BM": tile.rows, "BN": tile.outputs, "WARPS": tile.warps, "PDL": True
    }  # fmt: skip
    return compiled(int4s.int4_linear_kernel, kinds, fixed, num_warps=tile.warps, num_stages=tile.stages)


def every() -> Iterator[tuple[str, dict[str, Any]]]:
    for rows in experts.FOUR_BITS_TILES:
        yield f"INT4 experts of {rows} rows", experts_of_four_bits(rows, is_gated=True, group=128)
        yield f"experts of {rows} rows", experts_of_four_bits(rows, is_gated=True)
        yield f"second GEMM of experts of {rows} rows", experts_of_four_bits(rows, is_gated=False)
    cases = (
        (16, "bf16", 128),
        (32, "fp16", 128),
        (32, "bf16", 64),
        (16, "bf16", 32),
        (64, "fp16", 128),
        (64, "bf16", 32),
        (128, "bf16", 128),
        (128, "fp16", 32),
    )
    for rows, kind, group in cases:
        yield f"INT4 GEMM of {rows} rows, {kind}, groups of {group}", int4(rows, kind, group)
    for n, k in ((6144, 4096), (24576, 4096), (57344, 8192)):
        yield f"INT4 GEMM of 16 rows, {n} x {k}", int4(16, "bf16", 128, n, k)
    yield "INT4 GEMM of 64 rows, 24576 x 4096", int4(64, "bf16", 128, 24576, 4096)
    for rows, quantized in ((16, False), (32, False), (128, False), (64, True)):
        yield f"FP8 GEMM of {rows} rows, scaled per output", fp8(rows, per_channel=True, quantized=quantized)
    yield "FP8 GEMM of 16 rows, scaled per block", fp8(16, per_channel=False, quantized=False)
    yield "FP8 GEMM of 64 rows in FP8, scaled per block", fp8(64, per_channel=False, quantized=True)
    for rows, n, k in ((4, 6144, 4096), (4, 24576, 4096), (16, 24576, 4096), (32, 4096, 12288), (32, 24576, 4096)):
        for per_channel in (False, True):
            scaled = "output" if per_channel else "block"
            name = f"FP8 GEMM of {rows} rows in FP8, {n} x {k}, scaled per {scaled}"
            yield name, fp8(rows, per_channel=per_channel, quantized=True, n=n, k=k)


if __name__ == "__main__":
    for name, found in every():
        print(json.dumps({"name": name, **found}))
