"""Compiles kernels for Hopper, which needs no GPU: deterministic ones, those of gpt-oss, of latent attention and of
collectives. One JSON line for each: shared memory, instructions of the tensor cores, how many instructions of the main
loop write to shared memory and how many load from memory, how many elements assembly takes together, registers and
bytes of stack of a thread, and before the wait for the previous kernel: loads of memory, asynchronous copies among
them, and fetches to L2. A process of its own: in the tests, kernels are interpreted."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specbatch.kernels.attention.deterministic import span_attention_triton as spans
from specbatch.kernels.attention.deterministic import span_latents_triton as span_latents
from specbatch.kernels.attention.latent import latent_attention_triton as latents
from specbatch.kernels.attention.prefill import prefill_attention_triton as prompts
from specbatch.kernels.attention.verify import verify_attention_triton as verifies
from specbatch.kernels.attention.verify.verify_attention_configs import Tile
from specbatch.kernels.collectives import push_triton as one_shots
from specbatch.kernels.collectives import two_shot_triton as two_shots
from specbatch.kernels.collectives.peer_words_triton import EMPTY, KINDS
from specbatch.kernels.gemm import head_gemm_triton as head_gemms
from specbatch.kernels.gemm.deterministic import fixed_order_gemm_triton as gemms

EARLY = {
    "early": r"ld\.global|cp\.async\.c[ag]\.",
    "copied_early": r"cp\.async\.c[ag]\.",
    "fetched_early": r"prefetch\.global\.L2",
}
SIZES = ("N", "K", "x_stride", "y_stride", "x_token", "x_head", "weight_head", "weight_k", "weight_n")


def compiled(kernel: Any, kinds: dict[str, str], fixed: dict[str, Any], **options: Any) -> dict[str, Any]:
    """kinds: types of the arguments, of which those of pointers and of sizes of 16 are multiples of it; arguments
    without a type or a fixed value are None."""
    names = kernel.arg_names
    fixed = fixed | {name: None for name in names if name not in kinds and name not in fixed}
    signature = {name: "constexpr" if name in fixed else kinds[name] for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or (name in SIZES and name not in fixed)]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=attributes)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    code = done.asm["ptx"]
    found = sorted({name.split(".")[0] for name in re.findall(r"wgmma\.mma_async|mma\.sync", code)})
    loops = [code[code.index(f"{label}:") : end.end()] for end in re.finditer(r"bra(?:\.uni)? \s*(\$\w+);", code)
             if f"{(label := end[1])}:" in code[: end.end()]]  # fmt: skip
    main_loop = max(loops, key=len, default="")
    copies, loads = main_loop.count("st.shared"), main_loop.count("ld.global")
    before, found_wait, _ = code.partition("griddepcontrol.wait")
    early = {name: len(re.findall(code, before)) if found_wait else 0 for name, code in EARLY.items()}
    together = max(map(int, re.findall(r"packed_element = (\d+)", done.asm["ttgir"])), default=0)
    registers, stack = usage_of(done.asm["cubin"])
    return {
        "shared": done.metadata.shared, "instructions": found, "copies": copies, "loads": loads, "together": together,
        "registers": registers, "stack": stack, **early,
    }  # fmt: skip


def usage_of(code: bytes) -> tuple[int, int]:
    """Of a thread in an assembled kernel: registers, and bytes of its stack, those of registers that were spilled, as
    no kernel has arrays."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", done.stdout)[0])
    return registers, stack


