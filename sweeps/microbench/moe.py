"""Mixture-of-experts blocks: norm, routing, both grouped GEMMs, shared expert and weighted sum.

The floor is one read of the weights of the experts that are hit, or the GEMMs at the rate of a large one. Random rows
choose their experts almost evenly. With --fp8 weights are in FP8 with a scale for 128 x 128, and in the second half of
the table activations, too. With --mxfp4 the blocks are those of gpt-oss, and weights are in MXFP4, then in BF16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import torch
import typer

from specbatch.kernels.common.block_sizes import MX_BLOCK
from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.gemm.quantized.fp8_activations import use_fp8_activations
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Weight
from specbatch.kernels.gemm.quantized.mxfp4 import Mxfp4Weight, pack_mxfp4
from specbatch.kernels.gemm.quantized.weight import Weight
from specbatch.kernels.moe.experts import Experts
from specbatch.kernels.moe.routing import Routing, route_ref
from specbatch.sweeps.microbench.runner import Case, Table

TOKENS, BLOCKS, SIDE = (1, 4, 32, 128, 512, 2048, 8192), 3, 128
# Routing, width of an expert, hidden size.
SHAPES = {
    "Qwen3.5-35B-A3B": (Routing(256, 8, shared=1, gated=True), 512, 2048),
    "Qwen3-Next-80B-A3B": (Routing(512, 10, shared=1, gated=True), 512, 2048),
    "Qwen3-30B-A3B": (Routing(128, 8), 768, 2048),
}
GPT_OSS = {"gpt-oss-20b": (Routing(32, 4), 2880, 2880), "gpt-oss-120b": (Routing(128, 4), 2880, 2880)}
BYTES = {"BF16": 2.0, "FP8": 1.0, "MXFP4": 17 / 32}  # of a value


def tables(
    fp8: Annotated[bool, typer.Option(help="FP8 weights; measures FP8 activations, too.")] = False,
    mxfp4: Annotated[bool, typer.Option(help="MXFP4 weights, and BF16 ones of the same shapes.")] = False,
) -> Iterator[Table]:
    modes = (False, True) if fp8 else (False,)
    for weights in ("MXFP4", "BF16") if mxfp4 else ("FP8",) if fp8 else ("BF16",):
        shapes = GPT_OSS if mxfp4 else SHAPES
        cases = (case for fp8_rows in modes for name in shapes for case in _cases(name, weights, fp8_rows))
        yield Table(cases, f"Weights in {weights}", shows=("floor",))


def _cases(name: str, weights: str, fp8_rows: bool) -> Iterator[Case]:
    rule, inner, hidden = (SHAPES | GPT_OSS)[name]
    blocks = [_block(rule, inner, hidden, weights) for _ in range(BLOCKS)]
    norm = Norm(torch.ones(hidden, device="cuda", dtype=torch.bfloat16), 1e-6)
    size = 3 * inner * hidden
    for tokens in TOKENS:
        xs = [torch.randn(tokens, hidden, device="cuda").bfloat16() for _ in blocks]
        hit = len(route_ref(blocks[0]._router(xs[0])[:, : rule.logits], rule)[1].unique())
        labels = {"shape": name, "activations": "FP8" if fp8_rows else "BF16", "tokens": tokens, "experts hit": hit}
        calls = [partial(_run, block, x, norm, fp8_rows) for block, x in zip(blocks, xs, strict=True)]
        moved, flop = int(hit * size * BYTES[weights]), 2 * tokens * rule.width * size
        yield Case(labels, {"block": calls}, bytes=moved, flop=flop, fp8=fp8_rows)


def _run(block: Experts, x: torch.Tensor, norm: Norm, fp8_rows: bool) -> torch.Tensor:
    with use_fp8_activations(fp8_rows):
        return block(x, norm=norm, residual=x)


def _block(rule: Routing, inner: int, hidden: int, weights: str) -> Experts:
    count = rule.experts + rule.shared
    router = torch.randn(rule.logits, hidden, device="cuda").bfloat16() * hidden**-0.5
    up, down = _weight((count, 2 * inner, hidden), weights), _weight((count, hidden, inner), weights)
    return Experts(rule, router, up, down)


def _weight(shape: tuple[int, int, int], kind: str) -> Weight:
    count, out, inner = shape
    if kind == "BF16":
        return Weight(torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(inner**-0.5))
    if kind == "MXFP4":
        blocks = torch.randint(0, 256, (count, out, inner // MX_BLOCK, 16), device="cuda", dtype=torch.uint8)
        return Mxfp4Weight(
            pack_mxfp4(blocks), torch.full((count, out, inner // MX_BLOCK), 120, device="cuda", dtype=torch.uint8)
        )
    values = torch.randint(0, 0x70, shape, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    return FP8Weight(values, torch.full((shape[0], shape[1] // SIDE, shape[2] // SIDE), 1e-3, device="cuda"))
