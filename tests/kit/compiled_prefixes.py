"""Compiles attention with shared prefixes for Hopper, which needs no GPU. One JSON line for each kernel, see
`compiled`. A process of its own: in the tests, kernels are interpreted."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
import triton
from compiled import compiled, usage_of
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from specbatch.kernels.attention.latent import latent_attention_triton as latents
from specbatch.kernels.attention.latent import latent_prefix_triton as latent_prefixes
from specbatch.kernels.attention.latent.latent_attention_configs import MOST_QUERIES, tile_for
from specbatch.kernels.attention.verify import prefix_attention_gluon as hopper
from specbatch.kernels.attention.verify import prefix_attention_triton as prefixes
from specbatch.kernels.attention.verify import verify_attention_triton as verifies
from specbatch.kernels.attention.verify.prefix_attention_configs import GLUON_TILES, LEAST_KEYS, prefix_tile

KINDS = dict.fromkeys(("page_table", "slots", "lengths"), "*i64")
KINDS |= dict.fromkeys(("members", "prefix_members", "groups", "items", "items_end", "count", "places"), "*i32")
KINDS |= dict.fromkeys(("outputs", "sums", "own", "own_sums"), "*fp32") | {"prefixes": "*i32"}
KINDS |= dict.fromkeys(("n", "first_node", "width", "lines", "programs", "capacity"), "i32")
KINDS |= {"eps": "fp32", "scale": "fp32"}
HALVES = ("qkv", "q_norm", "cos", "sin")
TREE, PACKED = {"positions": "*i64"}, {"firsts": "*i64"}


def attention(cache: str = "bf16", dtype: str = "bf16", source: str = "slots", **more: str) -> dict[str, Any]:
    tile = prefix_tile(verifies.torch.float32 if dtype == "fp32" else verifies.torch.bfloat16, 128, source)
    keys = f"tensordesc<{cache}[{tile.block_n}, 128]>" if source == "pages" else f"*{cache}"
    kinds = KINDS | dict.fromkeys(HALVES, f"*{dtype}") | dict.fromkeys(("keys", "values"), keys) | more
    fixed = {"KV": 8, "GROUP": 4, "DIM": 128, "HALF": 64, "PAGE": 64, "SOURCE": source, "BLOCK_M": tile.block_m,
             "BLOCK_N": tile.block_n, "SHARED": False, "FP8": cache == "fp8e4nv", "PDL": True}  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
    return compiled(prefixes.prefix_attention_kernel, kinds, fixed, **options)


def on_hopper(dim: int, page: int = 16, dtype: str = "bf16", **more: str) -> dict[str, Any]:
    tile, kernel = GLUON_TILES[dim], hopper.prefix_attention_kernel
    rows = min(page & -page, tile.block_n)
    layout = gl.NVMMASharedLayout.get_default_for([tile.block_n, dim], gl.bfloat16)
    fixed: dict[str, Any] = {"GROUP": 5, "KV": 2, "DIM": dim, "PAGE": page, "COPY": rows, "KEYS": tile.block_n,
                             "STAGES": tile.stages, "SHARED": False, "PDL": True}  # fmt: skip
    kinds = KINDS | dict.fromkeys(HALVES, f"*{dtype}") | more
    kinds |= dict.fromkeys(("keys", "values"), f"tensordesc<{dtype}[{rows}, {dim}],{layout!r}>")
    fixed |= {name: None for name in kernel.arg_names if name not in kinds and name not in fixed}
    signature = {name: "constexpr" if name in fixed else kinds[name] for name in kernel.arg_names}
    done = triton.compile(
        GluonASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps}
    )
    code = done.asm["ptx"]
    found = sorted({name.split(".")[0] for name in re.findall(r"wgmma\.mma_async|mma\.sync", code)})
    registers, stack = usage_of(done.asm["cubin"])
    return {"shared": done.metadata.shared, "instructions": found, "registers": registers, "stack": stack}


def own(cache: str = "bf16") -> dict[str, Any]:
    kinds = KINDS | dict.fromkeys((*HALVES, "k_norm"), "*bf16") | dict.fromkeys(("k_cache", "v_cache"), f"*{cache}")
    kinds |= {"out": "*fp32", "partials": "*fp32", "arrivals": "*i32", "rows": "*i64"}
    fixed = {"KV": 8, "GROUP": 4, "DIM": 128, "HALF": 64, "PAGE": 16, "BLOCK_M": 16, "BLOCK_N": 32, "FEW": 16,
             "PARTS": 4, "NEW": 1, "CAUSAL": True, "GROWN": False, "SHARED": False, "PDL": True}  # fmt: skip
    return compiled(verifies.verify_attention_kernel, kinds, fixed, num_warps=4, num_stages=3, maxnreg=128)


def of_latents(kernel: Any, rows: int, cache: str = "bf16", dtype: str = "bf16", **more: str) -> dict[str, Any]:
    """Of DeepSeek-V2-Lite: what is shared, and what each sequence has of its own."""
    tile = tile_for(rows, 4 if dtype == "fp32" else 2, torch.device("cpu"), fp8=cache == "fp8e4nv")
    kinds = KINDS | {"q": f"*{dtype}", "out": "*fp32"} | dict.fromkeys(("k_cache", "v_cache"), f"*{cache}")
    kinds |= dict.fromkeys(("partials", "logs"), "*fp32") | {"bounds_stride": "i32"} | more
    fixed = {"HEADS": 16, "RANK": 512, "ROPE": 64, "BLOCK_R": 512, "BLOCK_P": 64, "PAGE": 16, "BLOCK_M": tile.block_m,
             "BLOCK_N": tile.block_n, "TOKENS": 1}  # fmt: skip
    kinds = {name: kinds[name] for name in kernel.arg_names if name in kinds}
    fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
    return compiled(kernel, kinds, fixed, num_warps=tile.warps, num_stages=tile.stages)


def shared_latents(*kinds: str) -> dict[str, Any]:
    return of_latents(latent_prefixes.latent_prefix_kernel, MOST_QUERIES, *kinds)


def own_latents(**more: str) -> dict[str, Any]:
    return of_latents(latents.latent_attention_kernel, 16, **more)


def divide() -> dict[str, Any]:
    fixed = {"GROUP": 4, "GROUPS": 64, "BLOCK_M": 128, "BLOCK_N": 64, "LEAST": LEAST_KEYS, "ITEMS": 32}
    return compiled(prefixes.divide_kernel, KINDS, fixed)


def merge(sizes: tuple[int, int, int, int] = (8, 4, 128, 16), **more: str) -> dict[str, Any]:
    kv, group, dim, rows = sizes
    fixed = {"KV": kv, "GROUP": group, "DIM": dim, "HALF": dim // 2, "ROWS": rows, "PARTS": 4, "PDL": True}
    return compiled(prefixes.merge_prefixes_kernel, KINDS | {"out": "*bf16"} | more, fixed, num_warps=4)


if __name__ == "__main__":
    for name, variant in {
        "attention": lambda: attention(),
        "attention, pages in bulk, of a tree": lambda: attention(source="pages", **TREE),
        "attention, FP8 cache, packed rows": lambda: attention("fp8e4nv", k_scale="*fp32", v_scale="*fp32", **PACKED),
        "FP32 attention": lambda: attention("fp32", "fp32"),
        "Gluon": lambda: on_hopper(128),
        "Gluon, of a tree": lambda: on_hopper(64, 64, "fp16", **TREE),
        "Gluon, packed rows": lambda: on_hopper(256, 8, **PACKED),
        "own keys": lambda: own(),
        "own keys, FP8 cache": lambda: own("fp8e4nv"),
        "divide": divide,
        "merge": lambda: merge(),
        "merge packed rows": lambda: merge(**PACKED),
        "attention to latents": lambda: shared_latents(),
        "attention to latents, FP8 cache": lambda: shared_latents("fp8e4nv"),
        "FP32 attention to latents": lambda: shared_latents("fp32", "fp32"),
        "own latents": lambda: own_latents(),
        "own latents of a tree": lambda: own_latents(ancestors="*i64"),
        "merge latents": lambda: merge((1, 16, 512, 4)),
    }.items():
        print(json.dumps({"name": name, **variant()}), flush=True)