def attention(
    rows: int,
    few: int,
    *,
    is_prompt: bool,
    is_spread: bool,
    cache: str = "bf16",
    is_tree: bool = False,
    has_window: bool = False,
    has_sinks: bool = False,
    dtype: str = "bf16",
    dim: int = 128,
) -> dict[str, Any]:
    warps, stages = spans.warps_and_stages(rows, dim, is_fp32=dtype == "fp32", is_spread=is_spread)
    at_once = max(1, min(16, 32 * warps // few))
    kinds = dict.fromkeys(("q", "out"), f"*{dtype}") | dict.fromkeys(("k_cache", "v_cache"), f"*{cache}")
    kinds |= dict.fromkeys(("starts", "ends", "rows", "offsets", "tiles", "page_table"), "*i64")
    kinds |= dict.fromkeys(("page_stride", "q_stride", "width", "spans", "count", "per_sequence", "window"), "i32")
    kinds |= {
        "sinks": "*fp32",
        "partials": "*fp32",
        "arrivals": "*i32",
        "lineages": "*i32",
        "seen": "*i32",
        "scale": "fp32",
    }
    fixed = {
        "GROUP": 4, "KV": 8, "DIM": dim, "BLOCK_D": dim, "PAGE": 16, "TOKENS": rows // 4, "ROWS": rows, "FEW": few,
        "KEYS": spans.KEYS, "SPAN": spans.SPAN, "SPREAD": is_spread, "AT_ONCE": at_once, "PDL": True,
    }  # fmt: skip
    fixed |= {} if is_prompt else {"tiles": None}
    fixed |= {"TOKENS": 1} if is_tree else {"lineages": None, "seen": None}
    fixed |= {} if has_window else {"window": None}
    fixed |= {} if has_sinks else {"sinks": None}
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    return compiled(spans.span_attention_kernel, kinds, fixed, **options)


def verify(
    *, is_tree: bool, is_shared: bool = False, cache: str = "bf16", is_packed: bool = False, is_scaled: bool = False
) -> dict[str, Any]:
    """Verify attention of gpt-oss; with shared keys that of Gemma 4 E2B; scaled: that of Qwen3-8B, whose FP8 cache has
    scales and offsets."""
    tile = Tile(16, 16, 4, 3, 255) if is_shared else Tile(16, 32, 4, 3, 128)
    tile = Tile(16, 128, 4, 3, 255) if is_scaled else tile
    kinds = dict.fromkeys(("qkv", "out", "k_cache", "v_cache", "cos", "sin"), "*bf16")
    kinds |= dict.fromkeys(("page_table", "rows", "lengths", "firsts", "positions", "ancestors"), "*i64")
    kinds |= dict.fromkeys(("k_cache", "v_cache"), f"*{cache}")
    kinds |= dict.fromkeys(("sinks", "partials", "q_norm", "k_norm"), "*fp32") | dict.fromkeys(("eps", "scale"), "fp32")
    kinds |= dict.fromkeys(("n", "first_node", "capacity", "width", "window"), "i32") | {"arrivals": "*i32"}
    fixed: dict[str, Any] = {
        "KV": 8, "GROUP": 8, "DIM": 64, "HALF": 32, "PAGE": 16, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "FEW": 16, "PARTS": 4, "NEW": 1, "CAUSAL": True, "GROWN": False, "SHARED": is_shared, "PDL": True,
    }  # fmt: skip
    fixed |= (
        {"KV": 1, "DIM": 512, "HALF": 256, "NEW": 2, "sinks": None} if is_shared else {"q_norm": None, "k_norm": None}
    )
    if is_scaled:
        kinds |= dict.fromkeys(("k_scale", "v_scale", "k_offset"), "*fp32")
        kinds |= dict.fromkeys(("q_norm", "k_norm"), "*bf16")
        fixed |= {"GROUP": 4, "DIM": 128, "HALF": 64, "PARTS": 8, "sinks": None, "window": None}
        del fixed["q_norm"], fixed["k_norm"]
    fixed |= {} if is_tree else {"positions": None, "ancestors": None}
    fixed |= {} if is_packed else {"firsts": None}
    return compiled(verifies.verify_attention_kernel, kinds, fixed, num_warps=tile.warps, num_stages=tile.stages)


def prompt(source: str, dim: int, tile: prompts.Tiling, *, has_sinks: bool) -> dict[str, Any]:
    kind = "*bf16" if source == "slots" else f"tensordesc<bf16[{tile.keys}, {dim}]>"
    kinds = {"q": "*bf16", "keys": kind, "values": kind} | dict.fromkeys(("sinks", "out", "lse"), "*fp32")
    kinds |= dict.fromkeys(("table", "tiles", "page_table"), "*i64") | {"scale": "fp32"}
    kinds |= dict.fromkeys(("table_stride", "page_stride", "q_stride", "rows"), "i32")
    fixed = {
        "GROUP": 8, "KV": 8, "DIM": dim, "BLOCK_D": dim, "PAGE": 64, "SOURCE": source, "WINDOW": 128, "TOKENS": 8,
        "QUERIES": tile.queries, "KEYS": tile.keys, "SPLIT": True,
    }  # fmt: skip
    fixed |= {} if has_sinks else {"sinks": None}
    return compiled(prompts.prefill_attention_kernel, kinds, fixed, num_warps=tile.warps, num_stages=tile.stages)


def latent_attention(
    rows: int, *, is_tree: bool = False, is_prompt: bool = False, cache: str = "bf16", dtype: str = "bf16"
) -> dict[str, Any]:
    """Of DeepSeek-V2-Lite: 16 heads."""
    tile = latents.tile_for(rows, 4 if dtype == "fp32" else 2, torch.device("cpu"), fp8=cache == "fp8e4nv")
    kinds = dict.fromkeys(("q", "out"), f"*{dtype}") | dict.fromkeys(("k_cache", "v_cache"), f"*{cache}")
    kinds |= dict.fromkeys(("partials", "logs"), "*fp32") | {"scale": "fp32"}
    kinds |= dict.fromkeys(("page_table", "tiles", "bounds", "slots", "lengths", "ancestors"), "*i64")
    kinds |= dict.fromkeys(("n", "first_node", "capacity", "width", "bounds_stride"), "i32")
    fixed: dict[str, Any] = {
        "HEADS": 16, "RANK": 512, "ROPE": 64, "BLOCK_R": 512, "BLOCK_P": 64, "PAGE": 16, "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n, "TOKENS": max(1, tile.block_m // 16),
    }  # fmt: skip
    fixed |= dict.fromkeys(("slots", "lengths") if is_prompt else ("tiles", "bounds"))
    fixed |= {} if is_tree else {"ancestors": None}
    return compiled(latents.latent_attention_kernel, kinds, fixed, num_warps=tile.warps, num_stages=tile.stages)


def spans_of_latents(
    rows: int, *, is_prompt: bool = False, is_spread: bool = False, is_tree: bool = False, heads: int = 16,
    cache: str = "bf16", dtype: str = "bf16",
) -> dict[str, Any]:  # fmt: skip
    """Deterministic attention of DeepSeek-V2 and V3."""
    kinds = dict.fromkeys(("q", "out"), f"*{dtype}") | dict.fromkeys(("k_cache", "v_cache"), f"*{cache}")
    kinds |= dict.fromkeys(("starts", "ends", "page_rows", "offsets", "tiles", "page_table"), "*i64")
    kinds |= dict.fromkeys(("page_stride", "q_stride", "width", "total", "spans", "count", "per_sequence"), "i32")
    kinds |= {"partials": "*fp32", "lineages": "*i32", "seen": "*i32", "scale": "fp32"}
    group = min(heads, rows)
    fixed = {
        "HEADS": heads, "GROUP": group, "RANK": 512, "BLOCK_R": 512, "ROPE": 64, "BLOCK_P": 64, "PAGE": 16,
        "TOKENS": 1 if is_tree else rows // group, "ROWS": rows, "SPAN": span_latents.SPAN, "SPREAD": is_spread,
        "KEYS": span_latents.FP32_KEYS if dtype == "fp32" else span_latents.KEYS, "PDL": True,
    }  # fmt: skip
    fixed |= {} if is_prompt else {"tiles": None}
    fixed |= {} if is_tree else {"lineages": None, "seen": None}
    options = {"num_warps": span_latents.WARPS, "num_stages": span_latents.STAGES, "enable_fp_fusion": False}
    return compiled(span_latents.span_latents_kernel, kinds, fixed, **options)


def merge_of_latents() -> dict[str, Any]:
    kinds = {"partials": "*fp32", "positions": "*i64", "out": "*bf16", "total": "i32", "spans": "i32"}
    fixed = {
        "HEADS": 16, "RANK": 512, "BLOCK_R": 512, "SPAN": span_latents.SPAN, "AT_ONCE": span_latents.AT_ONCE,
        "PDL": True,
    }  # fmt: skip
    return compiled(span_latents.merge_spans_kernel, kinds, fixed, num_warps=4, enable_fp_fusion=False)


def head_gemm(tokens: int, *, is_turned: bool, dtype: str = "bf16") -> dict[str, Any]:
    """Of the queries, and turned of the output, of DeepSeek-V2-Lite."""
    tile = head_gemms.tile_for(tokens, 4 if dtype == "fp32" else 2)
    kinds = dict.fromkeys(("x", "weight", "y"), f"*{dtype}")
    kinds |= dict.fromkeys(("T", "x_token", "x_head", "weight_head", "weight_k", "weight_n"), "i32")
    k, n = (512, 128) if is_turned else (128, 512)
    fixed = {"N": n, "K": k, "BT": tile.tokens, "BN": head_gemms.OUTPUTS, "BK": tile.columns, "PDL": True}
    fixed |= {"weight_k" if is_turned else "weight_n": 1}
    return compiled(head_gemms.head_gemm_kernel, kinds, fixed, num_warps=tile.warps, num_stages=tile.stages)


def gemm(rows: int, dtype: str = "bf16") -> dict[str, Any]:
    tile = gemms.tile_for(rows, {"bf16": 2, "fp32": 4}[dtype])
    kinds = dict.fromkeys(("bias", "residual", "y"), f"*{dtype}")
    kinds |= dict.fromkeys(("T", "N", "K", "residual_stride", "y_stride"), "i32")
    kinds |= {
        "x": f"tensordesc<{dtype}[{tile.rows}, {tile.columns}]>",
        "weight": f"tensordesc<{dtype}[{tile.outputs}, {tile.columns}]>",
    }
    fixed = {"BT": tile.rows, "BN": tile.outputs, "BK": tile.columns, "GROUP": tile.group, "PDL": True}
    return compiled(gemms.fixed_order_gemm_kernel, kinds, fixed, num_warps=tile.warps, num_stages=tile.stages)


def collective(ranks: int, dtype: str = "bf16", *, reduces: bool = True, is_two_shot: bool = False) -> dict[str, Any]:
    kinds = dict.fromkeys(("x", "residual", "out"), f"*{dtype}") | dict.fromkeys(("calls", "abort", "late"), "*i32")
    kinds |= dict.fromkeys(("vectors", "out_vectors", "part", "mailbox_bytes"), "i32")
    kinds |= {"mailboxes": "*i64", "timeout_ns": "i64"}
    kind = KINDS[{"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]]
    module: Any = two_shots if is_two_shot else one_shots
    fixed: dict[str, Any] = {
        "RANK": 1, "RANKS": ranks, "KIND": kind, "EMPTY_WORD": EMPTY, "HAS_RESIDUAL": reduces, "THREADS": module.BLOCK,
        "PDL": True,
    }  # fmt: skip
    fixed |= {} if is_two_shot else {"REDUCES": reduces}
    kernel = module.two_shot_kernel if is_two_shot else module.exchange_kernel
    return compiled(kernel, kinds, fixed, num_warps=module.BLOCK // 32)


def every() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "prompt", attention(64, 64, is_prompt=True, is_spread=False)
    yield "prompt, FP8 keys", attention(32, 32, is_prompt=True, is_spread=False, cache="fp8e4nv")
    yield "prompt, spread", attention(64, 64, is_prompt=True, is_spread=True)
    yield "step", attention(16, 4, is_prompt=False, is_spread=False)
    yield "step, spread", attention(16, 4, is_prompt=False, is_spread=True)
    yield "step, FP8 keys", attention(16, 4, is_prompt=False, is_spread=True, cache="fp8e4nv")
    yield "tree", attention(16, 4, is_prompt=False, is_spread=True, is_tree=True)
    yield "verify", attention(32, 32, is_prompt=False, is_spread=True)
    yield "prompt, window", attention(64, 64, is_prompt=True, is_spread=False, has_window=True)
    yield "step, window", attention(16, 4, is_prompt=False, is_spread=True, has_window=True)
    yield "tree, window", attention(16, 4, is_prompt=False, is_spread=True, is_tree=True, has_window=True)
    yield (
        "verify, window and sinks",
        attention(64, 64, is_prompt=False, is_spread=True, has_window=True, has_sinks=True),
    )
    for rows, few, is_prompt, is_spread, cache in (
        (32, 32, True, False, "bf16"),
        (32, 32, True, True, "bf16"),
        (32, 32, True, True, "fp8e4nv"),
        (16, 4, False, True, "bf16"),
    ):
        name = f"wide heads, {rows} rows, {cache}{', spread' * is_spread}"
        yield name, attention(rows, few, is_prompt=is_prompt, is_spread=is_spread, cache=cache, dim=512)
    yield (
        "FP32 prompt, wide heads",
        attention(16, 16, is_prompt=True, is_spread=False, dtype="fp32", cache="fp32", dim=512),
    )
    yield "sinks", verify(is_tree=False)
    yield "sinks of a tree", verify(is_tree=True)
    yield "sinks, packed rows", verify(is_tree=False, is_packed=True)
    yield "shared keys, packed rows", verify(is_tree=False, is_shared=True, is_packed=True)
    yield "shared keys", verify(is_tree=False, is_shared=True)
    yield "shared keys in FP8", verify(is_tree=False, is_shared=True, cache="fp8e4nv")
    yield "shared keys of a tree", verify(is_tree=True, is_shared=True)
    for is_tree in (False, True):
        name = f"FP8 keys with scales{' of a tree' * is_tree}"
        yield name, verify(is_tree=is_tree, cache="fp8e4nv", is_scaled=True)
    for source in ("slots", "pages", "rows"):
        yield f"sinks of a prompt, {source}", prompt(source, 64, prompts.Tiling(64, 64, 4, 3), has_sinks=True)
        tile = prompts.tiling(torch.bfloat16, 512, source)
        yield f"wide heads in a prompt, {source}", prompt(source, 512, tile, has_sinks=False)
    yield "latents of a step", latent_attention(16)
    yield "latents of a verify", latent_attention(256)
    yield "latents of a tree", latent_attention(256, is_tree=True)
    yield "latents of a prompt", latent_attention(256, is_prompt=True)
    yield "latents of a verify, FP8", latent_attention(256, cache="fp8e4nv")
    yield "FP32 latents of a prompt", latent_attention(256, is_prompt=True, cache="fp32", dtype="fp32")
    yield "FP32 latents of a verify, FP8", latent_attention(256, cache="fp8e4nv", dtype="fp32")
    for rows in (16, 32):
        for is_spread in (False, True):
            yield f"spans of latents, {rows} rows, spread: {is_spread}", spans_of_latents(rows, is_spread=is_spread)
    yield "spans of latents of a prompt", spans_of_latents(32, is_prompt=True)
    yield "spans of latents of a tree", spans_of_latents(16, is_tree=True, is_spread=True)
    yield "spans of latents of 128 heads", spans_of_latents(32, heads=128, dtype="fp16", cache="fp16")
    yield "spans of latents, FP8", spans_of_latents(32, is_spread=True, cache="fp8e4nv")
    yield "FP32 spans of latents", spans_of_latents(16, cache="fp32", dtype="fp32")
    for tokens, is_turned in ((1, False), (1, True), (1024, False), (1024, True)):
        yield f"GEMM of heads, {tokens} tokens, turned: {is_turned}", head_gemm(tokens, is_turned=is_turned)
    yield "FP32 GEMM of heads", head_gemm(1024, is_turned=True, dtype="fp32")
    exact: dict[str, Any] = {"cache": "fp32", "dtype": "fp32"}
    yield "FP32 prompt", attention(16, 16, is_prompt=True, is_spread=False, **exact)
    yield "FP32 step, spread", attention(16, 4, is_prompt=False, is_spread=True, **exact)
    yield "FP32 tree", attention(16, 4, is_prompt=False, is_spread=True, is_tree=True, **exact)
    for rows in (16, 1024):
        yield f"FP32 GEMM of {rows} rows", gemm(rows, "fp32")
    for rows in (16, 32, 64, 128, 1024):
        yield f"GEMM of {rows} rows", gemm(rows)
    for ranks in (2, 4, 8):
        yield f"one-shot of {ranks} ranks", collective(ranks)
        yield f"one-shot of {ranks} ranks, gathering", collective(ranks, "fp32", reduces=False)
        yield f"two-shot of {ranks} ranks", collective(ranks, is_two_shot=True)
    for dtype in ("fp16", "fp32"):
        yield f"one-shot in {dtype}", collective(2, dtype)
        yield f"two-shot in {dtype}", collective(2, dtype, is_two_shot=True)


if __name__ == "__main__":
    for name, found in every():
        print(json.dumps({"name": name, **found}))
