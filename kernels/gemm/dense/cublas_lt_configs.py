"""Algorithms of cuBLASLt for BF16 GEMMs that took at least 3% less time than those of its heuristic.

`python -m specbatch.sweeps.microbench cublas-algorithms` searches for them; `results/h200/cublas-algorithms.md` has
what it found. One that is the fastest at some number of rows can be slow at the next ones, so that each is for a range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Those for which the search was; the version is that of cuBLASLt.
GPU, MULTIPROCESSORS, VERSION = "NVIDIA H200", 132, 130100


class Algorithm(NamedTuple):
    """Ids that cuBLASLt has for a tile of outputs, for a cluster of programs, and for a variant of the kernel."""

    tile: int
    cluster: int
    option: int = 0


class Range(NamedTuple):
    """Numbers of rows, both included, and their algorithm."""

    first: int
    last: int
    algorithm: Algorithm


# By outputs and inputs of a weight.
RANGES: dict[tuple[int, int], tuple[Range, ...]] = {
    (4096, 12288): (  # down of Qwen3-8B
        Range(33, 48, Algorithm(15, 4)),
        Range(49, 64, Algorithm(92, 4)),
        Range(65, 96, Algorithm(134, 7)),
        Range(97, 128, Algorithm(124, 4)),
        Range(169, 192, Algorithm(164, 2)),
        Range(217, 256, Algorithm(18, 2)),
    ),
    (4096, 4096): (  # o of Qwen3-8B and Llama-3.1-8B
        Range(33, 48, Algorithm(124, 4)),
        Range(105, 128, Algorithm(27, 7, 2)),
        Range(153, 192, Algorithm(18, 2)),
        Range(201, 256, Algorithm(18, 2)),
    ),
    (4096, 14336): (  # down of Llama-3.1-8B
        Range(33, 48, Algorithm(15, 4)),
        Range(49, 64, Algorithm(92, 4, 2)),
        Range(81, 112, Algorithm(143, 7)),
        Range(113, 128, Algorithm(15, 5)),
        Range(169, 192, Algorithm(27, 2)),
        Range(217, 256, Algorithm(18, 2)),
    ),
    (28672, 4096): (Range(33, 64, Algorithm(220, 3, 6)),),  # its gate and up
    (5120, 17408): (  # down of Qwen3-14B
        Range(33, 48, Algorithm(15, 4, 2)),
        Range(49, 64, Algorithm(104, 4, 2)),
        Range(81, 96, Algorithm(143, 7, 2)),
        Range(97, 128, Algorithm(143, 4)),
    ),
    (34816, 5120): (Range(49, 64, Algorithm(188, 2)),),  # its gate and up
    (2560, 9728): (  # down of Qwen3-4B
        Range(33, 48, Algorithm(80, 4)),
        Range(49, 64, Algorithm(80, 2)),
        Range(97, 112, Algorithm(15, 4, 1)),
        Range(113, 128, Algorithm(80, 5)),
        Range(169, 192, Algorithm(124, 2)),
        Range(233, 256, Algorithm(134, 2)),
    ),
    (2560, 4096): (Range(33, 48, Algorithm(12, 4)),),  # its o
}


Ranges = Mapping[tuple[int, int], tuple[Range, ...]]


def algorithm_for(rows: int, outputs: int, inputs: int, ranges: Ranges = RANGES) -> Algorithm | None:
    """None: that of the heuristic."""
    for found in ranges.get((outputs, inputs), ()):
        if found.first <= rows <= found.last:
            return found.algorithm
    return None
