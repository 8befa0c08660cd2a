"""Products with float8 weights in blocks against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specbatch.kernels import dispatch
from specbatch.kernels.linear import Norm
from specbatch.kernels.scaled_linear import ScaledLinear, SideBySide, linear, scaled_linear_ref
from specbatch.kernels.scaled_linear_triton import scaled_linear
from specbatch.kernels.weight import Weight

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}  # ||y - expected|| / ||expected||


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    if request.param == torch.bfloat16 and device.type != "cuda":
        pytest.skip("the interpreter's products of bfloat16 are wrong")
    return request.param  # type: ignore[no-any-return]


def random_weight(n: int, k: int, device: torch.device) -> tuple[Weight, torch.Tensor]:
    """A weight, and its values in float64, scale by scale."""
    values = (torch.randn(n, k) * 60).to(torch.float8_e4m3fn).to(device)
    scales = torch.rand(-(-n // 128), -(-k // 128), device=device) / 60 + 1e-3
    wide = values.double()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            wide[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scales[i, j].double()
    return Weight(values, scales), wide


def check(y: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert y.dtype == dtype
    assert y.shape == expected.shape
    assert (y.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 130, 256), (5, 32, 300), (17, 70, 40), (40, 129, 136), (130, 16, 128)]
)
def test_product(rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    weight, wide = random_weight(n, k, device)
    x, bias = torch.randn(rows, k + 9).to(device, dtype)[:, 4 : 4 + k], torch.randn(n).to(device, dtype)
    residual = torch.randn(rows, n + 5).to(device, dtype)[:, 3 : 3 + n]
    expected = x.double() @ wide.t()
    check(scaled_linear_ref(x, weight), expected, dtype)
    check(scaled_linear(x, weight), expected, dtype)
    expected += bias.double() + residual.double()
    check(scaled_linear_ref(x, weight, bias, residual), expected, dtype)
    check(scaled_linear(x, weight, bias, residual), expected, dtype)


@pytest.mark.parametrize("rows", [1, 40, 130])
def test_every_float8_is_itself(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Subnormal ones and both zeros among them: each stands alone in its sum."""
    bits = torch.arange(256, dtype=torch.uint8)[(torch.arange(256) & 127) != 127].repeat(128)[: 128 * 250]
    values = bits.view(250, 128).to(device).view(torch.float8_e4m3fn)
    weight = Weight(values, torch.ones(2, 1, device=device))
    column = torch.arange(rows, device=device) * 37 % 128
    x = F.one_hot(column, 128).to(dtype)
    assert torch.equal(scaled_linear(x, weight).float(), values.float().t()[column])


@pytest.mark.parametrize("kernels", [False, True])
def test_it_is_a_linear(kernels: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "runs_kernels", lambda x: kernels)
    weight, wide = random_weight(140, 48, device)
    product = ScaledLinear(weight)
    x, norm = torch.randn(3, 48, device=device), Norm(torch.rand(48, device=device) + 0.5, 1e-5)
    normal = F.rms_norm(x.double(), (48,), norm.weight.double(), norm.eps)
    expected = normal @ wide.t()
    assert product.shape == (140, 48)
    check(product(x, norm=norm), expected, torch.float32)
    check(product.gated(x, norm), F.silu(expected[:, :70]) * expected[:, 70:], torch.float32)
    out, residual = torch.empty(3, 140, device=device), torch.randn(3, 140, device=device)
    assert product(x, norm=norm, residual=residual, out=out) is out
    check(out, expected + residual.double(), torch.float32)
    expected = normal @ wide.t()
    check(product.squared(x, norm), expected.relu().square(), torch.float32)
    apart = torch.zeros(3, 150, device=device)
    product(x, norm=norm, out=apart[:, 5:145])
    check(apart[:, 5:145], expected, torch.float32)
    assert not apart[:, :5].any()
    assert not apart[:, 145:].any()


@pytest.mark.parametrize("kernels", [False, True])
def test_products_side_by_side(kernels: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "runs_kernels", lambda x: kernels and x.is_cuda)
    weight, wide = random_weight(130, 48, device)
    other = torch.randn(6, 48, device=device)
    product = SideBySide(linear(weight), linear(Weight(other)))
    assert product.shape == (136, 48)
    x, norm = torch.randn(3, 48, device=device), Norm(torch.rand(48, device=device) + 0.5, 1e-5)
    expected = F.rms_norm(x.double(), (48,), norm.weight.double(), norm.eps) @ torch.cat([wide, other.double()]).t()
    check(product(x, norm=norm), expected, torch.float32)
    out, residual = torch.empty(3, 136, device=device), torch.randn(3, 136, device=device)
    assert product(x, norm=norm, out=out) is out
    check(out, expected, torch.float32)
    check(product(x, norm=norm, residual=residual), expected + residual.double(), torch.float32)
    check(product.gated(x, norm), F.silu(expected[:, :68]) * expected[:, 68:], torch.float32)
