"""`GroupedSource`: matrices of a checkpoint in groups of whole numbers, which a CPU multiplies without dequantizing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from specbatch.kernels.gemm.quantized.grouped import GroupedWeight


class GroupedSource(Protocol):
    """bytes: name of each matrix -> what it takes in memory."""

    @property
    def bytes(self) -> Mapping[str, int]: ...

    def __call__(self, name: str) -> GroupedWeight:
        """The matrix, exactly. Several threads may ask at the same time."""
        ...
