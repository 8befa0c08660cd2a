"""Compiles the deterministic recurrences for Hopper, which needs no GPU. One JSON line for each variant of a kernel:
the layouts in which it adds, and how many of its instructions an assembler may fuse. A process of its own: in the
tests, kernels are interpreted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specbatch.kernels.recurrent import mamba2_triton, row_by_row_triton, short_conv_triton

WALKS = ("prompt", "chain", "replay of a tree", "tree")
_DELTA = {"KEYS": 16, "VALUES": 32, "K": 128, "V": 128, "BLOCK_K": 128}  # Qwen3-Next
_SSD = {"HEADS": 128, "GROUPS": 8, "STATE": 128}  # Nemotron-H-8B


def compiled(kernel: Any, kinds: dict[str, str], fixed: dict[str, Any], warps: int) -> dict[str, Any]:
    """kinds: types of the pointers; they and the sizes that a launch specializes are multiples of 16."""
    names, fixed = kernel.arg_names, fixed | {"PDL": True}
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
    plain = {
        "eps",
        *(name for name, parameter in zip(names, kernel.params, strict=True) if parameter.do_not_specialize),
    }
    aligned = [i for i, name in enumerate(names) if signature[name] != "constexpr" and name not in plain]
    source = ASTSource(kernel, signature, constexprs=fixed, attrs={(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": warps, "enable_fp_fusion": False}
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    # An instruction that names its rounding is not fused with another.
    fusible = len(re.findall(r"\b(?:mul|add|sub)\.f32", done.asm["ptx"]))
    return {"sums": layouts(done.asm["ttgir"]), "fusible": fusible}


def layouts(code: str) -> list[str]:
    """Axis, shape and layout of what the sums of floating-point numbers add."""
    names = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", code, re.M))
    sums = re.findall(r"\"tt\.reduce\".*?axis = (\d+).*?\}\) : \((tensor<.*?>)\) ->", code, re.S)
    resolved = (re.sub(r"#\w+", lambda name: names.get(name[0], name[0]), operand) for _, operand in sums)
    return sorted(
        {f"axis {axis} of {operand}" for (axis, _), operand in zip(sums, resolved, strict=True) if "f32" in operand}
    )


def walk(kernel: Any, variant: str, kinds: dict[str, str], fixed: dict[str, Any]) -> dict[str, Any]:
    kinds |= dict.fromkeys(("table", "slots", "counts", "path", "ancestors"), "*i64") | {"state": "*fp32"}
    absent = ("slots", "counts", "path", "old_k", "old_u", "old_g") if variant == "prompt" else ("table",)
    absent += () if variant == "tree" else ("ancestors",)
    fixed |= {name: None for name in absent if name in kernel.arg_names}
    return compiled(kernel, kinds, fixed | {"REPLAY": variant in WALKS[1:3]}, 1)


def delta_finish(*, keeps: bool) -> dict[str, Any]:
    kinds = dict.fromkeys(("o", "qkv", "z", "weight"), "*bf16") | dict.fromkeys(("gates", "kept_k", "kept_g"), "*fp32")
    fixed = _DELTA | {"BLOCK_V": 128, "TILE": row_by_row_triton.LINES}
    fixed |= {} if keeps else dict.fromkeys(("slots", "kept_k", "kept_g"))
    return compiled(row_by_row_triton.delta_finish_kernel, kinds | {"slots": "*i64", "eps": "fp32"}, fixed, 4)


def delta_gates() -> dict[str, Any]:
    kinds = dict.fromkeys(("qkv", "b", "a"), "*bf16") | dict.fromkeys(("a_log", "dt_bias", "gates"), "*fp32")
    fixed = {name: value for name, value in _DELTA.items() if name != "V"} | {"TILE": row_by_row_triton.LINES}
    return compiled(row_by_row_triton.delta_gates_kernel, kinds, fixed, 4)


def ssd_finish(*, keeps: bool) -> dict[str, Any]:
    kinds = dict.fromkeys(("y", "z", "norm", "xbc", "dt", "pending"), "*bf16") | {"rows": "*i64", "eps": "fp32"}
    fixed = _SSD | {"WIDTH": 1024, "BLOCK": 1024} | ({} if keeps else dict.fromkeys(("xbc", "dt", "pending", "rows")))
    return compiled(mamba2_triton.finish_kernel, kinds, fixed, 4)


def conv(kernel: Any, **sizes: int) -> dict[str, Any]:
    kinds = dict.fromkeys(("x", "weight", "window", "pending", "y"), "*bf16")
    kinds |= dict.fromkeys(("tiles", "table", "rows", "count", "kept", "ancestors"), "*i64")
    fixed = {"before": None, "after": None, "bias": None, "weight_stride": 1, "TAPS": 4, "SILU": True, "CHANNELS": 128}
    return compiled(kernel, kinds, fixed | sizes, 4)


def every() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Kernel, variant and what was found."""
    for variant in WALKS:
        kinds = dict.fromkeys(("qkv", "o"), "*bf16") | dict.fromkeys(("gates", "old_k", "old_u", "old_g"), "*fp32")
        fixed = _DELTA | {"COLUMNS": row_by_row_triton.COLUMNS}
        yield "gated delta rule", variant, walk(row_by_row_triton.delta_walk_kernel, variant, kinds, fixed)
    for variant in WALKS:
        kinds = dict.fromkeys(("xbc", "dt", "y", "pending"), "*bf16") | dict.fromkeys(
            ("a_log", "d", "dt_bias"), "*fp32"
        )
        fixed = _SSD | {"DIM": 64, "BLOCK_S": 128, "ROWS": row_by_row_triton.ROWS}
        yield "Mamba2", variant, walk(row_by_row_triton.ssd_walk_kernel, variant, kinds, fixed)
    for keeps in (False, True):
        yield "norm of the gated delta rule", "verify" if keeps else "prompt", delta_finish(keeps=keeps)
        yield "norm of Mamba2", "verify" if keeps else "prompt", ssd_finish(keeps=keeps)
    yield "gates of the gated delta rule", "all", delta_gates()
    yield "convolution", "prompt", conv(short_conv_triton.conv_prefill_kernel, CHANNELS=512, TOKENS=16)
    for rows in (1, 8):
        yield "convolution", f"tree of {rows}", conv(short_conv_triton.conv_verify_kernel, N=rows, ROWS=rows, PAST=4)
        yield "convolution", f"chain of {rows}", conv(short_conv_triton.conv_chain_kernel, CHANNELS=512, N=rows)


if __name__ == "__main__":
    for name, variant, found in every():
        print(json.dumps({"name": name, "variant": variant, **found}))
