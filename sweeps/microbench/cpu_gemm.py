"""What a decode step's matrix products cost on a CPU, by how the weight lies.

    python sweeps/microbench/cpu_gemm.py

All products of one step of SmolLM2-135M (30 layers and the head, random float32 weights) for 1 to 40 rows, as
`torch.nn.functional.linear`, as weight x rows^T, and as `specbatch.kernels.gemm.linear.Linear`. Milliseconds, medians
over repeats that take turns; the floor is the time to read the weights once, at the speed of a sum over 800 MB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from tabulate import tabulate

from specbatch.kernels.gemm.linear import Linear
from specbatch.records import environment

LAYER = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # out, in: qkv, o, gate and up, down
SHAPES = [*LAYER * 30, (49152, 576)]
REPEATS = 7
Inputs = dict[int, torch.Tensor]  # by their width


def milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def _linear(inputs: Inputs, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        F.linear(inputs[weight.shape[1]], weight)


def _transposed(inputs: Inputs, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        torch.mm(weight, inputs[weight.shape[1]].t())


def _blocked(inputs: Inputs, products: list[Linear]) -> None:
    for product in products:
        product(inputs[product.shape[1]])


@torch.inference_mode()
def main() -> None:
    weights = [torch.randn(shape) for shape in SHAPES]
    blocked = [Linear(weight) for weight in weights]
    data = torch.ones(200_000_000)
    speed = data.numel() * 4 / median(milliseconds(data.sum) for _ in range(REPEATS))  # bytes per millisecond
    rows = []
    for count in (1, 2, 4, 8, 16, 40):
        inputs = {width: torch.randn(count, width) for width in {shape[1] for shape in SHAPES}}
        forms = {
            "linear": partial(_linear, inputs, weights),
            "weight x rows^T": partial(_transposed, inputs, weights),
            "specbatch": partial(_blocked, inputs, blocked),
        }
        times: dict[str, list[float]] = {name: [] for name in forms}
        for repeat in range(REPEATS + 1):
            for name, run in forms.items():
                taken = milliseconds(run)
                if repeat:  # the first round warms up
                    times[name].append(taken)
        rows.append({"rows": count, **{name: f"{median(values):.1f}" for name, values in times.items()}})
    hardware = environment.hardware()
    size = sum(weight.numel() for weight in weights) * 4
    print(f"{hardware['cpu']}, {hardware['torch_threads']} threads, {hardware['cores']} cores")
    print(f"{size / 1e6:.0f} MB of weights; read at {speed / 1e6:.1f} GB/s they take {size / speed:.1f} ms\n")
    print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
