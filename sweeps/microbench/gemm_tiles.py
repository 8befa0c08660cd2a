"""Tiles of GEMMs in Qwen3-8B's shapes: the rules' choice and the three fastest of a grid, in microseconds.

BF16 weights, INT4 weights in groups of 128, and FP8 weights scaled per output with activations in BF16 and in FP8. A
GEMM is timed alone, over more weights than the L2 cache holds; `gemm` times the chain of a layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import torch
import typer

from specbatch.errors import refuse
from specbatch.kernels.gemm.dense import skinny_gemm_configs
from specbatch.kernels.gemm.dense.one_row_triton import OneRowTile, one_row_tile_for
from specbatch.kernels.gemm.quantized import fp8_linear_triton, int4_triton
from specbatch.kernels.gemm.quantized.few_rows_triton import MOST_ROWS
from specbatch.kernels.gemm.quantized.fp8_few_rows_triton import FP8FewRowsTile
from specbatch.kernels.gemm.quantized.fp8_quantize import quantize_fp8
from specbatch.kernels.gemm.quantized.int4_few_rows_triton import Int4FewRowsTile
from specbatch.kernels.gemm.quantized.w8a8_few_rows_triton import W8A8FewRowsTile
from specbatch.kernels.gemm.split_k_triton import MULTIPROCESSORS, WORKSPACE, workspace
from specbatch.sweeps.microbench.gemm import (
    HIDDEN,
    MEASURED_LAYERS,
    OF_LAYER,
    QUANTIZED_COPIES,
    SIZES,
    model_gemm,
    quantized_weight,
)
from specbatch.sweeps.microbench.runner import Call, Row, Table
from specbatch.sweeps.microbench.tile_search import compile_all, fastest

ROWS, SPLITS = (16, 32, 64, 128), (1, 2, 3, 4, 6, 8, 12, 16)
BLOCKS = {16: (16,), 32: (16, 32), 64: (32, 64), 128: (64, 128)}  # rows of a tile, by rows of x
SHARED_BYTES = 227 * 1024  # of a multiprocessor of an H200
KINDS = {
    "BF16": "outputs, k, splits, warps, stages; of one row rows of the weight, warps",
    "INT4": f"rows, outputs, splits, warps, stages; to {MOST_ROWS} rows outputs, splits, chunks, stages",
    "FP8": f"rows, outputs, k, splits, warps, stages; to {MOST_ROWS} rows outputs, splits, warps, stages, ahead",
    "FP8 x FP8": f"rows, outputs, k, splits, warps, stages; to {MOST_ROWS} rows outputs, splits, warps, stages, ahead, "
    "early",
}


def tables(
    weights: Annotated[str, typer.Option(help=f"One of {', '.join(KINDS)}; all by default.")] = "",
) -> Iterator[Table]:
    if weights and weights not in KINDS:
        raise refuse("weights", weights, f"use {', '.join(KINDS)}")
    workspace(torch.device("cuda"))
    for kind, columns in KINDS.items():
        if weights not in ("", kind):
            continue
        works = [(name, rows) for name in OF_LAYER for rows in rows_of(kind)]
        jobs = {(kind, name, rows, tile) for name, rows in works for tile in grid(kind, name, rows)}
        compile_all(_launch, sorted(jobs, key=repr))
        yield Table((_row(kind, name, rows, columns) for name, rows in works), f"{kind} weights")


def _row(kind: str, name: str, rows: int, columns: str) -> Row:
    multiply, copies = _multiply(kind, name, rows), MEASURED_LAYERS if kind == "BF16" else QUANTIZED_COPIES
    stored = [_weight(kind, SIZES[name]) for _ in range(copies)]

    def launches(tile: Any) -> Sequence[Call]:
        return [partial(multiply, weight, tile) for weight in stored]

    return fastest({"GEMM": name, "rows": rows}, launches, rule(kind, name, rows), grid(kind, name, rows), columns)


def rows_of(kind: str) -> tuple[int, ...]:
    """Numbers of rows with tiles of their own."""
    return (1, *ROWS) if kind == "BF16" else ROWS


def rule(kind: str, name: str, rows: int) -> Any:
    """The tile that the kernel chooses."""
    outputs, inputs = SIZES[name]
    if kind == "BF16":
        gated = name == "gate+up"
        if rows == 1:
            return one_row_tile_for(inputs, gated)
        return skinny_gemm_configs.tile_for(outputs // 2 if gated else outputs, inputs, rows, gated, 2)
    if kind == "INT4":
        return int4_triton.tile_for(rows, outputs, inputs, 2)
    return fp8_linear_triton.tile_for(rows, outputs, inputs, 1 if kind == "FP8 x FP8" else 2)


def grid(kind: str, name: str, rows: int) -> list[Any]:
    """Tiles that fit in shared memory, in numbers that give a multiprocessor between 3/4 and 4 programs on average."""
    outputs, inputs = SIZES[name]
    tiles: list[Any] = []
    halves = 2 if name == "gate+up" else 1
    if kind == "BF16" and rows == 1:
        for of_weight, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
            if of_weight >= halves and 8 <= of_weight * inputs // (64 * warps) <= 96:  # registers that hold weights
                tiles.append(OneRowTile(of_weight, warps))
    elif kind == "BF16":
        is_weight_first = skinny_gemm_configs.puts_weight_first(rows)
        sizes = (32, 64, 128), (64, 128, 256), SPLITS, (2, 4, 8), (3, 4, 5, 6)
        for n, k, splits, warps, stages in itertools.product(*sizes):
            is_split = splits > 1 and (halves == 2 or inputs // k < splits)
            fits = (n * halves + rows) * k * 2 * (stages - 1) <= SHARED_BYTES and n * halves >= 16 * warps
            fits = fits and (not is_weight_first or n >= max(64, 16 * warps))
            if fits and not is_split and _fills(outputs // halves, n, rows, rows, splits):
                tiles.append(skinny_gemm_configs.Tile(n, k, splits, warps, stages))
    elif kind == "INT4" and rows <= MOST_ROWS:
        for n, splits, steps in itertools.product((64, 128), SPLITS, ((1, 3), (1, 4), (1, 5), (2, 3), (2, 4))):
            if _fills(outputs, n, rows, rows, splits):
                tiles.append(Int4FewRowsTile(n, splits, *steps))
    elif kind == "FP8" and rows <= MOST_ROWS:
        few_shapes = (64, 4), (128, 4), (128, 8)
        for (n, warps), splits, stages, ahead in itertools.product(few_shapes, SPLITS, (4, 6), (0, 8)):
            if _fills(outputs, n, rows, rows, splits):
                tiles.append(FP8FewRowsTile(n, splits, warps, stages, ahead))
    elif kind == "INT4":
        shapes = [(64, 4), (128, 8)]  # with fewer warps, weights go through shared memory twice
        for block, (n, warps), splits, stages in itertools.product(BLOCKS[rows], shapes, SPLITS, range(3, 7)):
            if _fills(outputs, n, rows, block, splits):
                tiles.append(int4_triton.Tile(block, n, splits, warps, stages))
    elif kind == "FP8":
        shapes = [(64, 4), (128, 4), (128, 8)]
        for block, (n, warps), k, splits, stages in itertools.product(
            BLOCKS[rows], shapes, (64, 128), SPLITS, range(3, 7)
        ):
            if _fills(outputs, n, rows, block, splits):
                tiles.append(fp8_linear_triton.Tile(block, n, k, splits, warps, stages))
    elif rows <= MOST_ROWS:
        pipelines = (64, 4, 4), (64, 4, 6), (128, 4, 3), (128, 4, 4), (128, 8, 4)
        for (n, warps, stages), splits in itertools.product(pipelines, SPLITS):
            if _fills(outputs, n, rows, rows, splits):
                ways = (0, False), (1024 // n, False), (0, True)
                tiles += [W8A8FewRowsTile(n, splits, warps, stages, *way) for way in ways]
    else:  # never split, and always the 64 rows of an instruction: see `fp8_linear_triton.tile_for`
        for n, warps, stages in itertools.product((32, 64, 128), (4, 8), range(3, 9)):
            tiles.append(fp8_linear_triton.Tile(64, n, 128, 1, warps, stages))
    return tiles


def _fills(outputs: int, n: int, rows: int, block: int, splits: int) -> bool:
    tiles = -(-outputs // n) * -(-rows // block)
    is_room = splits == 1 or splits * tiles * n * block <= WORKSPACE
    return is_room and 3 * MULTIPROCESSORS // 4 <= tiles * splits <= 4 * MULTIPROCESSORS


def _weight(kind: str, shape: tuple[int, int]) -> Any:
    if kind == "BF16":
        return torch.randn(shape, device="cuda").mul_(shape[1] ** -0.5).bfloat16()
    return quantized_weight(kind.split()[0], shape)


def _multiply(kind: str, name: str, rows: int) -> Callable[[Any, Any], object]:
    """The GEMM of rows with a weight and a tile; in BF16 see `model_gemm`."""
    _, inputs = SIZES[name]
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    if kind == "BF16":
        norm = torch.ones(inputs, device="cuda").bfloat16()
        residual = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        return lambda weight, tile: model_gemm(name, x, weight, norm, residual, tile=tile)
    if kind == "INT4":
        return lambda weight, tile: int4_triton.int4_linear(x, weight, tile=tile)
    rows_of = quantize_fp8(x) if kind == "FP8 x FP8" else x
    return lambda weight, tile: fp8_linear_triton.fp8_linear(rows_of, weight, tile=tile)


def _launch(kind: str, name: str, rows: int, tile: Any) -> None:
    _multiply(kind, name, rows)(_weight(kind, SIZES[name]), tile)
