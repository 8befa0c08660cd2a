"""Mixture-of-experts blocks: norm, routing, both grouped GEMMs, shared expert and weighted sum.

The floor is one read of the weights of the experts that are hit, or the GEMMs at the rate of a large one. Random rows
choose their experts almost evenly. With --fp8 weights are in FP8 with a scale for 128 x 128, and in the second half of
the table activations, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import torch
import typer

from specbatch.kernels.gemm.fp8_activations import use_fp8_activations
from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.gemm.weight import Weight
from specbatch.kernels.moe.experts import Experts
from specbatch.kernels.moe.routing import Routing, route_ref
from specbatch.sweeps.microbench.runner import Case, Table

HIDDEN, TOKENS, BLOCKS, SIDE = 2048, (1, 4, 32, 128, 512, 2048, 8192), 3, 128
SHAPES = {
    "Qwen3.5-35B-A3B": (Routing(256, 8, shared=1, gated=True), 512),
    "Qwen3-Next-80B-A3B": (Routing(512, 10, shared=1, gated=True), 512),
    "Qwen3-30B-A3B": (Routing(128, 8), 768),
}


def tables(
    fp8: Annotated[bool, typer.Option(help="FP8 weights; measures FP8 activations, too.")] = False,
) -> Iterator[Table]:
    modes = (False, True) if fp8 else (False,)
    cases = (case for fp8_rows in modes for name in SHAPES for case in _cases(name, fp8, fp8_rows))
    yield Table(cases, f"Weights in {'FP8' if fp8 else 'BF16'}", shows=("floor",))


def _cases(name: str, fp8: bool, fp8_rows: bool) -> Iterator[Case]:
    rule, inner = SHAPES[name]
    blocks = [_block(rule, inner, fp8) for _ in range(BLOCKS)]
    norm = Norm(torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16), 1e-6)
    size = 3 * inner * HIDDEN
    for tokens in TOKENS:
        xs = [torch.randn(tokens, HIDDEN, device="cuda").bfloat16() for _ in blocks]
        hit = len(route_ref(blocks[0]._router(xs[0])[:, : rule.logits], rule)[1].unique())
        labels = {"shape": name, "activations": "FP8" if fp8_rows else "BF16", "tokens": tokens, "experts hit": hit}
        calls = [partial(_run, block, x, norm, fp8_rows) for block, x in zip(blocks, xs, strict=True)]
        moved, flop = hit * size * (1 if fp8 else 2), 2 * tokens * rule.width * size
        yield Case(labels, {"block": calls}, bytes=moved, flop=flop, fp8=fp8_rows)


def _run(block: Experts, x: torch.Tensor, norm: Norm, fp8_rows: bool) -> torch.Tensor:
    with use_fp8_activations(fp8_rows):
        return block(x, norm=norm, residual=x)


def _block(rule: Routing, inner: int, fp8: bool) -> Experts:
    count = rule.experts + rule.shared
    router = torch.randn(rule.logits, HIDDEN, device="cuda").bfloat16() * HIDDEN**-0.5
    return Experts(rule, router, _weight((count, 2 * inner, HIDDEN), fp8), _weight((count, HIDDEN, inner), fp8))


def _weight(shape: tuple[int, int, int], fp8: bool) -> Weight:
    if not fp8:
        return Weight(torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(shape[2] ** -0.5))
    values = torch.randint(0, 0x70, shape, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    return Weight(values, torch.full((shape[0], shape[1] // SIDE, shape[2] // SIDE), 1e-3, device="cuda"))
