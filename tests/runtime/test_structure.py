"""Two parts of a model have one structure if they launch the same kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.models.layers.blocks import SwiGlu
from specbatch.runtime.structure import structure_of


def mlp(dtype: torch.dtype = torch.bfloat16, width: int = 24, bias: torch.Tensor | None = None) -> SwiGlu:
    norm = Norm(torch.randn(16, dtype=dtype), 1e-6)
    return SwiGlu(
        norm, Linear(torch.randn(2 * width, 16, dtype=dtype), bias), Linear(torch.randn(16, width, dtype=dtype))
    )


def test_values_do_not_count() -> None:
    assert structure_of(mlp()) == structure_of(mlp())
    assert len({structure_of(mlp()), structure_of(mlp())}) == 1


@pytest.mark.parametrize(
    "other",
    [
        mlp(torch.float16),
        mlp(width=32),
        mlp(bias=torch.zeros(48)),
        replace(mlp(), norm=Norm(torch.zeros(16, dtype=torch.bfloat16), 1e-5)),
        replace(mlp(), norm=Norm(torch.zeros(17, dtype=torch.bfloat16)[1:], 1e-6)),
        replace(mlp(), down=None),
        mlp().down,
    ],
    ids=["type", "width", "bias", "setting", "alignment", "missing", "another class"],
)
def test_what_decides_on_kernels_counts(other: Any) -> None:
    assert structure_of(other) != structure_of(mlp())


def test_weights_in_a_layout_of_their_own() -> None:
    assert structure_of(mlp(torch.float32)) == structure_of(mlp(torch.float32))
    assert structure_of(mlp(torch.float32)) != structure_of(mlp())
