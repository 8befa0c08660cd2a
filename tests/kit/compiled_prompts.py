"""Compiles prefill attention for Hopper, which needs no GPU. One JSON line for each variant: shared memory, and of its
shortest loop with tensor cores, which is the main loop: loads and stores of registers that were spilled, exponentials,
and how many of these come before the wait for the last product."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from specbatch.kernels.attention.hopper import ROWS, TILINGS
from specbatch.kernels.attention.prefill import prefill_attention_gluon as prompts


def compiled(dim: int, *, page: int = 0, group: int = 4, dtype: str = "bf16", **more: Any) -> dict[str, Any]:
    tile = TILINGS[dim]
    rows = min(page & -page, tile.keys) if page else tile.keys
    layout = gl.NVMMASharedLayout.get_default_for([tile.keys, dim], gl.bfloat16)
    fixed: dict[str, Any] = {
        "GROUP": group, "KV": 8, "DIM": dim, "PAGE": page, "COPY": rows, "WINDOW": 0, "TOKENS": ROWS // group,
        "KEYS": tile.keys, "SPLIT": False, "STAGES": tile.stages, "sinks": None,
    } | more  # fmt: skip
    kinds = dict.fromkeys(("table_stride", "num_tiles", "page_stride", "q_stride", "rows", "splits"), "i32")
    kinds |= dict.fromkeys(("table", "tiles", "page_table"), "*i64") | {"scale": "fp32", "q": f"*{dtype}"}
    kinds |= dict.fromkeys(("keys", "values"), f"tensordesc<{dtype}[{rows}, {dim}],{layout!r}>")
    kinds |= dict.fromkeys(("out", "lse"), "*fp32" if fixed["SPLIT"] else f"*{dtype}")
    kernel = prompts.prefill_attention_kernel
    signature = {name: "constexpr" if name in fixed else kinds[name] for name in kernel.arg_names}
    source = GluonASTSource(kernel, signature, fixed)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    loop = main_loop(disassembled(done.asm["cubin"]))
    wait = max(at for at, line in enumerate(loop) if "DEPBAR.LE gsb0, 0x0" in line)
    exponentials = [at for at, line in enumerate(loop) if "MUFU.EX2" in line]
    spills = sum("LDL" in line or "STL" in line for line in loop)
    early = sum(at < wait for at in exponentials)
    return {"shared": done.metadata.shared, "spills": spills, "exponentials": len(exponentials), "early": early}


def disassembled(code: bytes) -> list[str]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def main_loop(lines: list[str]) -> list[str]:
    labels = {line.strip()[:-1]: at for at, line in enumerate(lines) if re.match(r"\.L_x_\d+:", line.strip())}
    loops = []
    for end, line in enumerate(lines):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if target and (start := labels[target[1]]) < end and any("HGMMA" in each for each in lines[start:end]):
            loops.append(lines[start:end])
    return min(loops, key=len)


if __name__ == "__main__":
    for name, variant in {
        "rows": {"dim": 128},
        "pages of 16": {"dim": 128, "page": 16, "SPLIT": True},
        "window": {"dim": 64, "page": 64, "WINDOW": 128, "group": 8, "dtype": "fp16"},
        "heads of 256": {"dim": 256, "page": 16, "group": 5},
    }.items():
        print(json.dumps({"name": name, **compiled(**variant)}))
