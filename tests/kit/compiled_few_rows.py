"""Compiles GEMMs of few rows in 16 bits for Hopper, as compiled.py does others. Prints the same lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import triton
from compiled import compiled

from specbatch.kernels.gemm.dense import one_row_triton as one_rows
from specbatch.kernels.gemm.dense import skinny_gemm_triton as skinny
from specbatch.kernels.gemm.dense.skinny_gemm_configs import Tile, puts_weight_first, tile_for, undivided_tile_for

# qkv, o, gate and up, down; of Qwen3-8B, Qwen2.5-1.5B, Qwen2.5-0.5B and SmolLM2-135M
SHAPES = {
    "8b": ((6144, 4096), (4096, 4096), (12288, 4096), (4096, 12288)),
    "1.5b": ((2048, 1536), (1536, 1536), (8960, 1536), (1536, 8960)),
    "0.5b": ((1152, 896), (896, 896), (4864, 896), (896, 4864)),
    "135m": ((960, 576), (576, 576), (1536, 576), (576, 1536)),
}


def one_row(n: int, k: int, *, gated: bool, normed: bool, kind: str = "bf16", norm: str = "") -> dict[str, Any]:
    tile = one_rows.one_row_tile_for(k, gated)
    kinds = dict.fromkeys(("x", "weight", "norm", "residual", "y"), f"*{kind}") | {"N": "i32", "eps": "fp32"}
    kinds["norm"] = f"*{norm or kind}"
    fixed: dict[str, Any] = {
        "bias": None, "K": k, "GATED": gated, "SQUARED": False, "HAS_BIAS": False, "HAS_NORM": normed,
        "HAS_RESIDUAL": not normed, "R": tile.rows // (1 + gated), "C": 128 * tile.warps, "PDL": True,
    }  # fmt: skip
    fixed["residual" if normed else "norm"] = None
    found = compiled(one_rows.one_row_kernel, kinds, fixed, num_warps=tile.warps)
    pieces = -(-k // (256 * tile.warps))  # that a thread reads 16 bytes of
    return found | {"expected": pieces * (tile.rows + (normed and (1 if norm != "fp32" else 2)))}


def skinny_gemm(n: int, k: int, tile: Tile, rows: int, *, gated: bool, normed: bool, rounded: bool) -> dict[str, Any]:
    blocks = triton.cdiv(k, tile.k)
    kinds = dict.fromkeys(("x", "weight", "norm", "residual", "y"), "*bf16") | {"partial": "*fp32", "counters": "*i32"}
    kinds |= dict.fromkeys(("M", "N", "K", "x_stride", "residual_stride"), "i32") | {"eps": "fp32"}
    fixed: dict[str, Any] = {
        "bias": None, "GATED": gated, "SQUARED": False, "HAS_BIAS": False, "HAS_NORM": normed,
        "HAS_RESIDUAL": not gated and not normed, "ROUNDED": rounded, "WEIGHT_FIRST": puts_weight_first(rows),
        "SPLITS": triton.cdiv(blocks, triton.cdiv(blocks, tile.splits)), "EVEN_K": k % tile.k == 0, "BM": rows,
        "BN": tile.n, "BK": tile.k, "PDL": True,
    }  # fmt: skip
    fixed |= {} if normed else {"norm": None}
    return compiled(skinny.skinny_kernel, kinds, fixed, num_warps=tile.warps, num_stages=tile.stages)


def every() -> Iterator[tuple[str, dict[str, Any]]]:
    for model, shapes in SHAPES.items():
        for name, (n, k) in zip(("qkv", "o", "gated", "down"), shapes, strict=True):
            how = {"gated": name == "gated", "normed": name in ("qkv", "gated")}
            yield f"one row, {name} of {model}", one_row(n, k, **how)
            tile = tile_for(n, k, 32, how["gated"], 2)
            yield f"32 rows, {name} of {model}", skinny_gemm(n, k, tile, 32, rounded=False, **how)
    yield "one row, head of 8b", one_row(151936, 4096, gated=False, normed=False)
    yield "one row in FP16, gated of 8b", one_row(12288, 4096, gated=True, normed=True, kind="fp16")
    yield "one row, FP32 norm, gated of 8b", one_row(12288, 4096, gated=True, normed=True, norm="fp32")
    yield "one row of 25600", one_row(5120, 25600, gated=False, normed=False)
    for n, k, gated in ((6144, 4096, False), (4096, 4096, False), (151936, 4096, False), (12288, 4096, True)):
        tile = undivided_tile_for(n, k, gated=gated, item=2)
        found = skinny_gemm(n, k, tile, 16, gated=gated, normed=False, rounded=True)
        yield f"undivided, 16 rows, {n} x {k}", found


if __name__ == "__main__":
    for name, found in every():
        print(json.dumps({"name": name, **found}))
