"""Algorithms of cuBLASLt for BF16 GEMMs of many rows: that of its heuristic, and the fastest of all, in microseconds.

All tiles and clusters are timed roughly, then the fastest with all variants of their kernels, and the fastest of these
in CUDA graphs, interleaved with `torch.mm`, over more weights than the L2 cache holds. `kernels/gemm/cublas_lt_configs`
has what was adopted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Annotated

import torch
import typer

from specbatch.errors import refuse
from specbatch.kernels.gemm.cublas_lt import Gemm, Sizes, tiles_and_options
from specbatch.kernels.gemm.cublas_lt_configs import Algorithm, algorithm_for
from specbatch.sweeps.machine.timing import captured, interleaved_seconds
from specbatch.sweeps.microbench.runner import Call, Row, Table, in_a_row

CLUSTERS = (2, 3, 4, 5, 6, 7, 8)  # 1 x 1, 2 x 1, 4 x 1, 1 x 2, 2 x 2, 4 x 2, 1 x 4
ROWS = (48, 64, 96, 128, 256, 384, 512, 1024)
BYTES, ROUGH, VARIED, TIMED = 400 << 20, 4, 6, 8
GEMMS, VOCABULARY = ("qkv", "o", "gate+up", "down", "head"), 151936
MODELS = {  # hidden size, outputs of qkv, inputs of o, and those of down
    "qwen3-4b": (2560, 6144, 4096, 9728),
    "qwen3-8b": (4096, 6144, 4096, 12288),
    "llama-3.1-8b": (4096, 6144, 4096, 14336),
    "qwen3-14b": (5120, 7168, 5120, 17408),
    "qwen3-32b": (5120, 10240, 8192, 25600),
}


def tables(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "qwen3-8b",
    rows: Annotated[str, typer.Option(help="Numbers of rows, with commas.")] = ",".join(map(str, ROWS)),
    gemms: Annotated[str, typer.Option(help="Of qkv, o, gate+up, down and head, with commas.")] = ",".join(GEMMS),
) -> Iterator[Table]:
    if model not in MODELS:
        raise refuse("model", model, f"use {', '.join(MODELS)}")
    shapes = shapes_of(model)
    for name in gemms.split(","):
        if name not in shapes:
            raise refuse("gemms", name, f"use {', '.join(GEMMS)}")
    found = (_row(name, int(number), *shapes[name]) for name in gemms.split(",") for number in rows.split(","))
    yield Table(found, "tile, cluster, option")


def shapes_of(model: str) -> dict[str, tuple[int, int, bool]]:
    """Outputs and inputs of each GEMM, and whether it adds to a residual."""
    hidden, qkv, heads, inner = MODELS[model]
    sizes = (qkv, hidden, False), (hidden, heads, True), (2 * inner, hidden, False), (hidden, inner, True)
    return dict(zip(GEMMS, (*sizes, (VOCABULARY, hidden, False)), strict=True))


def _row(name: str, m: int, n: int, k: int, adds: bool) -> Row:
    work = _Work(m, n, k, adds)
    plain = work.fastest([Algorithm(tile, cluster) for tile in work.tiles for cluster in CLUSTERS], VARIED)
    varied = [choice._replace(option=option) for choice in plain for option in range(work.options)]
    used = algorithm_for(m, n, k)
    times = work.times([*work.fastest(varied, TIMED), *([used] if used else [])])
    found = sorted((time, choice) for choice, time in times.items() if choice is not None)
    texts = [", ".join([f"{time:.1f}", *map(str, choice)]) for time, choice in found]
    row: Row = {"GEMM": name, "outputs": n, "inputs": k, "rows": m, "torch.mm": f"{times[None]:.1f}"}
    row["in use"] = f"{times[used]:.1f}, {', '.join(map(str, used))}" if used else "that of torch.mm"
    return row | dict(zip(("fastest", "second", "third"), texts, strict=False))


class _Work:
    def __init__(self, m: int, n: int, k: int, adds: bool) -> None:
        self.device, self.sizes, self.adds = torch.device("cuda"), Sizes(m, n, k, k, n), adds
        random = partial(torch.randn, device=self.device, dtype=torch.bfloat16)
        self.weights = [random(n, k) / 64 for _ in range(max(2, -(-BYTES // (2 * n * k))))]
        self.x, self.y = random(m, k), torch.zeros(m, n, device=self.device, dtype=torch.bfloat16)
        self.tiles, self.options = tiles_and_options(self.device)

    def fastest(self, choices: list[Algorithm], count: int) -> list[Algorithm]:
        """The fastest of those that exist, roughly."""
        found = []
        for choice in choices:
            with suppress(LookupError):
                found.append((self._roughly(Gemm(self.device, self.sizes, choice)), choice))
        return [choice for _, choice in sorted(found)[:count]]

    def _roughly(self, gemm: Gemm) -> float:
        """Seconds of a few GEMMs."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for place in range(-1, ROUGH):
            if place == 0:
                start.record()
            gemm(self.x, self.weights[place % len(self.weights)], self.y, adds=self.adds)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def times(self, choices: list[Algorithm]) -> dict[Algorithm | None, float]:
        """Microseconds of each, and of torch.mm by None."""
        calls: dict[Algorithm | None, list[Call]] = {None: [partial(self._torch, weight) for weight in self.weights]}
        for choice in dict.fromkeys(choices):
            gemm = Gemm(self.device, self.sizes, choice)
            calls[choice] = [partial(gemm, self.x, weight, self.y, adds=self.adds) for weight in self.weights]
        runs = {str(choice): captured(in_a_row(found)) for choice, found in calls.items()}
        seconds = interleaved_seconds(runs, self.device, 15, warm_ups=2)
        return {choice: 1e6 * median(seconds[str(choice)]) / len(self.weights) for choice in calls}

    def _torch(self, weight: torch.Tensor) -> torch.Tensor:
        return self.y.addmm_(self.x, weight.t()) if self.adds else torch.mm(self.x, weight.t(), out=self.y)
