"""Compiled RMSNorm and SwiGLU match their references."""

from __future__ import annotations

import pytest
import torch

from specbatch.kernels.common import native
from specbatch.kernels.elementwise.activations import silu_and_mul_ref
from specbatch.kernels.elementwise.elementwise_native import rms_norm, silu_and_mul
from specbatch.kernels.elementwise.norm import rms_norm_ref

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@pytest.mark.parametrize(("rows", "columns"), [(0, 16), (1, 576), (5, 48)])
def test_matches_the_reference(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 2 * columns, generator=generator), torch.randn(columns, generator=generator)
    for strided in (x[:, ::2], x[:, :columns]):
        torch.testing.assert_close(rms_norm(strided, weight, 1e-5), rms_norm_ref(strided, weight, 1e-5))
    torch.testing.assert_close(silu_and_mul(x), silu_and_mul_ref(x))


def test_gates_of_any_size() -> None:
    gates = torch.tensor([-1e4, -100.0, -87.5, -86.0, -20.0, -1e-6, 0.0, 1e-6, 1.0, 20.0, 88.0, 88.8, 100.0, 1e4, 3, 4])
    x = torch.cat([gates, torch.linspace(-2, 2, 16)])[None]
    torch.testing.assert_close(silu_and_mul(x), silu_and_mul_ref(x), rtol=1e-6, atol=1e-30)
    x[0, 0] = torch.nan
    assert silu_and_mul(x)[0].isnan().tolist() == [True] + [False] * 15
