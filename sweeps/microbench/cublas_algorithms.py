"""Algorithms of cuBLASLt for BF16 GEMMs of many rows: the fastest one next to that of its heuristic, in microseconds.

A search at some numbers of rows times all tiles and clusters roughly, then the fastest with all options of their
kernels. What it finds is timed at every eighth number of rows, in CUDA graphs, interleaved with `torch.mm`, over more
weights than the L2 cache holds: an algorithm that is the fastest at 256 rows can take twice the time at 144.
`kernels/gemm/dense/cublas_lt_configs` has what was adopted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Annotated

import torch
import typer

from specbatch.errors import SpecbatchError, refuse
from specbatch.kernels.gemm.dense.cublas_lt import Gemm, Sizes, tiles_and_options
from specbatch.kernels.gemm.dense.cublas_lt_configs import Algorithm, algorithm_for
from specbatch.sweeps.machine.timing import captured, interleaved_seconds
from specbatch.sweeps.microbench.runner import Call, Row, Table, in_a_row

CLUSTERS = (2, 3, 4, 5, 6, 7, 8)  # 1 x 1, 2 x 1, 4 x 1, 1 x 2, 2 x 2, 4 x 2, 1 x 4
SEARCHED, LEAST, STEP, LAST, MOST = (48, 64, 96, 128, 192, 256), 40, 8, 256, 8192  # rows
BYTES, ROUGH, VARIED, KEPT, REPEATS = 400 << 20, 4, 6, 3, 9
GEMMS = ("qkv", "o", "gate+up", "down")
MODELS = {  # hidden size, outputs of qkv, inputs of o, and those of down
    "qwen3-4b": (2560, 6144, 4096, 9728),
    "qwen3-8b": (4096, 6144, 4096, 12288),
    "llama-3.1-8b": (4096, 6144, 4096, 14336),
    "qwen3-14b": (5120, 7168, 5120, 17408),
    "qwen3-32b": (5120, 10240, 8192, 25600),
}


def tables(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "qwen3-8b",
    gemms: Annotated[str, typer.Option(help=f"Of {', '.join(GEMMS)}, with commas.")] = ",".join(GEMMS),
    rows: Annotated[str, typer.Option(help="Numbers of rows to search at, with commas.")] = ",".join(
        map(str, SEARCHED)
    ),
) -> Iterator[Table]:
    if torch.cuda.get_device_capability() != (9, 0):
        raise SpecbatchError("cublas-algorithms needs a Hopper GPU (H100, H200): its algorithms are those of that chip")
    if model not in MODELS:
        raise refuse("model", model, f"use {', '.join(MODELS)}")
    shapes, searched = shapes_of(model), _numbers(rows)
    for name in gemms.split(","):
        if name not in shapes:
            raise refuse("gemms", gemms, f"use {', '.join(GEMMS)}, with commas and no spaces")
    for name in gemms.split(","):
        outputs, inputs, adds = shapes[name]
        yield Table(_Work(outputs, inputs, adds).rows(searched), f"{name}, {outputs} x {inputs}")


def _numbers(rows: str) -> list[int]:
    found = [int(number) if number.isascii() and number.isdigit() else 0 for number in rows.split(",")]
    if not all(1 <= number <= MOST for number in found):
        raise refuse("rows", rows, f"use numbers from 1 to {MOST}, with commas and no spaces, such as 64,128")
    return found


def shapes_of(model: str) -> dict[str, tuple[int, int, bool]]:
    """Outputs and inputs of each GEMM, and whether it adds to a residual."""
    hidden, qkv, heads, inner = MODELS[model]
    sizes = (qkv, hidden, False), (hidden, heads, True), (2 * inner, hidden, False), (hidden, inner, True)
    return dict(zip(GEMMS, sizes, strict=True))


class _Work:
    """One GEMM with weights that are more than the L2 cache holds."""

    def __init__(self, outputs: int, inputs: int, adds: bool) -> None:
        self.device, self.outputs, self.inputs, self.adds = torch.device("cuda"), outputs, inputs, adds
        self._random = partial(torch.randn, device=self.device, dtype=torch.bfloat16)
        count = max(2, -(-BYTES // (2 * outputs * inputs)))
        self.weights = [self._random(outputs, inputs) / 64 for _ in range(count)]

    def rows(self, searched: list[int]) -> Iterator[Row]:
        choices = dict.fromkeys(choice for m in searched for choice in self.found(m))
        for m in sorted({*range(LEAST, LAST + 1, STEP), *searched}):
            used = algorithm_for(m, self.outputs, self.inputs)
            times = self.times(m, [*choices, *([used] if used else [])])
            best = sorted((time, choice) for choice, time in times.items() if choice is not None)
            texts = [", ".join([f"{time:.1f}", *map(str, choice)]) for time, choice in best]
            row: Row = {"rows": m, "torch.mm": f"{times[None]:.1f}", "in use": "that of torch.mm"}
            if used in times and used:
                row["in use"] = ", ".join([f"{times[used]:.1f}", *map(str, used)])
            yield row | dict(zip(("us, tile, cluster, option", "second", "third"), texts, strict=False))

    def found(self, m: int) -> list[Algorithm]:
        """The fastest algorithms for m rows, roughly."""
        tiles, options = tiles_and_options(self.device)
        plain = self._fastest(m, (Algorithm(tile, cluster) for tile in tiles for cluster in CLUSTERS), VARIED)
        return self._fastest(m, (one._replace(option=option) for one in plain for option in range(options)), KEPT)

    def times(self, m: int, choices: Iterable[Algorithm]) -> dict[Algorithm | None, float]:
        """Microseconds of each that exists, and of torch.mm by None."""
        x, y = self._operands(m)
        calls: dict[Algorithm | None, list[Call]] = {None: [partial(self._torch, x, w, y) for w in self.weights]}
        for choice in choices:
            with suppress(LookupError):
                gemm = self._gemm(m, choice)
                calls[choice] = [partial(gemm, x, weight, y, adds=self.adds) for weight in self.weights]
        runs = {str(choice): captured(in_a_row(found)) for choice, found in calls.items()}
        seconds = interleaved_seconds(runs, self.device, REPEATS, warm_ups=2)
        return {choice: 1e6 * median(seconds[str(choice)]) / len(self.weights) for choice in calls}

    def _fastest(self, m: int, choices: Iterable[Algorithm], count: int) -> list[Algorithm]:
        x, y = self._operands(m)
        found = []
        for choice in choices:
            with suppress(LookupError):
                found.append((self._roughly(self._gemm(m, choice), x, y), choice))
        return [choice for _, choice in sorted(found)[:count]]

    def _roughly(self, gemm: Gemm, x: torch.Tensor, y: torch.Tensor) -> float:
        """Milliseconds of a few GEMMs."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for place in range(-1, ROUGH):
            if place == 0:
                start.record()
            gemm(x, self.weights[place % len(self.weights)], y, adds=self.adds)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def _operands(self, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._random(m, self.inputs), self._random(m, self.outputs)

    def _gemm(self, m: int, choice: Algorithm) -> Gemm:
        return Gemm(self.device, Sizes(m, self.outputs, self.inputs, self.inputs, self.outputs), choice)

    def _torch(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.addmm_(x, weight.t()) if self.adds else torch.mm(x, weight.t(), out=y)
