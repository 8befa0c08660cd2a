"""Programmatic dependent launch (PDL): a kernel starts while the previous one ends, and waits for what it writes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def pdl(x: torch.Tensor) -> dict[str, bool]:
    """Launch arguments: `PDL` for the kernel, `launch_pdl` for the launcher; on for CUDA tensors."""
    return {"PDL": x.is_cuda, "launch_pdl": x.is_cuda}


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """Wait until all earlier kernels have ended and their writes are visible, then let the next kernel start. Every
    kernel calls it before it reads what the previous kernel wrote, and before it stores what that kernel may read."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def gdc_wait(PDL: tl.constexpr):
    """The same, after `let_next_kernel_start`."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_in_loop(PDL: tl.constexpr):
    """`wait_for_previous_kernel` within a loop whose loads of weights come before it. In assembly: Triton 3.9 gives a
    loop with the operation no pipeline of loads."""
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def let_next_kernel_start(PDL: tl.constexpr):
    """Let the next kernel start before this one has waited. For small kernels, before `wait_for_previous_kernel`: the
    next GEMM then fetches its first weights while the kernel before the small one still runs.

    What the next kernel reads before its own wait must be written neither by this kernel nor by the one before it, nor,
    if that one starts the next early, too, by the one before that.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_to_l2(at):
    """Fetch what is at pointers to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
