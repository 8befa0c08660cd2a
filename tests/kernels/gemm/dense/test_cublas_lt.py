"""GEMMs of cuBLASLt with algorithms of a table: the table, and on the GPU that it is for results and fallbacks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from specbatch.kernels.common.rehearsal import rehearsing
from specbatch.kernels.dispatch import use_deterministic
from specbatch.kernels.gemm.dense import cublas_lt
from specbatch.kernels.gemm.dense.cublas_lt_configs import RANGES, Algorithm, Range, algorithm_for
from specbatch.kernels.gemm.deterministic import fixed_order
from specbatch.kernels.gemm.linear import Linear
from specbatch.kernels.gemm.quantized.few_rows_triton import MOST_ROWS

CPU = torch.device("cpu")


@pytest.fixture
def gpu() -> torch.device:
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available() or not cublas_lt.is_supported(device):
        pytest.skip(f"the table is for {cublas_lt.GPU} and version {cublas_lt.VERSION} of cuBLASLt")
    return device


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def check(y: torch.Tensor, expected: torch.Tensor) -> None:
    assert (y.double() - expected).norm() <= 4e-3 * expected.norm()


class OnCpu:
    """In place of `Gemm`: the same by torch, on a CPU, through the addresses alone as cuBLASLt has them."""

    calls = 0

    def __init__(self, device: torch.device, sizes: cublas_lt.Sizes, algorithm: Algorithm) -> None:
        self.sizes = sizes

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, adds: bool) -> None:
        type(self).calls += 1
        m, n, k, x_stride, y_stride = self.sizes
        x, y = x.as_strided((m, k), (x_stride, 1)), y.as_strided((m, n), (y_stride, 1))
        y.copy_((x.float() @ weight.float().T) + (y if adds else 0))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, force_kernels: Any) -> type[OnCpu]:
    """A table for weights [16, 64], on a CPU."""
    force_kernels()
    monkeypatch.setitem(RANGES, (16, 64), (Range(33, 48, Algorithm(1, 2)),))
    monkeypatch.setattr(cublas_lt, "is_supported", lambda device: True)
    monkeypatch.setattr(cublas_lt, "_gemm", OnCpu)
    OnCpu.calls = 0
    return OnCpu


def test_ranges_are_apart() -> None:
    for ranges in RANGES.values():
        assert ranges[0].first > MOST_ROWS  # fewer have kernels of ours
        assert all(found.first <= found.last for found in ranges)
        assert all(one.last < other.first for one, other in pairwise(ranges))


def test_layers_use_it(on_cpu: type[OnCpu]) -> None:
    x, weight, residual = (random(*shape, device=CPU) for shape in ((40, 64), (16, 64), (40, 16)))
    layer, expected = Linear(weight), x.double() @ weight.double().T
    check(layer(x), expected)
    out = torch.empty(40, 16, dtype=torch.bfloat16)
    assert layer(x, out=out) is out
    check(out, expected)
    before = residual.double()
    assert layer(x, residual=residual) is residual
    check(residual, expected + before)
    assert on_cpu.calls == 3
    layer(x[:34][:, :64].repeat(2, 1))  # 68 rows
    Linear(weight, torch.zeros(16, dtype=torch.bfloat16))(x)
    assert on_cpu.calls == 3


def test_deterministic_layers_do_not(on_cpu: type[OnCpu]) -> None:
    """Weights that `fixed_order` does not take go to torch."""
    layer = Linear(random(1, 1 + 16 * 64, device=CPU)[0, 1:].view(16, 64))
    assert not fixed_order.takes(layer.weight)
    with use_deterministic():
        layer(random(40, 64, device=CPU))
    assert on_cpu.calls == 0


def test_a_rehearsal_computes_nothing(on_cpu: type[OnCpu]) -> None:
    x, weight = random(40, 64, device=CPU), random(16, 64, device=CPU)
    assert cublas_lt.linear(x, weight) is not None
    with rehearsing():
        assert cublas_lt.linear(x, weight) is None
    assert on_cpu.calls == 1


def test_operands_that_do_not_fit_go_to_torch(on_cpu: type[OnCpu]) -> None:
    x, weight, y = (random(*shape, device=CPU) for shape in ((40, 64), (16, 64), (40, 16)))
    wide, odd = random(40, 128, device=CPU), random(40, 65, device=CPU)
    assert cublas_lt.linear(wide[:, 64:], weight) is not None
    for operands in (
        (x[:, :32], weight), (wide, weight), (x.half(), weight), (x, weight.half()), (odd[:, 1:], weight),
        (x, random(16, 128, device=CPU)[:, :64]), (x, weight, y.float()), (x, weight, y[:1]), (x, weight, None, y[:8]),
        (x, weight, None, y.float()), (x, weight, y, y.clone()), (x.t().contiguous().t(), weight),
    ):  # fmt: skip
        assert cublas_lt.linear(*operands) is None
    assert on_cpu.calls == 1


def test_rows_outside_of_the_ranges_have_none() -> None:
    small, large = Algorithm(1, 2), Algorithm(3, 4)
    ranges = {(8, 16): (Range(33, 48, small), Range(65, 128, large))}
    found = [algorithm_for(rows, 8, 16, ranges) for rows in (32, 33, 48, 49, 64, 65, 128, 129)]
    assert found == [None, small, small, None, None, large, large, None]
    assert algorithm_for(48, 16, 8, ranges) is None


def test_other_devices_have_no_algorithm(device: torch.device) -> None:
    assert not cublas_lt.is_supported(device, "another GPU")
    weight = torch.zeros(2560, 4096, dtype=torch.bfloat16)
    assert cublas_lt.linear(torch.zeros(48, 4096, dtype=torch.bfloat16), weight) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), RANGES)
def test_every_algorithm(outputs: int, inputs: int, gpu: torch.device) -> None:
    weight = random(outputs, inputs, device=gpu) / 64
    for rows in {end for found in RANGES[outputs, inputs] for end in (found.first, found.last - 5, found.last)}:
        x = random(rows, inputs, device=gpu)
        expected = x.double() @ weight.double().T
        y = cublas_lt.linear(x, weight)
        assert y is not None, f"{rows} rows"
        check(y, expected)
        assert cublas_lt.linear(x, weight, out=y.fill_(torch.nan)) is y
        check(y, expected)
        residual = random(rows, outputs, device=gpu)
        expected += residual.double()
        assert cublas_lt.linear(x, weight, residual) is residual
        check(residual, expected)


@pytest.mark.gpu
def test_rows_apart_and_graphs(gpu: torch.device) -> None:
    """Inputs and outputs that are columns of larger matrices, and a graph whose input changes."""
    linear = Linear(random(4096, 12288, device=gpu) / 64)
    wide, whole = random(128, 16384, device=gpu), random(128, 8192, device=gpu)
    x, out = wide[:, 2048:14336], whole[:, 4096:]
    left = whole[:, :4096].clone()
    graph = torch.cuda.CUDAGraph()
    linear(x, out=out)
    with torch.cuda.graph(graph):
        linear(x, out=out)
    for _ in range(2):
        wide.copy_(random(*wide.shape, device=gpu))
        graph.replay()
        check(out, x.double() @ linear.weight.double().T)
    assert torch.equal(whole[:, :4096], left)
