"""Microbenchmarks of a device: memory read bandwidth and GEMM rate."""

from __future__ import annotations

from functools import partial
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specbatch.sweeps.machine.timing import median_seconds

if TYPE_CHECKING:
    from specbatch.models.config import ModelConfig

READ_BYTES = 8 << 30
CPU_READ_VALUES = 200_000_000
GEMM_SIZE = 8192
CPU_GEMM_ROWS, CPU_GEMM_SIZE = 256, 4096
# block, steps, warps of the reading kernel; which is fastest differs between devices.
READ_SHAPES = ((4096, 32, 8), (4096, 8, 8), (8192, 16, 16), (2048, 64, 4))

# The data sheet's memory bandwidth in bytes per second, by a substring of the device's name.
DATA_SHEETS = {"H200": 4.8e12}


def data_sheet_bandwidth(gpu: str | None) -> float | None:
    """None for a device whose data sheet is not listed here."""
    return next((speed for name, speed in DATA_SHEETS.items() if gpu and name in gpu), None)


def measure_machine(device: torch.device) -> dict[str, float | None]:
    """`read_bytes_s`: the best reading shape over 8 GiB; `gemm_flop_s`: a BF16 GEMM of 8192 x 8192 x 8192.

    Random data, medians of 20 runs. None on a CPU, which is not measured.
    """
    if device.type != "cuda":
        return {"read_bytes_s": None, "gemm_flop_s": None}
    found: dict[str, float | None] = {"read_bytes_s": read_bandwidth(device), "gemm_flop_s": gemm_rate(device)}
    torch.cuda.empty_cache()
    return found


def read_bandwidth(device: torch.device, *, size: int = READ_BYTES, repeats: int = 20) -> float:
    """Bytes per second of reading `size` bytes; on a CPU those of a sum over 800 MB."""
    if device.type != "cuda":
        values = torch.ones(CPU_READ_VALUES)
        return values.nbytes / median_seconds(values.sum, device, repeats=7)
    from specbatch.sweeps.machine.read import read_sum

    data = torch.empty(size // 4, device=device).uniform_()
    best = 0.0
    for block, steps, warps in READ_SHAPES:
        sums = torch.empty(data.numel() // (block * steps), device=device)
        run = partial(read_sum, data, sums, block=block, steps=steps, warps=warps)
        best = max(best, size / median_seconds(run, device, repeats))
    return best


def gemm_rate(device: torch.device, *, fp8: bool = False, repeats: int = 20) -> float:
    """FLOP per second of a GEMM of 8192 x 8192 x 8192 in BF16, or in FP8 by torch's `_scaled_mm`."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    if not fp8:
        return 2 * GEMM_SIZE**3 / median_seconds(lambda: a @ b, device, repeats)
    low_a, low_b, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)

    def run() -> torch.Tensor:
        return torch._scaled_mm(low_a, low_b.t(), one, one, out_dtype=torch.bfloat16)

    return 2 * GEMM_SIZE**3 / median_seconds(run, device, repeats)


def cpu_speeds() -> tuple[float, float]:
    """Bytes per second of a float32 matrix-vector product, FLOP per second of a GEMM of 256 rows."""
    device = torch.device("cpu")
    matrix, rows = torch.randn(CPU_GEMM_SIZE, CPU_GEMM_SIZE), torch.randn(CPU_GEMM_ROWS, CPU_GEMM_SIZE)
    one = median_seconds(lambda: matrix @ rows[0], device, repeats=5)
    many = median_seconds(lambda: rows @ matrix, device, repeats=5)
    return matrix.numel() * 4 / one, 2 * matrix.numel() * CPU_GEMM_ROWS / many


@torch.inference_mode()
def gemm_seconds(
    model: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device, *, head_rows: int | None = None
) -> float:
    """Time of only the GEMMs of a forward pass, by torch's `linear`, for `rows` rows (`head_rows` in the head).

    Weights are random. The pass cycles through those of a few layers, which is more than a cache holds.
    """
    layers = [_weights(_layer_shapes(model), dtype, device) for _ in range(min(4, model.num_layers))]
    weights = [*chain.from_iterable(islice(cycle(layers), model.num_layers))]
    (head,) = _weights([(model.vocab_size, model.hidden_size)], dtype, device)
    inputs = {width: torch.randn(rows, width, dtype=dtype, device=device) for width in {w.shape[1] for w in weights}}
    last = inputs[model.hidden_size][:head_rows]

    def run() -> None:
        for weight in weights:
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
