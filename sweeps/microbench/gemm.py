"""GEMMs of a decode step in Qwen3-8B's shapes, BF16: `torch.nn.functional.linear` and specbatch's kernels.

Each GEMM for 1 to 128 rows, with the norm, residual or gating that the model has there; then the chain of whole layers,
in which each GEMM waits for the previous one: qkv with its norm, a stand-in for attention (5 us on 32 processors), o
with its residual, the gated pair, down with its residual. `library` is cuBLAS with kernels of norms and SwiGLU between
its GEMMs, as `Linear` multiplies more rows. Then GEMMs with INT4 weights in groups of 128 and with FP8 weights scaled
per output, with activations in BF16 and in FP8, and the chain with FP8 weights, in which activations are quantized on
the way. The floor is one read of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Annotated

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
import typer

from specbatch.errors import refuse
from specbatch.kernels.elementwise.activations import silu_and_mul
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.dense.one_row_triton import OneRowTile
from specbatch.kernels.gemm.dense.skinny_gemm_configs import Tile
from specbatch.kernels.gemm.dense.skinny_gemm_triton import skinny_gemm
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.gemm.quantized.fp8_activations import use_fp8_activations
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Weight, fp8_linear
from specbatch.kernels.gemm.quantized.fp8_quantize import quantize_fp8
from specbatch.kernels.gemm.quantized.int4 import Int4Tiles, Int4Weight, int4_linear, int4_tiles
from specbatch.kernels.gemm.quantized.weight import Weight
from specbatch.kernels.gemm.split_k_triton import workspace
from specbatch.sweeps.microbench.runner import Case, Table

HIDDEN, QKV, INNER, VOCABULARY, LAYERS = 4096, 6144, 12288, 151936, 36
SIZES = {
    "qkv": (QKV, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate+up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "head": (VOCABULARY, HIDDEN),
}
ROWS = 1, 4, 16, 24, 32, 64
NORMED, ADDED = ("qkv", "gate+up", "head"), ("o", "down")
MEASURED_LAYERS, HEADS = 8, 2  # with weights of their own: more than the L2 holds
QUANTIZED_COPIES = 4 * MEASURED_LAYERS  # of a weight, which is smaller than in BF16
KINDS = "BF16", "INT4", "FP8"
OF_LAYER = tuple(name for name in SIZES if name != "head")
LAYER_BYTES = sum(2 * outputs * inputs for outputs, inputs in map(SIZES.__getitem__, OF_LAYER))


@triton.jit  # type: ignore[untyped-decorator]
def _attention_kernel(  # type: ignore[no-untyped-def]
    qkv, y, rows, width, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Copies the query heads and spins for some 4 us."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, 128)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    query = tl.load(qkv + row * width + column, mask=row < rows)
    tl.store(y + row * HIDDEN + column, query, mask=row < rows)
    tl.inline_asm_elementwise(
        "{ .reg .u64 from, now; .reg .pred more; mov.u64 from, %clock64;\n"
        "spin: mov.u64 now, %clock64; sub.u64 now, now, from; setp.lt.u64 more, now, 8000; @more bra spin;\n"
        "mov.u32 $0, 0; }",
        "=r,r",
        [tl.arange(0, 128)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def _attention(qkv: torch.Tensor, pdl: bool) -> torch.Tensor:
    y = qkv.new_empty(qkv.shape[0], HIDDEN)
    _attention_kernel[(32,)](qkv, y, qkv.shape[0], qkv.shape[1], HIDDEN=HIDDEN, BLOCK=128, PDL=pdl, launch_pdl=pdl)
    return y


def model_gemm(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: torch.Tensor,
    residual: torch.Tensor,
    *,
    pdl: bool = True,
    tile: Tile | OneRowTile | None = None,
) -> torch.Tensor:
    """The GEMM with the norm, gating or residual that the model has there."""
    normed, added = (norm, 1e-6) if name in NORMED else None, residual if name in ADDED else None
    return skinny_gemm(x, weight, None, normed, added, gated=name == "gate+up", tile=tile, pdl=pdl)


def library_gemm(
    name: str, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    """`model_gemm` by the library and kernels before and after it; a residual is added to in place."""
    x = rms_norm(x, norm, 1e-6) if name in NORMED else x
    if name in ADDED:
        return residual.addmm_(x, weight.t())
    y = torch.mm(x, weight.t())
    return silu_and_mul(y) if name == "gate+up" else y


class Weights:
    """Weights of eight layers and two heads, and rows to multiply."""

    def __init__(self) -> None:
        self.of = {
            name: [
                torch.randn(size, device="cuda", dtype=torch.bfloat16).mul_(size[1] ** -0.5)
                for _ in range(HEADS if name == "head" else MEASURED_LAYERS)
            ]
            for name, size in SIZES.items()
        }
        self.norm = torch.rand(HIDDEN, device="cuda").add_(0.5).bfloat16()
        self.rows = {width: torch.randn(128, width, device="cuda").bfloat16() for width in (HIDDEN, INNER)}

    def gemm(
        self,
        name: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor,
        *,
        pdl: bool = True,
        library: bool = False,
    ) -> torch.Tensor:
        if library:
            return library_gemm(name, x, weight, self.norm, residual)
        return model_gemm(name, x, weight, self.norm, residual, pdl=pdl)

    def chain(
        self,
        rows: int,
        layers: int = MEASURED_LAYERS,
        *,
        attention: bool = True,
        head: bool = False,
        pdl: bool = True,
        library: bool = False,
    ) -> None:
        gemm = partial(self.gemm, pdl=pdl, library=library)
        x = self.rows[HIDDEN][:rows].clone()
        weights = zip(*(self.of[name] for name in OF_LAYER), strict=True)
        for qkv, o, gated, down in islice(cycle(weights), layers):
            h = gemm("qkv", x, qkv, x)
            h = _attention(h, pdl) if attention else h[:, :HIDDEN]
            x = gemm("o", h, o, x)
            h = gemm("gate+up", x, gated, x)
            x = gemm("down", h, down, x)
        if head:
            gemm("head", x, self.of["head"][0], x)


def tables(
    weights: Annotated[str, typer.Option(help=f"One of {', '.join(KINDS)}; all by default.")] = "",
) -> Iterator[Table]:
    if weights and weights not in KINDS:
        raise refuse("weights", weights, f"use {', '.join(KINDS)}")
    workspace(torch.device("cuda"))
    if weights in ("", "BF16"):
        yield from _tables_in_bf16(Weights())
    if weights != "BF16":
        yield Table(_quantized(weights), "Quantized weights", shows=("floor",))
    if weights in ("", "FP8"):
        yield Table(_chains_in_fp8(), "A layer of the chain with FP8 weights", shows=("floor",))


def _tables_in_bf16(weights: Weights) -> Iterator[Table]:
    yield Table(_single(weights), shows=("floor",))
    yield Table(_chains(weights), "A layer of the chain", shows=("floor",))
    step = partial(weights.chain, layers=LAYERS, head=True)
    cases = (
        Case({"rows": rows}, {"specbatch": [partial(step, rows)], "library": [partial(step, rows, library=True)]})
        for rows in ROWS
    )
    yield Table(cases, f"A decode step: {LAYERS} layers and a head", unit="ms")


def _single(weights: Weights) -> Iterator[Case]:
    for name, (outputs, inputs) in SIZES.items():
        for rows in (*ROWS, 128):
            x, residual = weights.rows[inputs][:rows], weights.rows[HIDDEN][:rows]
            calls = {
                "specbatch": [partial(weights.gemm, name, x, weight, residual) for weight in weights.of[name]],
                "torch": [partial(F.linear, x, weight) for weight in weights.of[name]],
            }
            yield Case({"GEMM": name, "rows": rows}, calls, bytes=2 * outputs * inputs)


def quantized_weight(kind: str, shape: tuple[int, int]) -> FP8Weight | Int4Tiles:
    """A random INT4 weight in groups of 128, or an FP8 weight with a scale per output."""
    (outputs, inputs), device = shape, torch.device("cuda")
    if kind == "INT4":
        values = torch.randint(0, 256, (outputs, inputs // 2), device=device, dtype=torch.uint8)
        groups = (outputs, inputs // 128)
        scales, zeros = torch.full(groups, 1e-3, device=device).bfloat16(), torch.full(groups, 8, device=device).byte()
        return int4_tiles(Int4Weight(values, scales, zeros))
    bits = torch.randint(0, 0x70, shape, device=device, dtype=torch.uint8)
    return FP8Weight(bits.view(torch.float8_e4m3fn), torch.full((outputs, 1), 1e-3, device=device))


def bytes_of(weight: Weight) -> int:
    return sum(part.nbytes for part in weight.tensors)


def _quantized(of: str) -> Iterator[Case]:
    """of: INT4, FP8 or all."""
    gemms: dict[str, Callable[..., object]] = {"INT4": int4_linear, "FP8": fp8_linear, "FP8 x FP8": fp8_linear}
    for name in OF_LAYER:
        shape = SIZES[name]
        for kind, multiply in gemms.items():
            if not kind.startswith(of):
                continue
            weights = [quantized_weight(kind.split()[0], shape) for _ in range(QUANTIZED_COPIES)]
            for rows in (1, 4, 16, 32, 64, 128, 256, 1024):
                x = torch.randn(rows, shape[1], device="cuda").bfloat16()
                given = quantize_fp8(x) if kind == "FP8 x FP8" else x
                calls = [partial(multiply, given, weight) for weight in weights]
                labels = {"weights": kind, "GEMM": name, "rows": rows}
                yield Case(labels, {"specbatch": calls}, bytes=bytes_of(weights[0]))


def _chains_in_fp8() -> Iterator[Case]:
    stored = [{name: quantized_weight("FP8", SIZES[name]) for name in OF_LAYER} for _ in range(QUANTIZED_COPIES)]
    size = sum(bytes_of(weight) for weight in stored[0].values())
    layers = [{name: weight.linear() for name, weight in layer.items()} for layer in stored]
    norm = Norm(torch.ones(HIDDEN, device="cuda").bfloat16(), 1e-6)
    for rows in (1, 4, 16, 32, 64, 128):
        x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        calls = {
            "FP8 activations": [partial(_chain_in_fp8, layers, x, norm, quantizes=True)],
            "BF16 activations": [partial(_chain_in_fp8, layers, x, norm, quantizes=False)],
        }
        yield Case({"rows": rows}, calls, count=QUANTIZED_COPIES, bytes=size)


def _chain_in_fp8(layers: list[dict[str, Linear]], x: torch.Tensor, norm: Norm, *, quantizes: bool) -> None:
    with use_fp8_activations(quantizes):
        for layer in layers:
            mixed = _attention(layer["qkv"](x, norm=norm), pdl=True)
            x = layer["o"](mixed, residual=x)
            x = layer["down"].after_gate(layer["gate+up"], x, norm, residual=x)


def _chains(weights: Weights) -> Iterator[Case]:
    for rows in ROWS:
        calls = {
            "PDL": [partial(weights.chain, rows)],
            "no PDL": [partial(weights.chain, rows, pdl=False)],
            "PDL, no attention": [partial(weights.chain, rows, attention=False)],
            "library": [partial(weights.chain, rows, library=True)],
        }
        yield Case({"rows": rows}, calls, count=MEASURED_LAYERS, bytes=LAYER_BYTES)
