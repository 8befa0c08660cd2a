"""What a device can do at best, read memory and multiply matrices: measured in the run that is held against it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, cycle, islice
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from specbatch.models.config import ModelConfig

READ_BYTES = 8 << 30
GEMM_SIZE = 8192
# block, steps, warps of the reading kernel; which is fastest differs between devices.
READ_SHAPES = ((4096, 32, 8), (4096, 8, 8), (8192, 16, 16), (2048, 64, 4))

# The data sheet's memory bandwidth in bytes per second, by a part of the device's name.
DATA_SHEETS = {"H200": 4.8e12}


def data_sheet_bandwidth(gpu: str | None) -> float | None:
    """None where the device's data sheet is not known here."""
    return next((speed for name, speed in DATA_SHEETS.items() if gpu and name in gpu), None)


def measure_machine(device: torch.device) -> dict[str, float | None]:
    """`read_bytes_s`: the best reading shape over 8 GiB; `gemm_flop_s`: a bfloat16 product of 8192 x 8192 x 8192.

    Random data, medians of 20 runs by device events. A CPU is not measured: None.
    """
    if device.type != "cuda":
        return {"read_bytes_s": None, "gemm_flop_s": None}
    found = {"read_bytes_s": _read_bandwidth(device), "gemm_flop_s": _gemm_rate(device)}
    torch.cuda.empty_cache()
    return found


def device_seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median device time of `run`, after three runs to warm up."""
    times = []
    for repeat in range(repeats + 3):
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        run()
        done.record()
        done.synchronize()
        if repeat >= 3:
            times.append(begun.elapsed_time(done) / 1000)
    return median(times)


def _read_bandwidth(device: torch.device) -> float:
    from specbatch.kernels.read import read_sum

    data = torch.empty(READ_BYTES // 4, device=device).uniform_()
    best = 0.0
    for block, steps, warps in READ_SHAPES:
        sums = torch.empty(data.numel() // (block * steps), device=device)
        seconds = device_seconds(lambda: read_sum(data, sums, block=block, steps=steps, warps=warps))  # noqa: B023
        best = max(best, READ_BYTES / seconds)
    return best


def _gemm_rate(device: torch.device) -> float:
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * GEMM_SIZE**3 / device_seconds(lambda: a @ b)


def products_seconds(model: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> float:
    """Device time of a step's matrix products alone, by the vendor's library, for that many rows.

    Weights are random; those of a few layers take turns, which is more than a cache holds.
    """
    layers = [_weights(shapes, dtype, device) for shapes in [_layer_shapes(model)] * min(4, model.num_layers)]
    head = _weights([(model.vocab_size, model.hidden_size)], dtype, device)
    turns = [*chain.from_iterable(islice(cycle(layers), model.num_layers)), *head]
    inputs = {width: torch.randn(rows, width, dtype=dtype, device=device) for width in {w.shape[1] for w in turns}}
    return device_seconds(lambda: [F.linear(inputs[weight.shape[1]], weight) for weight in turns], repeats=7)


def _layer_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """Outputs and inputs of qkv, output, gate and up, down."""
    heads = model.num_heads * model.head_dim
    return [
        (heads + 2 * model.num_kv_heads * model.head_dim, model.hidden_size),
        (model.hidden_size, heads),
        (2 * model.intermediate_size, model.hidden_size),
        (model.hidden_size, model.intermediate_size),
    ]


def _weights(shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, device=device) * shape[1] ** -0.5 for shape in shapes]
