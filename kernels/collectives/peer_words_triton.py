"""Words of 16 bytes that are exchanged through peer memory: load, store, poll, and sums of the numbers in them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

VECTOR = 16  # bytes
KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
EMPTY = 0x80008000  # a pair of -0.0 in 16 bits, and -4.6e-41 in float32
TIMEOUT_NS = 120_000_000_000  # a rank may compile kernels while the others wait


@triton.jit
def store(p, a, b, c, d):
    tl.inline_asm_elementwise(
        "{ st.volatile.global.v4.u32 [$1], {$2,$3,$4,$5}; mov.u32 $0, 0; }",
        "=r,l,r,r,r,r",
        [p, a, b, c, d],
        dtype=tl.uint32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load(p):
    return tl.inline_asm_elementwise(
        "ld.global.v4.u32 {$0,$1,$2,$3}, [$4];",
        "=r,=r,=r,=r,l",
        [p],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def poll(p, empty, limit, abort):
    """Four words, as soon as none of them is empty; or whatever is there once the clock passes `limit` or the word
    `abort` is set, which is in host memory and therefore read rarely."""
    return tl.inline_asm_elementwise(
        """{ .reg .pred %a; .reg .u64 %t; .reg .u32 %n; .reg .u32 %w;
        mov.u32 %n, 0;
        again: ld.volatile.global.v4.u32 {$0,$1,$2,$3}, [$4];
        setp.ne.u32 %a, $0, $5; setp.ne.and.u32 %a, $1, $5, %a;
        setp.ne.and.u32 %a, $2, $5, %a; setp.ne.and.u32 %a, $3, $5, %a;
        @%a bra done;
        add.u32 %n, %n, 1; and.b32 %w, %n, 4095; setp.ne.u32 %a, %w, 0; @%a bra again;
        ld.volatile.global.u32 %w, [$7]; setp.ne.u32 %a, %w, 0; @%a bra done;
        mov.u64 %t, %globaltimer; setp.lt.u64 %a, %t, $6; @%a bra again;
        done: }""",
        "=&r,=&r,=&r,=&r,l,r,l,l",
        [p, empty, limit, abort],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def clock(x):
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [x], dtype=tl.uint64, is_pure=False, pack=1)


@triton.jit
def low(w, KIND: tl.constexpr):
    """The first number of a word, in float32."""
    if KIND == 0:
        return (w << 16).to(tl.float32, bitcast=True)
    if KIND == 1:
        return (w & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return w.to(tl.float32, bitcast=True)


@triton.jit
def high(w, KIND: tl.constexpr):
    """The second number of a word; of a float32 the first again."""
    if KIND == 0:
        return (w & 0xFFFF0000).to(tl.float32, bitcast=True)
    if KIND == 1:
        return (w >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return w.to(tl.float32, bitcast=True)


@triton.jit
def word(low, high, KIND: tl.constexpr):
    """A word of two numbers, rounded once."""
    if KIND == 0:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.uint32, is_pure=True, pack=1
        )
    if KIND == 1:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.uint32, is_pure=True, pack=1
        )
    return low.to(tl.uint32, bitcast=True)
