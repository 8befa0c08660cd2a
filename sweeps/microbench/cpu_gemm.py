"""GEMMs of a decode step on a CPU, by weight layout: all of SmolLM2-135M's (30 layers and the head), float32.

As `torch.nn.functional.linear`, as weight x rows^T, and as `specbatch.kernels.gemm.linear.Linear`, for 1 to 40 rows.
The floor is one read of the weights at the speed of a sum over 800 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from specbatch.kernels.gemm.linear import Linear
from specbatch.sweeps.microbench.runner import Case, Table, in_a_row

LAYER = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # out, in: qkv, o, gate and up, down
SHAPES = [*LAYER * 30, (49152, 576)]


def tables() -> Iterator[Table]:
    yield Table(_cases(), shows=("floor",), unit="ms", device=torch.device("cpu"))


def _cases() -> Iterator[Case]:
    weights = [torch.randn(shape) for shape in SHAPES]
    blocked = [Linear(weight) for weight in weights]
    for count in (1, 2, 4, 8, 16, 40):
        inputs = {width: torch.randn(count, width) for width in {shape[1] for shape in SHAPES}}
        variants = {
            "specbatch": [partial(linear, inputs[linear.shape[1]]) for linear in blocked],
            "linear": [partial(F.linear, inputs[weight.shape[1]], weight) for weight in weights],
            "weight x rows^T": [partial(torch.mm, weight, inputs[weight.shape[1]].t()) for weight in weights],
        }
        calls = {name: [in_a_row(layers)] for name, layers in variants.items()}
        yield Case({"rows": count}, calls, bytes=sum(weight.nbytes for weight in weights))
