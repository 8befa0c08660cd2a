"""Algorithms of cuBLASLt for BF16 GEMMs that took at least 3% less time than those of its heuristic.

`python -m specbatch.sweeps.microbench cublas-algorithms` makes the table.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

GPU, VERSION = "NVIDIA H200", 130100  # for which the search was; the version is that of cuBLASLt


class Algorithm(NamedTuple):
    """Ids that cuBLASLt has for a tile of outputs, for a cluster of programs, and for a variant of the kernel."""

    tile: int
    cluster: int
    option: int = 0


# By outputs and inputs of a weight: for up to so many rows, where not for fewer. None: the heuristic's is as fast.
_ALGORITHMS: dict[tuple[int, int], tuple[tuple[int, Algorithm | None], ...]] = {
    (4096, 4096): (  # o of Qwen3-8B and Llama-3.1-8B
        (48, Algorithm(124, 4)), (64, None), (96, Algorithm(124, 7)), (128, Algorithm(27, 7, 2)),
        (256, Algorithm(18, 2)), (384, Algorithm(28, 2)),
    ),
    (4096, 12288): (  # down of Qwen3-8B
        (48, Algorithm(104, 4)), (64, Algorithm(92, 4)), (96, Algorithm(134, 7)), (128, Algorithm(124, 5)),
        (256, Algorithm(18, 2)), (384, Algorithm(28, 2)),
    ),
    (24576, 4096): ((96, None), (128, Algorithm(208, 5)), (384, None), (512, Algorithm(189, 3))),  # its gate and up
    (4096, 14336): (  # down of Llama-3.1-8B
        (48, Algorithm(15, 4)), (64, Algorithm(92, 4, 2)), (96, Algorithm(143, 7)), (128, Algorithm(15, 5)),
        (256, Algorithm(17, 2)), (384, Algorithm(28, 2)),
    ),
    (28672, 4096): (  # its gate and up
        (64, Algorithm(220, 3, 6)), (96, None), (128, Algorithm(220, 2)), (256, Algorithm(189, 5)),
    ),
    (2560, 4096): ((48, Algorithm(12, 4)),),  # o of Qwen3-4B
    (2560, 9728): ((96, None), (128, Algorithm(80, 5)), (256, Algorithm(134, 3))),  # its down
    (19456, 2560): (  # its gate and up
        (64, Algorithm(143, 3)), (128, None), (256, Algorithm(189, 3)), (384, None), (512, Algorithm(189, 3)),
    ),
    (5120, 5120): (  # o of Qwen3-14B
        (96, None), (128, Algorithm(143, 5)), (256, Algorithm(135, 2)), (384, None), (512, Algorithm(30, 3)),
    ),
    (5120, 17408): (  # its down
        (48, Algorithm(104, 4)), (64, Algorithm(104, 4, 2)), (96, Algorithm(143, 7)), (128, Algorithm(134, 2)),
        (256, Algorithm(193, 3)), (384, None), (512, Algorithm(30, 3)),
    ),
    (34816, 5120): (  # its gate and up
        (64, Algorithm(188, 2)), (96, Algorithm(233, 5)), (128, Algorithm(235, 2)), (256, None),
        (384, Algorithm(30, 3)),
    ),
}  # fmt: skip


def algorithm_for(rows: int, outputs: int, inputs: int) -> Algorithm | None:
    """None: that of the heuristic."""
    known = _ALGORITHMS.get((outputs, inputs), ())
    place = bisect_left(known, rows, key=lambda entry: entry[0])
    return known[place][1] if place < len(known) else None
