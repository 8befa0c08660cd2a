"""GEMMs of cuBLASLt with algorithms of a table: the table, and on the GPU that it is for results and fallbacks."""

from __future__ import annotations

import pytest
import torch

from specbatch.kernels.dispatch import use_deterministic
from specbatch.kernels.gemm import cublas_lt
from specbatch.kernels.gemm.cublas_lt_configs import RANGES, Algorithm, Range, algorithm_for
from specbatch.kernels.gemm.few_rows_triton import MOST_ROWS
from specbatch.kernels.gemm.linear import Linear


@pytest.fixture
def gpu() -> torch.device:
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available() or not cublas_lt._is_supported(device):
        pytest.skip(f"the table is for {cublas_lt.GPU} and version {cublas_lt.VERSION} of cuBLASLt")
    return device


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def check(y: torch.Tensor, expected: torch.Tensor) -> None:
    assert (y.double() - expected).norm() <= 4e-3 * expected.norm()


def test_ranges_are_apart() -> None:
    for ranges in RANGES.values():
        ends = [end for found in ranges for end in (found.first, found.last)]
        assert ends == sorted(ends)
        assert ends[0] > MOST_ROWS  # fewer have kernels of ours


def test_rows_outside_of_the_ranges_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = Algorithm(1, 2), Algorithm(3, 4)
    monkeypatch.setitem(RANGES, (8, 16), (Range(33, 48, small), Range(65, 128, large)))
    found = [algorithm_for(rows, 8, 16) for rows in (32, 33, 48, 49, 64, 65, 128, 129)]
    assert found == [None, small, small, None, None, large, large, None]
    assert algorithm_for(48, 16, 8) is None


def test_other_devices_have_no_algorithm(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas_lt, "GPU", "another GPU")
    monkeypatch.setattr(cublas_lt, "_is_supported", cublas_lt._is_supported.__wrapped__)
    weight = torch.zeros(2560, 4096, device=device, dtype=torch.bfloat16)
    assert cublas_lt.linear(torch.zeros(48, 4096, device=device, dtype=torch.bfloat16), weight) is None


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
def test_operands_that_it_does_not_take(gpu: torch.device) -> None:
    weight, x = random(4096, 12288, device=gpu), random(128, 12288, device=gpu)
    assert cublas_lt.linear(x, weight) is not None
    assert cublas_lt.linear(x.half(), weight.half()) is None
    assert cublas_lt.linear(random(128, 12289, device=gpu)[:, 1:], weight) is None  # rows are not aligned
    y = random(128, 4096, device=gpu)
    assert cublas_lt.linear(x, weight, y, y.clone()) is None
    with use_deterministic():
        ours = Linear(weight)(x[:64]), Linear(weight)(x)[:64]
    assert torch.equal(*ours)


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
