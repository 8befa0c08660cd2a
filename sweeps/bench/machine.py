"""What a device can do at best, read memory and multiply matrices: measured in the run that is held against it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
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


def require_cuda() -> None:
    """End a script that measures kernels, with status 2, where there is no device to measure them on."""
    if not torch.cuda.is_available():
        print("error: needs a CUDA device and torch sees none here", file=sys.stderr)
        raise SystemExit(2)


def measure_machine(device: torch.device) -> dict[str, float | None]:
    """`read_bytes_s`: the best reading shape over 8 GiB; `gemm_flop_s`: a bfloat16 product of 8192 x 8192 x 8192.

    Random data, medians of 20 runs. A CPU is not measured: None.
    """
    if device.type != "cuda":
        return {"read_bytes_s": None, "gemm_flop_s": None}
    found: dict[str, float | None] = {"read_bytes_s": _read_bandwidth(device), "gemm_flop_s": _gemm_rate(device)}
    torch.cuda.empty_cache()
    return found


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median time of `run` after three runs to warm up: between device events, or on the host for a CPU."""
    timed = _on_device if device.type == "cuda" else _on_host
    return median([timed(run) for _ in range(repeats + 3)][3:])


def replay_seconds(run: Callable[[], object], repeats: int = 9) -> float:
    """Median time of a replay of what `run` launches, in a CUDA graph."""
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_seconds(graph.replay, torch.device("cuda"), repeats)


def _on_device(run: Callable[[], object]) -> float:
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    run()
    done.record()
    done.synchronize()
    return float(begun.elapsed_time(done)) / 1000


def _on_host(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _read_bandwidth(device: torch.device) -> float:
    from specbatch.sweeps.microbench.read import read_sum

    data = torch.empty(READ_BYTES // 4, device=device).uniform_()
    best = 0.0
    for block, steps, warps in READ_SHAPES:
        sums = torch.empty(data.numel() // (block * steps), device=device)
        run = partial(read_sum, data, sums, block=block, steps=steps, warps=warps)
        best = max(best, READ_BYTES / median_seconds(run, device))
    return best


def _gemm_rate(device: torch.device) -> float:
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * GEMM_SIZE**3 / median_seconds(lambda: a @ b, device)


@torch.inference_mode()
def products_seconds(
    model: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device, *, head_rows: int | None = None
) -> float:
    """Time of a pass's matrix products alone, by torch's `linear`, for `rows` rows (`head_rows` in the head).

    Weights are random; those of a few layers take turns, which is more than a cache holds.
    """
    layers = [_weights(_layer_shapes(model), dtype, device) for _ in range(min(4, model.num_layers))]
    turns = [*chain.from_iterable(islice(cycle(layers), model.num_layers))]
    (head,) = _weights([(model.vocab_size, model.hidden_size)], dtype, device)
    inputs = {width: torch.randn(rows, width, dtype=dtype, device=device) for width in {w.shape[1] for w in turns}}
    last = inputs[model.hidden_size][:head_rows]

    def run() -> None:
        for weight in turns:
            F.linear(inputs[weight.shape[1]], weight)
        F.linear(last, head)

    return median_seconds(run, device, repeats=7)


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
