"""Names and shapes of a model's weights, from building it without them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from specbatch.errors import refuse
from specbatch.kernels.gemm.linear import Linear
from specbatch.kernels.gemm.quantized.weight import Weight
from specbatch.models.config import ModelConfig
from specbatch.models.formats.format import MatrixShape, Shape, Shapes
from specbatch.models.partition import rows_per_rank
from specbatch.models.weight_reader import Reader

MOST_VALUES = 1 << 40  # of a tensor
MOST_IN_VECTOR = 1 << 24
MOST_TENSORS = 1 << 18


class ShapeRecorder(Reader):
    """Records the name and shape of every tensor that a model reads, a `MatrixShape` of those that `in_fp8` covers.

    It returns matrices on the meta device, already concatenated, and vectors on the CPU: arithmetic on meta tensors
    would import torch._dynamo with about 900 modules.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.shapes: Shapes = {}
        self.joined: list[tuple[str, ...]] = []  # names of weights that form a matrix
        no_file: dict[str, torch.Tensor] = {}
        super().__init__(config, no_file.__getitem__, torch.bfloat16, torch.device("meta"))

    def weight(self, rows: Mapping[str, int], columns: int) -> Weight:
        return self.stack([rows], columns).of(0)

    def stack(self, groups: Sequence[Mapping[str, int]], columns: int) -> Weight:
        # Not a meta tensor per expert: a model may have 70,000 of them.
        for rows in groups:
            self.joined += [tuple(rows)] if len(rows) > 1 else []
            for name, count in rows.items():
                self._record(name, MatrixShape((count, columns)))
        return Weight(torch.empty(len(groups), sum(groups[0].values()), columns, dtype=self.dtype, device="meta"))

    def output_matrix(self, name: str, tokens: int, tied: torch.Tensor | None = None) -> Linear:
        matrix = super().output_matrix(name, rows_per_rank(tokens, self.config.ranks), tied)
        self.in_fp8(Weight(matrix.weight), name)  # by `head`, which does not know the name
        return matrix

    def in_fp8(self, weight: Weight, *names: str) -> Weight:
        for name in names:
            self.shapes[name] = MatrixShape(self.shapes[name])
        return weight

    def _stored(self, name: str, shape: Shape, order: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Weight:
        return Weight(self._upcast(name, shape, self.dtype))

    def _record(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuses a config whose tensors no model has, before memory is taken for them or for their names."""
        if math.prod(shape) > MOST_VALUES or (len(shape) == 1 and shape[0] > MOST_IN_VECTOR):
            raise refuse(name, list(shape), "the sizes in the config make a tensor that is larger than any model has")
        if len(self.shapes) >= MOST_TENSORS:
            raise refuse(name, list(shape), f"the config describes more than {MOST_TENSORS} tensors")
        self.shapes[name] = shape

    def _upcast(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._record(name, shape)
        return torch.empty(shape, dtype=dtype, device="meta") if len(shape) > 1 else torch.zeros(shape, dtype=dtype)
